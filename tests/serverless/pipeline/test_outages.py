"""Unavailable providers: waiting items, their delays, the reported causes, and the return of a provider."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.control.scheduler import FaultMeter
from rollart.errors import FaultRateExceeded
from rollart.model import AbortReason
from serverless.pipeline.offload import Offload
from serverless.pipeline.stages import PipelineSpec
from serverless.types import Cause, FaultKind, InfraFault, Outcome, Scored
from tests.serverless.modelled import Body, Modelled
from tests.serverless.pipeline.test_stages import drive, numbered


def away(begin: float, end: float, *, answers_s: float = 0.01) -> Body:
    """Answers in `answers_s`, and refuses connections from `begin` to `end`."""

    async def body(provider: Modelled, event: list[dict[str, Any]], cause: Cause) -> InfraFault | None:
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(answers_s)
        gone = begin <= now < end
        return InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail="nobody is there") if gone else None

    return body


async def each(
    o: Offload, count: int, *, gap_s: float = 0.0, deadline_s: float = 1000.0
) -> list[tuple[float, float, Outcome]]:
    """When each item was submitted, when it had its outcome, and that."""
    loop = asyncio.get_running_loop()
    ended: list[tuple[float, float, Outcome]] = []

    async def one(n: int) -> None:
        began = loop.time()
        outcome = await o.submit("behave", numbered(n), deadline_s)
        ended.append((began, loop.time(), outcome))

    async with asyncio.TaskGroup() as group:
        for n in range(count):
            group.create_task(one(n))
            if gap_s:
                await asyncio.sleep(gap_s)
    return ended


@pytest.mark.parametrize("chain", [1, 3])
def test_an_outage_of_every_provider_is_told_in_seconds_with_its_reason(chain: int) -> None:
    providers = [Modelled(away(0.0, 1e9), provider=f"p{n}") for n in range(chain)]
    ended = drive(lambda o: each(o, 300, deadline_s=60.0), *providers)
    assert len(ended) == 300
    assert max(t for _, t, _ in ended) < 10.0  # pauses of 1, 2 and 4 s; the deadline is at 60
    faults = [o for _, _, o in ended]
    assert {o.kind for o in faults} == {FaultKind.UNAVAILABLE}
    given_up = [o.detail for o in faults if "no provider of behave answers" in o.detail]
    assert len(given_up) > 200
    assert all(f"p{n} failed trial after trial: nobody is there" in given_up[0] for n in range(chain))
    assert sum(len(p.calls) for p in providers) < 100 * chain


def test_whoever_comes_late_in_a_long_outage_waits_for_one_trial() -> None:
    provider = Modelled(away(0.0, 1e9))

    async def main(o: Offload) -> Any:
        await each(o, 50)
        return await each(o, 100, gap_s=1.0)

    waits = [end - began for began, end, _ in drive(main, provider)]
    assert max(waits) <= 30.0 + 0.02  # the longest pause, and the trial
    assert len(provider.calls) < 75  # and not one per item


def test_an_outage_ends_a_run_by_its_rate_of_faults() -> None:
    meter = FaultMeter(max_rate=0.05, min_count=20)
    stopped: list[tuple[float, str]] = []

    async def main(o: Offload) -> None:
        loop = asyncio.get_running_loop()

        async def one(n: int) -> None:
            outcome = await o.submit("behave", numbered(n), 60.0)
            fault = isinstance(outcome, InfraFault)
            meter.ended(AbortReason.INFRA_FAULT if fault else None, getattr(outcome, "detail", ""))
            try:
                meter.check()
            except FaultRateExceeded as error:
                stopped.append((loop.time(), str(error)))

        async with asyncio.TaskGroup() as group:
            for n in range(600):
                group.create_task(one(n))
                await asyncio.sleep(0.05)

    drive(main, Modelled(away(10.0, 1e9)))
    seconds, why = stopped[0]
    assert 10.0 < seconds < 20.0
    assert "no provider of behave answers: modelled failed trial after trial: nobody is there" in why


def test_a_provider_that_does_not_answer_its_trial_holds_nobody_who_could_go_elsewhere() -> None:
    async def hangs(provider: Modelled, event: Any, cause: Cause) -> InfraFault | None:
        now = asyncio.get_running_loop().time()
        if now < 0.5:
            return InfraFault(FaultKind.UNAVAILABLE, retryable=True)
        await asyncio.sleep(1e6)
        raise AssertionError

    first, second = Modelled(hangs, provider="modal"), Modelled(away(0.0, 1.8), provider="aws")

    async def main(o: Offload) -> Any:
        return await each(o, 100, deadline_s=60.0)

    ended = drive(main, first, second, spec={"concurrency": 8})
    scored = [end for _, end, o in ended if isinstance(o, Scored)]
    # All but the attempts at the hanging provider, and those before both breakers had opened.
    assert len(scored) >= 80
    assert max(scored) < 5.0


def test_a_trial_that_hangs_until_its_items_deadline_has_failed() -> None:
    async def hangs(provider: Modelled, event: Any, cause: Cause) -> InfraFault | None:
        if asyncio.get_running_loop().time() < 0.5:
            return InfraFault(FaultKind.UNAVAILABLE, retryable=True)
        await asyncio.sleep(1e6)
        raise AssertionError

    provider = Modelled(hangs)

    async def main(o: Offload) -> Any:
        await each(o, 10, deadline_s=0.5)
        states = []
        for n in range(3):
            assert (await o.submit("behave", numbered(n), 10.0)).kind is FaultKind.DEADLINE  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
            states.append(o.providers("behave")["modelled"][0])
        return states

    assert drive(main, provider) == ["open"] * 3


def test_those_who_waited_do_not_all_come_at_once() -> None:
    provider = Modelled(away(1.0, 4.0, answers_s=0.1))
    running: list[tuple[float, int]] = []
    body = provider.body

    async def seen(one: Modelled, event: Any, cause: Cause) -> InfraFault | None:
        running.append((asyncio.get_running_loop().time(), one.running))
        return await body(one, event, cause)

    provider.body = seen

    async def main(o: Offload) -> Any:
        await each(o, 20)
        await asyncio.sleep(1.0)
        return await each(o, 600)

    ended = drive(main, provider, spec={"concurrency": 64})
    assert sum(isinstance(o, Scored) for _, _, o in ended) >= 500
    came = [(t, n) for t, n in running if t > 4.0]
    closed = came[0][0] + 0.1  # its trial's answer
    for t, n in came:
        rounds = round((t - closed) / 0.1, 6)
        assert n <= 2.0 * 2.0 ** int(max(0.0, rounds)) + 1, (t, n)
    assert max(n for _, n in came) >= 50, "it is not held down for good"


def test_what_waits_for_a_trial_elsewhere_goes_back_when_its_own_provider_does() -> None:
    """The first provider's trial is out when items are sent on to wait for the second's, which is far away."""
    first = Modelled(away(0.0, 0.9), provider="modal")
    second = Modelled(away(0.0, 1e9), provider="aws")

    async def main(o: Offload) -> Any:
        return await each(o, 200, deadline_s=60.0)

    ended = drive(main, first, second, spec={"concurrency": 8})
    scored = [end for _, end, o in ended if isinstance(o, Scored)]
    assert len(scored) >= 150
    assert max(end for _, end, _ in ended) < 4.0


@settings(max_examples=30, deadline=None)
@given(
    outages=st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(0.1, 20.0)), min_size=1, max_size=3),
    trials=st.integers(1, 4),
    open_s=st.sampled_from([0.2, 1.0]),
    count=st.integers(1, 60),
    gap_s=st.sampled_from([0.0, 0.05, 0.4]),
    max_items=st.sampled_from([1, 8]),
    seed=st.integers(0, 2**16),
)
def test_nobody_waits_for_more_than_the_breakers_allow(
    outages: list[tuple[float, float]],
    trials: int,
    open_s: float,
    count: int,
    gap_s: float,
    max_items: int,
    seed: int,
) -> None:
    providers = [Modelled(away(t, t + s), provider=f"p{n}") for n, (t, s) in enumerate(outages)]
    spec = {"breaker": {"trials": trials, "open_s": open_s, "max_open_s": 4.0}, "hedge": {"enabled": False}}
    states: list[str] = []

    async def main(o: Offload) -> Any:
        ended = await each(o, count, gap_s=gap_s)
        states.extend(o.providers("behave")[p.provider][0] for p in providers)
        assert sum(map(o.waiting_for, o.functions)) == 0
        return ended

    ended = drive(
        main,
        *providers,
        seed=seed,
        settings=PipelineSpec.model_validate(spec),
        spec={"batch": {"max_items": max_items, "max_wait_ms": 1.0}, "concurrency": 8},
    )
    assert len(ended) == count
    assert all(isinstance(o, Scored) or o.kind is FaultKind.UNAVAILABLE for _, _, o in ended)
    # Each of an item's attempts (3, and one per hop) waits for trials, at most `trials` per provider, and one more; a
    # trial takes 10 ms, a retry's pause at most 2 s. Without an outage longer than that no item fails.
    pauses = sum(min(4.0, open_s * 2.0**n) for n in range(trials)) + 4.0
    bound = (3 + len(outages)) * (pauses + 0.1 + 2.0) + count * 0.02
    assert max(end - began for began, end, _ in ended) <= bound
    # No attempt storms an outage: only trials and the calls in flight when the breaker opened.
    for provider, (begin, long) in itertools.product(providers, outages):
        in_outage = [c for c in provider.calls if c.status == "unavailable" and begin <= c.t0 < begin + long]
        assert len(in_outage) <= 5 + 8 * 3 + long / open_s + trials
