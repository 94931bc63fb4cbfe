"""The experts of a trajectory's tokens come from the engines, turn by turn, and reach the trainer with its sample."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.control.trajectory import ExpertHistory
from rollart.ledger.payloads import decode_sample, encode_sample
from rollart.model import Completion, FinishReason, GenerateRequest, Group, VersionSpan
from rollart.policy.continuing import join_completions
from rollart.sim import loop
from rollart.strategies.token_budget import BatchTruncation
from rollart.testing.parts import SimulatedEngine
from rollart.testing.run import SimulatedRun, make_simulated_run
from tests.control.test_harness import Programs
from tests.train.trainkit import sample


def mark(context: Sequence[int]) -> bytes:
    """The experts of a context's last token: they depend on all tokens before it."""
    return zlib.crc32(repr(tuple(context)).encode()).to_bytes(4, "little")


def marks(context: Sequence[int]) -> tuple[bytes, ...]:
    return tuple(mark(context[: n + 1]) for n in range(len(context)))


class Routing(SimulatedEngine):
    """An engine of a model with experts, whose tokens vary."""

    asked: list[int | None]

    async def generate(self, request: GenerateRequest) -> Completion:
        self.asked.append(request.experts_from)
        done = await super().generate(request)
        first = request.experts_from
        if first is None or not done.token_ids:
            return done
        assert first < len(request.token_ids)
        ids = tuple(97 + (len(request.token_ids) + n) % 7 for n in range(len(done.token_ids)))
        return replace(done, token_ids=ids, experts=marks((*request.token_ids, *ids)[:-1])[first:])


def run_of(*, programs: Programs | None = None, **more: Any) -> SimulatedRun:
    run = make_simulated_run(turns=3, tokens=3, engine_s=lambda rng: rng.uniform(0.5, 4.0), **more)
    run.engines = [Routing(e.id, version=0, tokens=3, seconds=lambda rng: rng.uniform(0.5, 4.0)) for e in run.engines]
    for engine in run.engines:
        engine.asked = []  # type: ignore[attr-defined]
    if programs is not None:
        run.domains = [replace(d, harness=programs) for d in run.domains]
    return run


def asked(run: SimulatedRun) -> list[int | None]:
    return [first for engine in run.engines for first in engine.asked]  # type: ignore[attr-defined]


@pytest.mark.parametrize("program", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_every_token_has_the_experts_of_its_own_context(seed: int, program: bool) -> None:
    """Across turns, engines and weight updates that end turns. The last token has none: no token has followed it."""
    run = run_of(experts=True, steps=4, seed=seed, programs=Programs(asks=3) if program else None)
    loop.run(run.run(), seed=seed)
    samples = [s for _, batch in run.trainer.batches for s in batch]
    assert len(samples) == 16
    for one in samples:
        assert one.experts == (*marks(one.token_ids[:-1]), b"\xff" * 4)
        assert decode_sample(encode_sample(one)) == one
    firsts = asked(run)
    assert {first > 0 for first in firsts if first is not None} == {False, True}, "each token's are sent once"
    assert None not in firsts


def test_a_run_without_experts_asks_for_none() -> None:
    run = run_of()
    loop.run(run.run(), seed=0)
    assert set(asked(run)) == {None}
    assert all(s.experts == () for _, batch in run.trainer.batches for s in batch)


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=12), st.randoms())
def test_a_history_knows_the_longest_common_beginning(contexts: list[list[int]], rng: random.Random) -> None:
    """Of contexts that branch: an agent program may go back, drop a message or start again."""
    history, seen = ExpertHistory(), [()]
    for context in map(tuple, contexts):
        known = history.known(context)
        longest = max(next((n for n in range(len(c)) if c[: n + 1] != context[: n + 1]), len(c)) for c in seen)
        assert known == marks(context[:longest])
        answered = context[: rng.randint(longest, len(context))]
        history.add(context, marks(answered))
        seen.append(answered)


def test_an_interrupted_answer_keeps_the_experts_of_its_beginning() -> None:
    def part(ids: tuple[int, ...], *experts: bytes) -> Completion:
        return Completion(ids, (-1.0,) * len(ids), (VersionSpan(0, 0, len(ids)),), FinishReason.ABORT, experts=experts)

    rest = part((3, 4), b"a", b"b", b"c")
    assert join_completions(part((1,), b"x"), rest).experts == (b"x", b"b", b"c")
    assert join_completions(part((1,)), rest).experts == rest.experts, "streamed tokens came without"


def test_a_cut_sample_keeps_the_experts_of_its_tokens() -> None:
    one = replace(sample("x", turns=[(3, 2), (2, 2)]), experts=marks(range(9)))
    assert decode_sample(encode_sample(one)) == one
    (cut,) = BatchTruncation(6)([Group(one.group, one.domain, (one,))], 0)
    assert cut.experts == marks(range(6))
