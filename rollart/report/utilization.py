"""Utilization of the hardware, and throughput of the domains. Pure.

Also reads, for others, the shares of domains in the trained trajectories, and the engines' own counters as rows from
which constants of the performance model are fitted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollart.ledger import events
from rollart.ledger.intervals import ResourceState
from rollart.ledger.reader import ChargeSum
from rollart.ports import RunEvent
from rollart.report import functions
from rollart.report.rows import ENGINE_ROLES, RunRows
from rollart.report.tables import (
    Cell,
    Report,
    Row,
    Table,
    as_count,
    as_number,
    as_seconds,
    as_share,
    as_text,
    ratio,
    table,
)
from rollart.report.usage.efficiency import efficiency, engine_counters

if TYPE_CHECKING:
    from placement.calibrate import Row as CalibrationRow

LEAST_STEPS = 20
"""Fewest steps of an interval that gives a row: a mean of fewer is too noisy."""

RUNNING = ("train", "evaluate", "spare")
"""Claims of trajectories; waits of prefetched environments delay no trajectory."""


def utilization(rows: RunRows) -> Report:
    """The utilization report."""
    tables = (
        _resources(rows),
        _down(rows),
        _nodes(rows),
        _rates(rows),
        _domains(rows),
        functions.health(rows),
        functions.refused(rows),
        _against_kept(rows, events.CANCELLED_AGAINST_KEPT, "cancelled", "Cancelled as redundant against kept"),
        _against_kept(rows, events.FILTERED_AGAINST_KEPT, "filtered", "Filtered (rewards alike) against kept"),
        engines(rows),
        efficiency(rows),
        _handoffs(rows),
        _shares(rows),
        _concurrency(rows),
        _updates(rows),
        _broadcasts(rows),
        _making(rows),
        _slot_waits(rows),
    )
    return Report("utilization", rows.run, tables, tuple(functions.left_processes(rows)))


@dataclass(frozen=True, slots=True)
class DomainShareSummary:
    """One domain at the end of a run. `drift` is the number of groups trained minus those due, `worst` its largest
    absolute value during the run."""

    floor: float
    cap: float
    wanted: float
    trained: float
    drift: float
    worst: float


def domain_shares(events: Sequence[RunEvent]) -> dict[str, DomainShareSummary]:
    """The last event of each domain; none for a run with quotas."""
    found: dict[str, DomainShareSummary] = {}
    for event in events:
        floor, cap, wanted, share, served, due, worst = (
            float(event.fields[name] or 0.0) for name in ("floor", "cap", "wanted", "share", "served", "due", "worst")
        )
        found[event.subject] = DomainShareSummary(floor, cap, wanted, share, served - due, worst)
    return found


def engine_rows(events: Sequence[RunEvent], devices: Mapping[str, tuple[str, int]]) -> list[CalibrationRow]:
    """Rows for `placement.calibrate.fit`, one per interval in which an engine took enough steps; `devices`: type and
    number of each engine's. A mean step is one of mean batch, context and prompt tokens; an engine that only prefills
    gives the time to a first token, where it computes one prompt at a time."""
    from placement.calibrate import Row as CalibrationRow  # late: imports numpy

    found = []
    for event in events:
        s = _numbers(event)
        seconds, steps, ended = _step_s(s), s.get("steps", 0.0), s.get("ended", 0.0)
        if event.subject not in devices or steps < LEAST_STEPS or not ended or not seconds:
            continue
        device, tp = devices[event.subject]
        computed = max(0.0, s["prompt_tokens"] - s["cached_tokens"])
        if s["generated_tokens"] <= 1.01 * ended and s.get("latencies", 0.0) == 0:
            if steps >= 0.8 * ended and s["prefill_seconds"]:
                seconds, new, cached = s["prefill_seconds"] / ended, computed / ended, s["cached_tokens"] / ended
                found.append(CalibrationRow("prefill", seconds, device, tp, new=new, cached=cached, weight=ended))
            continue
        context = (s["prompt_tokens"] + s["generated_tokens"] / 2) / ended
        batch = max(1.0, s["generated_tokens"] / steps)
        found.append(CalibrationRow("step", seconds, device, tp, new=computed / steps, batch=batch, context=context))
    return found


@table("resources", "Resources")
def _resources(rows: RunRows) -> Iterator[Row]:
    """Share of each resource's life in each state; the shares of a row add up to 1."""
    seconds: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for i in rows.intervals:
        seconds[i.role, i.resource][i.state] += i.seconds
    known = [str(s) for s in ResourceState]
    states = [*known, *sorted({i.state for i in rows.intervals} - set(known))]
    for (role, resource), by_state in sorted(seconds.items()):
        life = math.fsum(by_state.values())
        shares = {state: as_share(ratio(by_state.get(state, 0.0), life)) for state in states}
        yield {"resource": resource, "role": role, "seconds": as_seconds(life), **shares}


