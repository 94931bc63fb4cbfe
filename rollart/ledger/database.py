"""The ledger's database file: its tables, opening, repair after a crash, and one transaction per flush. All SQL that
writes is here, and in `kept` for kept trajectories. No threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from operator import attrgetter
from pathlib import Path
from typing import Any

from rollart.errors import RollartError, RunFailed, StorageFailed, UsageError
from rollart.ledger.intervals import RESOURCE_CLOSED, RESOURCE_OPENED, ResourceState
from rollart.ledger.kept import KeptRow, KeptTrajectories
from rollart.ledger.payloads import INLINE_LIMIT, PayloadDamaged, PayloadFiles, decode_sample, encode_sample
from rollart.model import AbortReason, Group, TrainSample
from rollart.ports import FINISHED, Charge, Interval, Recovered, RunEvent
from rollart.settings.prices import PriceList, function_gpus
from serverless.meter import Saving, TokenBill, WorkerSpan, WorkerState
from serverless.types import Invocation, TokenUsage

FILE = "ledger.sqlite"

SEGMENTS = "segments"
"""Directory of the payloads above `INLINE_LIMIT`."""

SCHEMA_VERSION = 6

LIVE, CONSUMED, DROPPED = 0, 1, 2
"""States of groups and samples. A group leaves LIVE once, with its samples (I6)."""

STAMP = "stamp:"
"""Prefix of a version's number: the key of its stamp."""

MINUTE_S = 60.0
"""Worker time is kept by the minute: a row per function and state, independent of the number of calls."""

WORKER_TIME = """
CREATE TABLE worker_time (
  function TEXT NOT NULL, provider TEXT NOT NULL, memory_mb INTEGER NOT NULL, state TEXT NOT NULL,
  minute INTEGER NOT NULL, seconds REAL NOT NULL, spans INTEGER NOT NULL,
  PRIMARY KEY (function, provider, memory_mb, state, minute)) WITHOUT ROWID;
"""

TOKENS = """
CREATE TABLE tokens (
  function TEXT NOT NULL, provider TEXT NOT NULL, t REAL NOT NULL, cause TEXT NOT NULL, endpoint TEXT NOT NULL,
  model TEXT NOT NULL, requests INTEGER NOT NULL, input_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
  cache_write_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL);
"""
"""A row per answered call, endpoint and model."""

