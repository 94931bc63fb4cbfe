"""Values of the dashboard's pages: nothing is lost between a ledger and what is drawn."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.dashboard import values
from rollart.dashboard.readings import RunSnapshot
from rollart.ledger.kept import RoutedTurn
from rollart.ledger.reader import LedgerReader, TrajectoryRow
from rollart.policy.budget import SpendForecast
from rollart.ports import RunEvent
from rollart.report.cost import cost
from rollart.report.rows import RunRows, collect
from rollart.report.tables import Table
from rollart.report.timeline import DEVICES, TURNS, phases, timeline
from tests.dashboard.made import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "mine", steps=3)


@pytest.fixture(scope="module")
def rows(run: Path) -> RunRows:
    with LedgerReader(run) as reader:
        return collect(reader, "mine")


@settings(max_examples=20, deadline=None)
@given(st.floats(0.01, 9.99))
def test_stretches_of_a_run_add_up_to_it(run: Path, cut: float) -> None:
    with LedgerReader(run) as reader:
        whole, *parts = (timeline(reader, bins=7, during=d) for d in ((0.0, 10.0), (0.0, cut), (cut, 10.0)))
    for band in whole.bands:
        for state in band.amounts:
            found = [
                math.fsum(own.amounts.get(state, ())) * part.bin_s
                for part in (whole, *parts)
                for own in part.bands
                if (own.name, own.kind) == (band.name, band.kind)
            ]
            assert band.kind not in (DEVICES, TURNS) or math.fsum(found[1:]) == pytest.approx(found[0], abs=1e-6)


@settings(max_examples=50)
@given(st.lists(st.floats(0, 5), max_size=6), st.floats(0, 9), st.floats(0, 9), st.floats(0, 9))
def test_phases_of_a_trajectory_fill_its_life_without_overlap(
    asked: list[float], life: float, reset: float, reward: float
) -> None:
    routes = [RoutedTurn(t, t + 0.25, 0.1, "engine-0", "", "sticky", 1, 1) for t in sorted(asked)]
    row = TrajectoryRow(
        *("lake-0.0", "lake", "train", "trained", 1, 3.0, 3.0 + life, len(routes), 1, 1, 0.1, reset, 0.0, reward),
        *(1, 1.0, 1, 1),
    )
    found = list(phases(row, (), routes))
    assert all(row.t0 <= t0 and t1 <= row.t1 + 1e-9 for _, t0, t1 in found if t1 > t0)
    assert math.fsum(max(0.0, t1 - t0) for _, t0, t1 in found) <= life + 1e-6
    ends = row.t0
    for _, t0, t1 in found:
        if t1 > t0:
            assert t0 >= ends - 1e-9
            ends = t1


def test_runs_side_by_side_lose_no_cell(rows: RunRows) -> None:
    table = next(t for t in cost(rows).tables if t.name == "waste")
    other = Table("waste", "", table.columns, (("trainer", "idle: other", 1.0, None), *table.rows[:1]))
    found = values.side_by_side({"a": table, "b": other}, keys=2, value="usd")
    assert [c.name for c in found.columns] == ["role", "cause", "a", "b"]
    assert {row[:3] for row in found.rows if row[2] is not None} == {row[:3] for row in table.rows}
    assert {(*row[:2], row[3]) for row in found.rows if row[3] is not None} == {row[:3] for row in other.rows}


def test_engines_over_time_are_their_counters(rows: RunRows) -> None:
    plots = {plot.title: plot for plot in values.engine_plots(rows)}
    found = {title: (list(plot.x), [list(s.values) for s in plot.series]) for title, plot in plots.items()}
    assert found == {
        "Batch": ([8.0], [[8.0]]),
        "KV cache in use": ([8.0], [[0.5]]),
        "Prefix hits": ([8.0], [[0.25]]),
        "Sampled tokens per second": ([8.0], [[80.0]]),
    }


@pytest.mark.parametrize(("running", "expected"), [(True, SpendForecast(2.0, 0.5)), (False, None)])
def test_the_forecast_is_that_of_the_last_step(running: bool, expected: SpendForecast | None) -> None:
    steps = [RunEvent(t, "step", "training", {"usd_at_end": 3.0 - t, "usd_at_end_half": 0.5}) for t in (0.0, 1.0)]
    assert values.at_end(RunSnapshot("mine", running, "s", steps=tuple(steps))) == expected
    assert values.at_end(RunSnapshot("mine", running, "s")) is None


def test_lost_work_is_counted_by_kind() -> None:
    cases = (RunEvent(3.0, "engine_lost", "engine-1", {"why": "silent"}), RunEvent(1.0, "engine_lost", "engine-0", {}))
    sums = (("engine_lost", 2, 1.0, 3.0), ("step", 9, 0.0, 9.0))
    table = values.lost_work(RunSnapshot("mine", True, "s", event_sums=sums, faults=cases))
    assert table.rows == (("engine lost", 2, 1.0, 3.0, "engine-1, why silent"),)
