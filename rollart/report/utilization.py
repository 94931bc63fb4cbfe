"""Utilization of the hardware, and throughput of the domains. Pure.

Work of engines by their own counters: a table, and rows from which constants of the performance model are fitted.
Pure.

Shares of domains in the trained trajectories: due and actual. Pure.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from placement.calibrate import Row
from rollart.ledger.intervals import ResourceState
from rollart.ledger.reader import ChargeSum
from rollart.ports import RunEvent
from rollart.report import functions
from rollart.report.rows import ENGINE_ROLES, RunRows
from rollart.report.tables import Cell, Report, Table, TableColumn

LEAST_STEPS = 20
"""Fewest steps of an interval that gives a row: a mean of fewer is too noisy."""

Sums = Mapping[str, float]


def engines(rows: RunRows) -> Table:
    """A row per engine. `hits`: share of the prompts' tokens whose KV was cached; `pulled`: share whose KV came from
    another engine. `batch` and `step_ms`: of a mean step."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    fullest: dict[str, float] = defaultdict(float)
    for event in rows.engines:
        for name, value in _numbers(event).items():
            sums[event.subject][name] += value
        fullest[event.subject] = max(fullest[event.subject], _numbers(event).get("kv_used", 0.0))
    columns = (
        TableColumn("engine"),
        TableColumn("prompt_tokens", "count"),
        TableColumn("hits", "share"),
        TableColumn("pulled", "share"),
        TableColumn("sampled_tokens", "count"),
        TableColumn("prefill_tokens_per_s", "number"),
        TableColumn("steps", "count"),
        TableColumn("batch", "number"),
        TableColumn("step_ms", "number"),
        TableColumn("kv_used", "share"),
        TableColumn("preemptions", "count"),
    )
    found: list[tuple[Cell, ...]] = []
    for engine, s in sorted(sums.items()):
        prompt, cached, external, steps = s["prompt_tokens"], s["cached_tokens"], s["external_tokens"], s["steps"]
        step = _step_s(s)
        found.append(
            (
                engine,
                int(prompt),
                (cached - external) / prompt if prompt else None,
                external / prompt if prompt else None,
                int(s["generated_tokens"]),
                (prompt - cached) / s["prefill_seconds"] if s["prefill_seconds"] else None,
                int(steps),
                s["generated_tokens"] / steps if steps else None,
                None if step is None else 1000 * step,
                fullest[engine],
                int(s["preemptions"]),
            )
        )
    return Table("engines", "Engines by their own counters", columns, tuple(found), people=bool(found))


def engine_rows(events: Sequence[RunEvent], devices: Mapping[str, tuple[str, int]]) -> list[Row]:
    """Rows for `placement.calibrate.fit`, one per interval in which an engine took enough steps; `devices`: type and
    number of each engine's. A mean step is one of mean batch, context and prompt tokens; an engine that only prefills
    gives the time to a first token, where it computes one prompt at a time."""
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
                found.append(Row("prefill", seconds, device, tp, new=new, cached=cached, weight=ended))
            continue
        context = (s["prompt_tokens"] + s["generated_tokens"] / 2) / ended
        batch = max(1.0, s["generated_tokens"] / steps)
        found.append(Row("step", seconds, device, tp, new=computed / steps, batch=batch, context=context))
    return found


def _step_s(s: Sums) -> float | None:
    """Mean seconds of a step. vLLM counts the time between tokens of a request, which is a step; the embedded engine
    counts its compute time."""
    if s.get("latencies"):
        return s["latency_seconds"] / s["latencies"]
    if not s.get("steps"):
        return None
    return (s["prefill_seconds"] + s["decode_seconds"]) / s["steps"]


def _numbers(event: RunEvent) -> dict[str, float]:
    return {name: float(value) for name, value in event.fields.items() if isinstance(value, int | float)}


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
    last = {event.subject: event.fields for event in events}

    def number(name: str, field: str) -> float:
        return float(last[name][field] or 0.0)

    return {
        n: DomainShareSummary(
            number(n, "floor"),
            number(n, "cap"),
            number(n, "wanted"),
            number(n, "share"),
            number(n, "served") - number(n, "due"),
            number(n, "worst"),
        )
        for n in last
    }


def shares(rows: RunRows) -> Table:
    """The shares of one run."""
    columns = (
        TableColumn("domain"),
        TableColumn("floor", "share"),
        TableColumn("cap", "share"),
        TableColumn("wanted", "share"),
        TableColumn("trained", "share"),
        TableColumn("drift_groups", "number"),
        TableColumn("worst_drift_groups", "number"),
    )
    found = tuple(
        (name, s.floor, s.cap, s.wanted, s.trained, s.drift, s.worst) for name, s in domain_shares(rows.shares).items()
    )
    return Table("shares", "Shares of domains in what was trained", columns, found, people=bool(found))


