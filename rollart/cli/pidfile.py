"""The controller process of a run: a file with its id, start and machine, so that neither a recycled id nor the same id
on another machine is taken for it. Machines that share the run's directory see its heartbeat."""

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

FILE = "run.pid"


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
    """Record this process as the controller of the run in `directory` until the end of the block, and answer requests
    of other machines."""
    path = directory / FILE
    pid = os.getpid()
    process = ControllerProcess(
        pid, _start_ticks(pid) or 0, secrets.token_hex(8), socket.gethostname(), _pid_namespace()
    )
    with beat.heartbeat(directory, process.life):
        fresh = directory / f"{FILE}.new"
        fresh.write_text(json.dumps(asdict(process)))
        fresh.replace(path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def recorded_controller(directory: Path) -> ControllerProcess | None:
    """The process recorded in the directory, alive or not."""
    try:
        found = json.loads((directory / FILE).read_text())
        return ControllerProcess(**{**found, "pid": int(found["pid"]), "started": int(found["started"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def live_controller(directory: Path) -> ControllerProcess | None:
    """The live controller of the run; None if it has ended, even if its id was recycled. For a process on another
    machine the answer takes up to `beat.HEARTBEAT_TIMEOUT_S`."""
    found = recorded_controller(directory)
    if found is None:
        return None
    return found if (found.alive if found.here else beat.has_heartbeat(directory, found.life)) else None


def age_s() -> float:
    """Seconds since this process began, to the kernel's tick of 10 ms; 0 without /proc. The reference is the start of a
    new thread, since containers differ in their clocks."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(_start_ticks("thread-self") or 0))
    thread.start()
    thread.join()
    return max(0, found[0] - (_start_ticks("self") or 0)) / os.sysconf("SC_CLK_TCK")


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
