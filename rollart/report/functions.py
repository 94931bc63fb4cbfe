"""Cost, savings and activity of functions as tables. Pure: a run's sums in, tables out."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields

from rollart.ledger.events import (
    FUNCTION_HEALTH,
    FUNCTION_REFUSED,
    FUNCTION_VERSION,
    OFFLOAD_STAGE,
    WORKER_LEFT_PROCESSES,
)
from rollart.ledger.intervals import ResourceState
from rollart.ledger.reader import InvocationSum
from rollart.money import dollars
from rollart.ports import RunEvent
from rollart.report.rows import CostLine, RunRows
from rollart.report.tables import Row, as_count, as_number, as_seconds, as_share, as_text, as_usd, ratio, table
from rollart.settings.prices import gpu_price_name
from serverless.meter import NO_SCORE, WorkerState
from serverless.pipeline.stages import OffloadStage, RefusingLimit, StageCounts
from serverless.spec import gpu_type
from serverless.types import Cause, Throttle

REWARD = "reward"
"""Role of functions."""

BILLED, ELSEWHERE = "billed", "elsewhere"
"""Dollars that are part of the totals, and list-price dollars of calls that ran on the run's own cores."""

UNPRICED = "unpriced"
"""Cost of tokens of a model that is not in the price list."""

COLD_START = "function cold start"
IDLE = "function idle"


def lines(rows: RunRows) -> Iterator[CostLine]:
    """Every dollar of calls and workers once: calls without their start-up, start-up, and idle workers.

    A failed call is one line with its failure as the cause, start-up included. Lines of workers on the run's own cores
    are not billed: their dollars are the price of the calls at a provider.
    """
    for call in rows.invocations:
        billed = rows.prices.billed(call.provider)
        resource, usd = f"{call.provider}:{call.function}", _usd(rows, call)
        start_s = min(call.cold_billed_s, call.billed_s) if call.status == "ok" else 0.0
        # Without the request fee, and at most the whole bill.
        gpu = rows.gpus.get(call.function, "")
        start_usd = rows.prices.function_usd(
            call.provider, billed_s=start_s, memory_mb=call.memory_mb, requests=0, gpu=gpu
        )
        if not start_usd:
            start_s = 0.0
        work_s, work_usd = call.billed_s - start_s, usd - start_usd
        yield CostLine(REWARD, resource, ResourceState.BUSY, cause_of(call), work_s, work_usd, billed)
        if start_usd:
            yield CostLine(REWARD, resource, ResourceState.STARTUP, COLD_START, start_s, start_usd, billed)
    for worker in rows.workers:
        if worker.state == WorkerState.IDLE and rows.prices.charges_idle(worker.provider):
            gpu = rows.gpus.get(worker.function, "")
            usd = rows.prices.idle_usd(worker.provider, seconds=worker.seconds, memory_mb=worker.memory_mb, gpu=gpu)
            resource = f"{worker.provider}:{worker.function}"
            billed = rows.prices.billed(worker.provider)
            yield CostLine(REWARD, resource, ResourceState.IDLE, IDLE, worker.seconds, usd, billed)


def token_lines(rows: RunRows) -> Iterator[CostLine]:
    """Every dollar of tokens that functions consumed at language models."""
    for row in rows.tokens:
        used = row.usage
        resource, usd = f"{used.endpoint}/{used.model}:{row.function}", rows.prices.token_usd(used)
        cause = "tokens without a score" if row.cause == NO_SCORE else overhead(row.cause)
        yield CostLine(REWARD, resource, ResourceState.BUSY, cause, 0.0, usd)


def _usd(rows: RunRows, call: InvocationSum) -> float:
    return rows.prices.function_usd(
        call.provider,
        billed_s=call.billed_s,
        memory_mb=call.memory_mb,
        requests=call.calls,
        gpu=rows.gpus.get(call.function, ""),
    )


def cause_of(call: InvocationSum) -> str:
    """The cause of a call that a run without faults and stragglers would not have made: its failure, or its trigger;
    '' for other calls."""
    if call.status != "ok":
        return f"function {call.status}"
    return overhead(call.cause)


def overhead(cause: str) -> str:
    return "" if cause == Cause.CALL else f"function {cause}"


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


@table("tokens", "Tokens of language models that functions asked (billed by the endpoint)", optional=True)
def tokens(rows: RunRows) -> Iterator[Row]:
    """`usd` is empty for a model without a price: its tokens are in no total."""
    for row in rows.tokens:
        used = row.usage
        priced = rows.prices.prices_tokens(used)
        yield {
            "function": row.function,
            "endpoint": used.endpoint,
            "model": used.model,
            "cause": row.cause,
            "requests": as_count(used.requests),
            "input": as_count(used.input_tokens),
            "cached": as_count(used.cached_tokens),
            "cache_write": as_count(used.cache_write_tokens, people=False),
            "output": as_count(used.output_tokens),
            "usd": as_usd(rows.prices.token_usd(used) if priced else None),
            "cost": as_text(BILLED if priced else UNPRICED, people=False),
        }


