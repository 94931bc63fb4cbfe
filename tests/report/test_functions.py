"""Functions in reports: cold starts and idle tails as causes, workers by state, stages and health."""

from __future__ import annotations

import pytest

from rollart.ledger.reader import InvocationSum, WorkerSum
from rollart.ports import RunEvent
from rollart.report.cost import cost, cost_lines, waste
from rollart.report.render import render
from rollart.report.rows import estimated_workers
from rollart.report.utilization import utilization
from serverless.types import Invocation
from tests.report.test_report import cells, rows

LAMBDA, REQUEST, IDLE = 0.0000166667, 0.2e-6, 0.0000041667
CORE, GIB = 0.0000131, 0.00000222


def call(t0: float, t1: float, *, worker: str = "c1", cold: float = 0.0, billed: float | None = None) -> Invocation:
    billed = t1 - t0 if billed is None else billed
    return Invocation("f", "modal", worker, t0, t1, cold, billed, 1024, 4, "ok", cold_billed_s=cold)


def test_a_first_call_is_split_and_the_sum_stays() -> None:
    """By hand: 10 s billed on 1 GB, of which 3 s were start-up; a failed call keeps its start-up."""
    calls = [
        InvocationSum("f", "aws_lambda", 1024, "ok", 4, 40, 1, 3.0, 10.0, "call", 3.0),
        InvocationSum("f", "aws_lambda", 1024, "crash", 1, 10, 1, 2.0, 2.0, "call", 2.0),
    ]
    run = rows(intervals=[], charges=[], invocations=calls)
    lines = cost_lines(run)
    assert [(x.state, x.cause, x.seconds) for x in lines] == [
        ("busy", "", 7.0),
        ("startup", "function cold start", 3.0),
        ("busy", "function crash", 2.0),
    ]
    assert [x.usd for x in lines] == pytest.approx([7 * LAMBDA + 4 * REQUEST, 3 * LAMBDA, 2 * LAMBDA + REQUEST])
    assert waste(run, lines) == pytest.approx(
        {("reward", "function cold start"): 3 * LAMBDA, ("reward", "function crash"): 2 * LAMBDA + REQUEST}
    )
    (role,) = cells(cost(run), "by_role")
    assert role["not_busy_usd"] == pytest.approx(3 * LAMBDA)


def test_idle_tails_cost_where_the_provider_charges_them() -> None:
    idle = [
        WorkerSum("f", "aws_lambda", 2048, "idle", 100.0),
        WorkerSum("f", "local", 2048, "idle", 100.0),
        WorkerSum("f", "local", 2048, "busy", 25.0),
        WorkerSum("g", "modal", 1024, "idle", 60.0, True),
    ]
    run = rows(intervals=[], charges=[], invocations=[], workers=idle)
    assert waste(run, cost_lines(run)) == pytest.approx(
        {("reward", "function idle"): 100 * 2 * IDLE + 60 * (CORE + GIB)}
    )
    table = {(r["function"], r["provider"]): r for r in cells(cost(run), "function_workers")}
    assert [table[k]["how"] for k in sorted(table)] == ["metered", "metered", "estimated"]
    assert table["f", "local"]["idle_share"] == pytest.approx(0.8)
    assert table["f", "local"]["idle_usd"] == 0
    assert table["g", "modal"]["idle_usd"] == pytest.approx(60 * (CORE + GIB)), "a Modal minute, as it says: $0.0009"
    notes = cost(run).notes
    assert any(n.startswith("modal: idle seconds are estimated") for n in notes)
    prices = [row["source"] for row in cells(cost(run), "prices")]
    assert any("provisioned concurrency" in source for source in prices), "the price of what was idle is stated"


