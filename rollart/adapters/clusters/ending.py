"""Termination of a child process."""

from __future__ import annotations

import asyncio


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
