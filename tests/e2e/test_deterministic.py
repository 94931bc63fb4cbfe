"""`deterministic: true`: runs of one spec end with the same weights, whatever the timing and the company in batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.harness import Home, Launched

pytestmark = pytest.mark.slow  # the quickstart twice, and a resume: about 20 CPU-seconds

STEPS = 2
SMALL = ("steps=2", "domains.0.trajectories=16", "domains.1.trajectories=16", "batch.trajectories=32")
SAME = (*SMALL, "deterministic=true", "schedule=sync", "staleness=0", "evaluation.episodes=0", "warm_start.batches=10")


def launch(home: Home, slots: int) -> Launched:
    command = ["launch", "--cluster", "cluster.yaml", "--name", "tiny-1"]
    return Launched(home.path, [*command, *SAME, f"cluster.engines.max_slots={slots}"])


def digests(run: Path) -> dict[str, str]:
    """Of the files of the last version, weights and the trainer's state."""
    found: dict[str, str] = json.loads((run / f"weights/v{STEPS:06d}/COMPLETE").read_text())["files"]
    return found


def test_runs_end_with_the_same_weights(home: Home) -> None:
    """Beside another number of sequences in each forward pass; and after a kill of the controller, whose resume rolls
    a part of a batch out again."""
    home.write()
    launch(home, slots=48).finished()
    first = digests(home.directory.rename(home.path / "first"))
    second = launch(home, slots=5)
    second.until_step(1)
    second.kill()
    second.end()
    home.resume().finished()
    assert digests(home.directory) == first
