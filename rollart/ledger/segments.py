"""Large payloads beside the database: append-only files of [length, crc32, payload].

A payload is on disk before the row that refers to it is committed. Bytes after the last committed payload of a crashed
run are never read and never overwritten, because each opening starts a new file.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

from rollart.errors import StorageFailed

__all__ = ["INLINE_LIMIT", "PayloadDamaged", "PayloadFiles"]

INLINE_LIMIT = 64 * 1024
"""Payloads above it leave the database: SQLite's own overflow pages are slower than a file from this size on."""

ROLL_BYTES = 64 * 1024 * 1024
"""A file beyond this size is closed, so that whole files can be deleted once their samples are consumed."""

_HEAD = struct.Struct("<II")


class PayloadDamaged(StorageFailed):
    """A payload is missing or differs from the written one. An unreadable payload is a StorageFailed."""


class PayloadFiles:
    """Segment files of one run. Owned by the ledger's one writer."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: BinaryIO | None = None
        self._number = max((int(p.stem) for p in directory.glob("*.seg")), default=0)
        self._dirty = False
        self.rolled = False
        """True if a file was closed since the last call of `keep`."""

    def append(self, payload: bytes) -> tuple[int, int]:
        """Write a payload: (segment, offset). Durable after `sync`."""
        if self._file is None or self._file.tell() > ROLL_BYTES:
            self._roll()
        assert self._file is not None
        offset = self._file.tell()
        self._file.write(_HEAD.pack(len(payload), zlib.crc32(payload)) + payload)
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
                head = file.read(_HEAD.size)
                length, crc = _HEAD.unpack(head)
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
