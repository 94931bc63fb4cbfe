"""A whole run as a trace in Chrome's trace event format, which Perfetto (https://ui.perfetto.dev) and chrome://tracing
open: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.

Processes of the trace are kinds of parts, and its threads are single resources, or lanes in which trajectories, groups
and calls take turns. An arrow leads from a trajectory to the step that trained it. Counters show the engines' KV cache
and running requests, live trajectories and calls. Times are seconds of the run in microseconds.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, TypeAlias

from rollart.ledger.events import ENGINE_DID, TURN
from rollart.ledger.reader import LedgerReader, TrajectorySpan
from rollart.ports import RunEvent
from rollart.report.timeline import COLD, ELSEWHERE, FAULT_EVENTS, QUEUED, RESET, ROLES, RUNNING, STEP

TraceEvent: TypeAlias = dict[str, Any]

RUN = "run"
STEPS, EVENTS = "steps", "faults and drops"
"""Threads of the run."""

LEVELS = 10_000
"""Most values of a counter: more are no more to see."""


class TraceTracks:
    """Numbers of processes and threads by their names; `metadata` names and orders them in the trace."""

    def __init__(self) -> None:
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[str, str], tuple[int, int]] = {}

    def of(self, process: str, thread: str) -> tuple[int, int]:
        """(pid, tid), the same for the same names."""
        known = self._threads.get((process, thread))
        if known is None:
            pid = self._processes.setdefault(process, len(self._processes) + 1)
            known = self._threads[process, thread] = (pid, len(self._threads) + 1)
        return known

    def metadata(self) -> Iterator[TraceEvent]:
        for name, pid in self._processes.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        for (_, name), (pid, tid) in self._threads.items():
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


class TraceLanes:
    """As many threads of one process as it has slices at a time. Slices must come by begin."""

    def __init__(self, tracks: TraceTracks, process: str) -> None:
        self._tracks, self._process = tracks, process
        self._free: list[tuple[float, int]] = []

    def take(self, t0: float, t1: float) -> tuple[int, int]:
        """The thread of a slice from t0 to t1: one on which the last slice has ended."""
        lane = heapq.heappop(self._free)[1] if self._free and self._free[0][0] <= t0 else len(self._free) + 1
        heapq.heappush(self._free, (t1, lane))
        return self._tracks.of(self._process, f"{lane}")


def chrome_trace(reader: LedgerReader, run: str) -> Iterator[str]:
    """The trace as pieces of JSON text."""
    yield '{"displayTimeUnit":"ms","otherData":{"run":' + json.dumps(run) + '},"traceEvents":[\n'
    encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode  # `json.dumps` makes one per call
    first = True
    for event in trace_events(reader, run):
        yield ("" if first else ",\n") + encode(event)
        first = False
    yield "\n]}\n"


def trace_events(reader: LedgerReader, run: str) -> Iterator[TraceEvent]:
    """Every event of the trace, in no order of time."""
    tracks = TraceTracks()
    seconds = reader.facts().seconds
    steps = _step_times(reader.events("step"))
    yield from _run(tracks, run, seconds, steps, reader)
    yield from _devices(tracks, reader)
    yield from _trajectories(tracks, reader, {version: begins for version, _, begins, _ in steps})
    yield from _calls(tracks, reader)
    yield from tracks.metadata()


def _slice(track: tuple[int, int], name: str, t0: float, t1: float, args: Mapping[str, Any]) -> TraceEvent:
    pid, tid = track
    shown = {key: value for key, value in args.items() if value not in (None, "")}
    start = _us(t0)
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": start, "dur": _us(t1) - start, "args": shown}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _counter(track: tuple[int, int], name: str, t: float, value: float) -> TraceEvent:
    return {"ph": "C", "name": name, "pid": track[0], "tid": track[1], "ts": _us(t), "args": {"value": value}}


def _step_times(events: Sequence[RunEvent]) -> list[tuple[int, float, float, float]]:
    """(version, begin, begin of training, end) of every recorded step. A step begins where the last one ended."""
    found, begins = [], 0.0
    for event in events:
        trains = max(begins, event.t - float(event.fields.get("train_s") or 0.0))
        found.append((int(event.fields["version"] or 0), begins, trains, event.t))
        begins = event.t
    return found


def _run(
    tracks: TraceTracks,
    run: str,
    seconds: float,
    steps: Sequence[tuple[int, float, float, float]],
    reader: LedgerReader,
) -> Iterator[TraceEvent]:
    track, faults = tracks.of(RUN, STEPS), tracks.of(RUN, EVENTS)
    rows = {row.version: row for row in reader.versions()}
    yield _slice(track, run, 0.0, seconds, {"versions": len(rows)})
    for version, begins, trains, ends in steps:
        row = rows.get(version)
        args = {} if row is None else {"groups": row.groups, "samples": row.samples, "tokens": row.tokens}
        yield _slice(track, f"step {version}", begins, ends, args)
        metrics = {} if row is None else {name: value for name, value in row.metrics.items() if value == value}
        yield _slice(track, "train and publish", trains, ends, metrics)
    for t, kind in reader.occurrences():
        if kind in FAULT_EVENTS:
            yield {"ph": "i", "s": "t", "name": kind, "pid": faults[0], "tid": faults[1], "ts": _us(t), "args": {}}


def _devices(tracks: TraceTracks, reader: LedgerReader) -> Iterator[TraceEvent]:
    intervals = reader.intervals()
    rank = {role: n for n, role in enumerate(ROLES)}
    for role, resource in sorted({(i.role, i.resource) for i in intervals}, key=lambda k: (rank.get(k[0], 99), *k)):
        tracks.of(role, resource)
    for i in intervals:
        args = {"cause": i.cause, "units": i.units, "usd": i.usd}
        yield _slice(tracks.of(i.role, i.resource), i.state, i.t0, i.t1, args)
    roles = {i.resource: i.role for i in intervals}
    for event in reader.events(ENGINE_DID):
        track = tracks.of(roles.get(event.subject, "engine"), event.subject)
        for name in ("kv_used", "running"):
            value = event.fields.get(name)
            if value is not None:
                yield _counter(track, f"{event.subject} {name}", event.t, float(value))


def _trajectories(tracks: TraceTracks, reader: LedgerReader, steps: Mapping[int, float]) -> Iterator[TraceEvent]:
    turns: dict[str, list[RunEvent]] = defaultdict(list)
    for event in reader.events(TURN):
        turns[event.subject].append(event)
    lanes: dict[str, TraceLanes] = {}
    groups: dict[tuple[str, str], list[float]] = {}
    changes: list[tuple[float, int]] = []
    step_track, numbers = tracks.of(RUN, STEPS), count(1)
    for t in reader.trajectory_spans():
        process = f"trajectories of {t.domain}"
        track = lanes.setdefault(process, TraceLanes(tracks, process)).take(t.t0, t.t1)
        yield from _trajectory(track, t, turns.get(t.trajectory, ()))
        changes += ((t.t0, 1), (t.t1, -1))
        if t.group:
            span = groups.setdefault((t.domain, t.group), [t.t0, t.t1])
            span[1] = max(span[1], t.t1)
        if t.version is not None and t.version in steps:
            yield from _flow(next(numbers), track, t.t1, step_track, max(t.t1, steps[t.version]))
    for (domain, group), (t0, t1) in sorted(groups.items(), key=lambda item: item[1]):
        process = f"groups of {domain}"
        yield _slice(lanes.setdefault(process, TraceLanes(tracks, process)).take(t0, t1), group, t0, t1, {})
    yield from _levels(tracks.of(RUN, STEPS), "live trajectories", changes)


def _trajectory(track: tuple[int, int], t: TrajectorySpan, turns: Sequence[RunEvent]) -> Iterator[TraceEvent]:
    """A trajectory, its reset, its recorded turns, and its reward."""
    args = {
        "group": t.group,
        "outcome": t.outcome,
        "purpose": t.purpose,
        "first version": t.v0,
        "trained into": t.version,
        "turns": t.turns,
        "prompt tokens": t.prompt_tokens,
        "action tokens": t.action_tokens,
        "engine seconds": t.engine_seconds,
        "environment seconds": t.env_s,
        "score": t.score,
    }
    yield _slice(track, t.trajectory, t.t0, t.t1, args)
    begins, rewarded = min(t.t1, t.t0 + t.reset_s), max(t.t0, t.t1 - (t.reward_s or 0.0))
    rewarded = max(begins, rewarded)
    yield _slice(track, RESET, t.t0, begins, {})
    for turn in turns:
        acted = turn.t - float(turn.fields["environment_s"] or 0.0)
        t0, t1 = max(begins, acted - float(turn.fields["generation_s"] or 0.0)), min(rewarded, turn.t)
        acted = min(max(t0, acted), t1)
        args = {"engine": turn.fields["engine"], "version": turn.fields["version"], "tokens": turn.fields["tokens"]}
        if t0 < t1:
            yield _slice(track, f"turn {turn.fields['turn']}", t0, t1, args)
            yield _slice(track, ELSEWHERE, t0, acted, args)
            yield _slice(track, STEP, acted, t1, {})
    if t.reward_s is not None:
        yield _slice(track, "reward", rewarded, t.t1, {"score": t.score})


def _flow(number: int, start: tuple[int, int], t0: float, end: tuple[int, int], t1: float) -> Iterator[TraceEvent]:
    """An arrow from one slice, at its end, to another one."""
    common = {"cat": "training", "name": "trained", "id": number}
    yield {"ph": "s", **common, "pid": start[0], "tid": start[1], "ts": max(0, _us(t0) - 1)}
    yield {"ph": "f", "bp": "e", **common, "pid": end[0], "tid": end[1], "ts": _us(t1)}


def _calls(tracks: TraceTracks, reader: LedgerReader) -> Iterator[TraceEvent]:
    lanes: dict[str, TraceLanes] = {}
    changes: dict[str, list[tuple[float, int]]] = defaultdict(list)
    calls = sorted(reader.calls(), key=lambda call: call.t0 - max(0.0, call.queued_s))
    for call in calls:
        process = f"calls of {call.function}"
        asked, started = call.t0 - max(0.0, call.queued_s), min(call.t1, call.t0 + call.cold_start_s)
        track = lanes.setdefault(process, TraceLanes(tracks, process)).take(asked, call.t1)
        args = {
            "provider": call.provider,
            "worker": call.worker,
            "items": call.items,
            "cause": str(call.cause),
            "billed seconds": call.billed_s,
            "memory MB": call.memory_mb,
            "provider's id": call.provider_id,
        }
        yield _slice(track, call.status, asked, call.t1, args)
        for name, t0, t1 in ((QUEUED, asked, call.t0), (COLD, call.t0, started), (RUNNING, started, call.t1)):
            if t1 > t0:
                yield _slice(track, name, t0, t1, {})
        changes[process] += ((call.t0, 1), (call.t1, -1))
    for process, own in changes.items():
        yield from _levels(tracks.of(process, "1"), process.replace("calls", "running calls", 1), own)


def _levels(track: tuple[int, int], name: str, changes: Iterable[tuple[float, int]]) -> Iterator[TraceEvent]:
    """A counter of what is live, from begins (1) and ends (-1)."""
    ordered = sorted(changes)
    least_s = (ordered[-1][0] - ordered[0][0]) / LEVELS if ordered else 0.0
    level, due = 0, ordered[0][0] if ordered else 0.0
    for n, (t, change) in enumerate(ordered, 1):
        level += change
        if t >= due or n == len(ordered):
            yield _counter(track, name, t, level)
            due = t + least_s
