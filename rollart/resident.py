"""Memory of this process and its machine, from /proc: Linux. Other systems report 0 for unknown."""

from __future__ import annotations

import contextlib
from pathlib import Path

PROC = Path("/proc")
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""A container's limit, by the two versions of control groups."""


def resident_bytes(*, below: bool = True) -> int:
    """Resident memory of this process, and of its descendants (`below`) where the kernel lists them; without pages of
    files, which processes share."""
    total, seen, left = 0, set[str](), ["self"]
    while left:
        process = left.pop()
        if process in seen:
            continue
        seen.add(process)
        try:
            total += _own(process)
            if not below:
                break
            for thread in (PROC / process / "task").iterdir():
                with contextlib.suppress(OSError):  # the thread has ended, or the kernel has no such file
                    left += (thread / "children").read_text().split()
        except OSError:  # the process has ended
            continue
    return total


def machine_bytes() -> int:
    """Memory of the machine, or of the container if it has a lower limit."""
    found: list[int] = []
    try:
        found += [1024 * int(line.split()[1]) for line in (PROC / "meminfo").read_text().splitlines()[:1]]
        for path in LIMITS:
            if path.exists() and (limit := path.read_text().strip()).isdecimal():
                found.append(int(limit))
    except OSError:
        pass
    return min(found, default=0)


def _own(process: str) -> int:
    total = 0
    for line in (PROC / process / "status").read_text().splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            total += 1024 * int(line.split()[1])
    return total
