"""The two-engine path of one turn: what is sent, what is charged, and what every failure costs. On the virtual loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

import pytest

from rollart.control.domain import Domain
from rollart.control.trajectory import FreeRunning, TrajectoryRunner, TrajectoryState, WaitLimits
from rollart.errors import EngineError, HandoffFailed, LeaseExpired
from rollart.fleet import EnginePlacement, EngineRole, RoutePrices, Routes
from rollart.leases import Leases
from rollart.ledger.intervals import EngineShares, ResourceClock
from rollart.model import (
    Completion,
    EngineId,
    GenerateRequest,
    GroupId,
    Observation,
    Purpose,
    Sampling,
    Step,
    TrajectoryId,
    WeightsRef,
)
from rollart.policy.engine_health import HandoffCircuitBreaker
from rollart.policy.routing import PREFILL_RULES, HardwareAffinity, RoutingPolicy
from rollart.serving.engine_registry import GatewayLimits
from rollart.serving.gateway import Gateway
from rollart.serving.handoff import HandoffCounts
from rollart.sim import loop
from rollart.testing.handoff import HandoffEngine, HandoffFabric, HandoffTimings
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.parts import WordTokenizer
from tests.policy.models import LinearModel

SAMPLING = Sampling(max_tokens=8)
PROMPT = tuple(range(100))


class Asked(HandoffEngine):
    """Remembers what it was asked."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        return await super().generate(request)


class Bench:
    """One gateway over `p` (prefill) and `d` (decode), always remote, without jitter in their durations."""

    def __init__(
        self,
        names: dict[str, EnginePlacement] | None = None,
        *,
        rule_name: str = "remote",
        affinity: HardwareAffinity | None = None,
        pace: HandoffTimings | None = None,
        versioned: bool = False,
        attempts: int = 4,
    ) -> None:
        self.recorder = MemoryRecorder()
        self.leases = Leases(self.recorder)
        self.suspected: list[str] = []
        self.fabric = HandoffFabric()
        self.charged = 0.0
        self.told: list[int] = []
        seats = names or {
            "p": EnginePlacement("fast", role=EngineRole.PREFILL),
            "d": EnginePlacement("wide", role=EngineRole.DECODE),
        }
        self.gateway = Gateway(
            self.leases,
            limits=GatewayLimits(generate_s=50.0, handoff_s=2.0, engine_s=5.0, attempts=attempts),
            version=0,
            on_suspect=self.suspected.append,
            recorder=self.recorder,
            router=RoutingPolicy(rule=PREFILL_RULES[rule_name], affinity=affinity or HardwareAffinity()),
            seats=seats,
        )
        self.engines = {n: Asked(n, self.fabric, pace=pace, versioned=versioned) for n in seats}
        self.shares: dict[str, EngineShares] = {}
        now = asyncio.get_running_loop().time
        for name, engine in self.engines.items():
            engine.rng.uniform = lambda a, b: 1.0  # type: ignore[method-assign]
            clock = ResourceClock(role="engine", resource=name, recorder=self.recorder, clock=now)
            self.shares[name] = EngineShares(clock, clock=now)
            self.gateway.join(engine, version=0, shares=self.shares[name])

    async def ask(self, tokens: tuple[int, ...] = PROMPT, session: str = "s", domain: str = "a") -> Completion:
        return await self.gateway.generate(
            session, tokens, SAMPLING, spend=self.spend, sent=self.told.append, domain=domain
        )

    def spend(self, seconds: float) -> None:
        self.charged += seconds

    def requests(self, name: str) -> list[GenerateRequest]:
        return self.engines[name].requests

    def events(self, kind: str) -> list[dict[str, object]]:
        return [dict(e.fields) for e in self.recorder.events if e.kind == kind]

    def idle(self) -> bool:
        return all(not s.requests for s in self.shares.values()) and not self.leases.open


