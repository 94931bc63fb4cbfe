"""Functions against dedicated workers from a run's calls, checked by hand and on a recorded run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollart.ledger.reader import LedgerReader, RunFacts
from rollart.ledger.store import Ledger
from rollart.model import TrajectoryId
from rollart.ports import Charge
from rollart.report.exposure import TrajectoryLife
from rollart.report.offload import MATCH_S, CallTrace, matched_calls, offload, read_trace
from rollart.report.rows import collect
from serverless.spec import FunctionSpec
from serverless.types import Cause, Invocation
from tests.report.test_report import cells, rows


def call(t0: float, seconds: float = 2.0, *, function: str = "f", items: int = 1, **more: Any) -> Invocation:
    fields: dict[str, Any] = {
        "function": function,
        "provider": "local",
        "worker": "w",
        "t0": t0,
        "t1": t0 + seconds,
        "cold_start_s": 0.0,
        "billed_s": seconds,
        "cold_billed_s": 0.0,
        "memory_mb": 1024,
        "items": items,
        "status": "ok",
        "cause": "call",
        "queued_s": 0.0,
    }
    return Invocation(**(fields | more))


def given(calls: list[Invocation], **more: Any) -> CallTrace:
    spec = FunctionSpec.model_construct(name="f", source="f.py", keep_alive_s=3.0, concurrency=8)
    fields: dict[str, Any] = {
        "calls": calls,
        "lives": [],
        "domains": {"f": frozenset({"lake"})},
        "specs": {"f": spec, "g": spec},
        "core_usd_hour": 3.6,
    }
    return CallTrace(**(fields | more))


def test_dedicated_workers_by_hand() -> None:
    """Two calls of 2 s at 0 and two at 1 s, in a run of 100 s: two workers make the last wait 1 s, four none."""
    run = rows(facts=RunFacts(100.0, 1, 1, 1, 1, 0, 0, 0), invocations=[])
    trace = given([call(0), call(0), call(1), call(1)])
    ways = {row["served_by"]: row for row in cells(offload(run, trace, wait_s=1.0), "ways")}
    enough, most = ways["dedicated, enough"], ways["dedicated, no wait"]
    assert (enough["workers"], enough["wait_p50_ms"], enough["wait_p99_ms"]) == (2, 0, 1000)
    assert (enough["worker_s"], enough["used"], enough["usd"]) == pytest.approx((200, 8 / 200, 0.2))
    assert (most["workers"], most["wait_p99_ms"], most["usd"]) == (4, 0, pytest.approx(0.4))
    assert ways["dedicated, one"]["wait_p99_ms"] == pytest.approx(5000)
    (summary,) = cells(offload(run, trace, wait_s=1.0), "summary")
    assert (summary["dedicated"], summary["work_s"]) == (2, 8)


def test_functions_win_below_the_share_that_is_told() -> None:
    from rollart.ledger.reader import InvocationSum

    billed = [InvocationSum("f", "local", 1024, "ok", 100, 100, 0, 0.0, 200.0)]
    run = rows(facts=RunFacts(1000.0, 1, 1, 1, 1, 0, 0, 0), invocations=billed)
    calls = [call(10.0 * n) for n in range(100)]
    (summary,) = cells(offload(run, given(calls, core_usd_hour=0.0472)), "summary")
    usd = 200 * 0.0000166667 + 100 * 0.2e-6
    assert summary["functions_usd"] == pytest.approx(usd)
    assert summary["dedicated_used"] == pytest.approx(0.2)
    assert summary["dedicated_wins_above"] == pytest.approx(0.0472 / 3600 / (usd / 200))
    assert (summary["dedicated_usd"] < summary["functions_usd"]) == (
        summary["dedicated_used"] > summary["dedicated_wins_above"]
    )


def test_elastic_replays_are_billed_as_functions() -> None:
    """By hand: starts of 1 s kept for 3 s, calls at 0, 5 and 20 s: 2 starts, 13 worker-seconds."""
    calls = [call(0, cold_start_s=1.0, cold_billed_s=0.5, billed_s=2.5), call(5), call(20)]
    ways = {row["served_by"]: row for row in cells(offload(rows(invocations=[]), given(calls)), "ways")}
    demand = ways["on demand"]
    assert (demand["cold_starts"], demand["worker_s"], demand["wait_p99_ms"]) == (2, pytest.approx(13), 1000)
    assert demand["usd"] == pytest.approx((6 + 2 * 0.5) * 0.0000166667 + 3 * 0.2e-6)
    assert {"Knative", "forecast"} <= ways.keys()


def test_what_no_deployment_would_serve_is_left_out_and_functions_can_share() -> None:
    calls = [
        call(0),
        call(0, cause="hedge"),
        call(0, items=0, cause="warm"),
        call(1, cause="retry"),
        call(0.5, function="g"),
        call(0, cause="fallback"),
        call(0, cause="smoke"),
    ]
    report = offload(rows(invocations=[]), given(calls))
    assert {r["function"]: r["calls"] for r in cells(report, "summary")} == {"f": 2, "g": 1, "(all)": 3}
    together = [r["served_by"] for r in cells(report, "ways") if r["function"] == "(all)"]
    assert (together[0], together[-1]) == ("as billed", "inline")  # replays that scale are of one function each
    empty = offload(rows(invocations=[]), given([]))
    assert (cells(empty, "ways"), empty.notes) == ([], ())


def test_a_worker_is_as_large_as_its_memory() -> None:
    (big,) = cells(offload(rows(invocations=[]), given([call(0, memory_mb=8192)], core_gb=4.294967296)), "summary")
    (small,) = cells(offload(rows(invocations=[]), given([call(0)], core_gb=4.294967296)), "summary")
    assert big["dedicated_usd"] == pytest.approx(2 * small["dedicated_usd"])


def test_calls_are_matched_with_the_trajectories_that_waited_for_them() -> None:
    spans = [("pond", 0.0, 2.1), ("lake", 1.0, 2.2), ("lake", 1.5, 2.3), ("lake", 3.0, 9.0), ("lake", 9.5, 10.0)]
    lives = [TrajectoryLife(*span) for span in spans]
    early = [call(0, items=2), call(2.5, 1.0), call(9.0, 0.5)]
    found = matched_calls(early, lives, frozenset({"lake"}))
    # No trajectory had begun before the first call; the next one ended too late after the second; the last began late.
    assert (found.found, [c.since for c in found.calls]) == (0, [None, None, None])
    later = [call(1.6, 0.5, items=2), call(8.0, 0.9)]
    found = matched_calls(later, lives, frozenset({"lake"}))
    assert (found.found, [(c.since, c.kind) for c in found.calls]) == (2, [(1.0, "lake"), (3.0, "lake")])
    assert found.trajectories == [(1, 2), (3,)]
    assert matched_calls([call(1.6, 0.5, status="crash")], lives, frozenset({"lake"})).found == 0
    late = [TrajectoryLife("lake", 0.0, 2.1 + MATCH_S + 0.1)]
    assert matched_calls(later, late, frozenset({"lake"})).found == 0
    assert matched_calls(later, lives, frozenset()).found == 0


def test_a_recorded_run(tmp_path: Path) -> None:
    """From the ledger: the time of asking, the price of the cluster's pool, functions' settings, domains."""
    config = {
        "run": {
            "domains": [{"name": "lake", "rewards": [{"function": "f"}]}, {"name": "pond"}],
            "functions": [{"name": "f", "source": "f.py", "keep_alive_s": 7.0, "concurrency": 2, "memory_mb": None}],
            "faults": {"max_rate": 0.05},
        },
        "cluster": {
            "pools": [
                {"name": "gpus", "device": "H20", "count": 8},
                {"name": "here", "device": "cpu", "count": 4, "memory_gb": 16.0},
            ]
        },
        "usd_per_device_hour": {"gpus": 2.0, "here": 0.5},
    }

    async def main() -> None:
        with Ledger(tmp_path, clock=lambda: 0.0, config=config, inline=True) as ledger:
            for n in range(20):
                ledger.invocation(
                    Invocation("f", "local", "w", n + 0.5, n + 1.0, 0, 0.5, 512, 1, "ok", Cause.CALL, queued_s=0.25)
                )
                ledger.charge(
                    Charge(
                        TrajectoryId(str(n)),
                        domain="lake",
                        outcome="finished",
                        v0=0,
                        engine_seconds=0.1,
                        turns=1,
                        prompt_tokens=1,
                        action_tokens=1,
                        success=None,
                        score=None,
                        purpose="train",
                        t0=n - 3.0,
                        t1=n + 1.01,
                    )
                )
            await ledger.flush()

    asyncio.run(main())
    with LedgerReader(tmp_path) as reader:
        found, run = read_trace(reader), collect(reader, "r")
    assert (found.core_usd_hour, found.core_gb, found.core_source) == (0.5, 4.0, "pool 'here'")
    assert (found.specs["f"].keep_alive_s, found.specs["f"].concurrency) == (7.0, 2)
    assert run.fault_threshold == 0.05
    report = offload(run, found)
    billed = cells(report, "ways")[0]
    assert (billed["served_by"], billed["wait_p99_ms"], billed["worker_s"]) == ("as billed", 250, None)
    assert any("20 of 20 calls matched" in note for note in report.notes)
    assert not any("replayed as they were begun" in note for note in report.notes)
