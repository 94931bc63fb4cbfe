"""Cost and savings of a change of tensor parallelism."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.fleet import EngineRole, FleetMoveKind
from rollart.strategies.tp_change import (
    EngineCounters,
    StepMeasurement,
    preemption_loss_s,
    resharding_moves,
    resharding_pays,
)

SEEN = StepMeasurement(100.0, 4, EngineCounters(10, 1000, 50.0, 200.0), 20.0)


def test_preempted_contexts_are_computed_again_at_the_price_of_a_prefill() -> None:
    assert preemption_loss_s(SEEN) == pytest.approx(10 * 20.0 * 50.0 / 1000)
    assert preemption_loss_s(StepMeasurement(100.0, 4, EngineCounters(1000, 1000, 50.0), 1e6)) == 50.0, (
        "no more than all prefills"
    )
    assert preemption_loss_s(StepMeasurement(100.0, 4, EngineCounters(0, 1000, 50.0), 20.0)) == 0


def test_a_change_pays_over_the_horizon_or_is_not_made() -> None:
    assert resharding_pays(SEEN, grows=True, move_s=10.0, horizon_s=401.0)[0], (
        "10 s lost per step of 100 s: 40 in 400 s"
    )
    assert not resharding_pays(SEEN, grows=True, move_s=10.0, horizon_s=399.0)[0]
    faster = StepMeasurement(100.0, 4, EngineCounters(0, 1000, 50.0, 200.0), 20.0, speedup=1.25)
    assert resharding_pays(faster, grows=True, move_s=10.0, horizon_s=81.0)[0], "a fifth of 250 s"
    assert not resharding_pays(faster, grows=True, move_s=10.0, horizon_s=79.0)[0]
    slower = StepMeasurement(100.0, 4, EngineCounters(0, 1000, 50.0, 200.0), 20.0, speedup=0.8)
    assert not resharding_pays(slower, grows=True, move_s=0.0, horizon_s=1e9)[0]
    assert not resharding_pays(StepMeasurement(0.0, 4, EngineCounters(), 0.0), grows=False, move_s=0.0, horizon_s=1e9)[
        0
    ]


@given(st.integers(1, 8), st.booleans(), st.integers(1, 40))
def test_moves_need_no_more_devices_than_they_free(tp: int, grows: bool, engines: int) -> None:
    to = 2 * tp if grows else tp
    tp = tp if grows else 2 * tp
    free = least = 0
    for move in resharding_moves("p", EngineRole.ENGINE, tp, to, engines):
        free += move.tp if move.kind is FleetMoveKind.DRAIN else -move.tp
        least = min(least, free)
    assert free == least == 0


def test_counters_of_an_engine_that_began_anew_count_from_nothing() -> None:
    assert EngineCounters(5, 10, 1.0).since(EngineCounters(2, 4, 0.5)) == EngineCounters(3, 6, 0.5)
    assert EngineCounters(1, 2, 0.1).since(EngineCounters(5, 10, 1.0)) == EngineCounters(1, 2, 0.1)
