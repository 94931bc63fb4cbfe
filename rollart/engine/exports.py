"""KV that waits to be fetched by another engine: in files where memory is shared, else in this process.

It is handed out once, until its lease ends. It goes at once when the weights are replaced, when its session ends, when
a later export of the session takes its place, and, oldest first, when all of it needs more room than it may.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rollart.engine.shm import SharedKvFiles

__all__ = ["KvExport", "KvExports"]

MAX_REMEMBERED_REASONS = 256
"""Exports that are gone whose reason is kept: a pull that comes too late is told why."""


@dataclass(frozen=True, slots=True)
class KvExport:
    """One export. Its bytes are those of `transfer.encode_block`: in `file`, or in `data` where there is no file."""

    request_id: str
    session: str
    token: str
    token_ids: tuple[int, ...]
    start: int
    version: int
    size: int
    deadline: float
    file: str = ""
    data: bytes = b""


class KvExports:
    """The exports of one engine by request id. Owned by the server's loop, whose clock `now` is.

    Invariant: their sizes sum up to `limit_bytes` at most; a file exists only for an export that is here, except in the
    moment between another engine's taking it and the next `sweep`.
    """

    def __init__(self, now: Callable[[], float], *, limit_bytes: int, files: SharedKvFiles | None = None) -> None:
        self._now, self._limit, self._files = now, limit_bytes, files
        self._entries: OrderedDict[str, KvExport] = OrderedDict()
        self._sessions: dict[str, str] = {}
        self._gone: OrderedDict[str, str] = OrderedDict()
        self.bytes = 0
        self.expired = self.dropped = self.taken = self.exported_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, export: KvExport) -> bool:
        """Keep an export until its deadline; False, with nothing kept, if it alone is larger than the limit. One of the
        same request or of the same session is replaced."""
        for name in {export.request_id, self._sessions.get(export.session, export.request_id)}:
            if name in self._entries:
                self._drop(name, "a later one took its place")
        if export.size > self._limit:
            self.dropped += 1
            self._forget(export, "it was larger than what may wait (--kv-pending-mb)")
            return False
        if self.bytes + export.size > self._limit:
            self.sweep()
        while self.bytes + export.size > self._limit:
            self._drop(next(iter(self._entries)), "it was the oldest when room ran out")
        self._gone.pop(export.request_id, None)
        self._entries[export.request_id] = export
        if export.session:
            self._sessions[export.session] = export.request_id
        self.bytes += export.size
        self.exported_bytes += export.size
        return True

    def find(self, request_id: str, token: str) -> KvExport | str:
        """The export, or why it is not here."""
        export = self._entries.get(request_id)
        if export is not None and export.deadline <= self._now():
            self._expire(request_id)
            export = None
        if export is None:
            return self._gone.get(request_id, "it was never here")
        return export if export.token == token else "the token is not that of the export"

    def take(self, export: KvExport) -> bytes | mmap.mmap | None:
        """The bytes of an export, once; None if another engine took its file meanwhile."""
        data = self._files.take(export.file) if export.file and self._files is not None else export.data
        self._pop(export.request_id)
        self._remember(export.request_id, "it was taken")
        self.taken += 1
        return data or None

    def drop(self, request_ids: Iterable[str]) -> None:
        """Nobody will fetch these. Unknown ids are ignored."""
        for name in request_ids:
            if name in self._entries:
                self._drop(name, "it was aborted")

    def drop_session(self, session: str) -> None:
        if session in self._sessions:
            self._drop(self._sessions[session], "its session ended")

    def clear(self, why: str) -> None:
        """Drop everything: the weights are others now, or the cache is to be forgotten."""
        for name in list(self._entries):
            self._drop(name, why)

    def sweep(self) -> None:
        """Forget what nobody fetched in time, and what was taken by way of its file."""
        now = self._now()
        for name, export in list(self._entries.items()):
            if export.file and self._files is not None and not self._files.holds(export.file):
                self._pop(name)
                self._remember(name, "it was taken")
                self.taken += 1
            elif export.deadline <= now:
                self._expire(name)

    def _expire(self, name: str) -> None:
        self.expired += 1
        self._forget(self._pop(name), "its lease ended")

    def _drop(self, name: str, why: str) -> None:
        self.dropped += 1
        self._forget(self._pop(name), why)

    def _pop(self, name: str) -> KvExport:
        export = self._entries.pop(name)
        self.bytes -= export.size
        if self._sessions.get(export.session) == name:
            del self._sessions[export.session]
        return export

    def _forget(self, export: KvExport, why: str) -> None:
        if export.file and self._files is not None:
            self._files.remove(export.file)
        self._remember(export.request_id, why)

    def _remember(self, name: str, why: str) -> None:
        self._gone[name] = why
        self._gone.move_to_end(name)
        if len(self._gone) > MAX_REMEMBERED_REASONS:
            self._gone.popitem(last=False)
