"""Termination of all programs that a process started, in any session and under any parent: Linux.

Each program inherits its starter's environment, and with it a mark. A watcher waits for the end of the marked process,
kill -9 included, and then kills every process that carries the mark.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
from pathlib import Path

MARK = "ROLLART_LIFE"
ROUNDS, ROUND_S = 100, 0.1
"""Scans of all processes; done after two scans that find none."""


_marked: set[int] = set()
"""The id of this process once it has a watcher; a fork has the set of its parent, and an id of its own."""


def kill_at_end(grace_s: float = 0.0) -> None:
    """From now on, programs that this process starts end with it: programs still running `grace_s` after its end are
    killed.

    A second call changes nothing: one watcher serves all runs of a process.
    """
    if sys.platform != "linux" or os.getpid() in _marked:
        return
    _marked.add(os.getpid())
    mark = os.environ[MARK] = secrets.token_hex(16)
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark, str(grace_s)]
    null = subprocess.DEVNULL
    subprocess.Popen(command, stdin=null, stdout=null, stderr=null, env={}, cwd="/", start_new_session=True)


def _watch(parent: int, mark: str, grace_s: float) -> None:
    try:
        process = os.pidfd_open(parent)
    except ProcessLookupError:
        pass
    else:
        if os.getppid() == parent:  # else it has ended, and the id may be another's
            select.select([process], [], [])
    select.select([], [], [], grace_s)
    clean = 0
    for _ in range(ROUNDS):
        clean = 0 if _kill(f"{MARK}={mark}".encode(), parent) else clean + 1
        if clean == 2:
            return
        select.select([], [], [], ROUND_S)


def _kill(mark: bytes, session: int) -> bool:
    """True if a process with the mark was found, or one in the process's own session (forks keep the environment of the
    start)."""
    found = False
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            marked = mark in (entry / "environ").read_bytes().split(b"\0") or int(fields[3]) == session
            if marked and fields[0] not in ("Z", "X"):
                os.kill(int(entry.name), signal.SIGKILL)
                found = True
        except OSError:
            continue
    return found


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
