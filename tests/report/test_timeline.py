"""Timelines: bands hold every second of what they show, whatever the bins; few resources have rows of their own."""

from __future__ import annotations

import math
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.report.charts import duration, timeline_chart
from rollart.report.pages import timeline_page
from rollart.report.render import render
from rollart.report.timeline import MOST_ROWS, Band, Bins, Timeline, timeline_of, timeline_report

SPAN = 100.0
stretch = st.tuples(st.floats(0, SPAN), st.floats(0, SPAN)).map(sorted)


def span(resource: str, t0: float, t1: float, state: str, units: float = 1.0, role: str = "engine") -> Any:
    return (role, resource, t0, t1, state, units)


def seconds(band: Band, found: Timeline, state: str) -> float:
    return math.fsum(band.amounts[state]) * found.bin_s


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(stretch, st.floats(0.1, 50))), st.integers(1, 37))
def test_bins_lose_no_second(stretches: list[Any], bins: int) -> None:
    found = Bins(SPAN, bins)
    for (t0, t1), amount in stretches:
        found.add(t0, t1, amount)
    means = found.means()
    total = math.fsum((t1 - t0) * amount for (t0, t1), amount in stretches)
    assert len(means) == bins
    assert math.fsum(means) * SPAN / bins == pytest.approx(total, rel=1e-6, abs=1e-6)
    assert all(0 <= mean <= sum(amount for _, amount in stretches) + 1e-6 for mean in means)


def test_bins_know_when() -> None:
    found = Bins(10.0, 10)
    found.add(0.5, 3.25, 2.0)
    found.add(-5.0, 0.25)
    found.add(9.5, 20.0)
    assert found.means() == pytest.approx((1.25, 2, 2, 0.5, 0, 0, 0, 0, 0, 0.5))


@pytest.mark.parametrize(("seconds", "bins"), [(0.0, 10), (5.0, 0), (-1.0, 3)])
def test_nothing_to_put_into_bins(seconds: float, bins: int) -> None:
    with pytest.raises(ValueError, match="both > 0"):
        Bins(seconds, bins)


def test_few_resources_have_rows_and_many_have_bands() -> None:
    few = [span(f"engine-{n}", 0, 10, "busy", 2.0) for n in (0, 2, 10)]
    pools = {"engine-0": "big", "engine-2": "big", "engine-10": "wide"}
    names = [b.name for b in timeline_of(10.0, few, pools=pools, bins=5).bands]
    assert names == ["engine-0 on big", "engine-2 on big", "engine-10 on wide"]
    many = [span(f"engine-{n}", 0, 10, "busy" if n % 4 else "idle", 2.0) for n in range(3000)]
    many.append(span("trainer-0", 2, 10, "sync", 8.0, role="trainer"))
    found = timeline_of(10.0, many, pools={f"engine-{n}": "ab"[n % 2] for n in range(3000)}, bins=5)
    assert [(b.name, b.members, b.whole) for b in found.bands] == [
        ("engine on a", 1500, 3000.0),
        ("engine on b", 1500, 3000.0),
        ("trainer-0", 1, 8.0),
    ]
    assert found.bands[0].share("busy") == pytest.approx(0.5)
    assert seconds(found.bands[2], found, "sync") == pytest.approx(64.0)
    assert len(str(timeline_chart(found))) < 200_000


def test_rows_are_ordered_down_the_way_of_a_trajectory() -> None:
    roles = ("unused", "trainer", "decode", "engine", "prefill", "judge")
    found = timeline_of(1.0, [span(f"{r}-0", 0, 1, "busy", role=r) for r in roles], bins=2)
    assert [b.name for b in found.bands] == ["prefill-0", "decode-0", "engine-0", "trainer-0", "judge-0", "unused-0"]


def test_trajectories_are_somewhere_all_their_life() -> None:
    stays = [("lake", 0.0, 10.0, 2.0, 4.0), ("lake", 5.0, 6.0, 3.0, 0.0), ("pond", 0.0, 1.0, 0.0, 9.0)]
    lake, pond = timeline_of(10.0, [], stays, bins=4).bands
    found = timeline_of(10.0, [], stays, bins=4)
    assert seconds(lake, found, "reset") == pytest.approx(3.0)
    assert seconds(lake, found, "environment") == pytest.approx(4.0)
    assert seconds(lake, found, "generation") == pytest.approx(4.0)
    assert seconds(pond, found, "environment") == pytest.approx(1.0), "no longer than it lived"
    assert (lake.name, lake.members) == ("trajectories of lake", 2)


