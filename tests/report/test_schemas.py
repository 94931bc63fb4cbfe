"""Each report's JSON is valid under the schema that `rollart schema` prints for it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rollart.cli.main import run
from rollart.ledger.events import MODEL_SHAPE
from rollart.ledger.intervals import IntervalSum
from rollart.ports import RunEvent
from rollart.report.compare.advice import advice
from rollart.report.compare.alarms import Alarm
from rollart.report.compare.diff import ComparedRun, diff
from rollart.report.compare.parts import ExposedPart
from rollart.report.cost import cost
from rollart.report.render import render
from rollart.report.schemas import REPORTS
from rollart.report.utilization import utilization
from serverless.meter import Saving
from tests.report.compare.test_advice import trial, trials
from tests.report.test_efficiency import CONFIG
from tests.report.test_perfetto import record
from tests.report.test_report import rows

AGAINST = {
    "version": 1,
    "kept": 0.5,
    "cancelled": 0.9,
    "kept_count": 40,
    "cancelled_count": 20,
    "delta": 0.6,
    "notable": True,
}
EVENTS = (
    RunEvent(1.0, "engine_started", "engine-0", {"version": 0}),
    RunEvent(2.0, "node_lost", "n0", {}),
    RunEvent(3.0, "rebalanced", "plan", {"moves": "drain engine-1", "why": "nodes"}),
    RunEvent(1.0, "cancelled_against_kept", "turns", AGAINST),
    RunEvent(1.0, "filtered_against_kept", "difficulty", AGAINST),
    RunEvent(1.0, "weights_received", "e0", {"version": 1, "bytes": 10**9, "seconds": 4.0}),
    RunEvent(1.0, "engine_updated", "e0", {"version": 4, "skipped": 3, "bytes": 10**9, "seconds": 4.0}),
    RunEvent(1.0, "handoffs", "v1", {"decoded": 20, "failed": 0, "empty": 20}),
    RunEvent(1.0, "concurrency", "v1", {"engines": 2, "least": 1, "median": 2, "most": 3, "admitted": 4}),
    RunEvent(1.0, "environments_made", "h0", {"domain": "lake", "cold": 2, "cold_s": 0.5}),
    RunEvent(1.0, "environment_places", "training", {"places": 4, "waited": 1, "wait_s": 0.5, "longest_s": 0.5}),
    RunEvent(9.0, "function_health", "exact", {"outcomes": 90, "faults": 2, "fault.crash": 2}),
    RunEvent(9.0, "function_refused", "exact", {"provider": "aws_lambda", "concurrency": 26}),
    RunEvent(9.0, "offload_stage", "exact", {"stage": "dedupe", "entered": 10, "acted": 4, "saved_calls": 4}),
)


COMPARED = {
    "diff": [diff(ComparedRun(rows(), {"run": {"seed": 0}}), ComparedRun(rows(), {"run": {"seed": 1}}))],
    "advise": [
        advice(
            rows(),
            [Alarm("idle", "trainer", 0.5, "share of its time", None, "it waits")],
            [ExposedPart("rewards", 2.0, 1.0)],
            found,
            None,
            (),
        )
        for found in (trials(trial("faster", (1.25, 1.5625, 1.0, 1.25))), None)
    ],
}
"""Reports of `rollart diff` and `rollart advise`."""


SHAPE = RunEvent(0.0, MODEL_SHAPE, "policy", {"config": json.dumps(CONFIG), "weight_bytes": 2, "kv_bytes": 2})


@pytest.mark.slow  # needs jsonschema, which the fast suite's environment lacks
def test_reports_are_valid_under_their_schemas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from jsonschema import Draft202012Validator

    asyncio.run(record(tmp_path))
    with_rows: set[tuple[str, str]] = set()
    for name in REPORTS:
        assert run(["schema", f"report.{name}"]) == 0
        validator = Draft202012Validator(json.loads(capsys.readouterr().out))
        found: list[dict[str, Any]] = []
        if name not in COMPARED:
            arguments = ["--runs", str(tmp_path), "--by", "month,role"] if name == "fleet" else [str(tmp_path)]
            assert run(["report", name, *arguments, "-o", "json"]) == 0
            found.append(json.loads(capsys.readouterr().out))
        found += [json.loads(render(report, "json")) for report in COMPARED.get(name, ())]
        if name in ("cost", "utilization"):
            make = cost if name == "cost" else utilization
            down = IntervalSum("engine", "engine-0", "down", "engine_down", 10, 10, 1.0, 0, 100)
            full = rows(
                events=[*EVENTS, SHAPE], intervals=[down], savings=[Saving("exact", "cache", 0.0, 50, 300.0, 2048)]
            )
            found.append(json.loads(render(make(full), "json")))
        for report in found:
            validator.validate(report)
            with_rows |= {(name, table) for table, cells in report["tables"].items() if cells}
        broken = found[0] | {"tables": found[0]["tables"] | {next(iter(REPORTS[name])): [{"usd": "much"}]}}
        assert not validator.is_valid(broken)
    every = {(name, table) for name, tables in REPORTS.items() for table in tables}
    assert every - with_rows <= {
        ("cost", "elsewhere"),
        ("cost", "plan"),
        ("cost", "by_tag"),
        ("cost", "tokens"),
        ("utilization", "shares"),
        ("curve", "sampled"),
    }


def test_a_report_without_a_schema_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema", "report.costs"]) == 2
    assert "no report 'costs'; did you mean 'cost'?" in capsys.readouterr().err
