"""Logs of local workers: `<directory>/<function>/<slot>.log`, the output of the function as `serverless.output`
attributes it.

After a call with output follows one of Lambda's lines, `END RequestId: <id> Time: <ISO 8601, UTC>`, which dates the
lines before it and names their call. A log that exceeds `LOG_BYTES` is rotated; `<slot>.log.1` is the previous one.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import fcntl
import os
import pathlib
import re
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import BinaryIO

from serverless.output import LineReader
from serverless.providers.base import LogLine, log_line
from serverless.secret_runtime import Mask
from serverless.workers._worker import LOG_BYTES, end_line

_PIPE_BYTES = 2**18
"""Output that a worker with secrets may be ahead of its reader, before it waits."""

_READ_BYTES = 2**16
"""Bytes of one read: between two of them the loop does its other work."""

_KEPT_BYTES = 4 * 2**20
"""Bytes of the beginning and of the end of a call's output that are kept in memory until it is masked, which takes some
30 ms per MB: the first lines name the call's items, the last ones the error."""

_END = re.compile(r"END RequestId: (\S+) Time: (\S+)")

_FOLLOW_S = 0.2
"""Seconds between two looks for new lines."""


def append_end(path: pathlib.Path, before: int, request: str) -> None:
    """Append the END line for a worker that does not write it itself. `before` is the log's size at the call's
    start."""
    size = path.stat().st_size if path.exists() else 0
    if size <= before:
        return
    with path.open("ab") as log:
        log.write(end_line(request))
    if size > LOG_BYTES:  # its writer holds it open for appending, so it cannot be renamed
        path.with_name(path.name + ".1").write_bytes(path.read_bytes())
        os.truncate(path, 0)


