"""The ledger's tables, and the row of each kind of record. All SQL that writes is here."""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollart.errors import RunFailed
from rollart.ledger.codec import encode_sample
from rollart.ledger.segments import INLINE_LIMIT, PayloadFiles
from rollart.model import AbortReason, Group, TrainSample
from rollart.ports import FINISHED, Charge, Interval, RunEvent
from serverless.meter import Saving, WorkerSpan
from serverless.types import Invocation

__all__ = [
    "OLDER",
    "SCHEMA",
    "SCHEMA_VERSION",
    "UPGRADES",
    "Measure",
    "FlushRows",
    "admit",
    "commit",
    "drop",
    "finish",
    "forget",
    "insert",
    "outdate",
    "stamps",
]

SCHEMA_VERSION = 4

LIVE, CONSUMED, DROPPED = 0, 1, 2
"""States of groups and samples. A group leaves LIVE once, with its samples (I6)."""

Measure = Callable[[Sequence[int]], int]
"""Number of tokens that ids represent."""

STAMP = "stamp:"
"""Prefix of a version's number: the key of its stamp."""

MINUTE_S = 60.0
"""Worker time is kept by the minute: a row per function and state, independent of the number of calls."""

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE intervals (
  role TEXT NOT NULL, resource TEXT NOT NULL, t0 REAL NOT NULL, t1 REAL NOT NULL, state TEXT NOT NULL,
  cause TEXT NOT NULL, units REAL NOT NULL, price REAL NOT NULL);
CREATE TABLE events (t REAL NOT NULL, kind TEXT NOT NULL, subject TEXT NOT NULL, fields TEXT NOT NULL);
CREATE TABLE trajectories (
  id TEXT NOT NULL, domain TEXT NOT NULL, outcome TEXT NOT NULL, v0 INTEGER NOT NULL, engine_seconds REAL NOT NULL,
  turns INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, action_tokens INTEGER NOT NULL, success INTEGER, score REAL,
  purpose TEXT NOT NULL, first_tokens INTEGER NOT NULL, reset_s REAL NOT NULL, env_s REAL NOT NULL,
  t0 REAL NOT NULL, t1 REAL NOT NULL);
CREATE TABLE invocations (
  function TEXT NOT NULL, provider TEXT NOT NULL, worker TEXT NOT NULL, t0 REAL NOT NULL, t1 REAL NOT NULL,
  cold_start_s REAL NOT NULL, billed_s REAL NOT NULL, memory_mb INTEGER NOT NULL, items INTEGER NOT NULL,
  status TEXT NOT NULL, cause TEXT NOT NULL, provider_id TEXT NOT NULL, queued_s REAL NOT NULL,
  cold_billed_s REAL NOT NULL);
CREATE TABLE savings (
  function TEXT NOT NULL, stage TEXT NOT NULL, t REAL NOT NULL, items INTEGER NOT NULL, billed_s REAL NOT NULL,
  memory_mb INTEGER NOT NULL);
CREATE TABLE worker_time (
  function TEXT NOT NULL, provider TEXT NOT NULL, memory_mb INTEGER NOT NULL, state TEXT NOT NULL,
  minute INTEGER NOT NULL, seconds REAL NOT NULL, spans INTEGER NOT NULL,
  PRIMARY KEY (function, provider, memory_mb, state, minute)) WITHOUT ROWID;
CREATE TABLE groups (
  id TEXT PRIMARY KEY, domain TEXT NOT NULL, seed INTEGER NOT NULL, state INTEGER NOT NULL DEFAULT 0,
  reason TEXT NOT NULL DEFAULT '', version INTEGER);
CREATE TABLE samples (
  id TEXT PRIMARY KEY, grp TEXT NOT NULL, domain TEXT NOT NULL, v0 INTEGER NOT NULL, tokens INTEGER NOT NULL,
  action_tokens INTEGER NOT NULL, state INTEGER NOT NULL DEFAULT 0, version INTEGER, payload BLOB, segment INTEGER,
  offset INTEGER);
