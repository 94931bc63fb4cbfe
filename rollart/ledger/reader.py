"""Read access to a run's ledger from any process, during the run or after it."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rollart.errors import StorageFailed, UsageError
from rollart.ledger.database import (
    CONSUMED,
    DROPPED,
    FILE,
    LIVE,
    MINUTE_S,
    OLDER,
    SCHEMA_VERSION,
    SEGMENTS,
    TOKEN_SUMS,
)
from rollart.ledger.events import UTC_CLOCK
from rollart.ledger.intervals import IntervalSum
from rollart.ledger.kept import KeptTrajectory, read_kept
from rollart.ledger.payloads import PayloadDamaged, PayloadFiles, decode_sample
from rollart.ledger.utc import HOUR_S, UtcTimes, hourly_parts
from rollart.model import TrainSample
from rollart.ports import FINISHED, Interval, RunEvent
from serverless.meter import Saving
from serverless.types import Invocation, TokenUsage

R = TypeVar("R")

FATE = f"""CASE WHEN t.outcome <> '{FINISHED}' THEN t.outcome WHEN t.purpose = 'eval' THEN 'evaluated'
WHEN s.state = {CONSUMED} THEN 'trained' WHEN g.state = {DROPPED} THEN g.reason
WHEN s.state = {DROPPED} THEN 'group_dropped' ELSE 'waiting' END"""
"""The disposition of a trajectory `t` with its sample `s` and its group `g`."""

OF_TRAJECTORIES = """FROM trajectories t LEFT JOIN samples s ON s.id = t.id AND t.purpose <> 'eval'
LEFT JOIN groups g ON g.id = s.grp"""

WHOLE_RUN = (-math.inf, math.inf)

_GROUP = "rtrim(t.id, '0123456789r')"
"""The group of a trajectory `t` with a dot behind it: 'lake-12.' of 'lake-12.3r2'."""


@dataclass(frozen=True, slots=True)
class ChargeSum:
    """Trajectories of one domain, purpose, first version and outcome, added up.

    `outcome` is `trained`, `evaluated`, `waiting` (scored, not consumed yet) or the reason of the waste. `judged`
    counts the trajectories with a known success, `successes` the successful ones.
    """

    domain: str
    purpose: str
    outcome: str
    v0: int
    trajectories: int
    engine_seconds: float
    turns: int
    prompt_tokens: int
    action_tokens: int
    judged: int
    successes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TrajectorySpan:
    """A trajectory that ended. `outcome` is that of `ChargeSum`, `group` is '' and `version` None where there is no
    sample, or it was not trained. `reward_s` is None if it asked for no reward."""

    trajectory: str
    domain: str
    purpose: str
    outcome: str
    v0: int
    group: str
    version: int | None
    turns: int
    prompt_tokens: int
    action_tokens: int
    engine_seconds: float
    score: float | None
    t0: float
    t1: float
    reset_s: float
    env_s: float
    reward_s: float | None


@dataclass(frozen=True, slots=True)
class FinishedRow:
    """A training trajectory that was scored: its length in `tokens`, of which `action_tokens` were sampled and
    `first_tokens` form its first prompt; the seconds that it waited for its environment's reset and steps."""

    domain: str
    turns: int
    tokens: int
    action_tokens: int
    engine_seconds: float
    t0: float
    t1: float
    first_tokens: int
    reset_s: float = 0.0
    env_s: float = 0.0
    group: str = ""
    score: float | None = None


@dataclass(frozen=True, slots=True)
class InvocationSum:
    """Function calls of one function, provider and memory size, status and cause, added up."""

    function: str
    provider: str
    memory_mb: int
    status: str
    calls: int
    items: int
    cold_starts: int
    cold_start_s: float
    billed_s: float
    cause: str = "call"
    cold_billed_s: float = 0.0
    """The start-up part of `billed_s`."""
    estimated: int = 0
    """Calls without a bill from the provider: they count with the time until they were answered or given up."""
    estimated_s: float = 0.0
    """Their part of `billed_s`."""


@dataclass(frozen=True, slots=True)
class TokenSum:
    """Tokens that the calls of one function made for one cause consumed at one endpoint and model, added up."""

    function: str
    cause: str
    usage: TokenUsage


