"""The controller process of a run, and requests to it, by files in the run's directory.

A file with the process's id, start and machine, so that neither a recycled id nor the same id on another machine is
taken for it. Other machines, where the id is meaningless, see its heartbeat there and leave requests. A thread writes
the heartbeat, not a task: it answers while the controller is still importing, and when its loop hangs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

PID_FILE = "run.pid"

BEAT_FILE, REQUESTS, ANSWER = "run.beat", "requests", "answer"

SIGNALS = {"stop": signal.SIGTERM, "kill": signal.SIGKILL}
"""Requests to a controller, and the signal that it then sends itself."""

HEARTBEAT_INTERVAL_S = 0.5
"""Seconds between two heartbeats; requests are checked at each."""

POLL_INTERVAL_S = 0.1
"""Seconds between two reads of a controller's files."""

HEARTBEAT_TIMEOUT_S = 15.0
"""Without a heartbeat for this many seconds, a controller is dead or cannot reach the directory. Shared file systems
show the writes of other machines after seconds (NFS: 3 by default)."""


@dataclass(frozen=True, slots=True)
class ControllerProcess:
    """A process: its id, its start in clock ticks since boot, `place`, the namespace of the id, and `life`, a unique
    name."""

    pid: int
    started: int
    life: str = ""
    host: str = ""
    place: str = ""

    @property
    def here(self) -> bool:
        """True if the id is valid in this process's namespace. Files of older versions have no `place`."""
        return self.place in ("", _pid_namespace())

    @property
    def alive(self) -> bool:
        return self.here and _start_ticks(self.pid) == self.started


@contextlib.contextmanager
def hold_run(directory: Path) -> Iterator[None]:
    """Record this process as the controller of the run in `directory` until the end of the block, write heartbeats, and
    answer requests of other machines."""
    path = directory / PID_FILE
    pid = os.getpid()
    process = ControllerProcess(
        pid, _start_ticks(pid) or 0, secrets.token_hex(8), socket.gethostname(), _pid_namespace()
    )
    done = threading.Event()
    shutil.rmtree(directory / REQUESTS, ignore_errors=True)  # requests to earlier processes
    with contextlib.suppress(OSError):  # the run's first write reports the error
        (directory / REQUESTS).mkdir()
    beats = threading.Thread(target=_heartbeat_loop, args=(directory, process.life, done), name="beat", daemon=True)
    beats.start()
    try:
        fresh = directory / f"{PID_FILE}.new"
        fresh.write_text(json.dumps(asdict(process)))
        fresh.replace(path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        done.set()
        beats.join()
        with contextlib.suppress(OSError):
            (directory / BEAT_FILE).unlink(missing_ok=True)
        shutil.rmtree(directory / REQUESTS, ignore_errors=True)


def recorded_controller(directory: Path) -> ControllerProcess | None:
    """The process recorded in the directory, alive or not."""
    try:
        found = json.loads((directory / PID_FILE).read_text())
        return ControllerProcess(**{**found, "pid": int(found["pid"]), "started": int(found["started"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def live_controller(directory: Path) -> ControllerProcess | None:
    """The live controller of the run; None if it has ended, even if its id was recycled. For a process on another
    machine the answer takes up to `beat.HEARTBEAT_TIMEOUT_S`."""
    found = recorded_controller(directory)
    if found is None:
        return None
    return found if (found.alive if found.here else has_heartbeat(directory, found.life)) else None


def age_s() -> float:
    """Seconds since this process began, to the kernel's tick of 10 ms; 0 without /proc. The reference is the start of a
    new thread, since containers differ in their clocks."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(_start_ticks("thread-self") or 0))
    thread.start()
    thread.join()
    return max(0, found[0] - (_start_ticks("self") or 0)) / os.sysconf("SC_CLK_TCK")


def has_heartbeat(directory: Path, life: str, *, lost_s: float = HEARTBEAT_TIMEOUT_S) -> bool:
    """True if the process `life` writes a heartbeat; returns at its next one, or after `lost_s` seconds."""
    first = _read(directory / BEAT_FILE)
    for _ in poll_ticks(lost_s):
        now = _read(directory / BEAT_FILE)
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
        return any(answer.exists() or not requests.exists() for _ in poll_ticks(lost_s))
    finally:
        for path in (request, answer):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _heartbeat_loop(directory: Path, life: str, done: threading.Event) -> None:
    for number in itertools.count():
        with contextlib.suppress(OSError):  # a full disk or a missing file system: retry at the next heartbeat
            (directory / BEAT_FILE).write_text(f"{life} {number}")
            for path in sorted((directory / REQUESTS).glob("*.*")):
                action = path.suffix[1:]
                if action in SIGNALS and _read(path) == life:  # requests to other processes are ignored
                    path.with_suffix(f".{ANSWER}").touch()
                    path.unlink(missing_ok=True)
                    os.kill(os.getpid(), SIGNALS[action])
        if done.wait(HEARTBEAT_INTERVAL_S):
            return


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def poll_ticks(seconds: float) -> Iterator[None]:
    """Ticks over `seconds`, the first at once."""
    yield
    for _ in range(max(1, round(seconds / POLL_INTERVAL_S))):
        threading.Event().wait(POLL_INTERVAL_S)
        yield


def _pid_namespace() -> str:
    """The scope of a process id: the boot of a machine, and the pid namespace on it (containers have their own)."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _start_ticks(pid: int | str) -> int | None:
    """Field 22 of /proc/PID/stat; the name in field 2 may hold spaces and ')'. None if the process is not alive."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])
