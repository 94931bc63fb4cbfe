"""Two runs beside each other: differences of inputs, of success beyond its intervals, and parts that add up."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.ledger.intervals import IntervalSum
from rollart.ledger.reader import ChargeSum, InvocationSum, RunFacts, VersionRow
from rollart.ports import RunEvent
from rollart.report.compare.diff import ComparedRun, diff, dollars_apart, input_changes, newcombe, seconds_apart
from rollart.report.cost import cost_lines
from tests.report.test_report import cells, rows

STATES = st.sampled_from(["busy", "idle", "sync", "startup", "down"])
CAUSES = st.sampled_from(["", "starved", "warm_start"])
SECONDS = st.just(0.0) | st.floats(1e-3, 1e5)


@st.composite
def runs(draw: st.DrawFn) -> ComparedRun:
    """A run of some steps, with a trainer of some states, engines, calls, and seconds without a trainer."""
    intervals = [
        IntervalSum(role, f"{role}-0", state, cause, seconds, seconds * units, seconds * units * price / 3600, 0, 1)
        for (role, state, cause), (seconds, units, price) in draw(
            st.dictionaries(
                st.tuples(st.sampled_from(["trainer", "engine"]), STATES, CAUSES),
                st.tuples(SECONDS, st.floats(1, 8), st.floats(0, 9)),
            )
        ).items()
    ]
    calls = [
        InvocationSum("exact", "aws_lambda", 1024, status, 10, 100, 2, 0.3, billed)
        for status, billed in draw(st.dictionaries(st.sampled_from(["ok", "timeout"]), SECONDS)).items()
    ]
    steps = draw(st.integers(0, 5))
    trainer_s = math.fsum(i.seconds for i in intervals if i.role == "trainer")
    facts = RunFacts(trainer_s + draw(st.floats(0, 100)), steps, steps, 1000, 8 * steps, 0, 0, 0)
    versions = [VersionRow(n, n, 0, 8 if n else 0, 100, {}) for n in range(steps + 1)]
    return ComparedRun(rows(facts=facts, intervals=intervals, invocations=calls, versions=versions))


@settings(max_examples=30)
@given(runs(), runs())
def test_parts_add_up_to_the_difference(a: ComparedRun, b: ComparedRun) -> None:
    seconds, dollars = seconds_apart(a, b), dollars_apart(a.rows, b.rows)
    wall = b.rows.facts.seconds - a.rows.facts.seconds
    total = math.fsum(line.usd for line in cost_lines(b.rows)) - math.fsum(line.usd for line in cost_lines(a.rows))
    assert math.fsum(c.difference for c in seconds.values()) == pytest.approx(wall, abs=1e-6)
    assert math.fsum(c.difference for c in dollars.values()) == pytest.approx(total, abs=1e-6)
    for c in (*seconds.values(), *dollars.values()):
        assert c.by_count + c.by_size == pytest.approx(c.difference, abs=1e-6)
        assert math.isfinite(c.by_count)


def test_more_steps_are_apart_from_slower_steps() -> None:
    """2 steps of 10 s against 3 steps of 20 s: one more of 15 s, and 2.5 that are 10 s slower."""

    def run(steps: int, seconds: float, usd: float) -> ComparedRun:
        busy = IntervalSum("trainer", "trainer-0", "busy", "", seconds, 2 * seconds, usd, 0, seconds)
        versions = [VersionRow(n, n, 1, 8, 100, {}) for n in range(1, steps + 1)]
        facts = RunFacts(seconds, steps, steps, 1000, 8 * steps, 0, 0, 0)
        return ComparedRun(rows(facts=facts, intervals=[busy], invocations=[], versions=versions))

    a, b = run(2, 20.0, 4.0), run(3, 60.0, 18.0)
    training = seconds_apart(a, b)["training"]
    assert (training.by_count, training.by_size) == (pytest.approx(15.0), pytest.approx(25.0))
    (dollars,) = dollars_apart(a.rows, b.rows).values()
    # 40 device-seconds at $0.10 against 120 at $0.15.
    assert (dollars.by_count, dollars.by_size) == (pytest.approx(10.0), pytest.approx(4.0))
    assert seconds_apart(b, a)["training"].by_count == pytest.approx(-15.0)


def test_an_interval_of_two_shares() -> None:
    """56 of 70 against 48 of 80: Newcombe (1998), table II, row (a), method 10."""
    low, high = newcombe(48, 80, 56, 70)
    assert (low, high) == (pytest.approx(0.0524, abs=1e-4), pytest.approx(0.3339, abs=1e-4))


def curve_of(successes: int, samples: int = 40) -> ComparedRun:
    charges = [ChargeSum("lake", "train", "trained", v, 100, 1.0, 100, 0, 0, 100, successes, 1.0) for v in range(4)]
    versions = [VersionRow(v, v, 1, samples if v else 0, 100, {}) for v in range(5)]
    facts = RunFacts(100.0, 4, 4, 1000, 4 * samples, 0, 0, 0)
    return ComparedRun(rows(charges=charges, versions=versions, facts=facts))


def test_only_a_difference_beyond_its_interval_is_one() -> None:
    near, far = diff(curve_of(50), curve_of(55)), diff(curve_of(50), curve_of(70))
    trained = [row for row in cells(near, "curves") if row["kind"] == "training"]
    assert len(trained) == 4
    assert {row["finding"] for row in trained} == {""}
    assert all(row["low"] < 0.05 < row["high"] for row in trained)
    assert {row["finding"] for row in cells(far, "curves") if row["kind"] == "training"} == {"b is higher"}
    held_out = [row for row in cells(near, "curves") if row["kind"] == "held-out"]
    assert [row["samples"] for row in held_out] == [0, 80], "evaluations after as many samples"


def test_curves_are_compared_at_as_many_samples() -> None:
    """The second run trains twice as many samples a step: its versions 0 and 1 are beside four versions."""
    found = cells(diff(curve_of(50, samples=20), curve_of(50, samples=40)), "curves")
    assert [(row["samples"], row["a_episodes"], row["b_episodes"]) for row in found if row["kind"] == "training"] == [
        (20, 100, 100),
        (60, 100, 100),
    ]


CONFIG: dict[str, Any] = {
    "run": {"staleness": 1, "domains": [{"name": "lake", "group_size": 4}], "budget": {"usd": None}},
    "cluster": {"engines": {"count": 1}},
    "functions": {"exact": {"concurrency": 4, "memory_mb": 512}},
    "plan": {"assignments": [{"part": "engine-0", "pool": "here", "devices": [0, 1]}]},
    "usd_per_device_hour": {"here": 1.0},
    "prices": {"prices": [{"name": "modal", "unit": "core-second", "usd": 0.01}]},
}


def test_inputs_that_differ() -> None:
    other = {
        **CONFIG,
        "run": {"staleness": 2, "domains": [{"name": "lake", "group_size": 8}], "budget": {"usd": 5.0}, "seed": 1},
        "functions": {"exact": {"concurrency": 1, "memory_mb": 512}},
        "plan": {"assignments": [{"part": "engine-0", "pool": "there", "devices": [0]}]},
        "usd_per_device_hour": {"there": 2.0},
    }
    code = [RunEvent(0.0, "function_version", "exact", {"version": version}) for version in ("a1", "b2")]
    a = ComparedRun(rows(events=code[:1]), CONFIG, "0.1.0")
    b = ComparedRun(rows(events=code[1:]), other, "0.2.0")
    assert input_changes(a, b) == {
        ("run", "staleness"): ("1", "2"),
        ("run", "domains.lake.group_size"): ("4", "8"),
        ("run", "budget.usd"): ("null", "5.0"),
        ("function", "exact.concurrency"): ("4", "1"),
        ("plan", "engine-0"): ("here: 0, 1", "there: 0"),
        ("price", "device-hour of here"): ("1", "-"),
        ("code", "exact"): ("a1", "b2"),
        ("code", "rollart"): ("0.1.0", "0.2.0"),
        ("run", "seed"): ("-", "1"),
        ("price", "device-hour of there"): ("-", "2"),
    }
    report = diff(a, b)
    assert cells(report, "inputs")[0] == {"kind": "run", "key": "staleness", "a": "1", "b": "2"}
    assert not any("no difference" in note for note in report.notes)


def test_a_run_beside_itself() -> None:
    run = ComparedRun(rows(), CONFIG, "0.1.0")
    report = diff(run, run)
    assert "no difference" in report.notes
    assert cells(report, "inputs") == []
    assert {row["difference"] for row in cells(report, "outcome")} == {0.0}
    assert {row["difference_s"] for row in cells(report, "seconds")} == {0.0}
    assert {row["finding"] for row in cells(report, "curves")} == {""}


def test_the_largest_parts_are_named() -> None:
    slower = [replace(i, seconds=i.seconds + 50 * (i.role == "trainer")) for i in rows().intervals]
    facts = replace(rows().facts, seconds=150.0)
    (named,) = [
        n for n in diff(ComparedRun(rows()), ComparedRun(rows(intervals=slower, facts=facts))).notes if "took" in n
    ]
    assert named == "b took 50.0 s longer: training +50.0 s"
