"""Who runs a run: a file with the process, its start and its machine, so that neither a recycled id nor the same id on
another machine is ever taken for it. Machines that share the run's directory see its beat."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rollart.cli import beat

__all__ = ["FILE", "ControllerProcess", "age_s", "hold_run", "recorded_controller", "live_controller"]

FILE = "run.pid"


@dataclass(frozen=True, slots=True)
class ControllerProcess:
    """A process: its id, its start in clock ticks since boot, the place in which that id means it, and a name of its
    own, `life`, that no other process ever has."""

    pid: int
    started: int
    life: str = ""
    host: str = ""
    place: str = ""

    @property
    def here(self) -> bool:
        """Whether the id means anything in this process: files of older versions name no place."""
        return self.place in ("", _pid_namespace())

    @property
    def alive(self) -> bool:
        return self.here and _start_ticks(self.pid) == self.started


@contextlib.contextmanager
def hold_run(directory: Path) -> Iterator[None]:
    """This process runs the run in `directory` until the end of the block, and does what other machines ask of it."""
    path = directory / FILE
    pid = os.getpid()
    mine = ControllerProcess(pid, _start_ticks(pid) or 0, secrets.token_hex(8), socket.gethostname(), _pid_namespace())
    with beat.heartbeat(directory, mine.life):
        fresh = directory / f"{FILE}.new"
        fresh.write_text(json.dumps(asdict(mine)))
        fresh.replace(path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def recorded_controller(directory: Path) -> ControllerProcess | None:
    """The process that the directory names, whether it lives or not."""
    try:
        found = json.loads((directory / FILE).read_text())
        return ControllerProcess(**{**found, "pid": int(found["pid"]), "started": int(found["started"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def live_controller(directory: Path) -> ControllerProcess | None:
    """The process that runs the run now; None if it is gone, whatever has its id since. Of a process on another machine
    it takes up to `beat.LOST_S` to know that it is gone."""
    found = recorded_controller(directory)
    if found is None:
        return None
    return found if (found.alive if found.here else beat.has_heartbeat(directory, found.life)) else None


def age_s() -> float:
    """Seconds since this process began, to the kernel's tick of 10 ms; 0 where there is no /proc. A thread that begins
    now is what they are counted to: no clock of the machine means the same in every container."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(_start_ticks("thread-self") or 0))
    thread.start()
    thread.join()
    return max(0, found[0] - (_start_ticks("self") or 0)) / os.sysconf("SC_CLK_TCK")


def _pid_namespace() -> str:
    """Where a process id means one process: a boot of a machine, and a namespace of ids on it (a container has one)."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _start_ticks(pid: int | str) -> int | None:
    """Field 22 of /proc/PID/stat; the name in field 2 may hold spaces and ')'. None if it is not alive."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])
