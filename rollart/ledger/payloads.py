"""Large payloads beside the database, and the encoding of training samples in either.

Segments are append-only files of [length, crc32, payload]. A payload is on disk before the row that refers to it is
committed. Bytes after the last committed payload of a crashed run are never read and never overwritten, because each
opening starts a new file. Samples are encoded losslessly: per-token numbers as packed arrays inside msgpack, behind a
checksum.
"""

from __future__ import annotations

import os
import struct
import zlib
from array import array
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from rollart.errors import StorageFailed
from rollart.model import GroupId, TrainSample, TrajectoryId

INLINE_LIMIT = 64 * 1024
"""Payloads above it leave the database: SQLite's own overflow pages are slower than a file from this size on."""

ROLL_BYTES = 64 * 1024 * 1024
"""A file beyond this size is closed, so that whole files can be deleted once their samples are consumed."""

FORMAT = 1

_PAYLOAD_HEAD = struct.Struct("<II")

PAYLOAD_HEAD_BYTES = _PAYLOAD_HEAD.size

_SAMPLE_HEAD = struct.Struct("<cI")

_CHECKED = b"\xc1"
"""First byte of data with a checksum, which no msgpack value begins with; older ledgers hold samples without one."""


class PayloadDamaged(StorageFailed):
    """A payload is missing or differs from the written one. An unreadable payload is a StorageFailed."""


class PayloadFiles:
    """Segment files of one run, of about `roll_bytes` each. Owned by the ledger's one writer."""

    def __init__(self, directory: Path, *, roll_bytes: int = ROLL_BYTES) -> None:
        self._directory = directory
        self._roll_bytes = roll_bytes
        self._file: BinaryIO | None = None
        self._number = max((int(p.stem) for p in directory.glob("*.seg")), default=0)
        self._dirty = False
        self.rolled = False
        """True if a file was closed since the last call of `keep`."""

    def append(self, payload: bytes) -> tuple[int, int]:
        """Write a payload: (segment, offset). Durable after `sync`."""
        if self._file is None or self._file.tell() > self._roll_bytes:
            self._roll()
        assert self._file is not None
        offset = self._file.tell()
        self._file.write(_PAYLOAD_HEAD.pack(len(payload), zlib.crc32(payload)) + payload)
        self._dirty = True
        return self._number, offset

    def sync(self) -> None:
        """Make all appended payloads durable."""
        if self._file is not None and self._dirty:
            self._file.flush()
            os.fdatasync(self._file.fileno())
            self._dirty = False

    def read(self, segment: int, offset: int) -> bytes:
        """Read a payload. PayloadDamaged if its checksum does not match, StorageFailed if it cannot be read."""
        path = self._path(segment)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                length, crc = _PAYLOAD_HEAD.unpack(file.read(_PAYLOAD_HEAD.size))
                payload = file.read(length)
        except (FileNotFoundError, struct.error) as error:
            raise PayloadDamaged(f"{path}: payload at {offset} is not there: {error}") from None
        except OSError as error:
            raise StorageFailed(
                f"{path}: payload at {offset} cannot be read: {error.strerror or error}",
                remedy="look at the disk and at the limit of open files, then continue with --resume",
            ) from None
        if len(payload) != length or zlib.crc32(payload) != crc:
            raise PayloadDamaged(
                f"{path}: payload at {offset} is damaged", remedy="restore the run directory from a backup"
            )
        return payload

    def sizes(self) -> dict[int, int]:
        """Bytes of every file by its number, as far as they were synchronised."""
        return {int(path.stem): path.stat().st_size for path in self._directory.glob("*.seg")}

    def keep(self, segments: Collection[int]) -> None:
        """Delete closed files without references."""
        self.rolled = False
        for path in self._directory.glob("*.seg"):
            if int(path.stem) not in segments and int(path.stem) != self._number:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self.sync()
            self._file.close()
            self._file = None

    def _roll(self) -> None:
        self.rolled = self._file is not None
        self.close()
        self._directory.mkdir(exist_ok=True)
        self._number += 1
        self._file = self._path(self._number).open("xb")
        entry = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(entry)
        finally:
            os.close(entry)

    def _path(self, segment: int) -> Path:
        return self._directory / f"{segment:06d}.seg"


def encode_sample(sample: TrainSample) -> bytes:
    """All fields of a sample; floats keep all their bits. `truncated` and experts come last, where either is given."""
    packed: bytes = msgpack.packb(
        (
            FORMAT,
            sample.id,
            sample.group,
            sample.domain,
            sample.v0,
            array("q", sample.token_ids).tobytes(),
            bytes(sample.loss_mask),
            array("d", sample.logprobs).tobytes(),
            array("q", sample.versions).tobytes(),
            array("q", sample.turn).tobytes(),
            array("d", sample.rewards).tobytes(),
            sample.score,
            sample.success,
            sample.allowed,
            *((sample.truncated, b"".join(sample.experts)) if sample.truncated or sample.experts else ()),
        )
    )
    return _SAMPLE_HEAD.pack(_CHECKED, zlib.crc32(packed)) + packed


def decode_sample(data: bytes) -> TrainSample:
    """The decoded sample. ValueError for invalid bytes, or bytes that changed since they were encoded."""
    if data.startswith(_CHECKED):
        head, data = data[: _SAMPLE_HEAD.size], data[_SAMPLE_HEAD.size :]
        if head != _SAMPLE_HEAD.pack(_CHECKED, zlib.crc32(data)):
            raise ValueError("a sample is damaged: its checksum is not the one that was written")
    try:
        form, id_, group, domain, v0, tokens, mask, logprobs, versions, turn, rewards, score, success, allowed, *end = (
            msgpack.unpackb(data, use_list=False)
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"not a sample: {error}") from None
    if form != FORMAT:
        raise ValueError(f"sample format {form} (rule: {FORMAT})")
    truncated, experts = end or (False, b"")
    width = max(1, len(experts) // max(1, len(tokens) // 8))
    return TrainSample(
        id=TrajectoryId(id_),
        group=GroupId(group),
        domain=domain,
        v0=v0,
        token_ids=_unpack("q", tokens),
        loss_mask=tuple(map(bool, mask)),
        logprobs=_unpack("d", logprobs),
        versions=_unpack("q", versions),
        turn=_unpack("q", turn),
        rewards=_unpack("d", rewards),
        score=score,
        success=success,
        allowed=allowed,
        truncated=truncated,
        experts=tuple(experts[i : i + width] for i in range(0, len(experts), width)),
    )


def _unpack(code: str, data: bytes) -> tuple[Any, ...]:
    values: array[Any] = array(code)
    values.frombytes(data)
    return tuple(values)
