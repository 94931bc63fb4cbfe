"""Timelines of a run: busy, waiting and syncing time of its parts. Pure, from a ledger's rows.

A band is one row of a timeline: one resource if a run has few, all resources of a role in a pool if it has many; then a
domain's trajectories by phase, and a function's calls. A band holds mean amounts per bin of time, so that a timeline is
as large for 3,000 GPUs as for three.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from rollart.ledger.events import TURN
from rollart.ledger.intervals import ResourceState
from rollart.ledger.kept import RoutedTurn
from rollart.ledger.reader import LedgerReader, TrajectoryRow
from rollart.ports import RunEvent
from rollart.report.tables import Cell, Report, Row, Table, TableColumn, as_count, as_number, as_share

BINS = 320
"""Number of bins: enough for a curve on a page; more would be narrower than a stroke."""

MOST_ROWS = 24
"""Largest number of resources that get a row each; a run with more has rows for roles and pools."""

FEW = 2
"""Largest number of resources of a role in a pool that get a row each even in a large run."""

ROLES = ("prefill", "decode", "engine", "trainer", "environment", "reward", "unused")
"""Order of rows: along the path of a trajectory."""

MOST_TRAJECTORIES = 64
"""Largest number of trajectories in a stretch of a run that get a row each, with their turns."""

DEVICES, TRAJECTORIES, CALLS, FAULTS, TURNS = "devices", "trajectories", "calls", "faults", "turns"
FAULT_EVENTS = frozenset(
    {
        "engine_lost",
        "engine_given_up",
        "group_dropped",
        "handoff_failed",
        "infra_fault",
        "learning_stopped",
        "lease_expired",
        "rebalance_failed",
        "samples_too_stale",
        "stalled",
        "trainer_restarted",
    }
)
"""Events that lose work: their row shows how many occurred when."""

RESET, STEP, ELSEWHERE = "reset", "environment", "generation"
QUEUED, COLD, RUNNING = "queued", "cold start", "running"
REWARD = "reward"
TURN_PAIR = ("a turn", "the turn after it")
"""States of consecutive turns, alternating."""


@dataclass(frozen=True, slots=True)
class Band:
    """One row. `amounts` has, by state, the mean amount in each bin: concurrent devices, trajectories or calls, by
    `kind`; for faults, by kind of event, their number in the bin. `whole` is the amount at full height: all devices, or
    the largest amount in any bin."""

    name: str
    kind: str
    members: int
    whole: float
    amounts: Mapping[str, tuple[float, ...]]

    def share(self, state: str) -> float:
        """The share of the band's total amount that is in `state`; 0 for an empty band."""
        total = math.fsum(math.fsum(values) for values in self.amounts.values())
        return math.fsum(self.amounts.get(state, ())) / total if total else 0.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bands over the same bins of `seconds` in all, from second `begins` of the run."""

    seconds: float
    bins: int
    bands: tuple[Band, ...]
    label: str = ""
    begins: float = 0.0

    @property
    def bin_s(self) -> float:
        return self.seconds / self.bins


class Bins:
    """Amounts over time, summed into bins of the same width. O(1) for each stretch."""

    def __init__(self, seconds: float, bins: int) -> None:
        if not (seconds > 0 and bins > 0):
            raise ValueError(f"{bins} bins of {seconds} s (rule: both > 0)")
        self._width, self._bins = seconds / bins, bins
        self._edges = [0.0] * (bins + 1)
        self._steps = [0.0] * (bins + 1)

    def add(self, t0: float, t1: float, amount: float = 1.0) -> None:
        """Add `amount` from t0 to t1, cut to the timeline."""
        a, b = max(0.0, t0 / self._width), min(float(self._bins), t1 / self._width)
        if b <= a:
            return
        first, last = int(a), int(b)
        if first == last:
            self._edges[first] += (b - a) * amount
            return
        self._edges[first] += (first + 1 - a) * amount
        self._edges[last] += (b - last) * amount
        self._steps[first + 1] += amount
        self._steps[last] -= amount

    def means(self) -> tuple[float, ...]:
        """Mean amount in each bin."""
        whole = accumulate(self._steps[: self._bins])
        return tuple(max(0.0, edge + step) for edge, step in zip(self._edges, whole, strict=False))


class _Stack:
    """Bins by state."""

    def __init__(self, seconds: float, bins: int) -> None:
        self.states: dict[str, Bins] = defaultdict(lambda: Bins(seconds, bins))

    def add(self, state: str, t0: float, t1: float, amount: float = 1.0) -> None:
        if t1 > t0:
            self.states[state].add(t0, t1, amount)

    def band(self, name: str, kind: str, members: int, order: Sequence[str], whole: float = 0.0) -> Band:
        return _band(name, kind, members, {state: own.means() for state, own in self.states.items()}, order, whole)


def timeline(reader: LedgerReader, *, bins: int = BINS, during: tuple[float, float] | None = None) -> Timeline:
    """The timeline of one ledger, or of the stretch `during` of its run, in which the turns of trajectories are shown
    where they are few. A run without records has no bands."""
    begins, ends = during or (0.0, reader.facts().seconds)
    seconds = ends - begins
    if seconds <= 0:
        return Timeline(0.0, bins, ())
    pools = {a["part"]: a["pool"] for a in reader.config().get("plan", {}).get("assignments", ())}
    if during is None:
        return timeline_of(
            seconds, reader.spans(), reader.stays(), reader.call_spans(), reader.occurrences(), pools=pools, bins=bins
        )
    found = timeline_of(
        seconds,
        ((role, name, t0 - begins, t1 - begins, s, n) for role, name, t0, t1, s, n in reader.spans(during)),
        ((domain, t0 - begins, t1 - begins, r, e) for domain, t0, t1, r, e in reader.stays(during)),
        ((function, t0 - begins, t1 - begins, q, c) for function, t0, t1, q, c in reader.call_spans(during)),
        ((t - begins, kind) for t, kind in reader.occurrences(during)),
        pools=pools,
        bins=bins,
    )
    rows = list(reader.trajectories(during=during, order="t.t0, t.rowid", most=MOST_TRAJECTORIES + 1))
    bands = turn_bands(reader, rows, during, bins=bins) if len(rows) <= MOST_TRAJECTORIES else ()
    return replace(found, bands=(*found.bands, *bands), begins=begins)


def timeline_of(
    seconds: float,
    spans: Iterable[tuple[str, str, float, float, str, float]],
    stays: Iterable[tuple[str, float, float, float, float]] = (),
    calls: Iterable[tuple[str, float, float, float, float]] = (),
    events: Iterable[tuple[float, str]] = (),
    *,
    pools: Mapping[str, str] | None = None,
    bins: int = BINS,
) -> Timeline:
    """The timeline of rows as returned by `LedgerReader.spans`, `stays`, `call_spans` and `occurrences`; `pools` maps a
    resource to its pool, where known."""
    bands = (
        *_devices(seconds, spans, pools or {}, bins),
        *_trajectories(seconds, stays, bins),
        *_calls(seconds, calls, bins),
        *_faults(seconds, events, bins),
    )
    return Timeline(seconds, bins, bands)


def timeline_report(run: str, found: Timeline) -> Report:
    """Shares of time for people; for machines also the amounts in every bin."""
    tables = [_bands(title, kind, found) for kind, title in TITLES.items()]
    if not tables[-1].rows:
        tables.pop()
    amounts: list[tuple[Cell, ...]] = [
        (band.name, state, n * found.bin_s, (n + 1) * found.bin_s, amount)
        for band in found.bands
        for state, values in band.amounts.items()
        for n, amount in enumerate(values)
    ]
    columns = tuple(map(TableColumn, ("who", "state", "t0", "t1", "amount")))
    tables.append(Table("amounts", "Mean amounts at a time", columns, tuple(amounts), people=False))
    return Report("timeline", run, tuple(tables), (SPREAD,))


SKETCHES = ("busy over time", "over time")
TITLES = {DEVICES: "Devices", TRAJECTORIES: "Trajectories", CALLS: "Calls of functions", FAULTS: "Faults and drops"}
SPREAD = "trajectories: when their environment's steps were is not recorded; they are spread between reset and end"


def _bands(title: str, kind: str, found: Timeline) -> Table:
    own = [band for band in found.bands if band.kind == kind]
    states = list(dict.fromkeys(state for band in own for state in band.amounts))
    counted = {DEVICES: "parts", TRAJECTORIES: "ended", CALLS: "calls", FAULTS: "events"}[kind]
    whole = {DEVICES: "devices", FAULTS: "most in a bin"}.get(kind, "peak")
    rows: list[Row] = [
        {
            "who": band.name,
            counted: as_count(band.members),
            whole: as_number(band.whole),
            **{state: as_share(band.share(state) if state in band.amounts else None) for state in states},
            SKETCHES[kind != DEVICES]: _sketch(band),
        }
        for band in own
    ]
    return Table.of(kind, title, rows)


def _devices(
    seconds: float, spans: Iterable[tuple[str, str, float, float, str, float]], pools: Mapping[str, str], bins: int
) -> Iterator[Band]:
    stacks: dict[tuple[str, str, str], _Stack] = defaultdict(lambda: _Stack(seconds, bins))
    units: dict[tuple[str, str, str], float] = defaultdict(float)
    for role, resource, t0, t1, state, amount in spans:
        key = (role, pools.get(resource, ""), resource)
        stacks[key].add(state, t0, t1, amount)
        units[key] = max(units[key], amount)
    groups: dict[tuple[str, str], list[tuple[str, str, str]]] = defaultdict(list)
    for key in sorted(stacks, key=_natural):
        groups[key[:2]].append(key)
    rank = {role: n for n, role in enumerate(ROLES)}
    for (role, pool), keys in sorted(groups.items(), key=lambda g: (rank.get(g[0][0], rank["unused"]), g[0])):
        on = f" on {pool}" if pool else ""
        if len(stacks) <= MOST_ROWS or len(keys) <= FEW:
            for k in keys:
                yield stacks[k].band(f"{k[2]}{on}", DEVICES, 1, tuple(ResourceState), units[k])
        else:
            amounts: dict[str, list[tuple[float, ...]]] = defaultdict(list)
            for key in keys:
                for state, own in stacks[key].states.items():
                    amounts[state].append(own.means())
            pooled = {s: tuple(map(math.fsum, zip(*each, strict=True))) for s, each in amounts.items()}
            yield _band(f"{role}{on}", DEVICES, len(keys), pooled, tuple(ResourceState))


def _band(
    name: str,
    kind: str,
    members: int,
    amounts: Mapping[str, tuple[float, ...]],
    order: Sequence[str],
    whole: float = 0.0,
) -> Band:
    """A band with its states in this order, others after them by name, and at least `whole` high."""
    known = [*(str(s) for s in order if s in amounts), *sorted(amounts.keys() - set(order))]
    peak = max((math.fsum(column) for column in zip(*amounts.values(), strict=True)), default=0.0)
    return Band(name, kind, members, max(peak, whole), {state: amounts[state] for state in known})


def _trajectories(seconds: float, stays: Iterable[tuple[str, float, float, float, float]], bins: int) -> list[Band]:
    """A trajectory begins with its reset. The times of its steps are not recorded: they are spread over the rest."""
    stacks: dict[str, _Stack] = defaultdict(lambda: _Stack(seconds, bins))
    count: dict[str, int] = defaultdict(int)
    for domain, t0, t1, reset_s, env_s in stays:
        begins = min(t1, t0 + reset_s)
        part = min(1.0, env_s / (t1 - begins)) if t1 > begins else 0.0
        own = stacks[domain]
        own.add(RESET, t0, begins)
        own.add(STEP, begins, t1, part)
        own.add(ELSEWHERE, begins, t1, 1.0 - part)
        count[domain] += 1
    order = (RESET, STEP, ELSEWHERE)
    return [stacks[d].band(f"trajectories of {d}", TRAJECTORIES, count[d], order) for d in sorted(stacks)]


def turn_bands(
    reader: LedgerReader, rows: Sequence[TrajectoryRow], during: tuple[float, float], *, bins: int = BINS
) -> Iterator[Band]:
    """A band with the phases of each of these trajectories."""
    begins, ends = during
    ids = {row.id for row in rows}
    kept = {(one.id, one.t): one.routes for one in reader.kept(ids)}
    events: dict[str, list[RunEvent]] = defaultdict(list)
    for event in reader.events_about(*ids) if ids else ():
        if event.kind == TURN:
            events[event.subject].append(event)
    order = (RESET, QUEUED, *TURN_PAIR, ELSEWHERE, STEP, RUNNING, REWARD)
    for row in rows:
        own = _Stack(ends - begins, bins)
        for state, t0, t1 in phases(row, events[row.id], kept.get((row.id, row.t1), ())):
            own.add(state, t0 - begins, t1 - begins)
        yield own.band(row.id, TURNS, row.turns, order, 1.0)


def phases(
    row: TrajectoryRow, turns: Sequence[RunEvent], routes: Sequence[RoutedTurn]
) -> Iterator[tuple[str, float, float]]:
    """State, begin and end of each phase of a trajectory. Generation and the environment's step of a turn are known of
    trajectories whose turns were traced (`telemetry.turns`); of those with kept routes, the queue of a turn and the
    time from its routing to the next turn (`TURN_PAIR`); of others, only the rest as a whole."""
    begins, ends = min(row.t1, row.t0 + row.reset_s), max(row.t0, row.t1 - (row.reward_s or 0.0))
    if routes:  # a prefetched environment was reset before the trajectory began
        begins = min(begins, row.t0 + routes[0].asked)
    ends = max(begins, ends)
    yield RESET, row.t0, begins
    if turns:
        for turn in turns:
            acted = turn.t - float(turn.fields["environment_s"] or 0.0)
            yield ELSEWHERE, max(begins, acted - float(turn.fields["generation_s"] or 0.0)), min(acted, ends)
            yield STEP, max(begins, acted), min(turn.t, ends)
    elif routes:
        asked = [*(min(ends, row.t0 + route.asked) for route in routes), ends]
        for n, (route, (t0, t1)) in enumerate(zip(routes, pairwise(asked), strict=True)):
            routed = min(t1, row.t0 + route.routed)
            yield QUEUED, t0, routed
            yield TURN_PAIR[n % 2], routed, t1
    else:
        yield RUNNING, begins, ends
    yield REWARD, ends, row.t1


def _calls(seconds: float, calls: Iterable[tuple[str, float, float, float, float]], bins: int) -> list[Band]:
    stacks: dict[str, _Stack] = defaultdict(lambda: _Stack(seconds, bins))
    count: dict[str, int] = defaultdict(int)
    for function, t0, t1, queued_s, cold_s in calls:
        own = stacks[function]
        started = min(t1, t0 + cold_s)
        own.add(QUEUED, t0 - max(0.0, queued_s), t0)
        own.add(COLD, t0, started)
        own.add(RUNNING, started, t1)
        count[function] += 1
    return [stacks[f].band(f"calls of {f}", CALLS, count[f], (RUNNING, COLD, QUEUED)) for f in sorted(stacks)]


def _faults(seconds: float, events: Iterable[tuple[float, str]], bins: int) -> Iterable[Band]:
    counts: dict[str, list[float]] = defaultdict(lambda: [0.0] * bins)
    for t, kind in events:
        if kind in FAULT_EVENTS:
            counts[kind][min(bins - 1, max(0, int(t / seconds * bins)))] += 1.0
    if counts:
        total = round(math.fsum(math.fsum(own) for own in counts.values()))
        yield _band("faults and drops", FAULTS, total, {kind: tuple(own) for kind, own in counts.items()}, ())


def _natural(key: tuple[str, str, str]) -> tuple[Any, ...]:
    """engine-2 before engine-10."""
    name, _, count = key[2].rpartition("-")
    return (key[0], key[1], name, int(count)) if count.isdigit() else (key[0], key[1], key[2], 0)


BLOCKS = " ▁▂▃▄▅▆▇█"
SKETCH = 24


def _sketch(band: Band) -> str:
    """Activity over time as blocks: busy devices, or all live trajectories or calls."""
    chosen = [band.amounts.get(ResourceState.BUSY, ())] if band.kind == DEVICES else list(band.amounts.values())
    values = [math.fsum(column) for column in zip(*chosen, strict=True)]
    if not values or band.whole <= 0:
        return ""
    size = len(values) / SKETCH
    means = []
    for n in range(SKETCH):
        part = values[int(n * size) : max(int((n + 1) * size), int(n * size) + 1)]
        means.append(math.fsum(part) / len(part))
    return "".join(BLOCKS[min(8, round(8 * mean / band.whole))] for mean in means)