class MaskedLog:
    """The output of a worker with secrets: a pipe, whose end `fd` is the worker's. Its content is kept in memory, and
    is appended to the log with the secrets masked. The log shows the output of a call when the call has ended.

    Used from one event loop, which reads the pipe whenever the worker writes. `flush` follows each call; `close` is
    called once, when the worker has ended. Bound: at most 3 × `_KEPT_BYTES` are in memory; a call's output above that
    loses its middle, and the log says so.
    """

    def __init__(self, path: pathlib.Path, mask: Mask) -> None:
        self.mask = mask
        self._reader, self.fd = os.pipe()
        os.set_blocking(self._reader, False)
        with contextlib.suppress(OSError):  # its user has too many large pipes
            fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader, self._read)
        self._first, self._last = bytearray(), bytearray()
        self._dropped = 0

    def flush(self, request: str = "") -> None:
        """Append the new output, with an END line if it is that of a call."""
        if self.fd < 0:
            return
        unread = _PIPE_BYTES
        while unread > 0 and (count := self._read()):  # no more: other processes of the function may go on writing
            unread -= count
        if not self._first:
            return
        with open(self._path, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
            log.write(self.mask.data(self._taken()) + (end_line(request) if request else b""))
            full = log.tell() > LOG_BYTES
        if full:
            self._path.replace(self._path.with_name(self._path.name + ".1"))

    def close(self) -> None:
        if self.fd >= 0:
            with contextlib.suppress(OSError):  # its directory may be gone with the backend
                self.flush()
            self._loop.remove_reader(self._reader)
            os.close(self._reader)
            os.close(self.fd)
            self.fd = -1

    def _read(self) -> int:
        """Read what is in the pipe, at most `_READ_BYTES`; the number of bytes."""
        try:
            data = os.read(self._reader, _READ_BYTES)
        except BlockingIOError:
            return 0
        room = _KEPT_BYTES - len(self._first)
        self._first += data[:room]
        self._last += data[room:]
        if len(self._last) > 2 * _KEPT_BYTES:
            self._dropped += _KEPT_BYTES
            del self._last[:_KEPT_BYTES]
        return len(data)

    def _taken(self) -> bytes:
        """The output since the last flush. A line that was cut is dropped whole: it may hold a part of a secret."""
        first, last, dropped = bytes(self._first), bytes(self._last), self._dropped
        self._first.clear()
        self._last.clear()
        self._dropped = 0
        if not dropped:
            return first + last
        head, tail = first[: first.rfind(b"\n") + 1], last.partition(b"\n")[2]
        dropped += len(first) + len(last) - len(head) - len(tail)
        return head + b"[%d bytes of output were cut here]\n" % dropped + tail


def read(directory: pathlib.Path, function: str, *, since_s: float, limit: int) -> list[LogLine]:
    """The last `limit` lines of the last `since_s` seconds, oldest first; lines of unfinished calls come last, undated.

    An undated line is as old as its file's last change.
    """
    earliest = _earliest(since_s)
    dated: list[LogLine] = []
    undated: list[LogLine] = []
    for path in sorted((directory / function).glob("*.log*")):
        if _changed(path) < earliest:
            continue
        for line in _lines(path, limit):
            if not line.t:
                undated.append(line)
            elif datetime.datetime.fromisoformat(line.t) >= earliest:
                dated.append(line)
    dated.sort(key=lambda line: line.t)
    return [*dated, *undated][-limit:] if limit else []


async def follow(directory: pathlib.Path, *, since_s: float) -> AsyncIterator[LogLine]:
    """The lines of the last `since_s` seconds, then new ones as they appear, until closed. A line of a call that has
    not ended is dated by its appearance."""
    earliest = _earliest(since_s)
    tails: dict[pathlib.Path, _Tail] = {}
    with contextlib.ExitStack() as stack:
        while True:
            for path in sorted(directory.glob("*.log")):
                if path not in tails:
                    tails[path] = tail = _Tail(path)
                    stack.callback(tail.close)
            found = [line for tail in tails.values() for line in tail.read()]
            for line in sorted(found, key=lambda line: line.t):
                if datetime.datetime.fromisoformat(line.t) >= earliest:
                    yield line
            await asyncio.sleep(_FOLLOW_S)


class _Tail:
    """Reads what is appended to a log, across its rotations."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._part = b""
        self._reader = LineReader()

    def read(self) -> list[LogLine]:
        """The complete lines since the last call."""
        with contextlib.suppress(OSError):
            status = self._path.stat()
            changed = datetime.datetime.fromtimestamp(status.st_mtime, datetime.UTC).isoformat(timespec="milliseconds")
            if self._file is None:
                self._file = self._path.open("rb")
            if status.st_size < self._file.tell() and os.fstat(self._file.fileno()).st_ino == status.st_ino:
                self._file.seek(0)  # truncated
            data = self._file.read()
            if os.fstat(self._file.fileno()).st_ino != status.st_ino:  # renamed: this was its end
                self.close()
                self._file = self._path.open("rb")
                data += self._file.read()
            *complete, self._part = (self._part + data).split(b"\n")
            return list(_dated(self._path, (text.decode(errors="replace") for text in complete), self._reader, changed))
        return []

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _lines(path: pathlib.Path, limit: int) -> Iterator[LogLine]:
    """The last lines of a file."""
    with path.open(errors="replace") as log:
        yield from deque(_dated(path, (line.rstrip("\n") for line in log), LineReader(), ""), maxlen=limit)


def _dated(path: pathlib.Path, texts: Iterator[str], reader: LineReader, undated: str) -> Iterator[LogLine]:
    """Lines with the time at which their call ended, or `undated`."""
    source = path.name.partition(".")[0]
    waiting: list[str] = []

    def lines(t: str) -> Iterator[LogLine]:
        for text in waiting:
            if (line := log_line(reader, t, source, text)) is not None:
                yield line
        waiting.clear()

    for text in texts:
        if (ends := _END.match(text)) is None:
            waiting.append(text)
        else:
            yield from lines(ends[2])
    yield from lines(undated)


def _earliest(since_s: float) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=min(since_s, 3e9))


def _changed(path: pathlib.Path) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)