CREATE INDEX samples_of_group ON samples (grp);
CREATE TABLE versions (version INTEGER PRIMARY KEY, step INTEGER NOT NULL, groups INTEGER NOT NULL,
  samples INTEGER NOT NULL, tokens INTEGER NOT NULL, metrics TEXT NOT NULL);
"""

UPGRADES: Mapping[int, tuple[str, ...]] = {
    3: (
        "ALTER TABLE invocations ADD COLUMN queued_s REAL NOT NULL DEFAULT 0",
        "ALTER TABLE invocations ADD COLUMN cold_billed_s REAL NOT NULL DEFAULT 0",
        "UPDATE invocations SET cold_billed_s = min(cold_start_s, billed_s)",
        """CREATE TABLE worker_time (
          function TEXT NOT NULL, provider TEXT NOT NULL, memory_mb INTEGER NOT NULL, state TEXT NOT NULL,
          minute INTEGER NOT NULL, seconds REAL NOT NULL, spans INTEGER NOT NULL,
          PRIMARY KEY (function, provider, memory_mb, state, minute)) WITHOUT ROWID""",
    )
}
"""By version: the statements that upgrade a file to the next version, for a resume."""

OLDER: Mapping[int, tuple[str, ...]] = {
    3: (
        """CREATE TEMP VIEW invocations AS SELECT *, 0.0 AS queued_s, min(cold_start_s, billed_s) AS cold_billed_s
        FROM main.invocations""",
        """CREATE TEMP TABLE worker_time (function TEXT, provider TEXT, memory_mb INTEGER, state TEXT, minute INTEGER,
        seconds REAL, spans INTEGER)""",
    )
}
"""By version: views that make a file's tables look current to a reader. The file is not changed."""


