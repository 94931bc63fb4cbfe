"""The end of child processes: with their parent (Linux's parent-death signal), or on request.

`python -m rollart.lifeline PARENT_PID MODULE ARGS...` runs a module as a child that never outlives its parent. The
signal is requested before the module is imported: a program that requests it itself becomes an orphan for ever if its
parent dies during the seconds of its imports.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import runpy
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


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


async def terminate(process: asyncio.subprocess.Process, grace_s: float) -> None:
    """SIGTERM, then SIGKILL after `grace_s`; returns when the process is reaped, at once if it already was."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(grace_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def stop_event() -> asyncio.Event:
    """Set by SIGTERM and SIGINT, from now on for the running loop."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