@table("down", "Lost seconds by cause")
def _down(rows: RunRows) -> Iterator[Row]:
    """Lost seconds by cause: of engines and trainers from their death until they serve again, and of trajectories that
    waited for a slot on an environment host."""
    lost: dict[tuple[str, str], float] = defaultdict(float)
    for claim, fields in _waits_by_claim(rows).items():
        if claim in RUNNING:
            lost["place", f"trajectories ({claim})"] = float(fields.get("wait_s") or 0)
    for i in rows.intervals:
        if i.state == ResourceState.DOWN or (i.state == ResourceState.STARTUP and i.cause):
            lost[i.cause, i.resource] += i.seconds
    for (cause, resource), s in sorted(lost.items()):
        yield {"cause": cause, "resource": resource, "seconds": as_seconds(s)}


@table("nodes", "Nodes that came and went", optional=True)
def _nodes(rows: RunRows) -> Iterator[Row]:
    """Nodes that joined, were about to leave or were lost after the engines started, and the reactions of the plan."""
    serving = min((event.t for event in rows.events_of("engine_started")), default=math.inf)
    changes = [event for event in rows.events_of(*events.NODES) if event.t > serving]
    first = min((event.t for event in changes), default=math.inf)
    changes += [event for event in rows.events_of(*events.FOLLOWED) if event.t >= first]
    for e in sorted(changes, key=lambda event: event.t):
        yield {
            "t": as_seconds(e.t),
            "what": e.kind,
            "subject": e.subject,
            "moves": e.fields.get("moves"),
            "why": e.fields.get("why") or e.fields.get("cause"),
        }


@table("rates", "Amounts and rates")
def _rates(rows: RunRows) -> Iterator[Row]:
    seconds = rows.facts.seconds
    busy = math.fsum(i.seconds for i in rows.intervals if i.role in ENGINE_ROLES and i.state == ResourceState.BUSY)
    amounts = {
        "trajectories": sum(c.trajectories for c in rows.charges),
        "turns": sum(c.turns for c in rows.charges),
        "prompt tokens": sum(c.prompt_tokens for c in rows.charges),
        "sampled tokens": sum(c.action_tokens for c in rows.charges),
        "trained tokens": rows.facts.trained_tokens,
    }
    for name, n in amounts.items():
        yield {
            "what": name,
            "count": as_count(n),
            "per_second": as_number(ratio(n, seconds)),
            "per_busy_engine_second": as_number(ratio(n, busy) if name != "trained tokens" else None),
        }


@table("domains", "Domains (means per trajectory)")
def _domains(rows: RunRows) -> Iterator[Row]:
    groups: dict[tuple[str, str], list[ChargeSum]] = defaultdict(list)
    for charge in rows.charges:
        groups[charge.domain, charge.purpose].append(charge)
    for (domain, purpose), own in sorted(groups.items()):
        n = sum(c.trajectories for c in own)
        used = sum(c.trajectories for c in own if c.outcome in ("trained", "evaluated"))
        waiting = sum(c.trajectories for c in own if c.outcome == "waiting")
        judged = sum(c.judged for c in own)
        yield {
            "domain": domain,
            "purpose": purpose,
            "episodes": as_count(n),
            "used": as_count(used),
            "waiting": as_count(waiting),
            "lost": as_count(n - used - waiting),
            "success": as_share(ratio(sum(c.successes for c in own), judged)),
            "turns": as_number(sum(c.turns for c in own) / n),
            "tokens": as_number(sum(c.action_tokens for c in own) / n),
            "wall_s": as_seconds(sum(c.seconds for c in own) / n),
            "engine_ms": as_number(1000 * math.fsum(c.engine_seconds for c in own) / n),
        }


FIGURES = {
    "tokens": "sampled tokens",
    "age_s": "age in seconds",
    "turns": "turns",
    "difficulty": "reward of their group",
    "reward": "reward",
}
"""Names of the figures of `strategies.redundancy.bias_report` in the report."""


