"""An engine's answer is checked where it arrives: a wrong one costs its turn a retry and counts against its engine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest

from rollart.errors import EngineError, ForeignWeights
from rollart.model import Completion, CompletionChunk, FinishReason, GenerateRequest, Sampling, VersionSpan, WeightsRef
from rollart.policy.engine_health import EngineTrust, wrong_answer
from rollart.serving.engine_registry import GatewayLimits
from tests.serving.test_partial_answers import Telling, gateway_of
from tests.supervise.test_engines import FakeEngine, FakePart, Fleet, supervised, virtual

RIGHT = Completion((1,), (-0.5,), (VersionSpan(0, 0, 1),), FinishReason.STOP)

WRONG = {
    "log-probability of nan": {"logprobs": (math.nan,)},
    "log-probability of -inf": {"logprobs": (-math.inf,)},
    "log-probability of 0.7": {"logprobs": (0.7,)},
    "log-probability of None": {"logprobs": (None,)},
    "0 log-probabilities for 1": {"logprobs": ()},
    "token id 500": {"token_ids": (500,)},
    "token id -1": {"token_ids": (-1,)},
    "token id 1.0": {"token_ids": (1.0,)},
    "token id 7 (rule: one of": {"token_ids": (7,)},
    "2 tokens (rule: at most the 1": {
        "token_ids": (1, 1),
        "logprobs": (-1.0, -1.0),
        "spans": (VersionSpan(0, 0, 2),),
    },
    "tokens of v1000": {"spans": (VersionSpan(1000, 0, 1),)},
    "tokens of v-1": {"spans": (VersionSpan(-1, 0, 1),)},
    "versions of 0 tokens": {"spans": ()},
    "after token 0": {"spans": (VersionSpan(0, 1, 1),)},
    "no tokens": {"token_ids": (), "logprobs": (), "spans": ()},
    "usage": {"prompt_tokens": -3},
}

LIMITS = GatewayLimits(generate_s=20.0, engine_s=60.0, vocab=128)
ASKED = Sampling(max_tokens=1, allowed_token_ids=(1, 2, 500, -1))


class Lying(FakeEngine):
    """Each answer is wrong for which `lies` says so, in the way of `change`."""

    def __init__(self, name: str, version: int = 0, *, change: dict[str, object], lies: Callable[[int], bool]) -> None:
        super().__init__(name, version)
        self.asked, self._change, self._lies = 0, change, lies

    async def generate(self, request: GenerateRequest) -> Completion:
        self.asked += 1
        answer = await super().generate(request)
        return dataclasses.replace(answer, **self._change) if self._lies(self.asked) else answer  # type: ignore[arg-type]


@pytest.mark.parametrize(("says", "change"), WRONG.items(), ids=WRONG)
def test_a_wrong_answer_is_asked_of_another_engine(says: str, change: dict[str, object]) -> None:
    async def main() -> None:
        fleet = Fleet(LIMITS)
        liar, other = Lying("engine-0", change=change, lies=lambda _: True), FakeEngine("engine-1")
        fleet.join(liar)
        fleet.join(other)
        answer = await fleet.gateway.generate("s", (1, 2), ASKED, spend=lambda _: None)
        assert answer == RIGHT
        (told,) = (e for e in fleet.recorder.events if e.kind == "wrong_answer")
        assert (told.subject, liar.asked) == ("engine-0", 1)
        assert says in str(told.fields["what"])
        assert fleet.suspected == [], "one wrong answer is not the end of an engine"

    virtual(main)


def test_an_engine_that_answers_wrongly_too_often_is_restarted_though_it_is_healthy() -> None:
    """Its health check succeeds: only its answers say that it computes nonsense."""
    made: list[Lying] = []

    def make(weights: WeightsRef) -> Lying:
        first = not made
        made.append(Lying("engine-0", weights.version, change={"logprobs": (math.nan,)}, lies=lambda _: first))
        return made[-1]

    async def main() -> None:
        fleet = Fleet(LIMITS)
        part = FakePart(make)

        async def body() -> None:
            assert (await fleet.gateway.generate("s", (1, 2), ASKED, spend=lambda _: None)) == RIGHT
            (cause,) = fleet.causes()
            assert "answers cannot be used" in str(cause)
            assert "nan" in str(cause)
            assert len(made) == 2

        await supervised(fleet, part, body)

    virtual(main)


def test_an_engine_with_foreign_weights_is_restarted_at_its_first_answer() -> None:
    class Foreign(FakeEngine):
        async def generate(self, request: GenerateRequest) -> Completion:
            if self is made[0]:
                raise ForeignWeights("engine-0: its weights are not those that were published as v0")
            return await super().generate(request)

    made: list[Foreign] = []

    def make(weights: WeightsRef) -> Foreign:
        made.append(Foreign("engine-0", weights.version))
        return made[-1]

    async def main() -> None:
        fleet = Fleet(dataclasses.replace(LIMITS, attempts=2))

        async def body() -> None:
            assert (await fleet.gateway.generate("s", (1, 2), ASKED, spend=lambda _: None)) == RIGHT
            (cause,) = fleet.causes()
            assert "not those that were published as v0" in str(cause)
            assert [e.subject for e in fleet.recorder.events if e.kind == "wrong_answer"] == ["engine-0"]
            assert len(made) == 2

        await supervised(fleet, FakePart(make), body)

    virtual(main)


def test_rare_wrong_answers_cost_their_turns_alone() -> None:
    async def main() -> None:
        fleet = Fleet(LIMITS)
        engine = Lying("engine-0", change={"logprobs": (math.nan,)}, lies=lambda n: n % 30 == 0)
        fleet.join(engine)
        for n in range(600):
            assert (await fleet.gateway.generate(f"s{n}", (1, 2), ASKED, spend=lambda _: None)) == RIGHT
        assert fleet.suspected == []
        assert engine.asked == 600 + sum(e.kind == "wrong_answer" for e in fleet.recorder.events)

    virtual(main)


def test_a_turn_whose_every_answer_is_wrong_fails_with_the_rule() -> None:
    async def main() -> None:
        fleet = Fleet(dataclasses.replace(LIMITS, attempts=2))
        fleet.join(Lying("engine-0", change={"logprobs": (0.7,)}, lies=lambda _: True))
        with pytest.raises(EngineError, match=r"2 attempts: engine-0: a log-probability of 0\.7 \(rule: at most 0\)"):
            await fleet.gateway.generate("s", (1, 2), ASKED, spend=lambda _: None)

    virtual(main)


def test_tokens_that_are_heard_are_checked_as_they_come() -> None:
    """A listener hears none of a wrong piece; the answer goes on elsewhere after what was right."""

    class Garbling(Telling):
        async def generate(self, request: GenerateRequest) -> Completion:
            tell = request.on_chunk
            assert tell is not None

            def garbled(piece: CompletionChunk) -> None:
                tell(piece if piece.token_ids[0] < 3 else dataclasses.replace(piece, logprobs=(math.nan,)))

            return await super().generate(dataclasses.replace(request, on_chunk=garbled))

    async def main() -> None:
        engines: list[Telling] = [Garbling("e0"), Telling("e1")]
        gateway, streamed = gateway_of(engines), list[CompletionChunk]()
        answer = await gateway.generate("s", (0,), Sampling(8), spend=lambda _: None, on_chunk=streamed.append)
        assert answer.token_ids == tuple(range(1, 9))
        assert engines[1].requests[0].token_ids == (0, 1, 2)
        assert all(map(math.isfinite, (p for piece in streamed for p in piece.logprobs)))

    virtual(main)


def test_versions_that_an_update_brings_during_the_answer_are_right() -> None:
    spans = (VersionSpan(3, 0, 1), VersionSpan(4, 1, 2))
    two = Completion((1, 2), (0.0, -1.0), spans, FinishReason.LENGTH)
    assert wrong_answer(two, Sampling(2), vocab=128, versions=(3, 4)) == ""
    assert "v4" in wrong_answer(two, Sampling(2), vocab=128, versions=(3, 3))
    assert "v3" in wrong_answer(two, Sampling(2), vocab=128, versions=(4, 4))


def test_trust_returns_with_right_answers() -> None:
    trust = EngineTrust()
    for _ in range(50):
        assert not trust.failed()
        for _ in range(20):
            trust.right()
    assert not trust.failed()
    assert not trust.failed()
    assert trust.failed()


def test_an_aborted_answer_may_be_empty() -> None:
    assert wrong_answer(Completion((), (), (), FinishReason.ABORT), Sampling(2), vocab=128, versions=(0, 0)) == ""
