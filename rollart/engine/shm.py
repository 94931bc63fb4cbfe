"""KV for engines on the same host: one file per export, in memory, in a directory that only this user can read.

Layout: `<base>/rollart-kv-<uid>/<engine>/<name>`, directories 0700 and files 0600. A live engine holds a lock on its
directory; the lock ends with the process, however it ends. A process that can take the lock may remove the directory.
An engine takes a file by unlinking it: of several takers exactly one succeeds, and its mapping stays readable.
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

SHM_BASE = "/dev/shm"
"""Linux's in-memory file system."""

LOCATION_PATTERN = re.compile(r"[0-9a-f-]+/[0-9a-f]+")
"""Valid relative paths of files; none of them leads out of the root."""


class SharedKvFiles:
    """One engine's directory of KV files, and access to the directories of the other engines on the host. Calls are
    short and never wait; `write` and `take` may run in a worker thread."""

    def __init__(self, base: str) -> None:
        """Where `base` is '' or unusable, or the root belongs to another user, nothing is shared: no file exists, and
        `write` raises OSError. Nothing is created before the first `write`."""
        root = Path(base or os.devnull) / f"rollart-kv-{os.geteuid()}"
        self.root = root if not root.exists() or _is_own(root) else Path(os.devnull) / root.name
        self._directory: Path | None = None
        self._alive: int | None = None
        self.sweep()

    def write(self, parts: Iterable[memoryview]) -> str:
        """Write a new file; returns its path relative to the root. OSError if memory is full; no file remains then."""
        directory = self._directory or self._claim()
        path = directory / secrets.token_hex(16)
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(handle, "wb", buffering=0) as file:
                for part in parts:
                    while len(part):  # when memory is full, a short write precedes the error
                        part = part[file.write(part) :]
        except OSError:
            path.unlink()
            raise
        return f"{directory.name}/{path.name}"

    def take(self, location: str) -> mmap.mmap | None:
        """Map a file and unlink it. None if it does not exist, or is not a regular file of this user."""
        if not LOCATION_PATTERN.fullmatch(location):
            return None
        path = self.root / location
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

    def holds(self, location: str) -> bool:
        """True if the file was not taken yet."""
        return (self.root / location).exists()

    def remove(self, location: str) -> None:
        if LOCATION_PATTERN.fullmatch(location):
            with suppress(OSError):
                os.unlink(self.root / location)

    def sweep(self) -> None:
        """Remove the directories of dead engines. Skipped while another engine sweeps."""
        if not self.root.exists():
            return
        with suppress(OSError), _locked(self.root / "lock"):
            for directory in self.root.iterdir():
                if directory != self._directory and directory.is_dir():
                    with suppress(OSError), _locked(directory / "lock"):
                        shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """Remove this engine's files."""
        if self._directory is not None and self._alive is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            os.close(self._alive)
            self._directory = self._alive = None

    def _claim(self) -> Path:
        """Create this engine's directory. BlockingIOError while another engine sweeps; the next export retries."""
        with suppress(FileExistsError):
            self.root.mkdir(mode=0o700)
        if not _is_own(self.root):
            raise PermissionError(f"{self.root} is not a directory of this user")
        directory = self.root / f"{os.getpid():x}-{secrets.token_hex(6)}"
        with _locked(self.root / "lock"):  # no sweep can run before the new directory is locked
            directory.mkdir(mode=0o700)
            self._alive = lock_file(directory / "lock")
        self._directory = directory
        return directory


def _is_own(directory: Path) -> bool:
    found = directory.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def lock_file(path: Path) -> int:
    """Lock a file until its handle is closed or the process ends. BlockingIOError if another process holds the lock."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = lock_file(path)
    try:
        yield
    finally:
        os.close(handle)


def boot_id() -> str:
    """Identifies this boot of this host; '' if the kernel does not report it. Containers of one host share the id, so
    only opening a file proves that they share memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