def _against_kept(rows: RunRows, kind: str, treatment: str, title: str) -> Table:
    """Trajectories cancelled as redundant, or of filtered groups (all rewards equal), against those of kept groups, as
    of the last publish. Cancelled trajectories are cut off: their figures are lower bounds, and their rewards are
    unknown. Too easy and too hard prompts are not trained; the table shows how much that shifts the distribution."""
    found: list[Row] = []
    for name, f in {event.subject: event.fields for event in rows.events_of(kind)}.items():
        figure = FIGURES.get(name, name)
        more = "more" if float(f["delta"] or 0) > 0 else "less"
        warning = f"{treatment} ones have {more} {figure}" if f["notable"] else ""
        row: Row = {
            "figure": figure,
            treatment: as_number(f["cancelled"]),
            "kept": as_number(f["kept"]),
            f"{treatment}_count": as_count(f["cancelled_count"]),
            "kept_count": as_count(f["kept_count"]),
            "cliffs_delta": as_number(f["delta"]),
            "warning": as_text(warning, wrap=True),
        }
        found.append(row)
    return Table.of(treatment, title, found, optional=True)


@table("engines", "Engines by their own counters", optional=True)
def engines(rows: RunRows) -> Iterator[Row]:
    """A row per engine. `hits`: share of the prompts' tokens whose KV was cached; `pulled`: share whose KV came from
    another engine. `batch` and `step_ms`: of a mean step."""
    fullest: dict[str, float] = defaultdict(float)
    for event in rows.events_of(events.ENGINE_DID):
        fullest[event.subject] = max(fullest[event.subject], _numbers(event).get("kv_used", 0.0))
    for engine, s in sorted(engine_counters(rows).items()):
        prompt, cached, external, steps = s["prompt_tokens"], s["cached_tokens"], s["external_tokens"], s["steps"]
        step = _step_s(s)
        yield {
            "engine": engine,
            "prompt_tokens": as_count(int(prompt)),
            "hits": as_share(ratio(cached - external, prompt)),
            "pulled": as_share(ratio(external, prompt)),
            "sampled_tokens": as_count(int(s["generated_tokens"])),
            "prefill_tokens_per_s": as_number(ratio(prompt - cached, s["prefill_seconds"])),
            "steps": as_count(int(steps)),
            "batch": as_number(ratio(s["generated_tokens"], steps)),
            "step_ms": as_number(None if step is None else 1000 * step),
            "kv_used": as_share(fullest[engine]),
            "preemptions": as_count(int(s["preemptions"])),
        }


def _step_s(s: Mapping[str, float]) -> float | None:
    """Mean seconds of a step. vLLM counts the time between tokens of a request, which is a step; the embedded engine
    counts its compute time."""
    if s.get("latencies"):
        return s["latency_seconds"] / s["latencies"]
    if not s.get("steps"):
        return None
    return (s["prefill_seconds"] + s["decode_seconds"]) / s["steps"]


def _numbers(event: RunEvent) -> dict[str, float]:
    return {name: float(value) for name, value in event.fields.items() if isinstance(value, int | float)}


@table("handoffs", "Hand-offs from prefill to decode engines", optional=True)
def _handoffs(rows: RunRows) -> Iterator[Row]:
    """Turns that were prefilled on a prefill engine and decoded on another engine. Turns whose hand-off failed were
    prefilled again on the decode engine; for turns that pulled nothing, the prefill was wasted."""
    decoded, failed, empty = (
        int(math.fsum(float(e.fields.get(name) or 0) for e in rows.events_of(events.HANDOFFS)))
        for name in ("decoded", "failed", "empty")
    )
    whole = decoded + failed
    if whole:
        yield {
            "hand_offs": as_count(whole),
            "failed": as_count(failed),
            "failed_share": as_share(ratio(failed, whole)),
            "pulled_nothing": as_count(empty),
            "alarm": "prefill engines work for nothing" if decoded and empty == decoded else None,
        }


@table("shares", "Shares of domains in what was trained", optional=True)
def _shares(rows: RunRows) -> Iterator[Row]:
    """The shares of one run."""
    for name, s in domain_shares(rows.events_of(events.DOMAIN_SHARE)).items():
        yield {
            "domain": name,
            "floor": as_share(s.floor),
            "cap": as_share(s.cap),
            "wanted": as_share(s.wanted),
            "trained": as_share(s.trained),
            "drift_groups": as_number(s.drift),
            "worst_drift_groups": as_number(s.worst),
        }


@table("concurrency", "Trajectories per engine (limits by KV memory)", optional=True)
def _concurrency(rows: RunRows) -> Iterator[Row]:
    """Concurrent trajectories per engine, by version, and the effects of scarce KV memory: prefixes of `evicted`
    trajectories were recomputed at their next turn, `preempted` counts running requests."""
    names = ("engines", "least", "median", "most", "admitted", "waited", "waiting", "evicted", "preempted")
    for event in rows.events_of(events.CONCURRENCY):
        yield {"version": event.subject, **_sums(event.fields, names)}


