"""Tokens that a function's own requests consume: recorded by its code, carried by its answer, billed once per call."""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.sim import loop as virtual
from rollart.testing.functions import Meter
from serverless import wire
from serverless.deploy.handler import adapt
from serverless.errors import PolicyFault
from serverless.inline import inline
from serverless.meter import NO_SCORE, TokenBill
from serverless.pipeline.offload import Offload
from serverless.pipeline.stages import PipelineSpec
from serverless.providers.base import Reply
from serverless.types import Cause, FaultKind, InfraFault, Item, Scored, Throttle, TokenUsage
from serverless.usage import record_tokens
from tests.serverless.modelled import Modelled
from tests.serverless.support import item, package

ONE = TokenUsage("api.example", "small", 1, 100, 20, 0, 7)


def sync_reward(sample: Item) -> float:
    record_tokens(ONE)
    record_tokens(TokenUsage("api.example", "large", 1, 5, 0, 0, 1))
    if sample.metadata.get("twice"):
        record_tokens(ONE)
    return 1.0


async def async_reward(sample: Item) -> float:
    async def ask() -> None:
        await asyncio.sleep(0)
        record_tokens(ONE)

    await asyncio.gather(*(ask() for _ in range(int(sample.metadata.get("asks", 0)))))
    return 1.0


def batch_reward(samples: list[Item]) -> list[float]:
    for _ in samples:
        record_tokens(ONE)
    return [1.0] * len(samples)


def failing(sample: Item) -> Any:
    record_tokens(ONE)
    match sample.id:
        case "raises":
            raise ValueError("nonsense")
        case "policy":
            raise PolicyFault("empty")
        case _:
            return InfraFault(FaultKind.THROTTLED, True, "slow down", Throttle.RATE, 3.5)


def event(*ids: str, **metadata: Any) -> list[dict[str, Any]]:
    return [{"id": key, "messages": [], "reference_answer": None, "metadata": metadata} for key in ids]


def test_an_answer_carries_the_tokens_of_its_item_by_model() -> None:
    first, second = adapt(sync_reward)(event("a") + event("b", twice=True), None)
    assert [u["input_tokens"] for u in first["usage"]] == [100, 5]
    assert second["usage"][0] == {
        "endpoint": "api.example",
        "model": "small",
        "requests": 2,
        "input_tokens": 200,
        "cached_tokens": 40,
        "cache_write_tokens": 0,
        "output_tokens": 14,
    }
    assert [u.requests for u, _ in wire.usage([first, second])] == [1, 1, 2, 1]


def test_items_that_are_scored_concurrently_have_their_own_tokens() -> None:
    events = [*event("a", asks=1), *event("b", asks=3), *event("c")]
    answers = adapt(async_reward)(events, None)
    assert [sum(u.requests for u, _ in wire.usage([answer])) for answer in answers] == [1, 3, 0]
    assert "usage" not in answers[2]


def test_tokens_of_a_batch_are_in_its_first_answer() -> None:
    answers = adapt(batch_reward)(event("a", "b", "c"), None)
    assert [u.requests for u, _ in wire.usage(answers)] == [3]
    assert "usage" in answers[0]


def test_tokens_recorded_in_threads_are_in_the_first_answer_of_their_call() -> None:
    pool = ThreadPoolExecutor(2)

    def reward(sample: Item) -> float:
        record_tokens(ONE)
        list(pool.map(record_tokens, [ONE] * int(sample.metadata["asks"])))
        return 1.0

    handler = adapt(reward)
    for asks in (3, 0, 2):
        answers = handler(event("a", "b", asks=asks), None)
        assert [u.requests for u, _ in wire.usage(answers)] == [1 + 2 * asks, 1]
    pool.shutdown()


def test_a_handler_of_the_whole_list_is_billed_too() -> None:
    """It answers in the wire form, and may have no usage of its own."""

    def handler(event: list[dict[str, Any]], context: Any) -> list[dict[str, Any]]:
        record_tokens(ONE)
        return [{"id": raw["id"], "aggregate_reward_score": 1.0, "metrics_list": []} for raw in event]

    async def concurrent(event: list[dict[str, Any]], context: Any) -> list[dict[str, Any]]:
        await asyncio.sleep(0)
        return handler(event, context)

    for one in (handler, concurrent):
        assert [u.requests for u, _ in wire.usage(adapt(one)(event("a", "b"), None))] == [1]


def test_an_item_that_is_not_scored_has_its_tokens_too() -> None:
    answers = adapt(failing)(event("raises", "policy", "throttled"), None)
    assert [(u.requests, scored) for u, scored in wire.usage(answers)] == [(1, False), (1, True), (1, False)]
    last = wire.outcomes(answers, event("raises", "policy", "throttled"), deterministic=False)[2]
    assert last == InfraFault(FaultKind.THROTTLED, True, "InfraFault: slow down", Throttle.RATE, 3.5)


def test_tokens_recorded_between_calls_are_on_the_bill_of_the_next() -> None:
    """By a thread of the function's own, or while it loads."""
    contextvars.Context().run(record_tokens, ONE)
    handler = adapt(lambda sample: 1.0, takes="item")
    first, second = handler(event("a"), None), handler(event("a"), None)
    assert [u.requests for u, _ in wire.usage(first)] == [1]
    assert "usage" not in second[0]


