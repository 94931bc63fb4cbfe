"""Cost, savings and activity of functions as tables. Pure: a run's sums in, tables out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields

from rollart.ledger.events import FUNCTION_HEALTH, OFFLOAD_STAGE
from rollart.ledger.intervals import ResourceState
from rollart.ledger.reader import InvocationSum
from rollart.ports import RunEvent
from rollart.report.rows import CostLine, RunRows
from rollart.report.tables import Row, as_count, as_number, as_seconds, as_share, as_text, as_usd, ratio, table
from serverless.meter import WorkerState
from serverless.pipeline.stages import OffloadStage, StageCounts
from serverless.types import Cause

REWARD = "reward"
"""Role of functions."""

BILLED, ELSEWHERE = "billed", "elsewhere"
"""Dollars that are part of the totals, and list-price dollars of calls that ran on the run's own cores."""

COLD_START = "function cold start"
IDLE = "function idle"


def lines(rows: RunRows) -> Iterator[CostLine]:
    """Every dollar of functions once: calls without their start-up, start-up, and idle workers.

    A failed call is one line with its failure as the cause, start-up included. Lines of workers on the run's own cores
    are not billed: their dollars are the price of the calls at a provider.
    """
    for call in rows.invocations:
        billed = rows.prices.billed(call.provider)
        resource, usd = f"{call.provider}:{call.function}", _usd(rows, call)
        start_s = min(call.cold_billed_s, call.billed_s) if call.status == "ok" else 0.0
        # Without the request fee, and at most the whole bill.
        start_usd = rows.prices.function_usd(call.provider, billed_s=start_s, memory_mb=call.memory_mb, requests=0)
        if not start_usd:
            start_s = 0.0
        work_s, work_usd = call.billed_s - start_s, usd - start_usd
        yield CostLine(REWARD, resource, ResourceState.BUSY, _why(call), work_s, work_usd, billed)
        if start_usd:
            yield CostLine(REWARD, resource, ResourceState.STARTUP, COLD_START, start_s, start_usd, billed)
    for worker in rows.workers:
        if worker.state == WorkerState.IDLE and rows.prices.charges_idle(worker.provider):
            usd = rows.prices.idle_usd(worker.provider, seconds=worker.seconds, memory_mb=worker.memory_mb)
            resource = f"{worker.provider}:{worker.function}"
            billed = rows.prices.billed(worker.provider)
            yield CostLine(REWARD, resource, ResourceState.IDLE, IDLE, worker.seconds, usd, billed)


def _usd(rows: RunRows, call: InvocationSum) -> float:
    return rows.prices.function_usd(
        call.provider, billed_s=call.billed_s, memory_mb=call.memory_mb, requests=call.calls
    )


def _why(call: InvocationSum) -> str:
    """The cause of a call that a run without faults and stragglers would not have made: its failure, or its trigger;
    '' for other calls."""
    if call.status != "ok":
        return f"function {call.status}"
    return "" if call.cause == Cause.CALL else f"function {call.cause}"


@table("functions", "Function calls, at list prices")
def calls(rows: RunRows) -> Iterator[Row]:
    for call in rows.invocations:
        gb_s, usd = call.billed_s * call.memory_mb / 1024, _usd(rows, call)
        yield {
            "function": call.function,
            "provider": call.provider,
            "status": call.status,
            "cause": call.cause,
            "calls": as_count(call.calls),
            "items": as_count(call.items),
            "cold_starts": as_count(call.cold_starts),
            "cold_s": as_seconds(call.cold_start_s, people=False),
            "cold_billed_s": as_seconds(call.cold_billed_s, people=False),
            "billed_s": as_seconds(call.billed_s),
            "estimated": as_count(call.estimated, people=False),
            "estimated_s": as_seconds(call.estimated_s, people=False),
            "gb_s": as_number(gb_s, people=False),
            "usd": as_usd(usd),
            "cost": as_text(_kind(rows, call.provider), people=False),
            "usd_per_1000_items": as_usd(ratio(usd * 1000, call.items), people=False),
        }


