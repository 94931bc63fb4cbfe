"""Every trajectory that starts has one row and one disposition, and every ledger that a run leaves is sound."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollart.control.keeping import TrajectoryKeeper
from rollart.control.trajectory import AttemptTrace, TrajectoryState
from rollart.ledger.reader import LedgerReader
from rollart.ledger.store import Ledger
from rollart.policy.schedules import FIXED_LAG, SCHEDULES
from rollart.report.verification import verify
from rollart.settings.rollout import FilterSpec, RedundancySpec
from rollart.settings.run import EvaluationSpec, KeepSpec
from rollart.sim import loop
from rollart.testing.run import SimulatedRun, make_simulated_run


@st.composite
def worlds(draw: st.DrawFn) -> SimulatedRun:
    schedule = draw(st.sampled_from(tuple(SCHEDULES)))
    size = draw(st.integers(1, 3))
    world = make_simulated_run(
        quotas={"a": (2 * size, size), "b": (size, size)},
        alpha=FIXED_LAG[schedule] if schedule in FIXED_LAG else draw(st.integers(0, 2)),
        steps=draw(st.integers(1, 3)),
        engines=2,
        turns=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 10_000)),
        engine_s=lambda r: r.expovariate(1.0),
        env_s=lambda r: r.lognormvariate(0.0, 1.5),
        reward_s=lambda r: r.expovariate(2.0),
        reward_of=lambda r: float(r.random() < 0.5),
        train_s=lambda r: r.expovariate(1.0),
        env_faults=draw(st.sampled_from([0.0, 0.1])),
        reward_faults=draw(st.sampled_from([0.0, 0.1])),
        fail_steps=draw(st.sampled_from([frozenset(), frozenset({2})])),
        schedule=schedule,
        redundancy=RedundancySpec(groups=draw(st.sampled_from([1.0, 1.5])), size=draw(st.sampled_from([1.0, 1.5]))),
    )
    if size > 1 and schedule == "rollart" and draw(st.booleans()):
        world.filter = FilterSpec(zero_variance=True, max_additional_running_prompts=4, exhausted="keep")
    world.evaluation = EvaluationSpec(episodes=draw(st.integers(0, 2)), at=("end",))
    return world


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(worlds(), st.integers(0, 2**32))
def test_dispositions_sum_to_what_was_started(world: SimulatedRun, fuzz: int) -> None:
    started: list[str] = []

    async def main(directory: Path) -> None:
        with Ledger(directory, clock=asyncio.get_running_loop().time, inline=True, kept_mb=1.0) as ledger:
            world.journal = world.recorder = ledger
            keeper = TrajectoryKeeper(KeepSpec(), ledger.keep)

            def trace(state: TrajectoryState) -> AttemptTrace:
                started.append(state.id)
                return keeper(state)

            world.trace = trace
            await world.run()

    with tempfile.TemporaryDirectory() as directory:
        loop.run(main(Path(directory)), seed=fuzz)
        with LedgerReader(directory) as reader:
            rows, audit = list(reader.trajectories()), verify(reader)
            kept = Counter((one.id, one.t) for one in reader.kept())
    assert Counter(row.id for row in rows) == Counter(started), "one row for each that started"
    assert sum(audit.dispositions.values()) == len(started)
    assert kept == Counter((row.id, row.t1) for row in rows), "and its content, once"
    assert audit.violations == []
    trained = [row for row in rows if row.outcome == "trained"]
    assert len(trained) == sum(len(batch) for _, batch in world.trainer.batches)
    assert all(row.step is not None for row in trained)
