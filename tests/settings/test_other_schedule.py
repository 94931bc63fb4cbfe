"""A run under other schedules: nothing stays that the spec would refuse there, and all that goes is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollart.policy.schedules import FIXED_LAG, SCHEDULES
from rollart.settings.load import load_run
from rollart.settings.rules import run_problems
from rollart.settings.variants import adapt_to_schedule

RUN = """\
name: small
model: {init: {vocab: characters}}
batch: {trajectories: 16}
domains: [{name: a, environment: "a.b:C"}]
"""
SPECS = {
    "schedule: sync\nrollout: {tail_batching: {}}": {"rollout.tail_batching"},
    "schedule: sync_plus\ntraining: {stream: true}\nrollout: {lending: {}}": {"rollout.lending"},
    "rollout: {dispatch: skew_aware, concurrency: {mode: on}}": {"rollout.dispatch=skew_aware", "rollout.concurrency"},
    "weights: {update: staggered}": {"weights.update=staggered"},
    "batch: {trajectories: 16, sampler: deadline, deadline_s: 60}": {"batch.sampler=deadline"},
    "batch: {trajectories: 16, tokens: 9000}": {"batch.tokens"},
}


@pytest.mark.parametrize("text", SPECS)
def test_what_a_schedule_does_not_have_is_left_out_and_named(tmp_path: Path, text: str) -> None:
    path, base = tmp_path / "run.yaml", RUN
    if text.startswith("batch"):
        base = base.replace("batch: {trajectories: 16}\n", "")
    path.write_text(base + text + "\n")
    run = load_run(path)
    named = set()
    for name in SCHEDULES:
        other, left = adapt_to_schedule(run, name)
        named |= set(left)
        lag = FIXED_LAG.get(name, max(run.staleness, 1))
        assert not run_problems(other.model_copy(update={"schedule": name, "staleness": lag})), (name, left)
        assert (other == run) == (not left) or left == ("rollout.concurrency",)
    assert named == SPECS[text]
    assert adapt_to_schedule(run, run.schedule) == (run, ())