@dataclass(frozen=True, slots=True)
class WorkerSum:
    """Worker-seconds of one function, provider and memory size in one state (`cold`, `busy`, `idle`). `estimated`: not
    metered, but derived from the gaps between calls."""

    function: str
    provider: str
    memory_mb: int
    state: str
    seconds: float
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class HourSum:
    """Intervals of one resource in one state for one cause at one price within one hour of UTC, added up. `hour` counts
    from 1970."""

    hour: int
    role: str
    resource: str
    state: str
    cause: str
    price: float
    unit_seconds: float


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A published version and the groups, samples and tokens that were trained into it."""

    version: int
    step: int
    groups: int
    samples: int
    tokens: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Key figures of a run."""

    seconds: float
    version: int | None
    step: int | None
    trained_tokens: int
    trained_samples: int
    live_groups: int
    dropped_groups: int
    live_samples: int


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """A training trajectory with any outcome. `sample` is the state of its sample, None if it left none."""

    trajectory: str
    domain: str
    outcome: str
    turns: int
    action_tokens: int
    score: float | None
    sample: int | None


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group that was admitted, and its state; `reason` is set if it was dropped, `version` if it was trained."""

    id: str
    domain: str
    state: int
    reason: str
    seed: int = 0
    version: int | None = None


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """A trajectory that ended. `outcome` is that of `ChargeSum`; `version` and `step` are those that it was trained
    into. Times are seconds of the run; `reward_s` is None if it asked for no reward. Of its prompts, `prompt_tokens`
    were computed, the others were in a cache."""

    id: str
    domain: str
    purpose: str
    outcome: str
    v0: int
    t0: float
    t1: float
    turns: int
    prompt_tokens: int
    action_tokens: int
    engine_s: float
    reset_s: float
    env_s: float
    reward_s: float | None
    success: int | None
    score: float | None
    version: int | None
    step: int | None

    @property
    def group(self) -> str:
        return self.id.rpartition(".")[0]


class LedgerReader(AbstractContextManager["LedgerReader"]):
    """Read-only view of one ledger; a consistent snapshot per query. UsageError if the directory holds none,
    StorageFailed for an unknown version."""

    def __init__(self, directory: str | Path) -> None:
        self._path = Path(directory) / FILE
        if not self._path.is_file():
            raise UsageError(f"{directory}: no ledger here", remedy="give a run's name or directory")
        try:
            self._connection = sqlite3.connect(f"{self._path.resolve().as_uri()}?mode=ro", uri=True)
            found = self._connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
        except sqlite3.Error as error:
            raise self._failed(error) from None
        version = found and found[0]
        if version == str(SCHEMA_VERSION):
            return
        known = {str(older): statements for older, statements in OLDER.items()}
        if version not in known:
            rule = ", ".join((*known, str(SCHEMA_VERSION)))
            raise StorageFailed(f"{self._path}: schema version {version} (rule: {rule})")
        for statement in known[version]:  # makes an older file look like a current one
            self._query(statement)

    def config(self) -> dict[str, Any]:
        """The run's configuration (`Resolved.to_dict`); empty if there is none."""
        rows = self._query("SELECT value FROM meta WHERE key = 'config'")
        return dict(json.loads(rows[0][0])) if rows else {}

    def earlier_configs(self) -> list[dict[str, Any]]:
        """Configurations of earlier lives of the run, where they differ from those after them."""
        return [json.loads(value) for (value,) in self._query("SELECT value FROM meta WHERE key GLOB 'config.*'")]

    def facts(self) -> RunFacts:
        (facts,) = self._rows(
            RunFacts,
            f"""SELECT max((SELECT coalesce(max(t1), 0) FROM intervals), (SELECT coalesce(max(t), 0) FROM events)),
            (SELECT max(version) FROM versions), (SELECT max(step) FROM versions),
            (SELECT coalesce(sum(tokens), 0) FROM versions), (SELECT coalesce(sum(samples), 0) FROM versions),
            (SELECT count(*) FROM groups WHERE state = 0), (SELECT count(*) FROM groups WHERE state = {DROPPED}),
            (SELECT count(*) FROM samples s LEFT JOIN groups g ON g.id = s.grp
             WHERE s.state = 0 AND coalesce(g.state, 0) = 0)""",
        )
        return facts

    def interval_sums(self) -> list[IntervalSum]:
        """Intervals by (role, resource, state, cause)."""
        return self._rows(
            IntervalSum,
            """SELECT role, resource, state, cause, sum(t1 - t0), sum((t1 - t0) * units),
            sum((t1 - t0) * units * price / 3600.0), min(t0), max(t1)
            FROM intervals GROUP BY role, resource, state, cause ORDER BY role, resource, state, cause""",
        )

    def device_hours(self) -> list[tuple[float, float]]:
        """Hours of devices by their price per hour, where the price is above 0."""
        return self._query(
            """SELECT price, sum((t1 - t0) * units) / 3600.0 FROM intervals WHERE price > 0
            GROUP BY price ORDER BY price"""
        )

    def charge_sums(self) -> list[ChargeSum]:
        """Trajectories by (domain, purpose, outcome, first version)."""
        return self._rows(
            ChargeSum,
            f"""SELECT t.domain, t.purpose, {FATE} AS fate, t.v0,
            count(*), sum(t.engine_seconds), sum(t.turns), sum(t.prompt_tokens), sum(t.action_tokens),
            count(t.success), coalesce(sum(t.success), 0), sum(t.t1 - t.t0)
            {OF_TRAJECTORIES}
            GROUP BY t.domain, t.purpose, fate, t.v0 ORDER BY t.domain, t.purpose, fate, t.v0""",
        )

    def trajectory_spans(self, version: int | None = None) -> Iterator[TrajectorySpan]:
        """Every trajectory that ended, by begin; or those that were trained into `version`."""
        rows = self._cursor(
            f"""SELECT t.id, t.domain, t.purpose, {FATE}, t.v0, coalesce(s.grp, ''),
            CASE WHEN s.state = {CONSUMED} THEN s.version END, t.turns, t.prompt_tokens, t.action_tokens,
            t.engine_seconds, t.score, t.t0, t.t1, t.reset_s, t.env_s, t.reward_s
            {OF_TRAJECTORIES}{"" if version is None else f" WHERE s.state = {CONSUMED} AND s.version = {int(version)}"}
            ORDER BY t.t0, t.rowid"""
        )
        yield from (TrajectorySpan(*row) for row in rows)

    def finished(self) -> list[FinishedRow]:
        """Training trajectories that were scored, with any sample state, in the order in which they ended."""
        return self._rows(
            FinishedRow,
            f"""SELECT t.domain, t.turns, s.tokens, s.action_tokens, t.engine_seconds, t.t0, t.t1,
            t.first_tokens, t.reset_s, t.env_s, s.grp, t.score
            FROM trajectories t JOIN samples s ON s.id = t.id
            WHERE t.outcome = '{FINISHED}' AND t.purpose <> 'eval' ORDER BY t.t1, t.rowid""",
        )

    def attempts(self) -> list[AttemptRow]:
        """Training trajectories in the order in which they ended; a member that was retried has several."""
        return self._rows(
            AttemptRow,
            """SELECT t.id, t.domain, t.outcome, t.turns, t.action_tokens, t.score, s.state
            FROM trajectories t LEFT JOIN samples s ON s.id = t.id
            WHERE t.purpose <> 'eval' ORDER BY t.t1, t.rowid""",
        )

    def groups(self) -> list[GroupRow]:
        """Groups in the order in which they were admitted."""
        return self._rows(GroupRow, "SELECT id, domain, state, reason, seed, version FROM groups ORDER BY rowid")

    def trajectories(
        self,
        *,
        id_: str | None = None,
        group: str | None = None,
        domain: str | None = None,
        outcomes: Sequence[str] = (),
        during: tuple[float, float] | None = None,
        order: str = "t.rowid",
        most: int | None = None,
        offset: int = 0,
    ) -> Iterator[TrajectoryRow]:
        """The trajectories with this id, of this group and domain, and with one of the outcomes, as far as they are
        given, in the order of their rows, which is that of their ends but for milliseconds. The members of groups that
        were killed with the run have the same ids in the next life. `during`: those that lived at any time between two
        seconds of the run. `order`: an expression of the table's columns; `offset`: rows to skip."""
        began, ended = during or WHOLE_RUN
        marks = ", ".join("?" * len(outcomes))
        rows = self._cursor(
            f"""SELECT t.id, t.domain, t.purpose, {FATE} AS fate, t.v0, t.t0, t.t1, t.turns, t.prompt_tokens,
            t.action_tokens, t.engine_seconds, t.reset_s, t.env_s, t.reward_s, t.success, t.score,
            CASE WHEN s.state = {CONSUMED} AND t.outcome = '{FINISHED}' THEN s.version END,
            CASE WHEN s.state = {CONSUMED} AND t.outcome = '{FINISHED}' THEN v.step END
            {OF_TRAJECTORIES} LEFT JOIN versions v ON v.version = s.version
            WHERE (?1 IS NULL OR t.id = ?1) AND (?2 IS NULL OR {_GROUP} = ?2) AND (?3 IS NULL OR t.domain = ?3)
            AND t.t1 >= ?4 AND t.t0 <= ?5 {f"AND fate IN ({marks})" if outcomes else ""}
            ORDER BY {order} LIMIT {-1 if most is None else most} OFFSET {offset}""",
            id_,
            None if group is None else f"{group}.",
            domain,
            began,
            ended,
            *outcomes,
        )
        return (TrajectoryRow(*row) for row in rows)

    def trajectory_count(self, *, domain: str | None, outcomes: Sequence[str]) -> int:
        """The number of trajectories that `trajectories` gives."""
        return sum(
            row.trajectories
            for row in self.charge_sums()
            if (domain is None or row.domain == domain) and (not outcomes or row.outcome in outcomes)
        )

    def group_times(self, domain: str) -> list[tuple[str, float, float]]:
        """Id, begin of the first and end of the last trajectory of every group of a domain."""
        rows = self._query(
            f"""SELECT {_GROUP}, min(t.t0), max(t.t1) FROM trajectories t WHERE t.domain = ? AND t.purpose <> 'eval'
            GROUP BY {_GROUP}""",
            domain,
        )
        return [(group.removesuffix("."), began, ended) for group, began, ended in rows]

    def events_about(self, *subjects: str) -> list[RunEvent]:
        """All events of these subjects, in order of time."""
        marks = ", ".join("?" * len(subjects))
        query = f"SELECT t, kind, subject, fields FROM events WHERE subject IN ({marks}) ORDER BY t, rowid"
        return [RunEvent(t, k, subject, json.loads(fields)) for t, k, subject, fields in self._query(query, *subjects)]

    def ends(self, kind: str) -> list[tuple[float, str]]:
        """Time and subject of every event of a kind, in order of time, without its fields."""
        return self._query("SELECT t, subject FROM events WHERE kind = ? ORDER BY t, rowid", kind)

    def torn(self, tolerance_s: float) -> list[tuple[str, float, float, float, float]]:
        """Id, begin, end, seconds of the environment and of the reward of the trajectories with a negative number of
        seconds, or whose waits do not fit between their begin and their end. The reset of a prefetched environment may
        precede the begin."""
        return self._query(
            """SELECT id, t0, t1, env_s, coalesce(reward_s, 0.0) FROM trajectories
            WHERE min(engine_seconds, reset_s, env_s, coalesce(reward_s, 0.0)) < 0.0
            OR env_s + coalesce(reward_s, 0.0) > t1 - t0 + ? ORDER BY rowid""",
            tolerance_s,
        )

    def samples(self) -> Iterator[tuple[str, str, int, int, int | None, int, int]]:
        """Id, group, state, first version, version that it was trained into (None: none), sampled tokens, and the rows
        of trajectories that finished with it, for every sample."""
        yield from self._cursor(
            f"""SELECT s.id, s.grp, s.state, s.v0, s.version, s.action_tokens, count(t.id) FROM samples s
            LEFT JOIN trajectories t ON t.id = s.id AND t.outcome = '{FINISHED}' AND t.purpose <> 'eval'
            GROUP BY s.id"""
        )

    def waiting_samples(self, ids: Collection[str]) -> list[TrainSample]:
        """Those of these samples that were neither trained nor dropped. PayloadDamaged for one that changed."""
        rows = self._query(f"SELECT id, payload, segment, offset FROM samples WHERE state = {LIVE} ORDER BY rowid")
        files = PayloadFiles(self._path.parent / SEGMENTS)
        wanted, found = frozenset(ids), []
        for id_, payload, segment, offset in rows:
            if id_ in wanted:
                try:
                    found.append(decode_sample(payload if segment is None else files.read(segment, offset)))
                except ValueError as error:
                    raise PayloadDamaged(f"{self._path}: {error}") from None
        return found

    def batch_tokens(self) -> list[int]:
        """Length in tokens, prompts included, of the samples that were trained into each version, by version."""
        rows = self._query(
            f"SELECT sum(tokens) FROM samples WHERE state = {CONSUMED} GROUP BY version ORDER BY version"
        )
        return [tokens for (tokens,) in rows]

    def invocation_sums(self) -> list[InvocationSum]:
        """Function calls by (function, provider, memory, status, cause)."""
        return self._rows(
            InvocationSum,
            """SELECT function, provider, memory_mb, status, count(*), sum(items), sum(cold_start_s > 0),
            sum(cold_start_s), sum(billed_s), cause, sum(cold_billed_s),
            sum(provider_id = '' AND provider <> 'local'),
            sum(CASE WHEN provider_id = '' AND provider <> 'local' THEN billed_s ELSE 0 END)
            FROM invocations GROUP BY function, provider, memory_mb, status, cause
            ORDER BY function, provider, status, cause""",
        )

    def saving_sums(self) -> list[Saving]:
        """Items that needed no call, and the seconds that they would have been billed, by (function, stage, memory),
        at the time of the last one."""
        return self._rows(
            Saving,
            """SELECT function, stage, max(t), sum(items), sum(billed_s), memory_mb FROM savings
            GROUP BY function, stage, memory_mb ORDER BY function, stage""",
        )

    def token_sums(self) -> list[TokenSum]:
        """Tokens by (function, cause, endpoint, model)."""
        rows = self._query(
            f"""SELECT function, cause, {TOKEN_SUMS} FROM tokens GROUP BY function, cause, endpoint, model
            ORDER BY function, endpoint, model, cause"""
        )
        return [TokenSum(function, cause, TokenUsage(*usage)) for function, cause, *usage in rows]

    def worker_sums(self) -> list[WorkerSum]:
        """Worker-seconds by (function, provider, memory, state)."""
        return self._rows(
            WorkerSum,
            """SELECT function, provider, memory_mb, state, sum(seconds) FROM worker_time
            GROUP BY function, provider, memory_mb, state ORDER BY function, provider, memory_mb, state""",
        )

    def calls(self, provider: str | None = None) -> list[Invocation]:
        """Every function call, of one provider if it is named, by start, in seconds of the run."""
        query = "SELECT * FROM invocations WHERE ? IS NULL OR provider = ? ORDER BY t0, rowid"
        return self._rows(Invocation, query, provider, provider)

    def calls_between(self, function: str, t0: float, t1: float) -> list[Invocation]:
        """The calls of a function that ran at any time from `t0` to `t1`, by start, in seconds of the run."""
        query = "SELECT * FROM invocations WHERE function = ? AND t0 <= ? AND t1 >= ? ORDER BY t0, rowid"
        return self._rows(Invocation, query, function, t1, t0)

    def phase_seconds(self) -> tuple[float, float, float]:
        """Seconds of all trajectories on engines, in their environments and in wait for their rewards."""
        query = "SELECT sum(engine_seconds), sum(reset_s + env_s), sum(reward_s) FROM trajectories"
        engine, environment, reward = self._query(query)[0]
        return engine or 0.0, environment or 0.0, reward or 0.0

    def lives(self) -> list[tuple[str, float, float, str, int | None, float | None]]:
        """Domain, begin, end, group of the sample ('' without one), the version that it was trained into (None: not
        trained, as all of evaluations) and seconds of its reward (None: unknown) of every trajectory, by end."""
        return self._query(
            f"""SELECT t.domain, t.t0, t.t1, coalesce(s.grp, ''), CASE WHEN s.state = {CONSUMED} THEN s.version END,
            t.reward_s FROM trajectories t
            LEFT JOIN samples s ON s.id = t.id AND t.outcome = '{FINISHED}' AND t.purpose <> 'eval'
            ORDER BY t.t1, t.rowid"""
        )

    def versions(self) -> list[VersionRow]:
        rows = self._query("SELECT version, step, groups, samples, tokens, metrics FROM versions ORDER BY version")
        return [
            VersionRow(v, step, groups, n, tokens, json.loads(metrics)) for v, step, groups, n, tokens, metrics in rows
        ]

    def intervals(self) -> list[Interval]:
        """Every interval, in order of time: for timelines and checks."""
        return self._rows(Interval, "SELECT * FROM intervals ORDER BY t0, rowid")

    def spans(self, during: tuple[float, float] = WHOLE_RUN) -> Iterator[tuple[str, str, float, float, str, float]]:
        """Role, resource, begin, end, state and units of every interval that touches the stretch `during` of the run,
        one by one, in no order."""
        query = "SELECT role, resource, t0, t1, state, units FROM intervals WHERE t1 >= ? AND t0 <= ?"
        yield from self._cursor(query, *during)

    def stays(self, during: tuple[float, float] = WHOLE_RUN) -> Iterator[tuple[str, float, float, float, float]]:
        """Domain, begin, end, seconds of reset and of all steps of its environment, for every trajectory that ended."""
        query = "SELECT domain, t0, t1, reset_s, env_s FROM trajectories WHERE t1 >= ? AND t0 <= ?"
        yield from self._cursor(query, *during)

    def call_spans(self, during: tuple[float, float] = WHOLE_RUN) -> Iterator[tuple[str, float, float, float, float]]:
        """Function, begin, end, seconds queued before the call and seconds of cold start within it, for every call."""
        query = """SELECT function, t0, t1, queued_s, cold_start_s FROM invocations
            WHERE t1 >= ? AND t0 - max(0.0, queued_s) <= ?"""
        yield from self._cursor(query, *during)

    def occurrences(self, during: tuple[float, float] = WHOLE_RUN) -> Iterator[tuple[float, str]]:
        """Time and kind of every event, without its fields."""
        yield from self._cursor("SELECT t, kind FROM events WHERE t >= ? AND t <= ?", *during)

    def event_sums(self) -> list[tuple[str, int, float, float]]:
        """Kind of events, their number, and the times of the first and of the last one."""
        return self._query("SELECT kind, count(*), min(t), max(t) FROM events GROUP BY kind ORDER BY kind")

    def last_events(self, kinds: Collection[str], most: int) -> list[RunEvent]:
        """The last events of these kinds, the latest first."""
        marks = ", ".join("?" * len(kinds))
        query = f"SELECT t, kind, subject, fields FROM events WHERE kind IN ({marks}) ORDER BY rowid DESC LIMIT ?"
        rows = self._query(query, *kinds, most)
        return [RunEvent(t, kind, subject, json.loads(fields)) for t, kind, subject, fields in rows]

    def events(self, kind: str | None = None) -> list[RunEvent]:
        rows = self._query(
            "SELECT t, kind, subject, fields FROM events WHERE ? IS NULL OR kind = ? ORDER BY t, rowid", kind, kind
        )
        return [RunEvent(t, k, subject, json.loads(fields)) for t, k, subject, fields in rows]

    def last_event(self, kind: str) -> RunEvent | None:
        """The latest event of a kind."""
        rows = self._query(
            "SELECT t, subject, fields FROM events WHERE kind = ? ORDER BY t DESC, rowid DESC LIMIT 1", kind
        )
        return next((RunEvent(t, kind, subject, json.loads(fields)) for t, subject, fields in rows), None)

    def events_after(self, row: int, *kinds: str) -> tuple[int, list[RunEvent]]:
        """Events of these kinds that were written after the row `row` (0: all), and the last row that was written: for
        readers that follow a run."""
        (last,) = self._query("SELECT coalesce(max(rowid), 0) FROM events")[0]
        rows = self._query(
            f"""SELECT t, kind, subject, fields FROM events WHERE rowid > ? AND rowid <= ?
            AND kind IN ({", ".join("?" * len(kinds))}) ORDER BY rowid""",
            row,
            last,
            *kinds,
        )
        return last, [RunEvent(t, kind, subject, json.loads(fields)) for t, kind, subject, fields in rows]

    def utc(self) -> UtcTimes:
        """UTC times of the run. A ledger without them (a simulation, or an earlier version of rollart) ended when its
        file was last changed."""
        starts = [(event.t, float(event.fields["unix_s"] or 0.0)) for event in self.events(UTC_CLOCK)]
        return UtcTimes(starts or [(self.facts().seconds, self._path.stat().st_mtime)])

    def interval_hours(self, utc: UtcTimes) -> list[HourSum]:
        """Intervals by (hour of UTC, role, resource, state, cause, price): each is cut at the hours."""
        start = utc.sql("t0")
        rows = self._cursor(
            f"""SELECT CAST(start / {HOUR_S} AS INTEGER) AS hour, role, resource, state, cause, price,
            sum(seconds * units), 0.0, 0.0, 0.0
            FROM (SELECT *, {start} AS start, t1 - t0 AS seconds FROM intervals)
            WHERE hour = CAST((start + seconds) / {HOUR_S} AS INTEGER)
            GROUP BY hour, role, resource, state, cause, price
            UNION ALL
            SELECT CAST(start / {HOUR_S} AS INTEGER) AS hour, role, resource, state, cause, price, 0.0,
            start, seconds, units
            FROM (SELECT *, {start} AS start, t1 - t0 AS seconds FROM intervals)
            WHERE hour <> CAST((start + seconds) / {HOUR_S} AS INTEGER)"""
        )
        sums: dict[tuple[int, str, str, str, str, float], float] = {}
        for hour, role, resource, state, cause, price, unit_seconds, start_s, seconds, units in rows:
            if not seconds:
                key = (hour, role, resource, state, cause, price)
                sums[key] = sums.get(key, 0.0) + unit_seconds
            for n, part in hourly_parts(start_s, start_s + seconds) if seconds else ():
                key = (n, role, resource, state, cause, price)
                sums[key] = sums.get(key, 0.0) + part * units
        return [HourSum(*key, unit_seconds) for key, unit_seconds in sorted(sums.items())]

    def invocation_hours(self, utc: UtcTimes) -> list[tuple[int, InvocationSum]]:
        """`invocation_sums` by the hour of UTC in which the calls began."""
        rows = self._query(
            f"""SELECT CAST({utc.sql("t0")} / {HOUR_S} AS INTEGER) AS hour, function, provider, memory_mb, status,
            count(*), sum(items), sum(cold_start_s > 0), sum(cold_start_s), sum(billed_s), cause, sum(cold_billed_s)
            FROM invocations GROUP BY hour, function, provider, memory_mb, status, cause
            ORDER BY hour, function, provider, memory_mb, status, cause"""
        )
        return [(hour, InvocationSum(*row)) for hour, *row in rows]

    def token_hours(self, utc: UtcTimes) -> list[tuple[int, TokenSum]]:
        """`token_sums` by hour of UTC."""
        rows = self._query(
            f"""SELECT CAST({utc.sql("t")} / {HOUR_S} AS INTEGER) AS hour, function, cause, {TOKEN_SUMS} FROM tokens
            GROUP BY hour, function, cause, endpoint, model ORDER BY hour, function, endpoint, model, cause"""
        )
        return [(hour, TokenSum(function, cause, TokenUsage(*usage))) for hour, function, cause, *usage in rows]

    def worker_hours(self, utc: UtcTimes) -> list[tuple[int, WorkerSum]]:
        """`worker_sums` by the hour of UTC of the minutes by which they are kept."""
        rows = self._query(
            f"""SELECT CAST({utc.sql(f"minute * {MINUTE_S}")} / {HOUR_S} AS INTEGER) AS hour, function, provider,
            memory_mb, state, sum(seconds) FROM worker_time GROUP BY hour, function, provider, memory_mb, state
            ORDER BY hour, function, provider, memory_mb, state"""
        )
        return [(hour, WorkerSum(*row)) for hour, *row in rows]

    def kept(self, ids: Collection[str] | None = None) -> Iterator[KeptTrajectory]:
        """The kept trajectories in the order in which they ended, all or those with these ids; none for a run with
        `keep: none`."""
        try:
            yield from read_kept(self._connection, self._path.parent, ids)
        except sqlite3.Error as error:
            raise self._failed(error) from None

    def close(self) -> None:
        self._connection.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _cursor(self, sql: str, *parameters: object) -> Iterator[Any]:
        """Rows of a result that may be too large for a list."""
        try:
            yield from self._connection.execute(sql, parameters)
        except sqlite3.Error as error:
            raise self._failed(error) from None

    def _rows(self, kind: Callable[..., R], sql: str, *parameters: object) -> list[R]:
        return [kind(*row) for row in self._cursor(sql, *parameters)]

    def _query(self, sql: str, *parameters: object) -> list[Any]:
        return list(self._cursor(sql, *parameters))

    def _failed(self, error: sqlite3.Error) -> StorageFailed:
        return StorageFailed(f"{self._path}: {error}", remedy="check that the run directory is whole and readable")
