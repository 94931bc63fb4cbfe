"""A child that never outlives its parent: Linux's parent-death signal.

`python -m rollart.adapters.clusters.pdeathsig PARENT_PID MODULE ARGS...` runs a module under it. The signal is asked
for before the module is imported: a program that asks for it itself is an orphan for ever if its parent dies in the
seconds that its imports take.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel for a signal when the parent ends. Exits at once if `parent` has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