def compared_shares(by: Mapping[str, Sequence[Mapping[str, DomainShareSummary]]]) -> Table:
    """The shares of simulations, by schedule: means over seeds, and the worst drift of any seed."""
    columns = [TableColumn("domain")]
    for name in by:
        columns += [
            TableColumn(f"{name} wanted", "share"),
            TableColumn(f"{name} trained", "share"),
            TableColumn(f"{name} worst drift", "number"),
        ]
    names = dict.fromkeys(n for own in by.values() for one in own for n in one)
    rows = []
    for name in names:
        row: list[str | float | None] = [name]
        for own in by.values():
            seen = [one[name] for one in own if name in one]
            count = len(seen) or 1
            row += [
                sum(s.wanted for s in seen) / count,
                sum(s.trained for s in seen) / count,
                max((s.worst for s in seen), default=None),
            ]
        rows.append(tuple(row))
    return Table("shares", "Shares of domains in what was trained; drift in groups", tuple(columns), tuple(rows))


def utilization(rows: RunRows) -> Report:
    """The utilization report."""
    tables = (
        _resources(rows),
        _down(rows),
        _nodes(rows),
        _rates(rows),
        _domains(rows),
        functions.health(rows),
        _cancelled(rows),
        _filtered(rows),
        engines(rows),
        _handoffs(rows),
        shares(rows),
        _concurrency(rows),
        _updates(rows),
        _broadcasts(rows),
        _making(rows),
        _slot_waits(rows),
    )
    return Report("utilization", rows.run, tables)


def _resources(rows: RunRows) -> Table:
    """Share of each resource's life in each state; the shares of a row add up to 1."""
    seconds: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for i in rows.intervals:
        seconds[i.role, i.resource][i.state] += i.seconds
    states = [str(s) for s in ResourceState]
    extra = sorted({i.state for i in rows.intervals} - set(states))
    columns = (
        TableColumn("resource"),
        TableColumn("role"),
        TableColumn("seconds", "seconds"),
        *(TableColumn(state, "share") for state in [*states, *extra]),
    )
    found: list[tuple[Cell, ...]] = []
    for (role, resource), by_state in sorted(seconds.items()):
        life = math.fsum(by_state.values())
        shares = [by_state.get(state, 0.0) / life if life else None for state in [*states, *extra]]
        found.append((resource, role, life, *shares))
    return Table("resources", "Resources", columns, tuple(found))


def _down(rows: RunRows) -> Table:
    """Lost seconds by cause: of engines and trainers from their death until they serve again, and of trajectories that
    waited for a slot on an environment host."""
    lost: dict[tuple[str, str], float] = defaultdict(float)
    for claim, fields in _waits_by_claim(rows).items():
        if claim in RUNNING:
            lost["place", f"trajectories ({claim})"] = float(fields.get("wait_s") or 0)
    for i in rows.intervals:
        if i.state == ResourceState.DOWN or (i.state == ResourceState.STARTUP and i.cause):
            lost[i.cause, i.resource] += i.seconds
    columns = (TableColumn("cause"), TableColumn("resource"), TableColumn("seconds", "seconds"))
    return Table("down", "Lost seconds by cause", columns, tuple((*key, s) for key, s in sorted(lost.items())))


def _nodes(rows: RunRows) -> Table:
    """Nodes that joined and left, and the reactions of the plan."""
    columns = (
        TableColumn("t", "seconds"),
        TableColumn("what"),
        TableColumn("subject"),
        TableColumn("moves"),
        TableColumn("why"),
    )
    found = tuple(
        (e.t, e.kind, e.subject, e.fields.get("moves"), e.fields.get("why") or e.fields.get("cause"))
        for e in rows.nodes
    )
    return Table("nodes", "Nodes that came and went", columns, found, people=bool(found))


def _rates(rows: RunRows) -> Table:
    seconds = rows.facts.seconds
    busy = math.fsum(i.seconds for i in rows.intervals if i.role in ENGINE_ROLES and i.state == ResourceState.BUSY)
    amounts = {
        "trajectories": sum(c.trajectories for c in rows.charges),
        "turns": sum(c.turns for c in rows.charges),
        "prompt tokens": sum(c.prompt_tokens for c in rows.charges),
        "sampled tokens": sum(c.action_tokens for c in rows.charges),
        "trained tokens": rows.facts.trained_tokens,
    }
    columns = (
        TableColumn("what"),
        TableColumn("count", "count"),
        TableColumn("per_second", "number"),
        TableColumn("per_busy_engine_second", "number"),
    )
    found = [
        (name, n, n / seconds if seconds else None, n / busy if busy and name != "trained tokens" else None)
        for name, n in amounts.items()
    ]
    return Table("rates", "Amounts and rates", columns, tuple(found))


