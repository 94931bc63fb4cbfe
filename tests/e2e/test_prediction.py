"""Wall time and dollars of real local runs, predicted by simulating what their ledgers hold.

The figures of an idle machine are for `benchmarks/prediction.py` to show. Here other load on the host may come and go
within a run, which no mean of its times has, so the bounds are wide.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.prediction import WORKLOADS, recorded_and_predicted, row

NEAR, ATTEMPTS = 0.35, 3
"""Largest relative error, and runs until one is within it."""

pytestmark = pytest.mark.slow  # real runs: 20 s each on two idle cores


@pytest.mark.parametrize("name", ["words", "slow_mix"])  # `games` only repeats the steps of its trainer
def test_a_real_run_is_predicted(name: str, tmp_path: Path) -> None:
    for attempt in range(ATTEMPTS):
        (directory := tmp_path / f"{attempt}").mkdir()
        found = recorded_and_predicted(WORKLOADS[name], directory, steps=8)
        errors = {name: abs(row(name, found)[name]) for name in ("wall_error", "usd_error", "loop_error")}
        if max(errors.values()) < NEAR:
            break
    recorded, simulated = found.recorded, found.simulated
    assert recorded.steps == simulated.steps == 8
    assert simulated.loop_s != recorded.loop_s
    assert max(errors.values()) < NEAR, errors
    assert simulated.train_s == pytest.approx(recorded.train_s, rel=0.05), "the same tokens at the same speed"
