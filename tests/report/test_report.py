"""Reports add up: by role, by resource and by fate, to the same total; every format says the same."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.ledger.intervals import IntervalSum, ResourceState
from rollart.ledger.reader import ChargeSum, InvocationSum, RunFacts, VersionRow, WorkerSum
from rollart.ports import RunEvent
from rollart.report.cost import cost, cost_lines, fates, waste
from rollart.report.curve import curve, curves, sparkline, write_png
from rollart.report.render import render
from rollart.report.rows import RunRows
from rollart.report.tables import Report, Table
from rollart.report.utilization import utilization
from rollart.settings.load import builtin, load_prices
from serverless.meter import Saving, WorkerState
from serverless.types import Cause

PRICES = load_prices(builtin("prices.yaml"))


EVALUATIONS = (
    RunEvent(1.0, "evaluation", "lake", {"version": 0, "episodes": 4, "successes": 1}),
    RunEvent(9.0, "evaluation", "lake", {"version": 2, "episodes": 4, "successes": 3}),
    RunEvent(9.0, "evaluation", "pond", {"version": 2, "episodes": 0, "successes": 0}),
)


def rows(*, events: Sequence[RunEvent] = EVALUATIONS, **more: Any) -> RunRows:
    fields: dict[str, Any] = {
        "run": "quick",
        "facts": RunFacts(100.0, 2, 2, 1000, 10, 1, 1, 3),
        "intervals": [
            IntervalSum("engine", "engine-0", "busy", "", 60, 60, 6.0, 0, 100),
            IntervalSum("engine", "engine-0", "idle", "starved", 30, 30, 3.0, 0, 100),
            IntervalSum("engine", "engine-0", "sync", "", 10, 10, 1.0, 0, 100),
            IntervalSum("trainer", "trainer-0", "busy", "", 100, 200, 20.0, 0, 100),
        ],
        "charges": [
            ChargeSum("lake", "train", "trained", 0, 10, 30.0, 40, 500, 100, 10, 2, 50.0),
            ChargeSum("lake", "train", "stale", 0, 5, 10.0, 20, 250, 50, 0, 0, 25.0),
            ChargeSum("lake", "train", "trained", 1, 10, 10.0, 40, 500, 100, 10, 8, 50.0),
            ChargeSum("lake", "eval", "evaluated", 2, 4, 4.0, 8, 100, 20, 4, 3, 10.0),
        ],
        "invocations": [
            InvocationSum("exact", "aws_lambda", 1024, "ok", 10, 100, 2, 0.3, 6000.0),
            InvocationSum("exact", "aws_lambda", 1024, "timeout", 1, 10, 0, 0.0, 600.0),
        ],
        "versions": [VersionRow(0, 0, 0, 0, 0, {}), VersionRow(1, 1, 1, 10, 1000, {})],
        "events": {kind: [e for e in events if e.kind == kind] for kind in {e.kind for e in events}},
        "prices": PRICES,
    }
    return RunRows(**(fields | more))


def test_overhead_of_functions_is_waste_and_savings_are_shown() -> None:
    """Repeated and hedged calls bought no reward of their own: each has a line, and the total stays the total."""
    calls = [
        InvocationSum("exact", "aws_lambda", 1024, "ok", 10, 100, 2, 0.3, 6000.0),
        InvocationSum("exact", "aws_lambda", 1024, "ok", 2, 2, 0, 0.0, 30.0, "hedge"),
        InvocationSum("exact", "aws_lambda", 1024, "crash", 1, 1, 0, 0.0, 20.0, "retry"),
    ]
    run = rows(invocations=calls, savings=[Saving("exact", "cache", 0.0, 50, 300.0, 2048)])
    lost = {cause: usd for (role, cause), usd in waste(run, cost_lines(run)).items() if role == "reward"}
    per_s, per_call = 0.0000166667, 0.2e-6
    assert lost == pytest.approx({"function hedge": 30 * per_s + 2 * per_call, "function crash": 20 * per_s + per_call})
    (saved,) = cells(cost(run), "savings")
    assert (saved["stage"], saved["items"]) == ("cache", 50)
    assert saved["usd"] == pytest.approx(600 * per_s)


def table(report: Report, name: str) -> Table:
    return next(t for t in report.tables if t.name == name)


def cells(report: Report, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(render(report, "json"))["tables"][name]
    return found


def test_the_numbers_of_a_small_run() -> None:
    report = cost(rows())
    total = {(row["what"], row["unit"]): row["value"] for row in cells(report, "total")}
    functions = 6600 * 0.0000166667 + 11 * 0.2e-6
    assert total["total", "USD"] == pytest.approx(30 + functions)
    assert total["per 1,000 trained trajectories", "USD"] == pytest.approx((30 + functions) * 100)
    assert total["per million trained tokens", "USD"] == pytest.approx((30 + functions) * 1000)
    assert {row["role"]: row["usd"] for row in cells(report, "by_role")} == pytest.approx(
        {"engine": 10, "trainer": 20, "reward": functions}
    )
    lost = {(row["role"], row["cause"]): row["usd"] for row in cells(report, "waste")}
    assert lost == pytest.approx(
        {
            ("engine", "idle: starved"): 3,
            ("engine", "sync"): 1,
            ("engine", "trajectory stale"): 1,
            ("reward", "function timeout"): 600 * 0.0000166667 + 0.2e-6,
        }
    )
    by_fate = {row["fate"]: row["usd"] for row in cells(report, "trajectories")}
    assert by_fate == pytest.approx({"trained": 4, "stale": 1, "evaluated": 0.4, "unattributed": 0.6})
    assert [row["gb_s"] for row in cells(report, "functions")] == [6000, 600]
    prices = {(row["price"], row["unit"]): row for row in cells(report, "prices")}
    assert "AWS Lambda" in prices["aws_lambda", "GB-second"]["source"]
    assert prices["aws_lambda", "GB-second"]["date"].startswith("2026")


def test_utilization_of_a_small_run() -> None:
    report = utilization(rows())
    engine, trainer = cells(report, "resources")
    assert (engine["busy"], engine["idle"], engine["sync"], engine["down"]) == (0.6, 0.3, 0.1, 0)
    assert trainer["busy"] == 1
    train = next(row for row in cells(report, "domains") if row["purpose"] == "train")
    assert (train["episodes"], train["used"], train["lost"], train["success"]) == (25, 20, 5, 0.5)
    rates = {row["what"]: row["per_second"] for row in cells(report, "rates")}
    assert rates["sampled tokens"] == pytest.approx(2.7)


def test_lost_seconds_are_told_by_cause(tmp_path: Path) -> None:
    def life(state: str, cause: str, seconds: float) -> IntervalSum:
        return IntervalSum("engine", "engine-0", state, cause, seconds, seconds, 0.0, 0.0, seconds)

    run = replace(
        rows(),
        intervals=[
            life("startup", "", 3),
            life("down", "engine_down", 2),
            life("startup", "engine_restart", 4),
            life("busy", "", 9),
        ],
    )
    found = [(row["cause"], row["resource"], row["seconds"]) for row in cells(utilization(run), "down")]
    assert found == [("engine_down", "engine-0", 2), ("engine_restart", "engine-0", 4)]


def test_curves(tmp_path: Path) -> None:
    (lake,) = curves(rows())
    assert [(p.version, p.success, p.episodes) for p in lake.training] == [(0, 0.2, 10), (1, 0.8, 10)]
    assert [(p.version, p.success) for p in lake.evaluation] == [(0, 0.25), (2, 0.75)]
    (summary,) = cells(curve(rows()), "summary")
    assert (summary["curve"], summary["evaluated_last"]) == ("▂▇", 0.75)
    assert sparkline([]) == ""
    assert sparkline([0, 1]) == "▁█"
    assert len(sparkline([0.5] * 1000)) == 40


@pytest.mark.slow
def test_a_picture(tmp_path: Path) -> None:
    """Slow: imports matplotlib."""
    pytest.importorskip("matplotlib")
    write_png(rows(), tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


money = st.floats(0, 1e4)
intervals = st.lists(
    st.builds(
        IntervalSum,
        role=st.sampled_from(["engine", "trainer", "prefill"]),
        resource=st.sampled_from("abcd"),
        state=st.sampled_from([str(s) for s in ResourceState]),
        cause=st.sampled_from(["", "crash"]),
        seconds=money,
        unit_seconds=money,
        usd=money,
        t0=st.just(0.0),
        t1=st.just(1e4),
    )
)
charges = st.lists(
    st.builds(
        ChargeSum,
        domain=st.sampled_from(["lake", "pond"]),
        purpose=st.sampled_from(["train", "eval"]),
        outcome=st.sampled_from(["trained", "waiting", "stale", "infra_fault", "evaluated"]),
        v0=st.integers(-1, 5),
        trajectories=st.integers(1, 50),
        engine_seconds=money,
        turns=st.integers(0, 99),
        prompt_tokens=st.integers(0, 99),
        action_tokens=st.integers(0, 99),
        judged=st.just(1),
        successes=st.integers(0, 1),
        seconds=money,
    )
)
calls = st.lists(
    st.builds(
        InvocationSum,
        function=st.sampled_from("fg"),
        provider=st.sampled_from(["local", "modal", "nobody"]),
        memory_mb=st.integers(128, 4096),
        status=st.sampled_from(["ok", "crash"]),
        calls=st.integers(1, 1000),
        items=st.integers(0, 1000),
        cold_starts=st.integers(0, 9),
        cold_start_s=money,
        billed_s=money,
        cause=st.sampled_from(list(Cause)),
        cold_billed_s=money,
    )
)
workers = st.lists(
    st.builds(
        WorkerSum,
        function=st.sampled_from("fgh"),
        provider=st.sampled_from(["local", "modal", "aws_lambda"]),
        memory_mb=st.integers(128, 4096),
        state=st.sampled_from(list(WorkerState)),
        seconds=money,
        estimated=st.booleans(),
    )
)


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)


@settings(max_examples=30, deadline=None)
@given(intervals, charges, calls, workers)
def test_every_table_adds_up_to_the_same_total(i: list[Any], c: list[Any], f: list[Any], w: list[Any]) -> None:
    run = rows(intervals=i, charges=c, invocations=f, workers=w)
    report, lines = cost(run), cost_lines(run)
    total = math.fsum(line.usd for line in lines)
    billed = math.fsum(
        PRICES.function_usd(x.provider, billed_s=x.billed_s, memory_mb=x.memory_mb, requests=x.calls)
        for x in f
        if x.provider != "local"
    )
    waited = math.fsum(
        PRICES.idle_usd(x.provider, seconds=x.seconds, memory_mb=x.memory_mb) for x in w if x.state == "idle"
    )
    assert close(total, math.fsum(x.usd for x in i) + billed + waited), "starts are split out of calls, never added"
    priced = cells(report, "prices")
    by_unit = math.fsum(row["usd"] for row in priced if row["cost"] == "billed" and row["unit"] != "device-hour")
    assert close(by_unit, billed + waited), "prices times amounts"
    (elsewhere,) = (row["value"] for row in cells(report, "total") if row["what"] == "would cost elsewhere")
    assert close(elsewhere, math.fsum(row["usd"] for row in cells(report, "elsewhere")))
    assert close(elsewhere, math.fsum(row["usd"] for row in priced if row["cost"] == "elsewhere"))
    reward = math.fsum(usd for (role, _), usd in waste(run, lines).items() if role == "reward")
    useful = math.fsum(line.usd for line in lines if line.role == "reward" and not line.cause)
    assert close(reward + useful, billed + waited), "by cause too"
    assert all(line.usd >= 0 and line.seconds >= 0 for line in lines)
    for name in ("by_role", "by_resource"):
        assert close(math.fsum(row["usd"] for row in cells(report, name)), total)
        assert close(math.fsum(row["busy_usd"] + row["not_busy_usd"] for row in cells(report, name)), total)
    engine_busy = math.fsum(x.usd for x in i if x.role in ("engine", "prefill") and x.state == "busy")
    if any(x.seconds > 0 for x in i if x.role in ("engine", "prefill") and x.state == "busy") or c:
        charged = math.fsum(x.engine_seconds for x in c)
        if charged > 0 or any(x.seconds for x in i if x.role in ("engine", "prefill") and x.state == "busy"):
            assert close(math.fsum(x.usd for x in fates(run)), engine_busy)
    assert math.fsum(waste(run, lines).values()) <= total + math.fsum(x.usd for x in fates(run)) + 1e-6
    for row in cells(utilization(run), "resources"):
        shares = [v for k, v in row.items() if k not in ("resource", "role", "seconds")]
        assert row["seconds"] == 0 or close(math.fsum(shares), 1)


@pytest.mark.parametrize("make", [cost, utilization, curve])
def test_every_format_says_the_same(make: Any) -> None:
    report: Report = make(rows())
    as_json = json.loads(render(report, "json"))
    assert (as_json["schema_version"], as_json["run"]) == (2, "quick")
    as_csv = list(csv.DictReader(io.StringIO(render(report, "csv"))))
    flat = [
        (name, str(n), key, "" if value is None else str(value))
        for name, table in as_json["tables"].items()
        for n, row in enumerate(table)
        for key, value in row.items()
    ]
    assert [(r["table"], r["row"], r["column"], r["value"]) for r in as_csv] == flat
    text = render(report, "table")
    assert [t.title in text for t in report.tables] == [t.people for t in report.tables]
    assert all(t.people or not t.rows for t in report.tables), "left out is what a run did not use"
    assert "\x1b" not in text
    assert "\x1b" in render(report, "table", colour=True)
    with pytest.raises(ValueError, match="one of table, json, csv"):
        render(report, "xml")


def test_a_run_that_has_done_nothing() -> None:
    empty = rows(
        facts=RunFacts(0.0, None, None, 0, 0, 0, 0, 0),
        intervals=[],
        charges=[],
        invocations=[],
        versions=[],
        events=(),
    )
    for make in (cost, utilization, curve):
        assert "nothing yet" in render(make(empty), "table")
        json.loads(render(make(empty), "json"))


def test_what_was_cancelled_as_redundant_stands_beside_what_was_kept() -> None:
    """The last publish's figures, with a warning where they differ; and the cost of the cancelled is waste."""

    def event(t: float, figure: str, cancelled: float, notable: bool) -> RunEvent:
        fields: dict[str, Any] = {
            "version": 1,
            "kept": 2.0,
            "cancelled": cancelled,
            "kept_count": 40,
            "cancelled_count": 20,
            "delta": 0.5 if notable else 0.1,
            "notable": notable,
        }
        return RunEvent(t, "cancelled_against_kept", figure, fields)

    run = rows(
        events=[event(1.0, "turns", 2.0, False), event(2.0, "turns", 5.0, True), event(2.0, "age_s", 2.1, False)],
        charges=[ChargeSum("lake", "train", "redundant", 0, 5, 10.0, 20, 250, 50, 0, 0, 25.0)],
    )
    turns, age = cells(utilization(run), "cancelled")
    assert (turns["figure"], turns["cancelled"], turns["kept"], turns["cliffs_delta"]) == ("turns", 5.0, 2.0, 0.5)
    assert turns["warning"] == "cancelled ones have more turns"
    assert (age["figure"], age["warning"]) == ("age in seconds", "")
    assert waste(run, cost_lines(run))["engine", "trajectory redundant"] > 0


