"""Kept items: the scored items of a run as its reward functions got them, with their outcomes.

An item is first a row of the database, written in the transaction of its trajectory's row, so that a crash leaves both
or neither. Rows of `BLOCK_BYTES` together are compressed into one payload of a segment file, in one transaction: whole
conversations compress to a fraction of what each takes alone, and files are synchronised once per block.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from rollart.ledger.payloads import PAYLOAD_HEAD_BYTES, ROLL_BYTES, PayloadDamaged, PayloadFiles
from rollart.model import InfraFault, Item, ModelFault, Outcome, Scored
from serverless.types import FaultKind, Throttle

KEPT_DIRECTORY = "kept"

BLOCK_BYTES = 256 * 1024
"""Size from which waiting rows become a block. Of 11,520 items of a quickstart a block holds about 230; larger blocks
are hardly smaller per item."""

PARTS = 8
"""Files that a full store has: the oldest is deleted whole."""

LEVEL = 1
"""Of zlib. Level 6 takes 2.5 × the CPU for 23 % fewer bytes."""

_TABLES = (
    "CREATE TABLE IF NOT EXISTS kept_items (t REAL NOT NULL, payload BLOB NOT NULL)",
    """CREATE TABLE IF NOT EXISTS kept_blocks (segment INTEGER NOT NULL, offset INTEGER NOT NULL,
    items INTEGER NOT NULL, bytes INTEGER NOT NULL)""",
)


@dataclass(frozen=True, slots=True)
class KeptScore:
    """The outcome of one function. `version` is the digest of its package, '' for a function in the run's process;
    `weight` its factor in the reward of the trajectory."""

    function: str
    version: str
    weight: float
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class KeptItem:
    """A scored item; its id is that of its trajectory. `policy_version` is that of the first generated token; `value`
    the reward of the trajectory, None if a function failed."""

    item: Item
    group: str
    domain: str
    policy_version: int
    value: float | None
    scores: tuple[KeptScore, ...]
    t: float = 0.0
    """Second of the run at which it was scored."""

    def outcome(self, function: str) -> KeptScore | None:
        """The outcome of a function; None if it is no reward of the item's domain."""
        return next((score for score in self.scores if score.function == function), None)


@dataclass(frozen=True, slots=True)
class KeptRow:
    """An encoded item on its way to the database."""

    t: float
    payload: bytes


def encode_kept(kept: KeptItem) -> bytes:
    """Raises `TypeError`, `ValueError` or `OverflowError` for an item without a wire form, which no function has got
    either."""
    item = kept.item
    packed: bytes = msgpack.packb(
        (
            (item.id, [dict(m) for m in item.messages], item.reference_answer, dict(item.metadata)),
            *(kept.group, kept.domain, kept.policy_version, kept.value),
            [(s.function, s.version, s.weight, *_encode(s.outcome)) for s in kept.scores],
        )
    )
    return packed


def decode_kept(payload: bytes, t: float) -> KeptItem:
    """Raises `ValueError` for invalid bytes."""
    try:
        item, group, domain, version, value, scores = msgpack.unpackb(payload, strict_map_key=False)
        id_, messages, reference, metadata = item
        outcomes = tuple(KeptScore(f, v, weight, _decode(*outcome)) for f, v, weight, *outcome in scores)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"not a kept item: {error}") from None
    return KeptItem(Item(id_, tuple(messages), reference, metadata), group, domain, version, value, outcomes, t)


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


class KeptItems:
    """The writer's side, within the transactions of the ledger's database.

    Invariant: files take at most `max_mb`, whose oldest eighth goes when they would take more, and rows that are no
    block yet at most `BLOCK_BYTES` and one item.
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

    @property
    def largest(self) -> int:
        """Bytes of the largest item that is kept."""
        return self._most // PARTS

    def seal(self) -> None:
        """Compress the waiting rows into a block once they are large enough. Before the transaction is committed."""
        (waiting,) = self._connection.execute("SELECT coalesce(sum(length(payload)), 0) FROM kept_items").fetchone()
        if waiting < self._block:
            return
        rows = self._connection.execute("SELECT t, payload FROM kept_items ORDER BY rowid").fetchall()
        block = zlib.compress(msgpack.packb(rows), LEVEL)
        self._make_room(len(block))
        at = self._files.append(block)
        self._files.sync()
        self._connection.execute("INSERT INTO kept_blocks VALUES (?,?,?,?)", (*at, len(rows), len(block)))
        self._connection.execute("DELETE FROM kept_items")

    def committed(self) -> None:
        """Delete the files whose rows are gone. After the transaction is committed."""
        if self._deleted:
            self._deleted = False
            segments = self._connection.execute("SELECT DISTINCT segment FROM kept_blocks").fetchall()
            self._files.keep({segment for (segment,) in segments})

    def close(self) -> None:
        self._files.close()

    def _make_room(self, wanted: int) -> None:
        sizes = self._files.sizes()
        total = wanted + PAYLOAD_HEAD_BYTES + sum(sizes.values())
        for segment, size in sorted(sizes.items()):
            if total <= self._most:
                return
            self._connection.execute("DELETE FROM kept_blocks WHERE segment = ?", (segment,))
            self._deleted = True
            total -= size


def read_kept(connection: sqlite3.Connection, directory: Path) -> Iterator[KeptItem]:
    """The kept items of a run in the order in which they were scored; none for a run that keeps none. PayloadDamaged
    for a damaged block."""
    tables = connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'kept_blocks'").fetchone()
    if not tables[0]:
        return
    connection.execute("BEGIN")  # one snapshot: rows may become a block meanwhile
    try:
        blocks = connection.execute("SELECT segment, offset FROM kept_blocks ORDER BY rowid").fetchall()
        waiting = connection.execute("SELECT t, payload FROM kept_items ORDER BY rowid").fetchall()
    finally:
        connection.execute("COMMIT")
    files = PayloadFiles(directory / KEPT_DIRECTORY)
    for segment, offset in blocks:
        try:
            rows = msgpack.unpackb(zlib.decompress(files.read(segment, offset)))
        except PayloadDamaged:
            known = connection.execute("SELECT 1 FROM kept_blocks WHERE segment = ?", (segment,)).fetchone()
            if known is None:  # the live run has deleted it meanwhile
                continue
            raise
        yield from _decoded(rows, directory)
    yield from _decoded(waiting, directory)


def _decoded(rows: list[Any], directory: Path) -> Iterator[KeptItem]:
    for t, payload in rows:
        try:
            yield decode_kept(payload, t)
        except ValueError as error:
            raise PayloadDamaged(f"{directory}: {error}", remedy="restore the run directory from a backup") from None
