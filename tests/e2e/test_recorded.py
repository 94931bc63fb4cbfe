"""A run that an older rollart recorded and that was killed half-way: read and resumed with today's code."""

from __future__ import annotations

import json

import pytest

from tests.e2e.harness import BATCH, Home, sound, waiting_samples
from tests.fixtures.record_run import ARCHIVE, STEP, unpack

pytestmark = pytest.mark.slow  # starts a trainer and an engine: torch twice, about 7 s


def test_a_recorded_run_is_read_and_resumed(home: Home) -> None:
    directory = unpack(ARCHIVE, home.path)
    kept = waiting_samples(directory)
    assert _status(home)["step"] == STEP
    for report in ("cost", "utilization", "curve"):
        read = home.run("report", report, "tiny-1", "-o", "json")
        assert read.returncode == 0, read.stderr
    run = home.resume()
    run.finished()
    assert f"resumed at step {STEP}, v{STEP}, {len(kept)} finished samples kept" in run.said
    sound(directory, uncharged=kept.keys())
    after = _status(home)
    assert (after["state"], after["step"], after["trained_trajectories"]) == ("finished", 4, 4 * BATCH)


def _status(home: Home) -> dict[str, object]:
    shown = home.run("status", "tiny-1", "-o", "json")
    assert shown.returncode == 0, shown.stderr
    return {row["what"]: row["value"] for row in json.loads(shown.stdout)["tables"]["status"]}