def virtual(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    loop.run(main())


def test_a_remote_turn_is_two_requests_and_one_turn() -> None:
    async def main() -> None:
        bench = Bench()
        answer = await bench.ask()
        (first,), (second,) = bench.requests("p"), bench.requests("d")
        assert first.sampling.max_tokens == 1
        assert first.kv_transfer == {"do_remote_decode": True, "do_remote_prefill": False}
        assert second.sampling == SAMPLING
        assert second.token_ids == first.token_ids == PROMPT
        assert second.kv_transfer is not None
        assert second.kv_transfer["remote_request_id"] == first.request_id
        assert second.kv_transfer["do_remote_prefill"] is True
        assert first.request_id != second.request_id
        assert len(answer.token_ids) == 2, "the token of the prefill engine is nobody's"
        assert bench.told == [0], "sent once"
        assert bench.gateway.turns.served == 1
        # 100 tokens at 1 ms on P, then their KV at 0.1 ms each and 2 tokens at 10 ms on D: both legs are charged.
        assert bench.charged == pytest.approx(0.1 + 0.01 + 0.02)
        assert bench.idle()

    virtual(main)


def test_prefixes_are_spread_over_the_prefill_engines_until_their_trajectories_end() -> None:
    """One after another, so that no engine is ever busy when the next is routed."""

    async def main() -> None:
        seats = {n: EnginePlacement("fast", role=EngineRole.PREFILL) for n in ("p0", "p1", "p2")}
        bench = Bench(seats | {"d": EnginePlacement("wide", role=EngineRole.DECODE)})
        for n in range(6):
            await bench.ask(session=f"s{n}")
        assert [len(bench.requests(p)) for p in seats] == [2, 2, 2]
        await bench.ask((*PROMPT, *range(20)), session="s0")
        assert len(bench.requests("p0")) == 3, "a trajectory stays where its prefix is"
        members = bench.gateway.registry.members
        for session in ("s0", "s3"):
            await bench.gateway.forget(session)
        assert [len(members[p].prefill_sessions) for p in seats] == [0, 2, 2]
        for n in (6, 7):
            await bench.ask(session=f"s{n}")
        assert [len(bench.requests(p)) for p in seats] == [5, 2, 2]

    virtual(main)


def test_the_next_turn_brings_the_kv_back() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.ask()
        await bench.ask((*PROMPT, *range(20)))
        back = bench.requests("p")[1].kv_transfer
        assert back is not None
        assert back["remote_engine_id"] == "d"
        assert back["do_remote_decode"] is True
        assert bench.fabric.returned == 1
        assert bench.fabric.computed == 100 + 19, "19 new tokens: the last of the 2 sampled has no KV, 100 + 1 have"

    virtual(main)


def test_kv_of_old_weights_is_not_fetched_back() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.ask()
        await bench.gateway.update(WeightsRef(1, "v1"), lambda _: None)
        await bench.ask((*PROMPT, *range(20)))
        assert bench.requests("p")[1].kv_transfer == {"do_remote_decode": True, "do_remote_prefill": False}
        assert bench.fabric.computed == 100 + 120

    virtual(main)


def test_a_dead_prefill_engine_is_lost_and_the_turn_is_prefilled_at_home() -> None:
    async def main() -> None:
        bench = Bench()
        bench.engines["p"].fail = True
        await bench.ask()
        assert bench.suspected == ["p"]
        (event,) = bench.events("handoff_failed")
        assert event["prefill"] == "p"
        assert bench.requests("d")[0].kv_transfer is None
        await bench.ask((*PROMPT, 1))
        assert len(bench.requests("p")) == 1, "nothing is sent to the dead"
        assert bench.told == [0, 0]
        assert bench.idle()

    virtual(main)


def test_a_slow_prefill_engine_costs_no_more_than_its_lease() -> None:
    async def main() -> None:
        bench = Bench()
        bench.engines["p"].slow = 1000.0
        await bench.ask()
        assert asyncio.get_running_loop().time() == pytest.approx(2.0 + 0.1 + 0.02)
        assert bench.suspected == ["p"], "it is looked at before it takes turns again"
        (event,) = bench.events("handoff_failed")
        assert event["wasted_s"] == pytest.approx(2.0)
        assert bench.charged == pytest.approx(2.0 + 0.1 + 0.02), "what was wasted is charged"
        assert bench.gateway.trust(EngineId("p")), "a slow one is not lost"

    virtual(main)


def test_kv_that_expired_is_no_fault_of_the_decode_engine() -> None:
    async def main() -> None:
        bench = Bench(pace=HandoffTimings(lease_s=0.0))
        await bench.ask()
        assert bench.suspected == []
        assert len(bench.events("handoff_failed")) == 1
        assert [r.kv_transfer is None for r in bench.requests("d")] == [False, True]
        assert bench.told == [0], "one turn, sent once"
        assert bench.gateway.turns.served == 1

    virtual(main)


def test_an_engine_that_hands_nothing_over_is_not_used_blindly() -> None:
    async def main() -> None:
        bench = Bench()
        bench.engines["p"].export = lambda request: {}  # type: ignore[method-assign]
        await bench.ask()
        (event,) = bench.events("handoff_failed")
        assert "handed no KV over" in str(event["cause"])
        assert bench.suspected == []

    virtual(main)


def test_an_update_in_the_middle_of_a_hand_off_routes_the_turn_anew() -> None:
    async def main() -> None:
        bench = Bench()
        async with asyncio.TaskGroup() as tasks:
            turn = tasks.create_task(bench.ask())
            await asyncio.sleep(0.05)
            await bench.gateway.update(WeightsRef(1, "v1"), lambda _: None)
            assert (await turn).spans[0].version == 1
        (answered,) = bench.requests("d")
        assert answered.kv_transfer is not None, "remote, as the rule says"
        assert answered.cache_salt == "v1"
        assert bench.events("handoff_failed") == []
        assert bench.events("handoffs_taken_back") == [{"count": 1}]
        assert bench.suspected == []
        assert bench.told == [1]

    virtual(main)


@pytest.mark.parametrize("at", [0.05, 0.105, 0.12])
def test_a_cancelled_turn_frees_both_engines(at: float) -> None:
    """During the prefill, during the pull, during the decode."""

    async def main() -> None:
        bench = Bench()
        async with asyncio.TaskGroup() as tasks:
            turn = tasks.create_task(bench.ask())
            await asyncio.sleep(at)
            turn.cancel()
        await bench.gateway.forget("s")
        assert bench.idle()
        assert sum(e.holds() for e in bench.engines.values()) == 0
        assert bench.charged == pytest.approx(at)
        assert not bench.gateway.turns.pulls.unfetched

    virtual(main)


def test_an_update_meets_many_hand_offs_with_one_event_and_no_turn_counts_as_failed() -> None:
    async def main() -> None:
        bench = Bench()
        async with asyncio.TaskGroup() as tasks:
            turns = [tasks.create_task(bench.ask(session=f"s{i}")) for i in range(8)]
            for version in range(1, 7):  # more updates than a turn has attempts
                await asyncio.sleep(0.05)
                await bench.gateway.update(WeightsRef(version, f"v{version}"), lambda _: None)
        assert {turn.result().spans[0].version for turn in turns} == {6}
        assert bench.events("handoffs_taken_back") == [{"count": 8}] * 6
        assert bench.events("handoff_failed") == []
        assert bench.gateway.turns.paths.keys() == {"remote"}
        assert bench.fabric.broken == []
        assert bench.idle()

    virtual(main)


def test_an_engine_that_names_no_version_is_never_left_pulling_over_an_update() -> None:
    """It has no slot for the request at first, for longer than a hand-off may take."""

    async def main() -> None:
        bench = Bench(pace=HandoffTimings(lease_s=300.0))
        pull = bench.engines["d"].pull

        async def late(params: Mapping[str, object]) -> int:
            await asyncio.sleep(3.0)
            return await pull(params)

        bench.engines["d"].pull = late  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as tasks:
            turn = tasks.create_task(bench.ask())
            await asyncio.sleep(0.1 + 2.5)
            await bench.gateway.update(WeightsRef(1, "v1"), lambda _: None)
        assert turn.result().spans[0].version == 1
        assert bench.fabric.broken == []
        assert bench.events("handoffs_taken_back") == [{"count": 1}]
        assert set(bench.engines["p"].exports) == set(), "what nobody pulls any more is dropped"

    virtual(main)


@pytest.mark.parametrize("leaves", ["d", "p"])
def test_a_turn_whose_engine_drains_meanwhile_goes_by_another_way(leaves: str) -> None:
    async def main() -> None:
        bench = Bench(
            {
                "p": EnginePlacement("fast", role=EngineRole.PREFILL),
                "q": EnginePlacement("fast", role=EngineRole.PREFILL),
                "d": EnginePlacement("wide", role=EngineRole.DECODE),
                "e": EnginePlacement("wide", role=EngineRole.DECODE),
            }
        )
        async with asyncio.TaskGroup() as tasks:
            turn = tasks.create_task(bench.ask())
            await asyncio.sleep(0.05)
            assert len(bench.requests("p")) == 1
            drain = tasks.create_task(bench.gateway.drain(EngineId(leaves), seconds=5.0))
        assert drain.done()
        assert turn.done()
        assert len(bench.requests(leaves)) == (leaves == "p"), "nothing after it began to drain"
        decodes = bench.requests("e" if leaves == "d" else "d")
        assert [r.kv_transfer is not None for r in decodes] == [True]
        assert bench.events("handoff_failed") == []
        if leaves == "d":
            assert bench.fabric.computed == 100, "the prefill engine still has the KV"

    virtual(main)


@pytest.mark.parametrize(("turns", "fails"), [(3, False), (8, True)])
def test_every_answer_renews_the_leases_of_the_queue_up_to_twice_their_length(turns: int, fails: bool) -> None:
    """A burst, as after a publish. The third waits for nearly twice its lease; what would wait longer goes home."""

    async def main() -> None:
        bench = Bench()
        engine, one = bench.engines["p"], asyncio.Lock()
        engine.slow, works = 1.2, engine.work

        async def one_by_one(seconds: float) -> None:
            async with one:
                await works(seconds)

        engine.work = one_by_one  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as tasks:
            for n in range(turns):
                tasks.create_task(bench.ask(session=f"s{n}"))
        assert bool(bench.events("handoff_failed")) is fails
        assert {event["seconds"] for event in bench.events("lease_expired")} == ({4.0} if fails else set())
        assert len(bench.requests("p")) == len(bench.requests("d")) == turns
        await bench.gateway.update(WeightsRef(1, "v1"), lambda version: None)
        assert bench.events("handoffs") == [{"decoded": 3, "failed": turns - 3, "empty": 0}]
        assert bench.idle()

    virtual(main)


def test_an_engine_that_is_taken_out_is_an_event() -> None:
    async def main() -> None:
        bench = Bench()
        bench.engines["p"].fail = True
        await bench.ask()
        (down,) = bench.events("engine_down")
        assert "p is down" in str(down["cause"])

    virtual(main)


def test_a_split_that_pulls_nothing_is_an_alarm_once() -> None:
    told: list[tuple[str, dict[str, object]]] = []
    counts = HandoffCounts()
    for _ in range(20):
        counts.ended(pulled=0)
    counts.report(1, lambda kind, subject, **fields: told.append((kind, fields)), {"remote": 20})
    counts.report(2, lambda kind, subject, **fields: told.append((kind, fields)), {"remote": 20})
    assert [kind for kind, _ in told] == ["handoffs", "handoffs_pull_nothing"]
    assert told[0][1] == {"decoded": 20, "failed": 0, "empty": 20}


@pytest.mark.parametrize(("turns", "rule", "told"), [(199, "local", 0), (200, "local", 1), (200, "remote", 0)])
def test_a_prefill_engine_that_no_turn_goes_to_is_an_alarm_once(turns: int, rule: str, told: int) -> None:
    async def main() -> None:
        bench = Bench(rule_name=rule)
        for _ in range(turns):
            await bench.ask()
        for version in (1, 2):
            await bench.gateway.update(WeightsRef(version, "w"), lambda version: None)
        assert len(bench.events("prefill_unused")) == told

    virtual(main)


def test_a_prefill_as_long_as_predicted_is_no_failure() -> None:
    async def main() -> None:
        bench = Bench(pace=HandoffTimings(prefill_s=0.03))
        prices = RoutePrices(dict.fromkeys(bench.gateway.load(), 1.0))
        bench.gateway.turns.follow(Routes(prices, LinearModel(prefill_of={"fast": 0.03, "wide": 0.3}), {}))
        await bench.ask()  # 3 s there, and a hand-off may take 2
        assert bench.events("handoff_failed") == []
        assert bench.suspected == []
        assert bench.requests("d")[0].kv_transfer is not None

    virtual(main)


def test_kv_whose_pull_failed_or_whose_decode_engine_died_is_dropped() -> None:
    async def main() -> None:
        bench = Bench(
            {
                "p": EnginePlacement("fast", role=EngineRole.PREFILL),
                "d": EnginePlacement("w"),
                "e": EnginePlacement("w"),
            }
        )

        async def dies(params: Mapping[str, object]) -> int:
            raise error

        for error in (HandoffFailed("no route"), EngineError("out of memory", retryable=True)):
            before = len(bench.requests("p"))
            for engine in (bench.engines["d"], bench.engines["e"]):
                engine.pull = dies  # type: ignore[method-assign]
            await bench.ask(session=str(error))
            assert len(bench.requests("p")) == before + 1
            assert not bench.engines["p"].exports

    virtual(main)


def test_an_engine_that_keeps_failing_hand_offs_is_left_alone_for_longer_and_longer() -> None:
    async def main() -> None:
        bench = Bench(pace=HandoffTimings(lease_s=0.0))  # its KV is gone before anybody pulls
        now = asyncio.get_running_loop().time
        tried = []
        for _ in range(1150):
            before = len(bench.requests("p"))
            await bench.ask((*PROMPT, *range(len(tried))), session=f"{now()}")
            if len(bench.requests("p")) > before:
                tried.append(now())
            await asyncio.sleep(1.0)
        gaps = [b - a for a, b in itertools.pairwise(tried)]
        assert gaps[:2] == pytest.approx([1.0] * 2, abs=0.5), "3 in a row"
        assert gaps[2:] == pytest.approx([30.0, 60.0, 120.0, 240.0, 300.0, 300.0], abs=3.0)
        barred = bench.events("prefill_barred")
        assert [e["seconds"] for e in barred[:5]] == [30.0, 60.0, 120.0, 240.0, 300.0]
        assert len(barred) == len(tried) - 2
        bench.engines["p"].pace = bench.engines["d"].pace = HandoffTimings()
        await asyncio.sleep(300.0)
        before = len(bench.requests("p"))
        for i in range(3):
            await bench.ask(session=f"well {i}")
        assert len(bench.requests("p")) == before + 3
        assert len(bench.events("prefill_barred")) == len(barred)
        assert bench.gateway.registry.members["p"].breaker == HandoffCircuitBreaker()

    virtual(main)


def test_an_engine_without_a_connector_is_asked_once() -> None:
    async def main() -> None:
        bench = Bench()
        bench.engines["p"].export = lambda request: {}  # type: ignore[method-assign]
        for i in range(20):
            await bench.ask(session=f"s{i}")
        assert len(bench.requests("p")) == 1
        assert len(bench.events("handoff_failed")) == 1
        (event,) = bench.events("prefill_barred")
        assert "handed no KV over" in str(event["cause"])
        bench.gateway.lose(EngineId("d"))
        await bench.ask(session="alone")
        assert bench.requests("p")[-1].sampling == SAMPLING, "whole turns it can serve"

    virtual(main)


def test_a_session_is_released_wherever_it_has_been() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.ask()
        assert all(e.holds() for e in bench.engines.values())
        await bench.gateway.forget("s")
        assert not any(e.holds() for e in bench.engines.values())

    virtual(main)


def test_a_role_flip_is_the_routers_alone_and_the_kv_comes_along() -> None:
    async def main() -> None:
        bench = Bench({"a": EnginePlacement("x"), "b": EnginePlacement("x")}, rule_name="remote")
        await bench.ask()
        assert len(bench.requests("a")) == 1
        bench.gateway.flip(EngineId("a"), EngineRole.PREFILL)
        bench.gateway.flip(EngineId("b"), EngineRole.DECODE)
        await bench.ask((*PROMPT, *range(10)))
        assert bench.requests("b")[0].kv_transfer is not None
        assert bench.requests("a")[1].sampling.max_tokens == 1
        assert bench.fabric.computed == 100 + 9, "the old home prefills from its own copy"
        assert [e["after"] for e in bench.events("role_flipped")] == ["prefill", "decode"]

    virtual(main)


def test_a_role_outlives_a_restart() -> None:
    async def main() -> None:
        bench = Bench()
        bench.gateway.flip(EngineId("p"), EngineRole.DECODE)
        bench.gateway.lose(EngineId("p"))
        bench.gateway.join(bench.engines["p"], version=0, shares=bench.shares["p"], seat=EnginePlacement("fast"))
        seat = bench.gateway.registry.seat_of(EngineId("p"))
        assert seat is not None
        assert seat.role is EngineRole.DECODE

    virtual(main)


def test_prefill_engines_serve_whole_turns_when_nobody_else_is_left() -> None:
    async def main() -> None:
        bench = Bench()
        bench.gateway.lose(EngineId("d"))
        await bench.ask()
        assert bench.requests("p")[0].kv_transfer is None
        assert bench.requests("p")[0].sampling == SAMPLING

    virtual(main)


def test_a_preferred_pool_that_dies_falls_back_with_one_event_each_way() -> None:
    async def main() -> None:
        bench = Bench(
            {
                "a": EnginePlacement("h800", "H800"),
                "b": EnginePlacement("h20", "H20"),
                "c": EnginePlacement("l40", "L40S"),
            },
            affinity=HardwareAffinity({"lake": "H800"}, default="h20", order=("l40", "h20")),
        )

        async def go(session: str, domain: str) -> str:
            before = {n: len(bench.requests(n)) for n in bench.engines}
            await bench.ask(session=session, domain=domain)
            return next(n for n in bench.engines if len(bench.requests(n)) > before[n])

        assert await go("1", "lake") == "a"
        assert await go("2", "math") == "b"
        bench.gateway.lose(EngineId("a"))
        assert await go("3", "lake") == "c", "the order of the fallback, not the name's"
        assert await go("1", "lake") == "c"
        (event,) = bench.events("affinity_fallback")
        assert event == {"preferred": "H800", "pool": "l40", "engine": "c"}
        bench.gateway.join(bench.engines["a"], version=0, shares=bench.shares["a"])
        assert await go("3", "lake") == "c", "its KV is there"
        assert bench.events("affinity_restored") == []
        assert await go("4", "lake") == "a"
        assert len(bench.events("affinity_restored")) == 1

    virtual(main)


def test_one_slow_turn_is_no_news_of_affinity_and_a_doubt_that_stays_is() -> None:
    async def main() -> None:
        bench = Bench(
            {"a": EnginePlacement("h800", "H800"), "b": EnginePlacement("h20", "H20")},
            affinity=HardwareAffinity({"lake": "H800"}),
        )
        member = bench.gateway.registry.members["a"]

        async def doubt(session: str, seconds: float) -> None:
            bench.gateway.doubt(member, slow)
            await asyncio.sleep(seconds)
            await bench.ask(session=session, domain="lake")

        slow = LeaseExpired("s", "generation on a", 1.0)
        for i in range(3):
            await doubt(f"s{i}", 1.0)
            assert bench.gateway.trust(EngineId("a"))
            await bench.ask(session=f"well {i}", domain="lake")
        assert len(bench.requests("b")) == len(bench.requests("a")) == 3, "it is looked at first, all the same"
        assert bench.events("affinity_fallback") == bench.events("affinity_restored") == []
        await doubt("long", 11.0)
        assert len(bench.events("affinity_fallback")) == 1
        bench.gateway.trust(EngineId("a"))
        await bench.ask(session="again", domain="lake")
        assert len(bench.events("affinity_restored")) == 1
        await doubt("short", 1.0)
        bench.gateway.lose(EngineId("a"))
        await bench.ask(session="lost", domain="lake")
        assert len(bench.events("affinity_fallback")) == 2

    virtual(main)


def test_a_drained_engine_ends_its_turns_and_gets_no_more() -> None:
    async def main() -> None:
        bench = Bench({"a": EnginePlacement("x"), "b": EnginePlacement("x")}, rule_name="local")
        async with asyncio.TaskGroup() as tasks:
            turn = tasks.create_task(bench.ask())
            await asyncio.sleep(0.01)
            await bench.gateway.drain(EngineId("a"), seconds=5.0)
            assert turn.done()
        await bench.ask((*PROMPT, 1))
        assert len(bench.requests("b")) == 1
        bench.engines["b"].slow = 60.0
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_ignored(bench.ask((*PROMPT, 2))))
            await asyncio.sleep(0.01)
            with pytest.raises(LeaseExpired, match="b to drain"):
                await bench.gateway.drain(EngineId("b"), seconds=1.0)

    virtual(main)