def _domains(rows: RunRows) -> Table:
    groups: dict[tuple[str, str], list[ChargeSum]] = defaultdict(list)
    for charge in rows.charges:
        groups[charge.domain, charge.purpose].append(charge)
    columns = (
        TableColumn("domain"),
        TableColumn("purpose"),
        TableColumn("episodes", "count"),
        TableColumn("used", "count"),
        TableColumn("waiting", "count"),
        TableColumn("lost", "count"),
        TableColumn("success", "share"),
        TableColumn("turns", "number"),
        TableColumn("tokens", "number"),
        TableColumn("wall_s", "seconds"),
        TableColumn("engine_ms", "number"),
    )
    found: list[tuple[Cell, ...]] = []
    for (domain, purpose), own in sorted(groups.items()):
        n = sum(c.trajectories for c in own)
        used = sum(c.trajectories for c in own if c.outcome in ("trained", "evaluated"))
        waiting = sum(c.trajectories for c in own if c.outcome == "waiting")
        judged = sum(c.judged for c in own)
        found.append(
            (
                domain,
                purpose,
                n,
                used,
                waiting,
                n - used - waiting,
                sum(c.successes for c in own) / judged if judged else None,
                sum(c.turns for c in own) / n,
                sum(c.action_tokens for c in own) / n,
                sum(c.seconds for c in own) / n,
                1000 * math.fsum(c.engine_seconds for c in own) / n,
            )
        )
    return Table("domains", "Domains (means per trajectory)", columns, tuple(found))


def _handoffs(rows: RunRows) -> Table:
    """Turns that were prefilled on a prefill engine and decoded on another engine. Turns whose hand-off failed were
    prefilled again on the decode engine; for turns that pulled nothing, the prefill was wasted."""
    decoded, failed, empty = (
        int(math.fsum(float(e.fields.get(name) or 0) for e in rows.handoffs)) for name in ("decoded", "failed", "empty")
    )
    columns = (
        TableColumn("hand_offs", "count"),
        TableColumn("failed", "count"),
        TableColumn("failed_share", "share"),
        TableColumn("pulled_nothing", "count"),
        TableColumn("alarm"),
    )
    whole = decoded + failed
    alarm = "prefill engines work for nothing" if decoded and empty == decoded else None
    found = ((whole, failed, failed / whole, empty, alarm),) if whole else ()
    return Table("handoffs", "Hand-offs from prefill to decode engines", columns, found, people=bool(found))


def _cancelled(rows: RunRows) -> Table:
    """Trajectories cancelled as redundant against kept ones, as of the last publish. Cancelled trajectories are cut
    off: their figures are lower bounds, and their rewards are unknown."""
    found = _against(rows.cancelled, "cancelled")
    title = "Cancelled as redundant against kept"
    return Table("cancelled", title, _columns("cancelled"), found, people=bool(found))


def _filtered(rows: RunRows) -> Table:
    """Trajectories of filtered groups (all rewards equal) against those of kept groups. Too easy and too hard prompts
    are not trained; the table shows how much that shifts the distribution."""
    found = _against(rows.filtered, "filtered")
    title = "Filtered (rewards alike) against kept"
    return Table("filtered", title, _columns("filtered"), found, people=bool(found))


def _concurrency(rows: RunRows) -> Table:
    """Concurrent trajectories per engine, by version, and the effects of scarce KV memory: prefixes of `evicted`
    trajectories were recomputed at their next turn, `preempted` counts running requests."""
    names = ("engines", "least", "median", "most", "admitted", "waited", "waiting", "evicted", "preempted")
    columns = (TableColumn("version"), *(TableColumn(name, "count") for name in names))
    found = tuple((event.subject, *(event.fields.get(name) for name in names)) for event in rows.concurrency)
    title = "Trajectories per engine (limits by KV memory)"
    return Table("concurrency", title, columns, found, people=bool(found))


def _updates(rows: RunRows) -> Table:
    """Versions that engines loaded one by one (`weights.update`), and versions that they skipped before: bytes that
    were never sent, at the size of the loaded version. Versions skipped after an engine's last load are not counted."""
    columns = (
        TableColumn("engine"),
        TableColumn("loads", "count"),
        TableColumn("seconds", "seconds"),
        TableColumn("loaded_gb", "number"),
        TableColumn("skipped", "count"),
        TableColumn("saved_gb", "number"),
    )
    found: dict[str, list[float]] = defaultdict(lambda: [0.0] * 5)
    for event in rows.updates:
        gb, skipped = float(event.fields.get("bytes") or 0) / 1e9, float(event.fields.get("skipped") or 0)
        row = (1.0, float(event.fields.get("seconds") or 0), gb, skipped, skipped * gb)
        found[event.subject] = [a + b for a, b in zip(found[event.subject], row, strict=True)]
    lines = tuple((name, int(a), b, c, int(d), e) for name, (a, b, c, d, e) in sorted(found.items()))
    return Table("updates", "Weights that engines loaded one by one", columns, lines, people=bool(lines))