def test_the_gpu_of_a_function_is_billed_in_calls_starts_and_idle_tails() -> None:
    """By hand: 10 s on an L4 with 1 GiB, of which 3 s were start-up, and 60 s of waiting."""
    gpu, second = 0.000222, CORE + GIB + 0.000222
    calls = [InvocationSum("f", "modal", 1024, "ok", 4, 40, 1, 3.0, 10.0, "call", 3.0)]
    idle = [WorkerSum("f", "modal", 1024, "idle", 60.0, True)]
    run = rows(intervals=[], charges=[], invocations=calls, workers=idle, gpus={"f": "L4"})
    assert [x.usd for x in cost_lines(run)] == pytest.approx([7 * second, 3 * second, 60 * second])
    listed = {(r["price"], r["unit"]): r["usd"] for r in cells(cost(run), "prices")}
    assert (listed["modal-L4", "gpu-second"], listed["modal-L4", "idle-gpu-second"]) == pytest.approx(
        (10 * gpu, 60 * gpu)
    )
    assert sum(listed.values()) == pytest.approx(70 * second)
    (table,) = cells(cost(run), "function_workers")
    assert table["idle_usd"] == pytest.approx(60 * second)
    unknown = rows(intervals=[], charges=[], invocations=calls, gpus={"f": "TPU"})
    assert any("no price is known for its GPU TPU" in note for note in cost(unknown).notes)
    assert not any("no price is known" in note for note in cost(run).notes)


def test_where_nothing_idled_no_idle_price_is_stated() -> None:
    run = rows(invocations=[InvocationSum("f", "aws_lambda", 1024, "ok", 1, 1, 0, 0.0, 1.0)])
    assert not any("idle" in note for note in cost(run).notes)


def test_idle_time_from_the_gaps_of_a_container() -> None:
    """By hand, keep-alive 10 s: a gap of 3 s, one of 50 s (it can only have been 10), overlapping calls, two tails."""
    calls = [
        call(0, 2, cold=1.0),
        call(5, 6),
        call(56, 58),
        call(57, 60),
        call(0, 1, worker="c2"),
        call(70, 71, worker=""),
    ]
    found = {w.state: w.seconds for w in estimated_workers(calls, {"f": 10.0})}
    assert found["idle"] == pytest.approx(3 + 10 + 10 + 10)
    assert found["cold"] == 1.0
    assert found["busy"] == pytest.approx(1 + 1 + 2 + 3 + 1 + 1)
    assert all(w.estimated for w in estimated_workers(calls, {}))
    unknown = {w.state: w.seconds for w in estimated_workers(calls[:1], {})}
    assert unknown["idle"] == 60, "the default of functions"
    assert estimated_workers([], {}) == []


def stage(name: str, t: float = 9.0, **fields: float) -> RunEvent:
    return RunEvent(t, "offload_stage", "exact", {"stage": name, **fields})


def test_stages_are_in_the_order_of_an_item_and_lives_add_up() -> None:
    events = [
        stage("retry", acted=2, extra_calls=3, extra_billed_s=10.0),
        stage("dedupe", entered=10, acted=4, saved_calls=4, saved_billed_s=8.0, waited_s=0.5),
        stage("dedupe", t=20.0, entered=5, acted=1, saved_calls=1, saved_billed_s=2.0),
    ]
    dedupe, retry = cells(cost(rows(events=events)), "stages")
    assert (dedupe["stage"], dedupe["entered"], dedupe["acted"], dedupe["saved_calls"]) == ("dedupe", 15, 5, 5)
    assert dedupe["saved_usd"] == pytest.approx(10 * LAMBDA + 5 * REQUEST), "as calls of 1,024 MB on `local` are billed"
    assert (retry["stage"], retry["extra_calls"]) == ("retry", 3)
    assert retry["extra_usd"] == pytest.approx(10 * LAMBDA + 3 * REQUEST)


def test_health_of_functions() -> None:
    events = [
        RunEvent(9.0, "function_health", "exact", {"outcomes": 90, "faults": 2, "fault.crash": 2, "model_faults": 5}),
        RunEvent(19.0, "function_health", "exact", {"outcomes": 10, "faults": 2, "fault.crash": 1, "fault.timeout": 1}),
        RunEvent(19.0, "function_health", "other", {"outcomes": 7, "faults": 0}),
    ]
    exact, other = cells(utilization(rows(events=events, fault_threshold=0.05)), "health")
    assert (exact["outcomes"], exact["infra_faults"], exact["model_faults"]) == (100, 4, 5)
    assert (exact["rate"], exact["threshold"], exact["kinds"]) == (0.04, 0.05, "crash 3, timeout 1")
    assert (other["rate"], other["kinds"], other["model_faults"]) == (0, "", None)