def test_new_prices_do_not_forget_the_homes_given_and_new_shares_do() -> None:
    async def main() -> None:
        seats = {"a": EnginePlacement("a", "X"), "b": EnginePlacement("b", "Y")}
        bench = Bench(seats, rule_name="priced")
        prices = RoutePrices({seat.kind: 1.0 for seat in seats.values()})
        routes = Routes(prices, LinearModel(), {"a": {"a": 0.6, "b": 0.4}})
        bench.gateway.turns.follow(routes)
        for i in range(50):
            await bench.ask(session=f"s{i}")
            bench.gateway.turns.follow(replace(routes, prices=RoutePrices(prices.engines, in_flight=i * 1e-9)))
        assert (len(bench.requests("a")), len(bench.requests("b"))) == (30, 20)
        bench.gateway.turns.follow(replace(routes, shares={"a": {"a": 0.5, "b": 0.5}}))
        await bench.ask(session="first")
        await bench.ask(session="second")
        assert (len(bench.requests("a")), len(bench.requests("b"))) == (31, 21)

    virtual(main)


async def _ignored(turn: Coroutine[Any, Any, Completion]) -> None:
    try:
        await turn
    except (EngineError, LeaseExpired):
        return


class Endless:
    """An environment that never ends an episode."""

    async def reset(self, seed: int) -> Observation:
        return Observation("a b c d")

    async def step(self, action: str) -> Step:
        return Step(Observation("e f"), 0.0)

    async def close(self) -> None:
        pass


def test_the_prefill_of_the_last_turn_that_there_can_be_says_so() -> None:
    """Its engine then keeps no KV beyond the hand-over."""

    async def main() -> None:
        bench = Bench()
        runner = TrajectoryRunner(
            bench.gateway,
            WordTokenizer(),
            bench.leases,
            limits=WaitLimits(),
            stale=lambda _: False,
            barrier=FreeRunning(),
        )
        domain = Domain("a", Endless, quota=1, group_size=1, max_turns=3, max_tokens=4)
        await runner.run(TrajectoryState(TrajectoryId("a-0.0"), GroupId("a-0"), domain, 0, Purpose.TRAIN, 0, 0.0))
        asked = [(r.kv_transfer or {}).get("session_ends", False) for r in bench.requests("p")]
        assert asked == [False, False, True]
        assert [(r.kv_transfer or {}).get("return_kv", True) for r in bench.requests("d")] == [True, True, False]

    virtual(main)
