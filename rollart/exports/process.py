"""The exporting process of a run: started before the ledger, and ended after it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from rollart.errors import UsageError
from rollart.lifeline import terminate
from rollart.ports import RunEvent
from rollart.settings.telemetry import TelemetrySpec

START_S = 60.0
"""Longest start, imports of the clients included."""

REST_S = 20.0
"""Longest time for the figures that are left when the run has ended."""

LOG = "exports.log"


@contextlib.asynccontextmanager
async def exporting(spec: TelemetrySpec, directory: Path, progress: Callable[[RunEvent], None]) -> AsyncIterator[None]:
    """Export the run in `directory` while the body runs, and the rest once it has ended. Nothing happens for a run
    without exports. UsageError if the process cannot start; its end during the run is shown and ends nothing."""
    if not spec.exports:
        yield
        return
    log = directory / "logs" / LOG
    log.parent.mkdir(exist_ok=True)
    command = ["-m", "rollart.lifeline", str(os.getpid()), "rollart.exports", str(directory), spec.model_dump_json()]
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        )
    now = asyncio.get_running_loop().time
    try:
        progress(RunEvent(now(), "exporting", "run", await _ready(process, log)))
        yield
        if process.returncode is not None:
            lost = RunEvent(now(), "exports_lost", "run", {"exit_code": process.returncode, "log": str(log)})
            progress(lost)
    finally:
        await terminate(process, REST_S)


async def _ready(process: asyncio.subprocess.Process, log: Path) -> dict[str, str]:
    """The addresses that the process prints once it is ready."""
    assert process.stdout is not None
    line = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(START_S):
            line = await process.stdout.readline()
    if not line:
        raise UsageError("the process that exports the run's telemetry did not start", remedy=f"see {log}")
    said: dict[str, str] = json.loads(line)
    if "error" in said:
        raise UsageError(said["error"], remedy=said["remedy"])
    return said
