"""Termination of a process with its parent: Linux's parent-death signal. For programs and for their starters."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""prctl(2)."""


def die_with_parent(parent: int, number: int = signal.SIGKILL, *, code: int = 1) -> None:
    """Request a signal from the kernel for the parent's end; exit at once with `code` if `parent` has ended already.
    Without Linux, the parent's own supervision must suffice."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(code)