def test_what_was_filtered_stands_beside_what_was_kept_and_is_waste_of_its_own() -> None:
    fields: dict[str, Any] = {
        "version": 1,
        "kept": 0.5,
        "cancelled": 0.9,
        "kept_count": 40,
        "cancelled_count": 20,
        "delta": 0.6,
        "notable": True,
    }
    run = rows(
        events=[RunEvent(1.0, "filtered_against_kept", "difficulty", fields)],
        charges=[ChargeSum("lake", "train", "filtered", 0, 5, 10.0, 20, 250, 50, 0, 0, 25.0)],
    )
    (shown,) = cells(utilization(run), "filtered")
    assert (shown["filtered"], shown["kept"], shown["filtered_count"], shown["kept_count"]) == (0.9, 0.5, 20, 40)
    assert shown["warning"] == "filtered ones have more reward of their group"
    assert waste(run, cost_lines(run))["engine", "trajectory filtered"] > 0


def test_broadcasts_have_a_line_per_engine() -> None:
    events = [
        *(RunEvent(1.0, "weights_received", "e0", {"version": v, "bytes": 2 * 10**9, "seconds": 4.0}) for v in (1, 2)),
        RunEvent(9.0, "weights_not_received", "e1", {"version": 2, "why": "the broadcast broke off"}),
    ]
    table = next(t for t in utilization(rows(events=events)).tables if t.name == "broadcasts")
    assert table.rows == (("e0", 2, 4.0, 8.0, 0.5, 0, ""), ("e1", 0, 0.0, 0.0, None, 1, "the broadcast broke off"))


