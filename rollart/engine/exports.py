"""KV exports that wait for another engine to pull them: in files if memory is shared, else in this process.

An export is handed out once, until its lease ends. It is dropped early when the weights are replaced, when its session
ends, when a later export of the session replaces it, and, oldest first, when all exports together exceed their limit.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rollart.engine.shm import SharedKvFiles

MAX_REMEMBERED_REASONS = 256
"""Maximum exports for which the reason of their removal is remembered, for the error of a late pull."""


@dataclass(frozen=True, slots=True)
class KvExport:
    """One export. Its bytes are the output of `transfer.encode_block`: in `file`, or in `data` if there is no file."""

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
    """The exports of one engine by request id. Owned by the server's loop; `now` is the loop's clock.

    Invariants: the sizes sum up to at most `limit_bytes`; every file belongs to an entry. The file of an entry may be
    missing after another engine took it, until the next `sweep`.
    """

    def __init__(self, now: Callable[[], float], *, limit_bytes: int, files: SharedKvFiles | None = None) -> None:
        self._now, self._limit, self._files = now, limit_bytes, files
        self._entries: OrderedDict[str, KvExport] = OrderedDict()
        self._sessions: dict[str, str] = {}
        self._removal_reasons: OrderedDict[str, str] = OrderedDict()
        self.bytes = 0
        self.expired = self.dropped = self.taken = self.exported_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, export: KvExport) -> bool:
        """Keep an export until its deadline. False, with nothing kept, if it alone exceeds the limit. Replaces an
        export of the same request or the same session."""
        for name in {export.request_id, self._sessions.get(export.session, export.request_id)}:
            if name in self._entries:
                self._drop(name, "a later one took its place")
        if export.size > self._limit:
            self.dropped += 1
            self._forget(export, "it exceeded the limit of waiting KV (--kv-pending-mb)")
            return False
        if self.bytes + export.size > self._limit:
            self.sweep()
        while self.bytes + export.size > self._limit:
            self._drop(next(iter(self._entries)), "it was the oldest when room ran out")
        self._removal_reasons.pop(export.request_id, None)
        self._entries[export.request_id] = export
        if export.session:
            self._sessions[export.session] = export.request_id
        self.bytes += export.size
        self.exported_bytes += export.size
        return True

    def find(self, request_id: str, token: str) -> KvExport | str:
        """The export, or the reason why it is unavailable."""
        export = self._entries.get(request_id)
        if export is not None and export.deadline <= self._now():
            self._expire(request_id)
            export = None
        if export is None:
            return self._removal_reasons.get(request_id, "it was never here")
        return export if export.token == token else "the token is not that of the export"

    def take(self, export: KvExport) -> bytes | mmap.mmap | None:
        """Remove an export and return its bytes; None if another engine has taken its file."""
        data = self._files.take(export.file) if export.file and self._files is not None else export.data
        self._pop(export.request_id)
        self._remember(export.request_id, "it was taken")
        self.taken += 1
        return data or None

    def drop(self, request_ids: Iterable[str]) -> None:
        """Drop the exports of aborted requests. Unknown ids are ignored."""
        for name in request_ids:
            if name in self._entries:
                self._drop(name, "it was aborted")

    def drop_session(self, session: str) -> None:
        if session in self._sessions:
            self._drop(self._sessions[session], "its session ended")

    def clear(self, reason: str) -> None:
        """Drop all exports, because the weights were replaced or the cache is reset."""
        for name in list(self._entries):
            self._drop(name, reason)

    def sweep(self) -> None:
        """Remove exports whose lease ended, and those whose file another engine took."""
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

    def _drop(self, name: str, reason: str) -> None:
        self.dropped += 1
        self._forget(self._pop(name), reason)

    def _pop(self, name: str) -> KvExport:
        export = self._entries.pop(name)
        self.bytes -= export.size
        if self._sessions.get(export.session) == name:
            del self._sessions[export.session]
        return export

    def _forget(self, export: KvExport, reason: str) -> None:
        if export.file and self._files is not None:
            self._files.remove(export.file)
        self._remember(export.request_id, reason)

    def _remember(self, name: str, reason: str) -> None:
        self._removal_reasons[name] = reason
        self._removal_reasons.move_to_end(name)
        if len(self._removal_reasons) > MAX_REMEMBERED_REASONS:
            self._removal_reasons.popitem(last=False)
