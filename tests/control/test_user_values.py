"""Broken answers of environments are infrastructure faults with the cause in words, never numbers or crashes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from typing import Any

import numpy as np
import pytest

from rollart.model import AbortReason, Observation, Step
from rollart.sim import loop
from rollart.testing.run import make_simulated_run
from rollart.user_code import checked_observation, checked_step, require_awaitable

LOOK = Observation("look")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "answered NoneType where a rollart.Step is due"),
        (Step(LOOK, reward=math.nan), "reward is nan"),
        (Step(LOOK, reward=math.inf), "reward is inf"),
        (Step(LOOK, reward=None), "reward is None, not a number"),  # type: ignore[arg-type]
        (Step(LOOK, reward="1.0"), "reward is '1.0', not a number"),  # type: ignore[arg-type]
        (Step(None), "where a rollart.Observation is due"),  # type: ignore[arg-type]
        (Step(Observation("x", actions=())), "no legal action"),
        (Step(Observation(7)), "text is int"),  # type: ignore[arg-type]
    ],
)
def test_a_broken_step_is_refused_in_words(answer: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        checked_step(answer)


def test_numpy_scalars_are_taken_for_what_they_mean() -> None:
    step = checked_step(Step(LOOK, reward=np.float32(0.5), done=np.bool_(True), success=np.bool_(False)))  # type: ignore[arg-type]
    assert (step.reward, step.done, step.success) == (0.5, True, False)
    assert (type(step.reward), type(step.done), type(step.success)) == (float, bool, bool)


def test_a_good_answer_is_not_copied() -> None:
    step = Step(LOOK, 1.0, True, None)
    assert checked_step(step) is step
    assert checked_observation(LOOK) is LOOK


class Bad:
    """Breaks once per instance in the way it is told."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def reset(self, seed: int) -> Observation:
        return LOOK

    async def step(self, action: str) -> Any:
        return self.answer

    async def close(self) -> None:
        return None


@pytest.mark.parametrize("answer", [None, Step(LOOK, reward=math.nan, done=True), "done"])
def test_broken_answers_drop_the_group_and_name_the_cause(answer: Any) -> None:
    """Nothing of it is durable, nothing reaches the trainer, and the run still ends with whole batches."""
    run = make_simulated_run(steps=2)
    broken = 0
    plain = run.domains[0].environment

    def environment() -> Any:
        nonlocal broken
        broken += 1
        return Bad(answer) if broken % 5 == 1 else plain()

    run.domains = [_with(run.domains[0], environment)]
    loop.run(run.run(), seed=3)
    faults = [e for e in run.recorder.events if e.kind == "infra_fault"]
    assert faults
    assert all("environment step" in str(e.fields["detail"]) for e in faults)
    assert len(run.trainer.batches) == 2
    assert all(math.isfinite(r) for _, batch in run.trainer.batches for s in batch for r in s.rewards)
    assert all(c.score is None for c in run.recorder.charges if c.outcome == AbortReason.INFRA_FAULT)


def _with(domain: Any, environment: Any) -> Any:
    import dataclasses

    return dataclasses.replace(domain, environment=environment)


def test_a_method_that_is_no_coroutine_is_told_by_its_name() -> None:
    class Plain:
        def reset(self, seed: int) -> Observation:
            return Observation("at once")

        def step(self, action: str) -> Awaitable[Step]:
            return asyncio.sleep(0, Step(Observation(action)))

    with pytest.raises(TypeError, match=r"reset answered Observation at once \(rule: `async def reset`\)"):
        require_awaitable(Plain().reset(1), "reset")

    async def main() -> None:
        assert await require_awaitable(Plain().step("a"), "step") == Step(Observation("a")), (
            "whatever can be awaited will do"
        )

    loop.run(main())