def test_versions_that_engines_left_out_are_bytes_saved() -> None:
    loads = [
        RunEvent(1.0, "engine_updated", "e0", {"version": 1, "skipped": 0, "bytes": 2_000_000_000, "seconds": 3.0}),
        RunEvent(9.0, "engine_updated", "e0", {"version": 4, "skipped": 2, "bytes": 2_000_000_000, "seconds": 3.0}),
        RunEvent(9.0, "engine_updated", "e1", {"version": 4, "skipped": 3, "bytes": 2_000_000_000, "seconds": 4.0}),
    ]
    table = next(t for t in utilization(rows(events=loads)).tables if t.name == "updates")
    assert table.rows == (("e0", 2, 6.0, 4.0, 2, 4.0), ("e1", 1, 4.0, 2.0, 3, 6.0))


def test_hand_offs_are_counted_and_a_split_that_pulls_nothing_is_an_alarm() -> None:
    def published(decoded: int, failed: int, empty: int) -> RunEvent:
        return RunEvent(1.0, "handoffs", "v1", {"decoded": decoded, "failed": failed, "empty": empty})

    def table(*events: RunEvent) -> Table:
        return next(t for t in utilization(rows(events=events)).tables if t.name == "handoffs")

    assert table().rows == ()
    assert table(published(90, 4, 1), published(6, 0, 0)).rows == ((100, 4, 0.04, 1, None),)
    assert table(published(20, 0, 20)).rows == ((20, 0, 0.0, 20, "prefill engines work for nothing"),)