@pytest.mark.parametrize(
    "entry",
    [
        "tokens",
        {"input_tokens": -1},
        {"input_tokens": True},
        {"input_tokens": 1.5},
        {"input_tokens": 2**60},
        {"prompt_tokens": 3},
    ],
)
def test_usage_of_another_form_is_no_bill_and_no_fault(entry: Any) -> None:
    answers = [{"id": "a", "aggregate_reward_score": 1.0, "usage": [entry]}]
    assert wire.usage(answers) == []
    assert wire.outcomes(answers, event("a"), deterministic=True) == [Scored(1.0)]
    assert wire.usage({"usage": [entry]}) == wire.usage(None) == wire.usage([{"usage": entry}]) == []


def test_a_reward_of_this_process_bills_its_tokens_too() -> None:
    scorer, meter = inline(async_reward), Meter()
    asyncio.run(scorer.score(Item("a", (), None, {"asks": 2})))
    scorer.meter_tokens("judge", meter)
    assert asyncio.run(scorer.score(Item("b", (), None, {"asks": 3}))) == Scored(1.0)
    assert meter.usage["judge"].tokens == [TokenUsage("api.example", "small", 3, 300, 60, 0, 21)]


class CauseMeter(Meter):
    """Counts input tokens by cause, too."""

    def __init__(self) -> None:
        super().__init__()
        self.by_cause: Counter[str] = Counter()

    def tokens(self, bill: TokenBill) -> None:
        super().tokens(bill)
        self.by_cause[bill.cause] += bill.usage.input_tokens


class Asking(Modelled):
    """A provider whose calls consume tokens, and count those of every call that answered."""

    def __init__(self, body: Any) -> None:
        super().__init__(body)
        self.consumed = 0
        self.without_score = 0

    async def invoke(
        self, function: str, event: Sequence[dict[str, Any]], *, deadline_s: float, cause: Cause = Cause.CALL
    ) -> Reply:
        reply = await super().invoke(function, event, deadline_s=deadline_s, cause=cause)
        if not isinstance(reply.body, list):
            return reply
        self.consumed += 10 * len(event)
        usage = [{"endpoint": "e", "model": "m", "input_tokens": 10}]
        answers = [{**answer, "usage": usage} for answer in reply.body]
        broken = [{"id": a["id"], "error": {"kind": "unavailable", "retryable": True}, "usage": usage} for a in answers]
        fails = len(self.calls) % 3 == 0
        self.without_score += fails * 10 * len(event)
        return Reply(broken if fails else answers, None, reply.invocation)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(0, 1000), st.booleans())
def test_each_answered_call_is_billed_once_whatever_the_pipeline_makes_of_it(
    values: list[int], seed: int, reusable: bool
) -> None:
    """Retried, hedged and shared: the meter has the tokens of the answered calls, and an item that shares an answer
    adds none."""

    async def body(provider: Modelled, event: list[dict[str, Any]], cause: Cause) -> None:
        late = (seed + len(provider.calls)) % 11 == 0
        await asyncio.sleep(5.0 if late else 0.05)

    meter, backend = CauseMeter(), Asking(body)
    one = package("behave", batch={"max_items": 3}, deterministic=False, cache=reusable)
    spec = PipelineSpec.model_validate({"hedge": {"min_observations": 3, "budget": 0.5}})

    async def main() -> None:
        async with Offload([one], backend, settings=spec, meter=meter, seed=seed) as offload:
            calls = [offload.submit("behave", item(str(n), value=float(v)), 60.0) for n, v in enumerate(values)]
            await asyncio.gather(*calls)
            await asyncio.sleep(30.0)

    virtual.run(main())
    assert sum(used.input_tokens for used in meter.usage["behave"].tokens) == backend.consumed
    assert sum(meter.by_cause.values()) == backend.consumed
    assert meter.by_cause[NO_SCORE] == backend.without_score
    if reusable:
        executed = Counter(e["metadata"]["value"] for call in backend.events for e in call)
        assert executed.keys() == {float(v) for v in values}
        assert all(n <= 3 + backend.caused(Cause.HEDGE) for n in executed.values()), "equal items share a call"


def test_a_function_whose_calls_are_expensive_is_not_hedged() -> None:
    async def body(provider: Modelled, event: list[dict[str, Any]], cause: Cause) -> None:
        await asyncio.sleep(9.0 if len(provider.events) == 30 else 0.05)

    made = []
    for hedge in (True, False):
        backend = Modelled(body)
        one = package("behave", batch={"max_items": 1}, hedge=hedge)

        async def main(one: Any = one, backend: Modelled = backend) -> None:
            async with Offload([one], backend, settings=PipelineSpec()) as offload:
                for n in range(40):
                    await offload.submit("behave", item(str(n), value=float(n)), 60.0)

        virtual.run(main())
        made.append(backend.caused(Cause.HEDGE))
    assert made[0] > 0
    assert made[1] == 0
