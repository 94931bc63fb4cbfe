"""Who runs a run: a file with the process id and its start time, so that a recycled id is never taken for it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FILE", "Owner", "hold", "owner"]

FILE = "run.pid"


@dataclass(frozen=True, slots=True)
class Owner:
    """A live process: its id and its start in clock ticks since boot."""

    pid: int
    started: int


@contextlib.contextmanager
def hold(directory: Path) -> Iterator[None]:
    """This process runs the run in `directory` until the end of the block."""
    path = directory / FILE
    pid = os.getpid()
    path.write_text(json.dumps({"pid": pid, "started": _started(pid)}))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def owner(directory: Path) -> Owner | None:
    """The process that runs the run now; None if it is gone, whatever has its id since."""
    try:
        noted = json.loads((directory / FILE).read_text())
        found = Owner(int(noted["pid"]), int(noted["started"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if _started(found.pid) == found.started else None


def _started(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; the name in field 2 may hold spaces and ')'. None if it is not alive."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])