@table("updates", "Weights that engines loaded one by one", optional=True)
def _updates(rows: RunRows) -> Iterator[Row]:
    """Versions that engines loaded one by one (`weights.update`), and versions that they skipped before: bytes that
    were never sent, at the size of the loaded version. Versions skipped after an engine's last load are not counted."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0] * 5)
    for event in rows.events_of(events.ENGINE_UPDATED):
        gb, skipped = float(event.fields.get("bytes") or 0) / 1e9, float(event.fields.get("skipped") or 0)
        row = (1.0, float(event.fields.get("seconds") or 0), gb, skipped, skipped * gb)
        found[event.subject] = [a + b for a, b in zip(found[event.subject], row, strict=True)]
    for name, (a, b, c, d, e) in sorted(found.items()):
        yield {
            "engine": name,
            "loads": as_count(int(a)),
            "seconds": as_seconds(b),
            "loaded_gb": as_number(c),
            "skipped": as_count(int(d)),
            "saved_gb": as_number(e),
        }


@table("broadcasts", "Weights by broadcast", optional=True)
def _broadcasts(rows: RunRows) -> Iterator[Row]:
    """Versions that engines received by broadcast (`weights.collective`) while generating: bytes of all their workers,
    and seconds from the request to take part to the last byte. Missed versions were read from files."""
    found: dict[str, tuple[list[RunEvent], list[RunEvent]]] = defaultdict(lambda: ([], []))
    for event in rows.events_of("weights_received", "weights_not_received"):
        found[event.subject][event.kind == "weights_not_received"].append(event)
    for name, (got, missed) in sorted(found.items()):
        gb = sum(float(e.fields["bytes"] or 0) for e in got) / 1e9
        seconds = math.fsum(float(e.fields["seconds"] or 0) for e in got)
        yield {
            "engine": name,
            "received": as_count(len(got)),
            "gb": as_number(gb),
            "seconds": as_seconds(seconds),
            "gb_per_s": as_number(ratio(gb, seconds)),
            "missed": as_count(len(missed)),
            "why": as_text(str(missed[-1].fields["why"]) if missed else "", wrap=True),
        }


@table("environments", "Environments made, seconds waited for and ahead", optional=True)
def _making(rows: RunRows) -> Iterator[Row]:
    """Origin of the episodes' environments on each host: made during the reset, which waited for it (`cold`), made
    ahead, or reused after another episode."""
    last = {(e.subject, str(e.fields.get("domain"))): e.fields for e in rows.events_of(events.ENVIRONMENTS_MADE)}
    names = ("cold", "cold_s", "ahead", "ahead_s", "reused", "pulled", "pull_s")
    for (host, domain), f in sorted(last.items()):
        yield {"host": host, "domain": domain, **_sums(f, names)}


@table("places", "Waits for a place on an environment host", optional=True)
def _slot_waits(rows: RunRows) -> Iterator[Row]:
    """Waits for a slot while all environment hosts were full: of trajectories, held-out episodes, redundant group
    members, and prefetched environments, which gave up their slots to the others."""
    names = ("places", "waited", "wait_s", "longest_s", "given_up")
    for claim, f in _waits_by_claim(rows).items():
        yield {"episodes": claim, **_sums(f, names)}


def _sums(fields: Mapping[str, Cell], names: Iterable[str]) -> Row:
    """Fields of an event: seconds where their name says so, else counts."""
    return {name: (as_seconds if name.endswith("_s") else as_count)(fields.get(name)) for name in names}


def _waits_by_claim(rows: RunRows) -> dict[str, dict[str, float]]:
    """The sums of each claim, over all lives of the run, each of which counts from 0."""
    found: dict[str, dict[str, float]] = {}
    last: dict[str, Mapping[str, float]] = {}
    for event in rows.events_of(events.PLACES):
        now = {name: float(value or 0) for name, value in event.fields.items()}
        before = last.get(event.subject, {})
        new = any(now[name] < before.get(name, 0) for name in now)
        own = found.setdefault(event.subject, dict.fromkeys(now, 0.0))
        for name, value in now.items():
            own[name] = (
                max(own[name], value)
                if name == "longest_s"
                else (own[name] + value - (0.0 if new else before.get(name, 0.0)))
            )
        last[event.subject] = now
    return found