SCHEMA = f"""{WORKER_TIME}{TOKENS}
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE intervals (
  role TEXT NOT NULL, resource TEXT NOT NULL, t0 REAL NOT NULL, t1 REAL NOT NULL, state TEXT NOT NULL,
  cause TEXT NOT NULL, units REAL NOT NULL, price REAL NOT NULL);
CREATE TABLE events (t REAL NOT NULL, kind TEXT NOT NULL, subject TEXT NOT NULL, fields TEXT NOT NULL);
CREATE TABLE trajectories (
  id TEXT NOT NULL, domain TEXT NOT NULL, outcome TEXT NOT NULL, v0 INTEGER NOT NULL, engine_seconds REAL NOT NULL,
  turns INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, action_tokens INTEGER NOT NULL, success INTEGER, score REAL,
  purpose TEXT NOT NULL, first_tokens INTEGER NOT NULL, reset_s REAL NOT NULL, env_s REAL NOT NULL,
  t0 REAL NOT NULL, t1 REAL NOT NULL, reward_s REAL);
CREATE TABLE invocations (
  function TEXT NOT NULL, provider TEXT NOT NULL, worker TEXT NOT NULL, t0 REAL NOT NULL, t1 REAL NOT NULL,
  cold_start_s REAL NOT NULL, billed_s REAL NOT NULL, memory_mb INTEGER NOT NULL, items INTEGER NOT NULL,
  status TEXT NOT NULL, cause TEXT NOT NULL, provider_id TEXT NOT NULL, queued_s REAL NOT NULL,
  cold_billed_s REAL NOT NULL);
CREATE TABLE savings (
  function TEXT NOT NULL, stage TEXT NOT NULL, t REAL NOT NULL, items INTEGER NOT NULL, billed_s REAL NOT NULL,
  memory_mb INTEGER NOT NULL);
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

TOKEN_SUMS = """endpoint, model, sum(requests), sum(input_tokens), sum(cached_tokens), sum(cache_write_tokens),
sum(output_tokens)"""
"""Columns of a `TokenUsage` over a group of rows."""

UPGRADES: Mapping[int, tuple[str, ...]] = {
    3: (
        "ALTER TABLE invocations ADD COLUMN queued_s REAL NOT NULL DEFAULT 0",
        "ALTER TABLE invocations ADD COLUMN cold_billed_s REAL NOT NULL DEFAULT 0",
        "UPDATE invocations SET cold_billed_s = min(cold_start_s, billed_s)",
        WORKER_TIME,
    ),
    4: (TOKENS,),
    5: ("ALTER TABLE trajectories ADD COLUMN reward_s REAL",),
}
"""By version: the statements that upgrade a file to the next version, for a resume."""

_NO_TOKENS = """CREATE TEMP TABLE tokens (function TEXT, provider TEXT, t REAL, cause TEXT, endpoint TEXT, model TEXT,
    requests INTEGER, input_tokens INTEGER, cached_tokens INTEGER, cache_write_tokens INTEGER, output_tokens INTEGER)"""

_NO_REWARD_SECONDS = "CREATE TEMP VIEW trajectories AS SELECT *, NULL AS reward_s FROM main.trajectories"

OLDER: Mapping[int, tuple[str, ...]] = {
    3: (
        """CREATE TEMP VIEW invocations AS SELECT *, 0.0 AS queued_s, min(cold_start_s, billed_s) AS cold_billed_s
        FROM main.invocations""",
        """CREATE TEMP TABLE worker_time (function TEXT, provider TEXT, memory_mb INTEGER, state TEXT, minute INTEGER,
        seconds REAL, spans INTEGER)""",
        _NO_TOKENS,
        _NO_REWARD_SECONDS,
    ),
    4: (_NO_TOKENS, _NO_REWARD_SECONDS),
    5: (_NO_REWARD_SECONDS,),
}
"""By version: views that make a file's tables look current to a reader. The file is not changed."""

Measure = Callable[[Sequence[int]], int]
"""Number of tokens that ids represent."""

Operation = Callable[["Database"], Any]
"""A change with a waiting caller, run inside the flush's transaction."""

_Insertion = tuple[str, Callable[[Any], tuple[Any, ...]]]
"""A statement that inserts a row, and the row's values."""


def _insertion(table: str, names: str, row: Callable[[Any], tuple[Any, ...]] | None = None) -> _Insertion:
    """The statement that inserts a row with the attributes `names`, in the order of the table's columns, and their
    values. The row's last parameter converts the loop's seconds to the run's."""
    columns = names.split()
    shift = f"?{len(columns) + 1}"
    values = (f"?{n} + {shift}" if name in ("t", "t0", "t1") else f"?{n}" for n, name in enumerate(columns, 1))
    return f"INSERT INTO {table} VALUES ({', '.join(values)})", row or attrgetter(*columns)


_INSERTIONS: Mapping[type, _Insertion] = {
    Interval: _insertion("intervals", "role resource t0 t1 state cause units price_usd_per_unit_hour"),
    Charge: _insertion(
        "trajectories",
        "trajectory domain outcome v0 engine_seconds turns prompt_tokens action_tokens success score purpose "
        "first_tokens reset_s env_s t0 t1 reward_s",
    ),
    Invocation: _insertion(
        "invocations",
        "function provider worker t0 t1 cold_start_s billed_s memory_mb items status cause provider_id queued_s "
        "start_billed_s",
    ),
    Saving: _insertion("savings", "function stage t items billed_s memory_mb"),
    TokenBill: _insertion(
        "tokens",
        "function provider t cause endpoint model requests input_tokens cached_tokens cache_write_tokens output_tokens",
        lambda bill: (bill.function, bill.provider, bill.t, bill.cause, *astuple(bill.usage)),
    ),
    RunEvent: _insertion(
        "events", "t kind subject fields", lambda e: (e.t, e.kind, e.subject, json.dumps(dict(e.fields)))
    ),
}