@table("function_workers", "Function workers: seconds by state")
def workers(rows: RunRows) -> Iterator[Row]:
    """Seconds of function workers by state; the states of a row are its whole life."""
    groups: dict[tuple[str, str, int, bool], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for w in rows.workers:
        groups[w.function, w.provider, w.memory_mb, w.estimated][w.state] += w.seconds
    for (function, provider, memory_mb, estimated), states in sorted(groups.items()):
        idle_s = states[WorkerState.IDLE]
        usd = rows.prices.idle_usd(provider, seconds=idle_s, memory_mb=memory_mb, gpu=rows.gpus.get(function, ""))
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
        gpu = rows.gpus.get(s.function, "")
        usd = rows.prices.function_usd(provider, billed_s=s.billed_s, memory_mb=s.memory_mb, requests=0, gpu=gpu)
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
                provider,
                billed_s=n[f"{k}_billed_s"],
                memory_mb=memory_mb,
                requests=int(n[f"{k}_calls"]),
                gpu=rows.gpus.get(function, ""),
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


_LIMITS = {
    Throttle.CONCURRENCY: "concurrent calls of the account",
    Throttle.RESERVED: "reserved concurrency of the function",
    Throttle.RATE: "requests per second of the account",
    Throttle.SCALING: "start of environments at the provider",
    Throttle.QUEUE: "waiting calls on this side",
    RefusingLimit.UNKNOWN: "not named by the provider",
    RefusingLimit.QUOTA: "functions.quota of this run",
    RefusingLimit.API: "rate of an API that the function asks",
    RefusingLimit.COMPETED: "part of the above that others of the account took from this run",
}
"""The limits in the order of the table, in the user's words."""


@table("refused", "Calls that a limit refused or delayed", optional=True)
def refused(rows: RunRows) -> Iterator[Row]:
    """Calls of each function that a limit refused or delayed. A provider does not say which other run holds the
    concurrency of an account: a refusal below a level that it had admitted before is evidence that another one does.
    `beside` are the other runs of the machine that were active and called the provider."""
    beside = {(e.subject, e.fields["provider"]): e.fields.get("beside", "") for e in rows.events_of(FUNCTION_REFUSED)}
    for (function, provider), s in sorted(_summed(rows.events_of(FUNCTION_REFUSED), key="provider").items()):
        for limit, text in _LIMITS.items():
            if calls := int(s.get(str(limit), 0)):
                yield {
                    "function": function,
                    "provider": provider,
                    "limit": str(limit),
                    "by": text,
                    "calls": as_count(calls),
                    "beside": str(beside[function, provider]) if limit in Throttle else "",
                }


def left_processes(rows: RunRows) -> Iterable[str]:
    """Notes on functions whose processes outlived a call."""
    for event in rows.events_of(WORKER_LEFT_PROCESSES):
        yield (
            f"{event.subject}: processes outlived their call ({event.fields['processes']}): they and the worker were "
            "ended, each time (start them in `load`, or wait for them)"
        )


def notes(rows: RunRows) -> Iterable[str]:
    """Notes on drawn versions, on estimates, and on providers without a known price."""
    for event in {event.subject: event for event in rows.events_of(FUNCTION_VERSION)}.values():
        if "reference" in event.fields:
            number, provider = event.fields["number"], event.fields["provider"]
            weights, version = json.loads(str(event.fields["weights"])), str(event.fields["version"])[:12]
            drawn = f", drawn with {weights[number]:.4g} of its calls" if len(weights) > 1 and number in weights else ""
            yield f"{event.fields['reference']}: version {version} ({number} on {provider}){drawn}"
    for provider in sorted({call.provider for call in rows.invocations}):
        if not rows.prices.sources(provider):
            yield f"{provider}: no price is known: its calls count as $0 (add its prices to the cluster's price_list)"
    for function, provider in sorted({(call.function, call.provider) for call in rows.invocations}):
        gpu = rows.gpus.get(function, "")
        if rows.prices.billed(provider) and not rows.prices.prices_gpu(provider, gpu):
            name = gpu_price_name(provider, gpu_type(gpu)[0])
            yield (
                f"{function} on {provider}: no price is known for its GPU {gpu}, busy or idle, so that it counts as $0 "
                f"there (add {name} in gpu-second and idle-gpu-second to the cluster's price_list)"
            )
    for used in sorted(
        {(t.usage.endpoint, t.usage.model) for t in rows.tokens if not rows.prices.prices_tokens(t.usage)}
    ):
        yield (
            f"{'/'.join(used)}: no price is known for its input or output tokens, which count as $0 (add "
            "million-input-tokens and million-output-tokens of the model to the cluster's price_list)"
        )
    asking = {row.function for row in rows.tokens}
    cut = sum(c.calls for c in rows.invocations if c.function in asking and c.status != "ok")
    if cut:
        yield f"{cut:,} calls of {', '.join(sorted(asking))} gave no answer: tokens that they consumed are not known"
    for provider in sorted({call.provider for call in rows.invocations if call.estimated}):
        guessed = [call for call in rows.invocations if call.provider == provider]
        count, seconds = sum(c.estimated for c in guessed), math.fsum(c.estimated_s for c in guessed)
        usd = math.fsum(
            rows.prices.function_usd(
                provider,
                billed_s=c.estimated_s,
                memory_mb=c.memory_mb,
                requests=c.estimated,
                gpu=rows.gpus.get(c.function, ""),
            )
            for c in guessed
        )
        yield (
            f"{provider}: {count:,} calls without a bill of the provider are estimates: {seconds:.1f} s, "
            f"{dollars(usd)}, the time until each was answered or given up"
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
