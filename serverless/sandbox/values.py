"""Values of the sandbox: what a program may use, what it did, and the rungs of the ladder."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Limits", "Ran", "Rung", "Status"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use. `files_mb` of a sandbox's own limits also sizes its whole scratch directory."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    """Of each process, rounded up to whole seconds (RLIMIT_CPU)."""
    memory_mb: int = 512
    """Address space of each process, beyond what the preloaded modules take (RLIMIT_AS). Processes share nothing of
    it: all of them together may take `processes` times as much."""
    output_bytes: int = 1 << 20
    """Of standard output and error together; one byte more ends the program."""
    files_mb: int = 64
    """Largest file that it may write, and about the most of all files together."""
    processes: int = 16
    """Processes and threads at once. Where the kernel counts none for the sandbox alone (without namespaces, and in a
    user namespace of the real root user) a program can start no process, only threads."""

    def __post_init__(self) -> None:
        for name in ("wall_s", "cpu_s", "memory_mb", "output_bytes", "files_mb", "processes"):
            value = getattr(self, name)
            if not value > 0 or value > 1e9:
                raise ValueError(f"Limits({name}={value!r}) must be positive and at most 1e9")


class Status(enum.StrEnum):
    """How a program ended. All but OK are its own doing."""

    OK = "ok"
    EXIT = "exit"
    """With an exit code other than 0; an exception is code 1."""
    SIGNAL = "signal"
    TIME = "time"
    MEMORY = "memory"
    OUTPUT = "output"
    """More output, or (without a file system of its own) more files, than it may write."""
    KILLED = "killed"
    """It took its supervisor down with it."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What a program did. Text is UTF-8 with replacement characters for what is not.

    `exit_code` is negative for a signal. `max_rss_mb` is that of its largest process, the preloaded modules included.
    """

    stdout: str
    stderr: str
    status: Status
    exit_code: int
    wall_s: float
    cpu_s: float
    max_rss_mb: float

    @property
    def ok(self) -> bool:
        return self.status is Status.OK


@dataclass(frozen=True, slots=True)
class Rung:
    """A way to isolate programs, and why it cannot be used here ('' if it can)."""

    name: str
    available: bool
    why_not: str = ""
