"""Logs of local workers: `<directory>/<function>/<slot>.log`, the unmodified output of the function.

After a call with output follows one of Lambda's lines, `END RequestId: <id> Time: <ISO 8601, UTC>`, which dates the
lines before it and names their call. A log that exceeds `LOG_BYTES` is rotated; `<slot>.log.1` is the previous one.
"""

from __future__ import annotations

import datetime
import os
import pathlib
import re
from collections import deque
from collections.abc import Iterator

from serverless.providers.base import LogLine
from serverless.workers._worker import LOG_BYTES, end_line

_END = re.compile(r"END RequestId: (\S+) Time: (\S+)")


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


def read(directory: pathlib.Path, function: str, *, since_s: float, limit: int) -> list[LogLine]:
    """The last `limit` lines of the last `since_s` seconds, oldest first; lines of unfinished calls come last, undated.

    An undated line is as old as its file's last change.
    """
    earliest = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=since_s)
    dated: list[LogLine] = []
    undated: list[LogLine] = []
    for path in sorted((directory / function).glob("*.log*")):
        changed = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)
        if changed < earliest:
            continue
        for line in _lines(path, limit):
            if not line.t:
                undated.append(line)
            elif datetime.datetime.fromisoformat(line.t) >= earliest:
                dated.append(line)
    dated.sort(key=lambda line: line.t)
    return [*dated, *undated][-limit:] if limit else []


def _lines(path: pathlib.Path, limit: int) -> Iterator[LogLine]:
    """The last lines of a file, each with the time of the call that printed it."""
    source = path.name.partition(".")[0]
    waiting: deque[str] = deque(maxlen=limit)
    found: deque[LogLine] = deque(maxlen=limit)
    with path.open(errors="replace") as log:
        for line in log:
            ends = _END.match(line)
            if ends is None:
                waiting.append(line.rstrip("\n"))
                continue
            found.extend(LogLine(ends[2], source, text) for text in waiting)
            waiting.clear()
    yield from found
    yield from (LogLine("", source, text) for text in waiting)