class FlushRows:
    """Rows of one flush, by table."""

    def __init__(
        self, recorded: Sequence[Interval | RunEvent | Invocation | Saving | WorkerSpan | Charge], shift: float
    ) -> None:
        """`shift` converts the loop's seconds to the run's."""
        self.intervals: list[tuple[Any, ...]] = []
        self.events: list[tuple[Any, ...]] = []
        self.charges: list[tuple[Any, ...]] = []
        self.invocations: list[tuple[Any, ...]] = []
        self.calls: list[Invocation] = []
        self.savings: list[tuple[Any, ...]] = []
        self.worker_time: dict[tuple[str, str, int, str, int], list[float]] = {}
        """Seconds and spans by (function, provider, memory, state, minute of the run in which they ended)."""
        self.usd = 0.0
        """Cost of the intervals."""
        for row in recorded:
            match row:
                case Interval():
                    self.usd += row.usd
                    self.intervals.append(
                        (
                            row.role,
                            row.resource,
                            row.t0 + shift,
                            row.t1 + shift,
                            row.state,
                            row.cause,
                            row.units,
                            row.price_usd_per_unit_hour,
                        )
                    )
                case Charge():
                    self.charges.append(
                        (
                            row.trajectory,
                            row.domain,
                            row.outcome,
                            row.v0,
                            row.engine_seconds,
                            row.turns,
                            row.prompt_tokens,
                            row.action_tokens,
                            row.success,
                            row.score,
                            row.purpose,
                            row.first_tokens,
                            row.reset_s,
                            row.env_s,
                            row.t0 + shift,
                            row.t1 + shift,
                        )
                    )
                case RunEvent():
                    self.events.append((row.t + shift, row.kind, row.subject, json.dumps(dict(row.fields))))
                case Invocation():
                    self.calls.append(row)
                    self.invocations.append(
                        (
                            row.function,
                            row.provider,
                            row.worker,
                            row.t0 + shift,
                            row.t1 + shift,
                            row.cold_start_s,
                            row.billed_s,
                            row.memory_mb,
                            row.items,
                            row.status,
                            row.cause,
                            row.provider_id,
                            row.queued_s,
                            row.start_billed_s,
                        )
                    )
                case Saving():
                    self.savings.append(
                        (row.function, row.stage, row.t + shift, row.items, row.billed_s, row.memory_mb)
                    )
                case WorkerSpan():
                    self._add(row, row.t1 + shift)

    def _add(self, span: WorkerSpan, end: float) -> None:
        """Add a span to its sum; spans are not kept, because there are two per call."""
        key = (span.function, span.provider, span.memory_mb, str(span.state), int(end // MINUTE_S))
        sums = self.worker_time.setdefault(key, [0.0, 0])
        sums[0] += span.t1 - span.t0
        sums[1] += 1


def insert(connection: sqlite3.Connection, rows: FlushRows) -> None:
    """Append the recorded rows."""
    connection.executemany("INSERT INTO intervals VALUES (?,?,?,?,?,?,?,?)", rows.intervals)
    connection.executemany("INSERT INTO events VALUES (?,?,?,?)", rows.events)
    connection.executemany("INSERT INTO trajectories VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)", rows.charges)
    connection.executemany("INSERT INTO invocations VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)", rows.invocations)
    connection.executemany("INSERT INTO savings VALUES (?,?,?,?,?,?)", rows.savings)
    connection.executemany(
        "INSERT INTO worker_time VALUES (?,?,?,?,?,?,?) ON CONFLICT DO UPDATE SET "
        "seconds = seconds + excluded.seconds, spans = spans + excluded.spans",
        [(*key, *sums) for key, sums in rows.worker_time.items()],
    )


def admit(connection: sqlite3.Connection, group: str, domain: str, seed: int) -> None:
    """Record an admitted group. Admitting the same live group again (a resume) changes nothing."""
    known = connection.execute("SELECT domain, seed, state FROM groups WHERE id = ?", (group,)).fetchone()
    if known is None:
        connection.execute("INSERT INTO groups (id, domain, seed) VALUES (?,?,?)", (group, domain, seed))
    elif known != (domain, seed, LIVE):
        raise RunFailed(f"group {group} was admitted before, as {known} (rule: a group's id is used once)")


def finish(connection: sqlite3.Connection, segments: PayloadFiles, sample: TrainSample, measure: Measure = len) -> None:
    """Store a finished sample. A sample of a dropped group counts as dropped.

    The same id replaces a live sample (a resumed run repeats stale work) and never a consumed one.
    """
    if connection.execute("SELECT 1 FROM samples WHERE id = ?", (sample.id,)).fetchone() is not None:
        outdate(connection, sample.id)
    payload: bytes | None = encode_sample(sample)
    segment: int | None = None
    offset: int | None = None
    assert payload is not None
    if len(payload) > INLINE_LIMIT:
        segment, offset = segments.append(payload)
        payload = None
    group = connection.execute("SELECT state FROM groups WHERE id = ?", (sample.group,)).fetchone()
    state = LIVE if group is None or group[0] == LIVE else DROPPED
    done = connection.execute(
        "INSERT INTO samples VALUES (?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT (id) DO UPDATE SET grp = excluded.grp, "
        "v0 = excluded.v0, tokens = excluded.tokens, action_tokens = excluded.action_tokens, state = excluded.state, "
        f"payload = excluded.payload, segment = excluded.segment, offset = excluded.offset WHERE state = {LIVE}",
        (
            sample.id,
            sample.group,
            sample.domain,
            sample.v0,
            measure(sample.token_ids),
            _with_loss(sample, measure),
            state,
            None,
            payload,
            segment,
            offset,
        ),
    )
    if done.rowcount != 1:
        raise RunFailed(f"sample {sample.id} finished after it was trained or dropped (rule: an id is used once)")


def outdate(connection: sqlite3.Connection, trajectory: str) -> None:
    """A finished trajectory became stale. Rare: there is no index on the ids of trajectories."""
    connection.execute(
        "UPDATE trajectories SET outcome = ? WHERE id = ? AND outcome = ?",
        (str(AbortReason.STALE), trajectory, FINISHED),
    )


def drop(connection: sqlite3.Connection, group: str, reason: str) -> None:
    """Drop the group with its samples. The first reason is kept."""
    state = connection.execute("SELECT state FROM groups WHERE id = ?", (group,)).fetchone()
    if state is None:
        raise RunFailed(f"group {group} is dropped but was never admitted")
    if state[0] == CONSUMED:
        raise RunFailed(f"group {group} is dropped after it was trained (rule: consumed or dropped, once)")
    if state[0] == LIVE:
        connection.execute("UPDATE groups SET state = ?, reason = ? WHERE id = ?", (DROPPED, reason, group))
        connection.execute("UPDATE samples SET state = ?, payload = NULL WHERE grp = ?", (DROPPED, group))


def commit(
    connection: sqlite3.Connection,
    version: int,
    step: int,
    consumed: Sequence[Group],
    metrics: Mapping[str, float],
    measure: Measure = len,
    *,
    stamp: str = "",
) -> None:
    """Consume groups into a version. RunFailed, and nothing changes, if a sample is not live or the version is old."""
    last = connection.execute("SELECT max(version) FROM versions").fetchone()[0]
    if last is not None and version <= last:
        raise RunFailed(f"version {version} is committed after version {last} (rule: versions grow)")
    samples = [sample for group in consumed for sample in group.samples]
    _consume(connection, "samples", [s.id for s in samples], version)
    _consume(connection, "groups", [g.id for g in consumed], version)
    # The remaining live samples of these groups are superseded attempts: they will never be trained.
    connection.executemany(
        f"UPDATE samples SET state = {DROPPED}, payload = NULL WHERE grp = ? AND state = {LIVE}",
        [(g.id,) for g in consumed],
    )
    connection.execute(
        "INSERT INTO versions VALUES (?,?,?,?,?,?)",
        (
            version,
            step,
            len(consumed),
            len(samples),
            sum(_with_loss(s, measure) for s in samples),
            json.dumps(dict(metrics)),
        ),
    )
    if stamp:
        connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"{STAMP}{version}", stamp))


