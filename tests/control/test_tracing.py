"""Recorded turns: all of the share's prompts, within their trajectories, and without an effect on the run."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from rollart.ledger.events import TURN
from rollart.ports import Charge, RunEvent
from rollart.settings.telemetry import is_traced
from rollart.sim import loop
from rollart.testing.run import SimulatedRun, make_simulated_run


def simulated(traced: float, **more: Any) -> SimulatedRun:
    given: dict[str, Any] = {"quotas": {"a": (8, 2)}, "steps": 3, "turns": 3, "env_faults": 0.05, "max_attempts": 9}
    run = make_simulated_run(**given, env_s=lambda r: 1.0 + r.random(), engine_s=lambda r: 2.0, traced=traced, **more)
    loop.run(run.run(), seed=1)
    return run


def turns(run: SimulatedRun) -> dict[str, list[RunEvent]]:
    found = defaultdict(list)
    for event in run.recorder.events:  # type: ignore[attr-defined]
        if event.kind == TURN:
            found[event.subject].append(event)
    return found


def charges(run: SimulatedRun) -> list[Charge]:
    found: list[Charge] = run.recorder.charges  # type: ignore[attr-defined]
    return found


def test_every_turn_is_recorded_once_and_within_its_trajectory() -> None:
    run = simulated(1.0)
    found, by_id = turns(run), {charge.trajectory: charge for charge in charges(run)}
    assert sum(charge.turns for charge in by_id.values()) > 0
    for name, charge in by_id.items():
        own = found[name]
        answered = [event for event in own if event.fields["environment_s"]]
        assert charge.turns <= len(own) <= charge.turns + 1
        assert [event.fields["turn"] for event in own] == list(range(len(own)))
        assert sum(float(event.fields["environment_s"] or 0.0) for event in answered) >= charge.env_s - 1e-9
        last = charge.t0
        for event in own:
            seconds = [float(event.fields[n] or 0.0) for n in ("generation_s", "environment_s")]
            assert last - 1e-9 <= event.t - sum(seconds)
            last = event.t
        assert last <= charge.t1 + 1e-9
        assert all(event.fields["engine"] in ("e0", "e1") for event in own)


def test_tracing_changes_nothing_else() -> None:
    plain, traced = (simulated(share) for share in (0.0, 1.0))
    assert turns(plain) == {}
    assert charges(plain) == charges(traced)
    events = [[e for e in run.recorder.events if e.kind != TURN] for run in (plain, traced)]  # type: ignore[attr-defined]
    assert events[0] == events[1]


def test_a_share_takes_whole_prompts() -> None:
    groups = [f"lake-{n}" for n in range(2000)]
    assert sum(is_traced(group, 0.25) for group in groups) / len(groups) == pytest.approx(0.25, abs=0.04)
    assert all(is_traced(f"{group}~2", 0.25) == is_traced(group, 0.25) for group in groups)
    assert not any(is_traced(group, 0.0) for group in groups)
    found = {name.rpartition(".")[0] for name in turns(simulated(0.5))}
    assert found
    assert all(is_traced(group, 0.5) for group in found)
