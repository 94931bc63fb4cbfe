"""Heartbeats of a run's controller, and requests to it, through the run's directory: for other machines, where its
process id is meaningless.

A thread, not a task: it answers while the controller is still importing, and when its loop hangs.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

FILE, REQUESTS, ANSWER = "run.beat", "requests", "answer"

SIGNALS = {"stop": signal.SIGTERM, "kill": signal.SIGKILL}
"""Requests to a controller, and the signal that it then sends itself."""

HEARTBEAT_INTERVAL_S = 0.5
"""Seconds between two heartbeats; requests are checked at each."""

POLL_INTERVAL_S = 0.1
"""Seconds between two reads of a controller's files."""

HEARTBEAT_TIMEOUT_S = 15.0
"""Without a heartbeat for this many seconds, a controller is dead or cannot reach the directory. Shared file systems
show the writes of other machines after seconds (NFS: 3 by default)."""


@contextlib.contextmanager
def heartbeat(directory: Path, life: str) -> Iterator[None]:
    """Write heartbeats and answer requests to the process `life` until the end of the block."""
    done = threading.Event()
    shutil.rmtree(directory / REQUESTS, ignore_errors=True)  # requests to earlier processes
    with contextlib.suppress(OSError):  # the run's first write reports the error
        (directory / REQUESTS).mkdir()
    thread = threading.Thread(target=_heartbeat_loop, args=(directory, life, done), name="beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with contextlib.suppress(OSError):
            (directory / FILE).unlink(missing_ok=True)
        shutil.rmtree(directory / REQUESTS, ignore_errors=True)


def has_heartbeat(directory: Path, life: str, *, lost_s: float = HEARTBEAT_TIMEOUT_S) -> bool:
    """True if the process `life` writes a heartbeat; returns at its next one, or after `lost_s` seconds."""
    first = _read(directory / FILE)
    for _ in _poll_ticks(lost_s):
        now = _read(directory / FILE)
        if now != first and now.startswith(f"{life} "):
            return True
    return False


def send_request(directory: Path, life: str, action: str, *, lost_s: float = HEARTBEAT_TIMEOUT_S) -> bool:
    """Send a request (`stop` or `kill`) to the process `life`; True if it answered in time or has ended. It acts right
    after its answer. OSError if the directory cannot be written."""
    requests = directory / REQUESTS
    if not requests.exists():
        return True
    name = secrets.token_hex(8)
    request, answer = requests / f"{name}.{action}", requests / f"{name}.{ANSWER}"
    unfinished = requests / name
    unfinished.write_text(life)
    unfinished.rename(request)
    try:
        # A controller that ends removes the requests.
        return any(answer.exists() or not requests.exists() for _ in _poll_ticks(lost_s))
    finally:
        for path in (request, answer):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _heartbeat_loop(directory: Path, life: str, done: threading.Event) -> None:
    number = 0
    while True:
        with contextlib.suppress(OSError):  # a full disk or a missing file system: retry at the next heartbeat
            (directory / FILE).write_text(f"{life} {number}")
            for action, path in _pending_requests(directory, life):
                path.with_suffix(f".{ANSWER}").touch()
                path.unlink(missing_ok=True)
                os.kill(os.getpid(), SIGNALS[action])
        number += 1
        if done.wait(HEARTBEAT_INTERVAL_S):
            return


def _pending_requests(directory: Path, life: str) -> list[tuple[str, Path]]:
    """Requests to the process `life`; requests to other processes are ignored."""
    found = [(path.suffix[1:], path) for path in sorted((directory / REQUESTS).glob("*.*"))]
    return [(action, path) for action, path in found if action in SIGNALS and _read(path) == life]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _poll_ticks(seconds: float) -> Iterator[None]:
    """Ticks over `seconds`, the first at once."""
    yield
    for _ in range(max(1, round(seconds / POLL_INTERVAL_S))):
        threading.Event().wait(POLL_INTERVAL_S)
        yield
