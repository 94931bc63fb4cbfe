"""`stop_when`: a run ends at the step that fulfils a condition, orderly, and at no other."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.model import Group, GroupId, TrainSample
from rollart.policy.early_stop import BASELINE_STEPS, BatchStatistics, EarlyStopMonitor, StopCondition
from rollart.settings.run import EvaluationSpec, StopSpec
from rollart.sim import loop
from rollart.testing.run import make_simulated_run


@given(
    values=st.lists(st.one_of(st.none(), st.just(math.nan), st.floats(0, 1)), max_size=30),
    steps=st.integers(1, 4),
    limit=st.floats(0, 1),
)
def test_a_condition_holds_in_a_row_of_steps_with_a_value(values: list[float | None], steps: int, limit: float) -> None:
    monitor = EarlyStopMonitor([StopCondition("kl", limit, None, steps)])
    known: list[float] = []
    for value in values:
        why = monitor.step({"kl": value, "entropy": 99.0})
        if value is not None and not math.isnan(value):
            known.append(value)
            row = known[-steps:]
            assert bool(why) == (len(row) == steps and all(v > limit for v in row))
        else:
            assert why == ""


def group(*scores: float, tokens: int = 2, success: bool | None = None, domain: str = "a") -> Group:
    samples = [TrainSample.unsampled(str(n), domain, (1,), (2,) * tokens, score=s) for n, s in enumerate(scores)]
    return Group(GroupId("g"), domain, tuple(dataclasses.replace(s, success=success) for s in samples))


def test_statistics_of_a_batch() -> None:
    statistics = BatchStatistics()
    batch = [group(1, 1), group(0, 1), group(1), group(1, 0, success=True), group(0, 1, success=False, domain="b")]
    found = statistics.of(batch)
    assert found["zero_variance"] == 0.25
    assert (found["success"], found["success.a"], found["success.b"]) == (0.5, 1.0, 0.0)
    assert found["length_drift"] is None
    for _ in range(BASELINE_STEPS - 1):
        statistics.of(batch)
    assert statistics.of([group(1, tokens=5)])["length_drift"] == pytest.approx(1.5)
    assert statistics.of([group(1, tokens=1)])["length_drift"] == pytest.approx(0.5)
    assert statistics.of([group(1)])["zero_variance"] is None


def run_until(condition: StopSpec, steps: int = 9, **more: Any) -> Any:
    world = make_simulated_run(steps=steps, stop_when=[condition], **more)
    loop.run(world.run(), seed=1)
    return world


@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_ends_with_its_version_current_and_evaluated(overlap: bool) -> None:
    """With overlap the step that runs while the condition is seen is the last."""
    flat = StopSpec(metric="zero_variance", above=0.5, for_steps=3)
    world = run_until(
        flat, overlap=overlap, reward_of=lambda *_: 1.0, evaluation=EvaluationSpec(episodes=1), schedule="rollart"
    )
    last = 4 if overlap else 3
    assert world.published == list(range(1, last + 1))
    assert world.control.stopped == "zero_variance was above 0.5 3 times in a row (1 last)"
    evaluated = [(e.fields["label"], e.fields["version"]) for e in world.recorder.events if e.kind == "evaluation"]
    assert evaluated == [("start", 0), ("end", last)]


def test_a_run_whose_conditions_never_hold_is_whole() -> None:
    world = run_until(StopSpec(metric="zero_variance", below=-1.0), steps=4)
    assert (world.published, world.control.stopped) == ([1, 2, 3, 4], "")


def test_success_on_held_out_episodes_ends_a_run_and_is_not_measured_twice() -> None:
    target = StopSpec(metric="held_out_success", above=-0.5, for_steps=2)
    world = run_until(target, evaluation=EvaluationSpec(episodes=2, every=2))
    assert world.published == [1, 2, 3, 4]
    evaluated = [e.fields["version"] for e in world.recorder.events if e.kind == "evaluation"]
    assert evaluated == [0, 2, 4]
