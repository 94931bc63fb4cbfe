"""Values of the sandbox: the limits of a program, its result, and the rungs of isolation."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one program. `files_mb` of a sandbox's own limits also sizes its whole scratch directory."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    """CPU seconds of each process, rounded up to whole seconds (RLIMIT_CPU)."""
    memory_mb: int = 512
    """Address space of each process, beyond that of the preloaded modules (RLIMIT_AS). It is not shared between
    processes: all of them together may use `processes` times as much."""
    output_bytes: int = 1 << 20
    """Bytes of standard output and error together; one byte more ends the program."""
    files_mb: int = 64
    """Size of the largest file that it may write, and about the maximum of all its files together."""
    processes: int = 16
    """Maximum number of processes and threads. Where the kernel has no such count for the sandbox alone (without
    namespaces, and in a user namespace of the real root user) a program can start no processes, only threads."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0 or value > 1e9:
                raise ValueError(f"Limits({name}={value!r}) must be positive and at most 1e9")


class Status(enum.StrEnum):
    """The status of an ended program. Every status but OK was caused by the program."""

    OK = "ok"
    EXIT = "exit"
    """With an exit code other than 0; an exception is code 1."""
    SIGNAL = "signal"
    TIME = "time"
    MEMORY = "memory"
    OUTPUT = "output"
    """More output than allowed, or (without a private file system) more files."""
    KILLED = "killed"
    """It killed its supervisor."""


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of a program. Text is UTF-8 with replacement characters for invalid bytes.

    `exit_code` is negative for a signal. `max_rss_mb` is that of its largest process, including the preloaded modules.
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
    """A level of isolation, and the reason why it cannot be used here ('' if it can)."""

    name: str
    available: bool
    why_not: str = ""
