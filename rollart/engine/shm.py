"""KV for engines on the same host: one file per export, in memory, in a directory that only this user can read.

Layout: `<base>/rollart-kv-<uid>/<engine>/<name>`, directories 0700 and files 0600. An engine holds a lock on its own
directory for as long as it lives, however it ends; whoever can take that lock may remove what it left. A file is taken
by removing its name: of several takers exactly one succeeds, and what it mapped stays readable.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["SHM_BASE", "SharedKvFiles", "boot_id"]

SHM_BASE = "/dev/shm"
"""Where Linux keeps files in memory."""

LOCATION_PATTERN = re.compile(r"[0-9a-f-]+/[0-9a-f]+")
"""What a place may look like: no name of it leads out of the root."""


class SharedKvFiles:
    """One engine's directory, and the way into those of its neighbours. Calls are short and do not wait; `write` and
    `take` may run in a worker thread."""

    def __init__(self, base: str) -> None:
        """OSError if `base` is not there or another user stands in the way: then KV travels by socket only. Nothing is
        created before the first `write`."""
        if not Path(base).is_dir():
            raise FileNotFoundError(f"{base} is not a directory")
        self.root = Path(base) / f"rollart-kv-{os.geteuid()}"
        self._own: Path | None = None
        self._alive: int | None = None
        if self.root.exists():
            self._check()
        self.sweep()

    def write(self, parts: Iterable[memoryview]) -> str:
        """A new file of these bytes; its place, relative to the root. OSError when memory is full: nothing is left."""
        own = self._own or self._claim()
        path = own / secrets.token_hex(16)
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(handle, "wb", buffering=0) as file:
                for part in parts:
                    while len(part):  # a full memory shows as a short write first
                        part = part[file.write(part) :]
        except OSError:
            path.unlink()
            raise
        return f"{own.name}/{path.name}"

    def take(self, place: str) -> mmap.mmap | None:
        """Map a file and remove its name. None if it is not there, or not a plain file of this user."""
        if not LOCATION_PATTERN.fullmatch(place):
            return None
        path = self.root / place
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                return None
            os.unlink(path)
            return mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError):  # another taker was faster; an empty file
            return None
        finally:
            os.close(handle)

    def holds(self, place: str) -> bool:
        """Whether nobody took it yet."""
        return (self.root / place).exists()

    def remove(self, place: str) -> None:
        if LOCATION_PATTERN.fullmatch(place):
            with suppress(OSError):
                os.unlink(self.root / place)

    def sweep(self) -> None:
        """Remove what engines left that are dead. Skipped while another engine does so."""
        if not self.root.exists():
            return
        with suppress(OSError), _locked(self.root / "lock"):
            for directory in self.root.iterdir():
                if directory != self._own and directory.is_dir():
                    with suppress(OSError), _locked(directory / "lock"):
                        shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """Remove this engine's files."""
        if self._own is not None and self._alive is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            os.close(self._alive)
            self._own = self._alive = None

    def _claim(self) -> Path:
        """This engine's directory. BlockingIOError while a neighbour sweeps: the next export may use it."""
        with suppress(FileExistsError):
            self.root.mkdir(mode=0o700)
        self._check()
        own = self.root / f"{os.getpid():x}-{secrets.token_hex(6)}"
        with _locked(self.root / "lock"):  # nobody sweeps between the directory and its lock
            own.mkdir(mode=0o700)
            self._alive = _lock(own / "lock")
        self._own = own
        return own

    def _check(self) -> None:
        found = self.root.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(f"{self.root} is not a directory of this user")


def _lock(path: Path) -> int:
    """Lock a file until its handle is closed, or the process is gone. BlockingIOError if somebody else holds it."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = _lock(path)
    try:
        yield
    finally:
        os.close(handle)


def boot_id() -> str:
    """This boot of this host; empty where the kernel does not say. Containers of one host share it: only a file that
    opens proves that memory is shared."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
