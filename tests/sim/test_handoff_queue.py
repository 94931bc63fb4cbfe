"""A bound on hand-offs ahead of decode slots, over modelled engines: less KV waits, and nothing takes longer."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from rollart.serving.handoff import HandoffTracker
from rollart.settings.resolve import forecast, read_specs
from rollart.tools.simulate import simulate
from tests.tools.test_simulate import CLUSTER, RUN

SLOTS = 2


@pytest.fixture
def specs(tmp_path: Path) -> tuple[Path, Path]:
    run, cluster = tmp_path / "run.yaml", tmp_path / "cluster.yaml"
    run.write_text(RUN)
    cluster.write_text(CLUSTER + f"engines: {{max_slots: {SLOTS}}}\n")
    return run, cluster


@pytest.mark.slow
def test_contexts_wait_for_slots_no_more_than_the_depth_and_the_run_is_as_fast(
    specs: tuple[Path, Path], tmp_path: Path
) -> None:
    pull, waiting = HandoffTracker.pull, [0]

    @contextlib.asynccontextmanager
    async def watched(self: HandoffTracker, request: Any, source: Any, sticky: Any) -> AsyncIterator[None]:
        waiting[0] = max(waiting[0], sticky.running + 1 - SLOTS)
        async with pull(self, request, source, sticky):
            yield

    found = {}
    for handoffs in ("0", "auto", "1", "4"):
        overrides = (
            "placement.prefill_decode=only",
            "placement.router=remote",
            "batch.trajectories=256",
            "schedule=sync_plus",
            f"rollout.handoffs={handoffs}",
        )
        waiting[0] = 0
        with patch.object(HandoffTracker, "pull", watched):
            done = simulate(forecast(read_specs(*specs, overrides)), tmp_path / handoffs, steps=2)
        found[handoffs] = (done.seconds, waiting[0])
    assert found["1"][1] == 1
    assert found["4"][1] == 4
    assert 1 <= found["auto"][1] <= found["0"][1] - 4
    assert all(seconds == pytest.approx(found["0"][0], rel=0.01) for seconds, _ in found.values())