def test_refused_calls_name_the_limit_that_refused_them_and_lives_add_up() -> None:
    name = "function_refused"
    events = [
        RunEvent(9.0, name, "exact", {"provider": "aws_lambda", "concurrency": 26, "competed": 3, "quota": 1}),
        RunEvent(19.0, name, "exact", {"provider": "aws_lambda", "concurrency": 4, "rate": 2, "beside": "b"}),
        RunEvent(19.0, name, "judge", {"provider": "modal", "api": 7}),
    ]
    for report in (cost, utilization):
        found = [
            (r["function"], r["provider"], r["limit"], r["calls"])
            for r in cells(report(rows(events=events)), "refused")
        ]
        assert found == [
            ("exact", "aws_lambda", "concurrency", 30),
            ("exact", "aws_lambda", "rate", 2),
            ("exact", "aws_lambda", "quota", 1),
            ("exact", "aws_lambda", "competed", 3),
            ("judge", "modal", "api", 7),
        ]
    assert [row["beside"] for row in cells(cost(rows(events=events)), "refused")] == ["b", "b", "", "", ""]
    text = render(cost(rows(events=events)), "table", width=100)
    assert "functions.quota of this run" in text
    assert "Calls that a limit" not in render(cost(rows(events=[])), "table", width=100)


def test_calls_without_a_bill_are_marked_as_estimates() -> None:
    calls = [
        InvocationSum("f", "aws_lambda", 1024, "ok", 10, 10, 0, 0.0, 1.0),
        InvocationSum("f", "aws_lambda", 1024, "timeout", 3, 3, 0, 0.0, 31.0, estimated=2, estimated_s=30.0),
    ]
    shown = cost(rows(invocations=calls))
    sure, guessed = cells(shown, "functions")
    assert (sure["estimated"], guessed["estimated"], guessed["estimated_s"]) == (0, 2, 30.0)
    (note,) = [note for note in shown.notes if "estimates" in note]
    assert note.startswith("aws_lambda: 2 calls without a bill of the provider are estimates")
    assert "30.0 s" in note


def test_tables_of_functions_fit_a_hundred_columns() -> None:
    name = "a_reward_of_a_usual_name"
    calls = [InvocationSum(name, "aws_lambda", 1024, "ok", 123_456, 1_234_567, 123, 3.0, 12_345.6, "hedge", 3.0)]
    run = rows(
        invocations=calls,
        workers=[WorkerSum(name, "aws_lambda", 1024, "idle", 12_345.6)],
        events=[
            RunEvent(
                1.0,
                "offload_stage",
                name,
                {
                    "stage": "admission",
                    "entered": 1_234_567,
                    "acted": 123_456,
                    "waited_s": 12_345.6,
                    "saved_calls": 1000,
                },
            )
        ],
    )
    text = render(cost(run), "table", width=100)
    assert all(len(line) <= 100 for line in text.splitlines())
    assert text.count(name) >= 3, "on one line but where the numbers are as long as these"


def test_a_narrow_terminal_breaks_texts_and_no_number() -> None:
    name = "a_reward_with_a_name_that_is_longer_than_most_others_are"
    run = rows(invocations=[InvocationSum(name, "aws_lambda", 1024, "ok", 123_456, 7_654_321, 123, 3.0, 12_345.6)])
    text = render(cost(run), "table", width=70)
    assert all(len(line) <= 70 for line in text.splitlines())
    assert "7,654,321" in text, "a number is on one line"
    letters = [line.split()[0] for line in text.splitlines() if line and line.split()[0] in name]
    assert name in "".join(letters), "a text goes on in the next line, nothing is cut off"


def test_a_stage_that_only_passed_items_on_has_no_row() -> None:
    assert cells(cost(rows(events=[stage("schema", entered=10)])), "stages") == []


def test_processes_that_outlived_a_call_are_a_note() -> None:
    left = RunEvent(1.0, "worker_left_processes", "f", {"worker": "local/f/0", "processes": "sleep (12)"})
    (note,) = utilization(rows(intervals=[], charges=[], events=[left])).notes
    assert note.startswith("f: processes outlived their call (sleep (12))")