def stamps(connection: sqlite3.Connection) -> dict[int, str]:
    """Stamps of the content of committed versions; ledgers of older releases have none."""
    rows = connection.execute("SELECT key, value FROM meta WHERE key GLOB ?", (f"{STAMP}*",))
    return {int(key.removeprefix(STAMP)): stamp for key, stamp in rows}


def forget(connection: sqlite3.Connection, version: int) -> None:
    """Delete the versions after this one."""
    connection.execute("DELETE FROM versions WHERE version > ?", (version,))
    later = [(f"{STAMP}{known}",) for known in stamps(connection) if known > version]
    connection.executemany("DELETE FROM meta WHERE key = ?", later)


def _with_loss(sample: TrainSample, measure: Measure) -> int:
    if measure is len:
        return sum(sample.loss_mask)
    return measure(tuple(itertools.compress(sample.token_ids, sample.loss_mask)))


def _consume(connection: sqlite3.Connection, table: str, ids: Sequence[str], version: int) -> None:
    extra = ", payload = NULL" if table == "samples" else ""
    before = connection.total_changes
    connection.executemany(
        f"UPDATE {table} SET state = {CONSUMED}, version = ?{extra} WHERE id = ? AND state = {LIVE}",
        [(version, id_) for id_ in ids],
    )
    if connection.total_changes - before == len(ids):
        return
    for id_ in ids:
        row = connection.execute(f"SELECT state, version FROM {table} WHERE id = ?", (id_,)).fetchone()
        if row != (CONSUMED, version):
            status = (
                "is not in the ledger"
                if row is None
                else (f"was trained into version {row[1]}" if row[0] == CONSUMED else "was dropped")
            )
            raise RunFailed(f"{table[:-1]} {id_} is to be trained into version {version}, but it {status}")
    raise RunFailed(f"a {table[:-1]} is twice in the batch of version {version} (rule: none is trained twice)")