class Database:
    """One run's ledger file, opened for writing by exactly one process (enforced by a file lock).

    `now` is the loop's second at opening; it becomes the run's last known second, `clock` (0 for a new run), so that
    times in the file continue where a resumed run stopped. Opening closes the intervals that a crash cut off. Without
    `sync` a transaction survives kill -9 but not a power cut. `kept_mb`: bound of the kept trajectories, 0 for a
    run that keeps none.

    Errors: StorageFailed for any error of the disk or SQLite; UsageError when another process holds the run.
    """

    def __init__(
        self,
        directory: Path,
        *,
        now: float,
        config: Mapping[str, Any] | None = None,
        prices: PriceList | None = None,
        sync: bool = True,
        measure: Measure = len,
        kept_mb: float = 0.0,
    ) -> None:
        self.directory = directory
        self._prices, self._sync, self._measure = prices, sync, measure
        self._gpus = function_gpus(config or {})
        self.published = False
        """A version was committed since the last checkpoint."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(directory / "ledger.lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StorageFailed(
                f"{directory}: the run directory cannot be written: {error.strerror}",
                remedy="choose another place with --runs-dir",
            ) from None
        try:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError(
                    f"{directory}: another process is writing this run", remedy="wait for it, or `rollart stop` it"
                ) from None
            with self._storage_errors():
                self.segments = PayloadFiles(directory / SEGMENTS)
                self.connection = self._open(config, "FULL" if sync else "NORMAL")
                self.clock: float = self._one(
                    """SELECT max(0.0, coalesce(max(t), 0.0)) FROM (SELECT max(t1) AS t FROM intervals
                    UNION ALL SELECT max(t) FROM events UNION ALL SELECT max(t1) FROM trajectories)"""
                )[0]
                self._shift = self.clock - now
                self.kept = KeptTrajectories(self.connection, directory, kept_mb) if kept_mb else None
                self._heal()
                self.functions_usd = self._spent_on_functions()
                (devices_usd,) = self._one("SELECT sum((t1 - t0) * units * price / 3600.0) FROM intervals")
                self.spent_usd = (devices_usd or 0.0) + self.functions_usd
        except BaseException:
            os.close(self._lock)
            raise

    def write(self, recorded: Sequence[Any], operations: Sequence[Operation]) -> list[Any]:
        """Write everything in one durable transaction; returns the operations' results, or the RollartError of a
        refused one.

        A refused operation leaves no trace and the others stand. StorageFailed means that nothing was written, or that
        the file could not be brought up to date after it was.
        """
        results: list[Any] = []
        try:
            with self._storage_errors():
                self.connection.execute("BEGIN IMMEDIATE")
                self.insert(recorded)
                for operation in operations:
                    results.append(self._guarded(operation))
                if self.kept is not None:
                    self.kept.seal()
                self.segments.sync()
                self.connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # the first error is more informative
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
            raise
        self._clean_up()
        devices = functions = 0.0
        for row in recorded:
            match row:
                case Interval():
                    devices += row.usd
                case Invocation():
                    functions += self._bill(row.function, row.provider, row.billed_s, row.memory_mb, 1)
                case TokenBill() if self._prices is not None:
                    functions += self._prices.token_usd(row.usage)
                case WorkerSpan(state=WorkerState.IDLE):
                    functions += self._bill(row.function, row.provider, row.t1 - row.t0, row.memory_mb)
        self.functions_usd += functions
        self.spent_usd += devices + functions
        return results

    def _clean_up(self) -> None:
        """Delete files without references after a transaction, and keep the write-ahead log short."""
        with self._storage_errors():
            if self.kept is not None:
                self.kept.committed()
            if self.segments.rolled:
                # Delete segment files whose samples are all trained or dropped: once per file, so a scan is cheap.
                live = self.connection.execute(
                    f"SELECT DISTINCT segment FROM samples WHERE state = {LIVE} AND segment IS NOT NULL"
                )
                self.segments.keep({segment for (segment,) in live})
            if self.published:
                self.published = False
                if self._sync:  # without it there is no crash to prepare for
                    # Move committed pages from the write-ahead log into the database file: the log is an additional
                    # file that can be lost. Readers may limit the checkpoint; the next publish continues it.
                    self.connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def insert(self, recorded: Sequence[Any]) -> None:
        """Append recorded rows within the open transaction."""
        rows: dict[type, list[tuple[Any, ...]]] = defaultdict(list)
        kept: list[KeptRow] = []
        # Seconds and spans by (function, provider, memory, state, minute of the run in which they ended). Single spans
        # are not kept, because there are two per call.
        worker_time: dict[tuple[str, str, int, str, int], list[float]] = defaultdict(lambda: [0.0, 0])
        for row in recorded:
            if isinstance(row, WorkerSpan):
                minute = int((row.t1 + self._shift) // MINUTE_S)
                sums = worker_time[row.function, row.provider, row.memory_mb, str(row.state), minute]
                sums[0] += row.t1 - row.t0
                sums[1] += 1
            else:
                if isinstance(row, KeptRow):
                    kept.append(row)
                    row = row.charge
                kind = type(row)
                rows[kind].append((*_INSERTIONS[kind][1](row), self._shift))
        for kind, values in rows.items():
            self.connection.executemany(_INSERTIONS[kind][0], values)
        if self.kept is not None and kept:
            self.kept.add(kept, self._shift)
        self.connection.executemany(
            "INSERT INTO worker_time VALUES (?,?,?,?,?,?,?) ON CONFLICT DO UPDATE SET "
            "seconds = seconds + excluded.seconds, spans = spans + excluded.spans",
            [(*key, *sums) for key, sums in worker_time.items()],
        )

    def admit(self, group: str, domain: str, seed: int) -> None:
        """Record an admitted group. Admitting the same live group again (a resume) changes nothing."""
        known = self._one("SELECT domain, seed, state FROM groups WHERE id = ?", group)
        if known is None:
            self.connection.execute("INSERT INTO groups (id, domain, seed) VALUES (?,?,?)", (group, domain, seed))
        elif known != (domain, seed, LIVE):
            raise RunFailed(f"group {group} was admitted before, as {known} (rule: a group's id is used once)")

    def finish(self, sample: TrainSample) -> None:
        """Store a finished sample. A sample of a dropped group counts as dropped.

        The same id replaces a live sample (a resumed run repeats stale work) and never a consumed one.
        """
        if self._one("SELECT 1 FROM samples WHERE id = ?", sample.id) is not None:
            self.outdate(sample.id)
        encoded = encode_sample(sample)
        payload = (encoded, None, None) if len(encoded) <= INLINE_LIMIT else (None, *self.segments.append(encoded))
        group = self._one("SELECT state FROM groups WHERE id = ?", sample.group)
        state = LIVE if group is None or group[0] == LIVE else DROPPED
        tokens, sampled = self._measure(sample.token_ids), self._with_loss(sample)
        done = self.connection.execute(
            "INSERT INTO samples VALUES (?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT (id) DO UPDATE SET "
            "grp = excluded.grp, v0 = excluded.v0, tokens = excluded.tokens, action_tokens = excluded.action_tokens, "
            "state = excluded.state, "
            f"payload = excluded.payload, segment = excluded.segment, offset = excluded.offset WHERE state = {LIVE}",
            (sample.id, sample.group, sample.domain, sample.v0, tokens, sampled, state, None, *payload),
        )
        if done.rowcount != 1:
            raise RunFailed(f"sample {sample.id} finished after it was trained or dropped (rule: an id is used once)")

    def outdate(self, trajectory: str) -> None:
        """A finished trajectory became stale. Rare: there is no index on the ids of trajectories."""
        self.connection.execute(
            "UPDATE trajectories SET outcome = ? WHERE id = ? AND outcome = ?",
            (str(AbortReason.STALE), trajectory, FINISHED),
        )

    def drop(self, group: str, reason: str) -> None:
        """Drop the group with its samples. The first reason is kept."""
        state = self._one("SELECT state FROM groups WHERE id = ?", group)
        if state is None:
            raise RunFailed(f"group {group} is dropped but was never admitted")
        if state[0] == CONSUMED:
            raise RunFailed(f"group {group} is dropped after it was trained (rule: consumed or dropped, once)")
        if state[0] == LIVE:
            self._drop_group(group, reason)

    def commit(
        self, version: int, step: int, consumed: Sequence[Group], metrics: Mapping[str, float], stamp: str
    ) -> None:
        """Consume groups into a version. RunFailed, and nothing changes, if a sample is not live or the version is
        old."""
        (last,) = self._one("SELECT max(version) FROM versions")
        if last is not None and version <= last:
            raise RunFailed(f"version {version} is committed after version {last} (rule: versions grow)")
        samples = [sample for group in consumed for sample in group.samples]
        self._consume("samples", [s.id for s in samples], version)
        self._consume("groups", [g.id for g in consumed], version)
        # The remaining live samples of these groups are superseded attempts: they will never be trained.
        self.connection.executemany(
            f"UPDATE samples SET state = {DROPPED}, payload = NULL WHERE grp = ? AND state = {LIVE}",
            [(g.id,) for g in consumed],
        )
        count, tokens = len(samples), sum(map(self._with_loss, samples))
        if not consumed:  # given samples, which have no rows: the trainer counts them
            count, tokens = int(metrics.get("samples", 0)), int(metrics.get("trained_tokens", 0))
        self.connection.execute(
            "INSERT INTO versions VALUES (?,?,?,?,?,?)",
            (version, step, len(consumed), count, tokens, json.dumps(dict(metrics))),
        )
        if stamp:
            self.connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"{STAMP}{version}", stamp))
        self.published = True

    def recover(self) -> Recovered | None:
        """See `Journal.recover`; `clock` is the run's second at opening."""
        last = self._one("SELECT version, step FROM versions ORDER BY version DESC LIMIT 1")
        if last is None:
            return None
        rows = self.connection.execute(
            f"SELECT s.grp, s.payload, s.segment, s.offset FROM samples s LEFT JOIN groups g ON g.id = s.grp "
            f"WHERE s.state = {LIVE} AND coalesce(g.state, {LIVE}) = {LIVE} ORDER BY s.rowid"
        ).fetchall()
        self.segments.keep({segment for _, _, segment, _ in rows if segment is not None})
        samples: list[TrainSample] = []
        damaged: dict[str, str] = {}
        for group, *payload in rows:
            try:
                samples.append(self._sample(*payload))
            except PayloadDamaged as error:
                damaged.setdefault(group, error.message)
        for group in damaged:
            self._drop_group(group)
        pending = self.connection.execute(f"SELECT id, domain, seed FROM groups WHERE state = {LIVE} ORDER BY rowid")
        drawn = self.connection.execute("SELECT domain, count(*) FROM groups GROUP BY domain ORDER BY min(rowid)")
        consumed = self.connection.execute(
            f"SELECT domain, count(*) FROM groups WHERE state = {CONSUMED} GROUP BY domain"
        )
        return Recovered(
            version=last[0],
            step=last[1],
            samples=tuple(s for s in samples if s.group not in damaged),
            pending=tuple((g, d, s) for g, d, s in pending.fetchall()),
            seeds_drawn=dict(drawn.fetchall()),
            clock=self.clock,
            consumed=dict(consumed.fetchall()),
            stamps=self._stamps(),
            damaged=damaged,
        )

    def roll_back(self, version: int) -> int:
        """See `Ledger.roll_back`."""
        recovered = self.recover()
        if self._one("SELECT 1 FROM versions WHERE version = ?", version) is None:
            raise RunFailed(f"version {version} was never committed (rule: a run goes back to a committed version)")
        assert recovered is not None
        lost = {s.group for s in recovered.samples if max(s.v0, *s.versions) > version}
        trained = self.connection.execute(f"SELECT id FROM groups WHERE state = {CONSUMED} AND version > ?", (version,))
        lost.update(group for (group,) in trained.fetchall())
        samples = 0
        for group in lost:
            samples += self._one(f"SELECT count(*) FROM samples WHERE grp = ? AND state <> {DROPPED}", group)[0]
            self._drop_group(group)
        self.connection.execute(f"UPDATE groups SET version = NULL WHERE state = {DROPPED}")
        self.connection.execute(f"UPDATE samples SET version = NULL WHERE state = {DROPPED}")
        self.connection.execute("DELETE FROM versions WHERE version > ?", (version,))
        later = [(f"{STAMP}{known}",) for known in self._stamps() if known > version]
        self.connection.executemany("DELETE FROM meta WHERE key = ?", later)
        return samples

    def _one(self, sql: str, *parameters: object) -> Any:
        """The first row of a query, None without rows."""
        return self.connection.execute(sql, parameters).fetchone()

    def _stamps(self) -> dict[int, str]:
        """Stamps of the content of committed versions; ledgers of older releases have none."""
        rows = self.connection.execute("SELECT key, value FROM meta WHERE key GLOB ?", (f"{STAMP}*",))
        return {int(key.removeprefix(STAMP)): stamp for key, stamp in rows}

    def _consume(self, table: str, ids: Sequence[str], version: int) -> None:
        extra = ", payload = NULL" if table == "samples" else ""
        before = self.connection.total_changes
        self.connection.executemany(
            f"UPDATE {table} SET state = {CONSUMED}, version = ?{extra} WHERE id = ? AND state = {LIVE}",
            [(version, id_) for id_ in ids],
        )
        if self.connection.total_changes - before == len(ids):
            return
        for id_ in ids:
            row = self._one(f"SELECT state, version FROM {table} WHERE id = ?", id_)
            if row != (CONSUMED, version):
                status = "was dropped" if row is not None else "is not in the ledger"
                if row is not None and row[0] == CONSUMED:
                    status = f"was trained into version {row[1]}"
                raise RunFailed(f"{table[:-1]} {id_} is to be trained into version {version}, but it {status}")
        raise RunFailed(f"a {table[:-1]} is twice in the batch of version {version} (rule: none is trained twice)")

    def _drop_group(self, group: str, reason: str = AbortReason.INFRA_FAULT.value) -> None:
        """Drop the group, by default like one whose environment failed: a fresh prompt replaces it."""
        self.connection.execute(f"UPDATE groups SET state = {DROPPED}, reason = ? WHERE id = ?", (reason, group))
        self.connection.execute(f"UPDATE samples SET state = {DROPPED}, payload = NULL WHERE grp = ?", (group,))

    def close(self) -> None:
        self.segments.close()
        if self.kept is not None:
            self.kept.close()
        self.connection.close()
        os.close(self._lock)

    def _open(self, config: Mapping[str, Any] | None, synchronous: str) -> sqlite3.Connection:
        path = self.directory / FILE
        if not path.exists():
            self._create(path, config)
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        self._upgrade(connection, path)
        if config is not None:
            self._configure(connection, json.dumps(dict(config)))
        return connection

    def _create(self, path: Path, config: Mapping[str, Any] | None) -> None:
        """Create the file with its tables and the run's configuration: a kill leaves all of it, or none."""
        fresh = path.with_name(f"{path.name}.new")
        fresh.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(fresh, isolation_level=None)) as connection:
            connection.executescript(f"BEGIN;{SCHEMA}COMMIT;")
            connection.execute("INSERT INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),))
            if config is not None:
                self._configure(connection, json.dumps(dict(config)))
        fresh.rename(path)

    def _configure(self, connection: sqlite3.Connection, config: str) -> None:
        """Record the run's configuration; those of earlier lives are kept as `config.0`, …"""
        connection.execute(
            """INSERT INTO meta SELECT 'config.' || (SELECT count(*) FROM meta WHERE key LIKE 'config.%'), value
            FROM meta WHERE key = 'config' AND value != ?""",
            (config,),
        )
        connection.execute("INSERT OR REPLACE INTO meta VALUES ('config', ?)", (config,))

    def _upgrade(self, connection: sqlite3.Connection, path: Path) -> None:
        """Upgrade an older file to the current schema, in one transaction. StorageFailed for an unknown version."""
        found = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
        version = int(found[0]) if found is not None and found[0].isdecimal() else 0
        if version != SCHEMA_VERSION and version not in UPGRADES:
            known = ", ".join(map(str, (*UPGRADES, SCHEMA_VERSION)))
            raise StorageFailed(
                f"{path}: schema version {found and found[0]} (rule: {known})",
                remedy="resume with the rollart that wrote it",
            )
        if version == SCHEMA_VERSION:
            return
        connection.execute("BEGIN IMMEDIATE")
        for older in range(version, SCHEMA_VERSION):
            for statement in UPGRADES[older]:
                connection.execute(statement)
        connection.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (str(SCHEMA_VERSION),))
        connection.execute("COMMIT")

    def _guarded(self, operation: Operation) -> Any:
        self.connection.execute("SAVEPOINT operation")
        try:
            result = operation(self)
        except RollartError as refused:
            self.connection.execute("ROLLBACK TO operation")
            result = refused
        except (sqlite3.Error, OSError):
            raise
        except Exception as error:  # a value that cannot be written is its caller's error: the ledger continues
            self.connection.execute("ROLLBACK TO operation")
            result = RunFailed(f"the ledger cannot hold a record: {type(error).__name__}: {error}")
        self.connection.execute("RELEASE operation")
        return result

    @contextlib.contextmanager
    def _storage_errors(self) -> Iterator[None]:
        """Errors of the disk and of SQLite as StorageFailed."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            if "malformed" in text or "not a database" in text:
                remedy = "restore the run directory from a backup"
            elif "full" in text or "space" in text:
                remedy = "free some disk space, then continue with --resume"
            else:
                remedy = "check the disk and the directory's permissions, then continue with --resume"
            raise StorageFailed(f"{self.directory / FILE}: {text}", remedy=remedy) from None

    def _spent_on_functions(self) -> float:
        calls = self.connection.execute(
            "SELECT function, provider, sum(billed_s), memory_mb, count(*) FROM invocations GROUP BY 1, 2, 4"
        ).fetchall()
        idle = self.connection.execute(
            "SELECT function, provider, sum(seconds), memory_mb FROM worker_time WHERE state = ? GROUP BY 1, 2, 4",
            (WorkerState.IDLE,),
        ).fetchall()
        tokens = 0.0
        if self._prices is not None:
            rows = self.connection.execute(f"SELECT {TOKEN_SUMS} FROM tokens GROUP BY endpoint, model").fetchall()
            tokens = sum(self._prices.token_usd(TokenUsage(*row)) for row in rows)
        return sum(self._bill(*call) for call in calls) + sum(self._bill(*row) for row in idle) + tokens

    def _bill(self, function: str, provider: str, seconds: float, memory_mb: int, requests: int | None = None) -> float:
        """The bill of calls, or without `requests` of idle workers."""
        if self._prices is None or not self._prices.billed(provider):
            return 0.0
        gpu = self._gpus.get(function, "")
        items = self._prices.items(provider, seconds, memory_mb, requests, gpu)
        return sum(price.usd * amount for price, amount in items)

    def _heal(self) -> None:
        """For resources that were open when the run died, record the missing time as `down`, cause `crash`."""
        self.connection.execute(
            f"""INSERT INTO intervals
            SELECT json_extract(o.fields, '$.role'), o.subject, max(o.t, coalesce(i.t1, 0)), ?,
                   '{ResourceState.DOWN}', 'crash',
                   json_extract(o.fields, '$.units'), json_extract(o.fields, '$.usd_per_unit_hour')
            FROM (SELECT subject, t, fields, max(rowid) AS n FROM events WHERE kind = '{RESOURCE_OPENED}'
                  GROUP BY subject) o
            LEFT JOIN (SELECT resource, max(t1) AS t1 FROM intervals GROUP BY resource) i ON i.resource = o.subject
            WHERE max(o.t, coalesce(i.t1, 0)) < ?
              AND NOT EXISTS (SELECT 1 FROM events c WHERE c.kind = '{RESOURCE_CLOSED}' AND c.subject = o.subject
                              AND c.rowid > o.n)""",
            (self.clock, self.clock),
        )

    def _sample(self, payload: bytes | None, segment: int | None, offset: int | None) -> TrainSample:
        if segment is not None and offset is not None:
            payload = self.segments.read(segment, offset)
        try:
            return decode_sample(payload or b"")
        except ValueError as error:
            raise PayloadDamaged(
                f"{self.directory / FILE}: {error}", remedy="restore the run directory from a backup"
            ) from None

    def _with_loss(self, sample: TrainSample) -> int:
        return self._measure(tuple(itertools.compress(sample.token_ids, sample.loss_mask)))
