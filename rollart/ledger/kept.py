"""Kept trajectories: messages, tokens, log-probabilities, routes and scores, for people, exports and replays.

Trajectories are first in a row of the database, written in the transaction of their `Charge`s, so that a crash leaves
both or neither. Rows of `BLOCK_BYTES` together are compressed into one payload of a segment file, in one transaction:
whole conversations compress to a fraction of what each takes alone, and files are synchronised once per block.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from rollart.ledger.payloads import PAYLOAD_HEAD_BYTES, ROLL_BYTES, PayloadDamaged, PayloadFiles
from rollart.model import (
    AbortReason,
    GroupId,
    InfraFault,
    Item,
    ModelFault,
    Outcome,
    Purpose,
    Scored,
    Segment,
    SegmentKind,
    Trajectory,
    TrajectoryId,
    Turn,
    item_of,
)
from rollart.ports import Charge
from serverless.types import FaultKind, Throttle

KEPT_DIRECTORY = "trajectories"

BLOCK_BYTES = 256 * 1024
"""Size from which waiting rows become a block. Larger blocks are hardly smaller per trajectory."""

PARTS = 8
"""Files that a full store has: the oldest is deleted whole."""

LEVEL = 1
"""Of zlib. Level 6 takes 2.5 × the CPU for 23 % fewer bytes."""

FORMAT = 1

_KINDS = _PROMPT, _ACTION, _OBSERVATION = SegmentKind.PROMPT, SegmentKind.ACTION, SegmentKind.OBSERVATION

_OF_ITEM = frozenset(
    item_of(Trajectory(TrajectoryId(""), GroupId(""), "", 0, Purpose.TRAIN, 0, (), (), None, "", {})).metadata
)
"""Metadata that `item_of` replaces: stored in vain."""

_TABLES = (
    "CREATE TABLE IF NOT EXISTS kept_trajectories (ids TEXT NOT NULL, payload BLOB NOT NULL)",
    """CREATE TABLE IF NOT EXISTS trajectory_blocks (segment INTEGER NOT NULL, offset INTEGER NOT NULL,
    count INTEGER NOT NULL, bytes INTEGER NOT NULL, ids TEXT NOT NULL)""",
)


@dataclass(frozen=True, slots=True)
class KeptScore:
    """The outcome of one function. `version` is the digest of its package, '' for a function in the run's process;
    `weight` its factor in the reward of the trajectory."""

    function: str
    version: str
    weight: float
    outcome: Outcome


class RoutedTurn(NamedTuple):
    """One attempt to generate a turn. It was asked for at `asked` and routed at `routed`, in seconds after the begin of
    its trajectory, to `engine` (and first to `prefill`, if that is not ''), for the reason `why`, where `running` turns
    ran at that moment. It took `engine_s` seconds of engines and computed `prefilled` tokens of its prompt."""

    asked: float
    routed: float
    engine_s: float
    engine: str
    prefill: str
    why: str
    running: int
    prefilled: int


@dataclass(slots=True)
class KeptTrajectory:
    """A trajectory that ended, with any outcome; one that was aborted has the segments and turns until then, and
    v0 -1 if no token can have been sampled. `value` is its reward, None without one; `scores` are empty if it was not
    scored. Its outcome and costs are in its row of the ledger."""

    trajectory: Trajectory
    routes: tuple[RoutedTurn, ...] = ()
    value: float | None = None
    scores: tuple[KeptScore, ...] = ()
    t: float = 0.0
    """Second of the run at which it ended: `t1` of its row."""

    @property
    def id(self) -> str:
        return self.trajectory.id

    @property
    def group(self) -> str:
        return self.trajectory.group

    @property
    def domain(self) -> str:
        return self.trajectory.domain

    @property
    def item(self) -> Item:
        """The item that its reward functions got."""
        return item_of(self.trajectory)

    def outcome(self, function: str) -> KeptScore | None:
        """The outcome of a function; None if it did not score the trajectory."""
        return next((score for score in self.scores if score.function == function), None)

    def failed(self, outcome: str) -> bool:
        """True if a reward function or the policy failed on it, or if its `outcome` is an infrastructure fault."""
        faults = (isinstance(score.outcome, InfraFault | ModelFault) for score in self.scores)
        return outcome == AbortReason.INFRA_FAULT or any(faults)


@dataclass(frozen=True, slots=True)
class KeptRow:
    """The row of a trajectory with its content, for one transaction: a crash leaves both or neither."""

    charge: Charge
    kept: KeptTrajectory


def encode_kept(kept: KeptTrajectory) -> bytes:
    """Lossless but for float32 log-probabilities, as engines and trainers have them, and for the experts of tokens and
    metadata that the item replaces, which are not stored. Metadata without a wire form, which no reward function has
    got either, is left out."""
    t = kept.trajectory
    segments = t.segments
    fields = [
        FORMAT,
        (t.id, t.group, t.domain, t.seed, t.purpose, t.v0, t.success, t.final_observation, t.engine_seconds),
        t.truncated,
        # An enumeration's hash is slow: no dict of codes.
        [
            (
                0 if s.kind is _PROMPT else 1 if s.kind is _ACTION else 2,
                s.turn,
                s.token_ids,
                s.policy_version,
                s.allowed,
            )
            for s in segments
        ],
        array("f", chain.from_iterable([s.logprobs for s in segments])).tobytes(),
        [(turn.index, turn.observation, turn.action, turn.action_tokens, turn.env_reward) for turn in t.turns],
        kept.routes,
        kept.value,
        [(s.function, s.version, s.weight, *_encode(s.outcome)) for s in kept.scores],
        {name: value for name, value in t.metadata.items() if name not in _OF_ITEM},
    ]
    try:
        packed: bytes = msgpack.packb(fields, unicode_errors="surrogatepass")
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: its environment still changes it
        fields[-1] = {}
        packed = msgpack.packb(fields, unicode_errors="surrogatepass")
    return packed


def decode_kept(payload: bytes, t: float) -> KeptTrajectory:
    """Raises `ValueError` for invalid bytes."""
    try:
        form, head, truncated, segments, logprobs, turns, routes, value, scores, metadata = msgpack.unpackb(
            payload, strict_map_key=False, unicode_errors="surrogatepass"
        )
        if form != FORMAT:
            raise ValueError(f"format {form} (rule: {FORMAT})")
        id_, group, domain, seed, purpose, v0, success, final_observation, engine_seconds = head
        trajectory = Trajectory(
            TrajectoryId(id_),
            GroupId(group),
            domain,
            seed,
            Purpose(purpose),
            v0,
            tuple(_segments(segments, array("f", logprobs))),
            tuple(Turn(index, shown, action, tuple(tokens), paid) for index, shown, action, tokens, paid in turns),
            success,
            final_observation,
            metadata,
            engine_seconds,
            truncated,
        )
        outcomes = tuple(KeptScore(f, v, weight, _decode(*outcome)) for f, v, weight, *outcome in scores)
        routed = tuple(RoutedTurn(*route) for route in routes)
        return KeptTrajectory(trajectory, routed, value, outcomes, t)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"not a kept trajectory: {error}") from None


def _segments(columns: Sequence[Any], logprobs: array[float]) -> Iterator[Segment]:
    at = 0
    for code, turn, token_ids, version, allowed in columns:
        sampled = len(token_ids) if _KINDS[code] is SegmentKind.ACTION else 0
        drawn = tuple(logprobs[at : at + sampled])
        legal = None if allowed is None else tuple(allowed)
        yield Segment(_KINDS[code], turn, tuple(token_ids), version, drawn, legal)
        at += sampled


def _encode(outcome: Outcome) -> tuple[Any, ...]:
    match outcome:
        case Scored():
            return "scored", outcome.value, dict(outcome.metrics), outcome.steps
        case ModelFault():
            return "model", outcome.floor, outcome.reason
        case InfraFault():
            throttle = outcome.throttle and str(outcome.throttle)
            return "infra", str(outcome.kind), outcome.retryable, outcome.detail, throttle, outcome.retry_after_s


def _decode(kind: str, *fields: Any) -> Outcome:
    if kind == "scored":
        value, metrics, steps = fields
        return Scored(value, metrics, None if steps is None else tuple(steps))
    if kind == "model":
        return ModelFault(*fields)
    fault, retryable, detail, throttle, retry_after_s = fields
    return InfraFault(FaultKind(fault), retryable, detail, throttle and Throttle(throttle), retry_after_s)


class PendingTrajectories:
    """Trajectories that ended and whose rows are not written yet; on the loop. At most one per trajectory that waits
    for its reward. With `only_failed` the others are not kept."""

    def __init__(self, *, only_failed: bool) -> None:
        self._only_failed = only_failed
        self._ended: dict[str, KeptTrajectory] = {}

    def add(self, kept: KeptTrajectory) -> None:
        self._ended[kept.id] = kept

    def score(self, trajectory: str, value: float | None, scores: tuple[KeptScore, ...]) -> None:
        """The trajectory was scored. No effect on one that is not kept."""
        if (kept := self._ended.get(trajectory)) is not None:
            kept.value, kept.scores = value, scores

    def row(self, charge: Charge) -> KeptRow | Charge:
        """The row of a trajectory that ended, with its content unless that is not kept."""
        kept = self._ended.pop(charge.trajectory, None)
        if kept is None or (self._only_failed and not kept.failed(charge.outcome)):
            return charge
        return KeptRow(charge, kept)


class KeptTrajectories:
    """The writer's side, within the transactions of the ledger's database. Encoding is here, off the loop.

    Invariant: files take at most `max_mb`, whose oldest eighth goes when they would take more, and trajectories that
    are in no block yet at most `BLOCK_BYTES`. The table has those, one row per transaction.
    """

    def __init__(self, connection: sqlite3.Connection, directory: Path, max_mb: float) -> None:
        self._connection = connection
        self._most = int(max_mb * 1e6)
        part = self._most // PARTS
        self._block = min(BLOCK_BYTES, part)
        self._files = PayloadFiles(directory / KEPT_DIRECTORY, roll_bytes=min(ROLL_BYTES, part))
        self._deleted = True  # a crash may have left files without rows
        for statement in _TABLES:
            connection.execute(statement)
        rows = connection.execute("SELECT ids, payload FROM kept_trajectories ORDER BY rowid").fetchall()
        self._added: list[tuple[float, KeptRow]] = []
        self._ids: list[str] = [id_ for ids, _ in rows for id_ in json.loads(ids)]
        self._waiting: list[bytes] = [payload for _, payload in rows]
        self._bytes = sum(map(len, self._waiting))

    def add(self, rows: Iterable[KeptRow], shift: float) -> None:
        """Store contents with the open transaction. `shift`: the run's second of the loop's 0."""
        self._added += [(row.charge.t1 + shift, row) for row in rows]

    def seal(self) -> None:
        """Write the contents that were added, but for those above an eighth of the bound, and compress them into a
        block once they are large enough. Before the transaction is committed."""
        if not self._added:
            return
        fresh = 0
        for t, row in self._added:
            payload = encode_kept(row.kept)
            if len(payload) > self._most // PARTS:
                continue
            self._ids.append(row.charge.trajectory)
            self._waiting.append(msgpack.packb((t, payload)))
            self._bytes += len(self._waiting[-1])
            fresh += 1
            if self._bytes >= self._block:
                self._compress()
                fresh = 0
        self._added.clear()
        if fresh:
            values = (json.dumps(self._ids[-fresh:]), b"".join(self._waiting[-fresh:]))
            self._connection.execute("INSERT INTO kept_trajectories VALUES (?,?)", values)

    def _compress(self) -> None:
        block = zlib.compress(b"".join(self._waiting), LEVEL)
        self._make_room(len(block))
        at = self._files.append(block)
        self._files.sync()
        values = (*at, len(self._ids), len(block), json.dumps(self._ids))
        self._connection.execute("INSERT INTO trajectory_blocks VALUES (?,?,?,?,?)", values)
        self._connection.execute("DELETE FROM kept_trajectories")
        self._ids, self._waiting, self._bytes = [], [], 0

    def committed(self) -> None:
        """Delete the files whose rows are gone. After the transaction is committed."""
        if self._deleted:
            self._deleted = False
            segments = self._connection.execute("SELECT DISTINCT segment FROM trajectory_blocks").fetchall()
            self._files.keep({segment for (segment,) in segments})

    def close(self) -> None:
        self._files.close()

    def _make_room(self, wanted: int) -> None:
        sizes = self._files.sizes()
        total = wanted + PAYLOAD_HEAD_BYTES + sum(sizes.values())
        for segment, size in sorted(sizes.items()):
            if total <= self._most:
                return
            self._connection.execute("DELETE FROM trajectory_blocks WHERE segment = ?", (segment,))
            self._deleted = True
            total -= size


def read_kept(
    connection: sqlite3.Connection, directory: Path, ids: Collection[str] | None = None
) -> Iterator[KeptTrajectory]:
    """The kept trajectories of a run in the order in which they ended, all or those with these ids; none for a run that
    keeps none. PayloadDamaged for a damaged block."""
    tables = connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'trajectory_blocks'").fetchone()
    if not tables[0]:
        return
    wanted = None if ids is None else frozenset(ids)
    connection.execute("BEGIN")  # one snapshot: rows may become a block meanwhile
    try:
        blocks = connection.execute("SELECT segment, offset, ids FROM trajectory_blocks ORDER BY rowid").fetchall()
        waiting = connection.execute("SELECT payload FROM kept_trajectories ORDER BY rowid").fetchall()
    finally:
        connection.execute("COMMIT")
    files = PayloadFiles(directory / KEPT_DIRECTORY)
    for segment, offset, members in blocks:
        if wanted is not None and wanted.isdisjoint(json.loads(members)):
            continue
        try:
            block = zlib.decompress(files.read(segment, offset))
        except PayloadDamaged:
            known = connection.execute("SELECT 1 FROM trajectory_blocks WHERE segment = ?", (segment,)).fetchone()
            if known is None:  # the live run has deleted it meanwhile
                continue
            raise
        yield from _decoded(block, directory, wanted)
    yield from _decoded(b"".join(payload for (payload,) in waiting), directory, wanted)


def _decoded(block: bytes, directory: Path, wanted: frozenset[str] | None) -> Iterator[KeptTrajectory]:
    rows = msgpack.Unpacker(max_buffer_size=0)
    rows.feed(block)
    for t, payload in rows:
        try:
            kept = decode_kept(payload, t)
        except ValueError as error:
            raise PayloadDamaged(f"{directory}: {error}", remedy="restore the run directory from a backup") from None
        if wanted is None or kept.id in wanted:
            yield kept
