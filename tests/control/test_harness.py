"""Agent programs in an environment's place: trained like every other trajectory, and never waited for long."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from rollart.errors import FaultRateExceeded
from rollart.model import Completion, Observation, Segment, SegmentKind, Step
from rollart.ports import HarnessFactory, HarnessRequest
from rollart.sim import loop
from rollart.testing.run import SimulatedRun, make_simulated_run


@dataclass
class Scripted:
    """Implements `HarnessEpisode`: asks `asks` times, `think_s` apart, each time with the whole conversation so far."""

    asks: int
    think_s: float = 1.0
    breaks: bool = False
    wanted_so_far: int = 0
    tokens: tuple[int, ...] = ()
    captured: list[Segment] = field(default_factory=list)
    exhausted: bool = False
    closed: bool = False

    async def wanted(self) -> HarnessRequest | None:
        await asyncio.sleep(self.think_s)
        if self.breaks:
            raise OSError("the sandbox is gone")
        if self.exhausted or self.wanted_so_far == self.asks:
            return None
        kind = SegmentKind.OBSERVATION if self.captured else SegmentKind.PROMPT
        self.captured.append(Segment(kind, self.wanted_so_far, (7, 8)))
        self.tokens += (7, 8)
        self.wanted_so_far += 1
        return HarnessRequest(self.tokens, max_tokens=3)

    def answer(self, completion: Completion) -> None:
        for span in completion.spans:
            at = slice(span.start, span.end)
            ids, logprobs = completion.token_ids[at], completion.logprobs[at]
            turn = self.wanted_so_far - 1
            self.captured.append(Segment(SegmentKind.ACTION, turn, ids, span.version, logprobs))
        self.tokens += completion.token_ids

    def exhaust(self) -> None:
        self.exhausted = True

    def segments(self) -> tuple[Segment, ...]:
        return tuple(self.captured)

    def ending(self) -> Step:
        return Step(Observation("bye"), reward=0.25, done=True, success=True)

    async def close(self) -> None:
        self.closed = True


class Programs:
    """A `HarnessFactory` that keeps what it began."""

    def __init__(self, **script: Any) -> None:
        self.script = script
        self.begun: list[Scripted] = []

    def __call__(self, session: str, seed: int) -> Scripted:
        self.begun.append(Scripted(**self.script))
        return self.begun[-1]


def run_of(programs: HarnessFactory, *, turns: int = 5, **more: Any) -> SimulatedRun:
    run = make_simulated_run(quotas={"a": (4, 2)}, turns=turns, tokens=3, **{"alpha": 1, "steps": 3, **more})
    run.domains = [replace(d, harness=programs) for d in run.domains]
    return run


def test_a_program_is_trained_on_the_tokens_that_it_was_given() -> None:
    programs = Programs(asks=3)
    run = run_of(programs)
    loop.run(run.run(), seed=1)
    samples = [s for _, batch in run.trainer.batches for s in batch]
    assert len(samples) == 12
    for sample in samples:
        asked, answered = sample.token_ids[:2], sample.loss_mask.count(True)
        assert asked == (7, 8)
        assert len(sample.token_ids) == 6 + answered
        assert max(sample.turn) == 2
        assert sample.success is True
        assert sample.v0 == min(v for v in sample.versions if v >= 0)
    assert all(p.closed for p in programs.begun)


def test_it_has_as_many_turns_as_its_domain() -> None:
    programs = Programs(asks=1_000_000)
    loop.run(run_of(programs, turns=4).run(), seed=1)
    assert {p.wanted_so_far for p in programs.begun if p.exhausted} == {4}


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ({"asks": 2, "breaks": True}, "harness raised OSError: the sandbox is gone"),
        ({"asks": 2, "think_s": 1e9}, "request of its harness"),
        ({"asks": 0}, "ended without an answer"),
    ],
)
def test_one_that_breaks_stalls_or_says_nothing_is_a_fault_and_no_reward(script: dict[str, Any], cause: str) -> None:
    programs = Programs(**script)
    run = run_of(programs, max_fault_rate=0.5)
    with pytest.raises((FaultRateExceeded, ExceptionGroup)):
        loop.run(run.run(), seed=1)
    assert run.trainer.batches == []
    faults = [e for e in run.recorder.events if e.kind == "infra_fault"]
    assert faults
    assert all(cause in str(e.fields["detail"]) for e in faults)
    assert all(p.closed for p in programs.begun)


def test_one_that_was_overtaken_is_stopped_before_it_hears_more() -> None:
    """Every other program thinks so long that its version is stale by then."""

    class Mixed(Programs):
        def __call__(self, session: str, seed: int) -> Scripted:
            program = super().__call__(session, seed)
            program.think_s = 1.0 if len(self.begun) % 5 else 25.0
            return program

    programs = Mixed(asks=3)
    run = run_of(programs, steps=12)
    loop.run(run.run(), seed=1)
    outcomes = {c.outcome for c in run.recorder.charges}
    assert "finished" in outcomes
    assert outcomes & {"stale", "group_dropped"}, "a member that is stale takes its group along"
    assert all(n - s.v0 <= 1 for n, batch in run.trainer.batches for s in batch)