@table("function_workers", "Function workers: seconds by state")
def workers(rows: RunRows) -> Iterator[Row]:
    """Seconds of function workers by state; the states of a row are its whole life."""
    groups: dict[tuple[str, str, int, bool], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for w in rows.workers:
        groups[w.function, w.provider, w.memory_mb, w.estimated][w.state] += w.seconds
    for (function, provider, memory_mb, estimated), states in sorted(groups.items()):
        idle_s = states[WorkerState.IDLE]
        usd = rows.prices.idle_usd(provider, seconds=idle_s, memory_mb=memory_mb)
        yield {
            "function": function,
            "provider": provider,
            "memory_mb": as_count(memory_mb, people=False),
            "how": "estimated" if estimated else "metered",
            "cold_s": as_seconds(states[WorkerState.COLD]),
            "busy_s": as_seconds(states[WorkerState.BUSY]),
            "idle_s": as_seconds(idle_s),
            "idle_share": as_share(ratio(idle_s, math.fsum(states.values()))),
            "idle_usd": as_usd(usd),
            "cost": as_text(_kind(rows, provider), people=False),
        }


@table("savings", "Saved by the cache and by calls under way, at list prices")
def savings(rows: RunRows) -> Iterator[Row]:
    """Calls saved by the cache and by deduplication with live calls, at the price of the function's own calls."""
    for s in rows.savings:
        provider = _provider(rows).get(s.function, ("", 0))[0]
        usd = rows.prices.function_usd(provider, billed_s=s.billed_s, memory_mb=s.memory_mb, requests=0)
        yield {
            "function": s.function,
            "stage": s.stage,
            "items": as_count(s.items),
            "billed_s": as_seconds(s.billed_s),
            "usd": as_usd(usd),
            "cost": as_text(_kind(rows, provider), people=False),
        }


@table("stages", "What each stage of the function pipeline did, cost and saved, at list prices")
def stages(rows: RunRows) -> Iterator[Row]:
    """The effect of each stage of the pipeline, summed over all lives of the run. Dollars at the price of the
    function's calls. A stage that only passed items on has no row; its event is in the ledger."""
    sums = _summed(rows.events_of(OFFLOAD_STAGE), key="stage")
    order = {str(stage): n for n, stage in enumerate(OffloadStage)}
    priced = _provider(rows)
    for (function, stage), s in sorted(sums.items(), key=lambda kv: (kv[0][0], order.get(kv[0][1], len(order)))):
        if not s.keys() - {"entered"}:
            continue
        provider, memory_mb = priced.get(function, ("", 0))
        n = {f.name: s.get(f.name, 0.0) for f in fields(StageCounts)}
        extra, saved = (
            rows.prices.function_usd(
                provider, billed_s=n[f"{k}_billed_s"], memory_mb=memory_mb, requests=int(n[f"{k}_calls"])
            )
            for k in ("extra", "saved")
        )
        yield {
            "function": function,
            "stage": stage,
            "entered": as_count(int(n["entered"])),
            "acted": as_count(int(n["acted"])),
            "helped": as_count(int(n["helped"])),
            "waited_s": as_seconds(n["waited_s"]),
            "extra_calls": as_count(int(n["extra_calls"]), people=False),
            "extra_billed_s": as_seconds(n["extra_billed_s"], people=False),
            "extra_usd": as_usd(extra),
            "saved_calls": as_count(int(n["saved_calls"]), people=False),
            "saved_billed_s": as_seconds(n["saved_billed_s"], people=False),
            "saved_usd": as_usd(saved),
            "cost": as_text(_kind(rows, provider), people=False),
        }


@table("health", "Health of functions")
def health(rows: RunRows) -> Iterator[Row]:
    """Outcomes of functions as their callers received them, and the infrastructure faults among them by kind."""
    for (function, _), s in sorted(_summed(rows.events_of(FUNCTION_HEALTH)).items()):
        outcomes, faults = int(s.get("outcomes", 0)), int(s.get("faults", 0))
        kinds = {k.removeprefix("fault."): int(n) for k, n in sorted(s.items()) if k.startswith("fault.")}
        yield {
            "function": function,
            "outcomes": as_count(outcomes),
            "model_faults": as_count(int(s["model_faults"]) if "model_faults" in s else None),
            "infra_faults": as_count(faults),
            "rate": as_share(ratio(faults, outcomes)),
            "threshold": as_share(rows.fault_threshold),
            "kinds": ", ".join(f"{k} {n}" for k, n in kinds.items()),
        }


def notes(rows: RunRows) -> Iterable[str]:
    """Notes on estimates, and on providers without a known price."""
    for provider in sorted({call.provider for call in rows.invocations}):
        if not rows.prices.sources(provider):
            yield f"{provider}: no price is known: its calls count as $0 (add its prices to the cluster's price_list)"
    for provider in sorted({call.provider for call in rows.invocations if call.estimated}):
        guessed = [call for call in rows.invocations if call.provider == provider]
        count, seconds = sum(c.estimated for c in guessed), math.fsum(c.estimated_s for c in guessed)
        usd = math.fsum(
            rows.prices.function_usd(provider, billed_s=c.estimated_s, memory_mb=c.memory_mb, requests=c.estimated)
            for c in guessed
        )
        yield (
            f"{provider}: {count:,} calls without a bill of the provider are estimates: {seconds:.1f} s, ${usd:.2g}, "
            "the time until each was answered or given up"
        )
    for provider in sorted({w.provider for w in rows.workers if w.estimated}):
        yield f"{provider}: idle seconds are estimated: the gaps between a container's calls, up to keep_alive_s each"


def _summed(events: Iterable[RunEvent], key: str = "") -> dict[tuple[str, str], dict[str, float]]:
    """Numeric fields of events summed by (subject, the field `key`): a resumed run has an event for each of its
    lives."""
    sums: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        own = sums[event.subject, str(event.fields.get(key, ""))]
        for name, value in event.fields.items():
            if name != key and isinstance(value, int | float):
                own[name] += value
    return {k: dict(v) for k, v in sums.items()}


def _provider(rows: RunRows) -> Mapping[str, tuple[str, int]]:
    """Provider and memory of most calls, by function (ties: the first in the ledger's order)."""
    most: dict[str, InvocationSum] = {}
    for call in rows.invocations:
        if call.function not in most or call.calls > most[call.function].calls:
            most[call.function] = call
    return {name: (call.provider, call.memory_mb) for name, call in most.items()}


def _kind(rows: RunRows, provider: str) -> str:
    return BILLED if rows.prices.billed(provider) else ELSEWHERE