def _broadcasts(rows: RunRows) -> Table:
    """Versions that engines received by broadcast (`weights.collective`) while generating: bytes of all their workers,
    and seconds from the request to take part to the last byte. Missed versions were read from files."""
    columns = (
        TableColumn("engine"),
        TableColumn("received", "count"),
        TableColumn("gb", "number"),
        TableColumn("seconds", "seconds"),
        TableColumn("gb_per_s", "number"),
        TableColumn("missed", "count"),
        TableColumn("why", wrap=True),
    )
    found: dict[str, tuple[list[RunEvent], list[RunEvent]]] = defaultdict(lambda: ([], []))
    for event in rows.broadcasts:
        found[event.subject][event.kind == "weights_not_received"].append(event)
    lines = []
    for name, (got, missed) in sorted(found.items()):
        gb = sum(float(e.fields["bytes"] or 0) for e in got) / 1e9
        seconds = math.fsum(float(e.fields["seconds"] or 0) for e in got)
        why = str(missed[-1].fields["why"]) if missed else ""
        lines.append((name, len(got), gb, seconds, gb / seconds if seconds else None, len(missed), why))
    title = "Weights by broadcast"
    return Table("broadcasts", title, columns, tuple(lines), people=bool(lines))


def _making(rows: RunRows) -> Table:
    """Origin of the episodes' environments on each host: made during the reset, which waited for it (`cold`), made
    ahead, or reused after another episode."""
    columns = (
        TableColumn("host"),
        TableColumn("domain"),
        TableColumn("cold", "count"),
        TableColumn("cold_s", "seconds"),
        TableColumn("ahead", "count"),
        TableColumn("ahead_s", "seconds"),
        TableColumn("reused", "count"),
        TableColumn("pulled", "count"),
        TableColumn("pull_s", "seconds"),
    )
    last = {(event.subject, str(event.fields.get("domain"))): event.fields for event in rows.making}
    names = ("cold", "cold_s", "ahead", "ahead_s", "reused", "pulled", "pull_s")
    lines = tuple((*key, *(f.get(name) for name in names)) for key, f in sorted(last.items()))
    return Table("environments", "Environments made, seconds waited for and ahead", columns, lines, people=bool(lines))


def _slot_waits(rows: RunRows) -> Table:
    """Waits for a slot while all environment hosts were full: of trajectories, held-out episodes, redundant group
    members, and prefetched environments, which gave up their slots to the others."""
    columns = (
        TableColumn("episodes"),
        TableColumn("places", "count"),
        TableColumn("waited", "count"),
        TableColumn("wait_s", "seconds"),
        TableColumn("longest_s", "seconds"),
        TableColumn("given_up", "count"),
    )
    names = ("places", "waited", "wait_s", "longest_s", "given_up")
    lines = tuple((claim, *(f.get(name) for name in names)) for claim, f in _waits_by_claim(rows).items())
    return Table("places", "Waits for a place on an environment host", columns, lines, people=bool(lines))


def _waits_by_claim(rows: RunRows) -> dict[str, dict[str, float]]:
    """The sums of each claim, over all lives of the run, each of which counts from 0."""
    found: dict[str, dict[str, float]] = {}
    last: dict[str, Mapping[str, float]] = {}
    for event in rows.places:
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


RUNNING = ("train", "evaluate", "spare")
"""Claims of trajectories; waits of prefetched environments delay no trajectory."""


def _columns(treatment: str) -> tuple[TableColumn, ...]:
    return (
        TableColumn("figure"),
        TableColumn(treatment, "number"),
        TableColumn("kept", "number"),
        TableColumn(f"{treatment}_count", "count"),
        TableColumn("kept_count", "count"),
        TableColumn("cliffs_delta", "number"),
        TableColumn("warning", wrap=True),
    )


def _against(events: Sequence[RunEvent], treatment: str) -> tuple[tuple[Cell, ...], ...]:
    last = {event.subject: event.fields for event in events}
    found: list[tuple[Cell, ...]] = []
    for name, f in last.items():
        more = "more" if float(f["delta"] or 0) > 0 else "less"
        warning = f"{treatment} ones have {more} {FIGURES.get(name, name)}" if f["notable"] else ""
        found.append(
            (
                FIGURES.get(name, name),
                f["cancelled"],
                f["kept"],
                f["cancelled_count"],
                f["kept_count"],
                f["delta"],
                warning,
            )
        )
    return tuple(found)


FIGURES = {
    "tokens": "sampled tokens",
    "age_s": "age in seconds",
    "turns": "turns",
    "difficulty": "reward of their group",
    "reward": "reward",
}
"""Names of the figures of `strategies.redundancy.bias_report` in the report."""