def test_calls_are_queued_cold_and_running() -> None:
    found = timeline_of(10.0, [], calls=[("exact", 2.0, 4.0, 1.0, 0.5), ("exact", 3.0, 5.0, -1e-14, 0.0)], bins=20)
    (band,) = found.bands
    assert {s: round(seconds(band, found, s), 9) for s in band.amounts} == {
        "running": 3.5,
        "cold start": 0.5,
        "queued": 1,
    }
    assert band.whole == 2.0


def test_faults_are_counted_where_they_were() -> None:
    events = [
        (0.0, "resource_opened"),
        (1.0, "engine_lost"),
        (1.2, "lease_expired"),
        (1.3, "lease_expired"),
        (10.0, "stalled"),
    ]
    found = timeline_of(10.0, [], events=events, bins=10)
    (band,) = found.bands
    assert (band.members, band.whole) == (4, 3.0)
    assert band.amounts["lease_expired"] == (0, 2, 0, 0, 0, 0, 0, 0, 0, 0)
    assert band.amounts["stalled"][-1] == 1, "the end of the run is in its last bin"
    root = ElementTree.fromstring(str(timeline_chart(found)))
    marks = [r for r in root.iter("rect") if r.get("class") == "down"]
    assert ["".join(m.itertext()) for m in marks] == [
        "1 s to 2 s\nengine lost: 1\nlease expired: 2",
        "9 s to 10 s\nstalled: 1",
    ]
    assert float(marks[0].get("height") or 0) > float(marks[1].get("height") or 0)
    assert "Faults and drops" in render(timeline_report("quick", found), "table")
    assert not timeline_of(10.0, [], events=events[:1], bins=10).bands


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2 * MOST_ROWS), stretch, st.sampled_from(["busy", "idle", "odd"]), st.floats(0.5, 8)),
        max_size=60,
    ),
    st.integers(1, 50),
)
def test_every_device_second_is_in_one_band(rows: list[Any], bins: int) -> None:
    spans = [span(f"engine-{n}", t0, t1, state, units) for n, (t0, t1), state, units in rows]
    found = timeline_of(SPAN, spans, bins=bins)
    total = math.fsum((t1 - t0) * units for _, _, t0, t1, _, units in spans)
    shown = math.fsum(seconds(band, found, state) for band in found.bands for state in band.amounts)
    assert shown == pytest.approx(total, rel=1e-6, abs=1e-6)
    for band in found.bands:
        assert all(math.fsum(column) <= band.whole + 1e-6 for column in zip(*band.amounts.values(), strict=True))
    ElementTree.fromstring(str(timeline_chart(found)))


def test_the_report_says_it_in_every_form() -> None:
    spans = [span("engine-0", 0, 6, "busy"), span("engine-0", 6, 10, "idle")]
    found = timeline_of(10.0, spans, [("lake", 0.0, 5.0, 1.0, 1.0)], bins=10)
    report = timeline_report("quick", found)
    text = render(report, "table")
    assert "engine-0" in text
    assert "60.0%" in text
    assert "█" in text
    assert "Mean amounts" not in text
    page = timeline_page(report, found)
    ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    assert "engine-0, 0 s to 1 s\nbusy: 1 (100%)" in page
    assert "█" not in page


def test_a_run_that_has_recorded_nothing() -> None:
    empty = Timeline(0.0, 320, ())
    report = timeline_report("quick", empty)
    assert "nothing yet" in render(report, "table")
    assert "nothing yet" in timeline_page(report, empty)


@pytest.mark.parametrize(
    ("given", "told"),
    [(0.25, "0.25 s"), (59, "59 s"), (60, "1 min"), (3725, "1 h 2 min"), (90_000, "1 d 1 h"), (7200, "2 h")],
)
def test_durations(given: float, told: str) -> None:
    assert duration(given) == told
