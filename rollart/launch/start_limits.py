"""Time limits for starts of engines and the trainer, and progress events during a start."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from rollart.errors import PartDied, SpecError
from rollart.ports import Handle, Recorder, RunEvent
from rollart.settings.planning import run_shape
from rollart.settings.resolve import Resolved

STARTING_EVENT = "engine_starting"
"""Event of an engine that is starting: seconds so far, and the last line of its log."""

START_S, VLLM_START_S = 120.0, 300.0
"""For a program with negligible weights. vLLM compiles kernels and captures graphs, which takes one to four minutes."""

BYTES_PER_PARAMETER, BYTES_PER_S = 4.0, 0.5e9
"""Upper bound on the bytes to read per parameter, and lower bound on the read speed: a busy network file system, or a
disk."""

VLLM_START_FACTOR = 4.0
"""Total time of a vLLM server that keeps logging, as a multiple of its normal time."""

LOG_SILENCE_S = 120.0
"""Seconds without a new log line after which a late server is given up. The longest silences are compilations."""

DEADLINE_SHARE = 0.99
"""Share of the longest time at which a start is given up with its last log line, before its lease ends it without
one."""

LOG_POLL_S = 10.0
"""Seconds between reads of the log. The embedded engine has started before the first."""


@dataclass(frozen=True, slots=True)
class StartLimits:
    """A start may take `seconds`, and up to `most_s` while its log grows."""

    seconds: float
    most_s: float


def engine_start_limits(resolved: Resolved) -> StartLimits:
    """Limits by `leases.engine_start_s`; with `auto` by the kind of engine and the size of the model."""
    given, vllm = resolved.run.leases.engine_start_s, resolved.cluster.engines.kind == "vllm"
    if given != "auto":
        return StartLimits(given, given)
    seconds = (VLLM_START_S if vllm else START_S) + _reading_s(resolved)
    return StartLimits(seconds, VLLM_START_FACTOR * seconds if vllm else seconds)


def trainer_start_s(resolved: Resolved) -> float:
    """Seconds for a start, and the same again for the restore of a version."""
    given = resolved.run.leases.engine_start_s
    return START_S + _reading_s(resolved) if given == "auto" else given


async def watch_start(program: Handle, limits: StartLimits, recorder: Recorder) -> None:
    """Record the log lines of a program that starts, until cancelled. `PartDied` for a start that exceeds its limits,
    with its last log line."""
    loop = asyncio.get_running_loop()
    began = last_output = loop.time()
    last, size = began + DEADLINE_SHARE * limits.most_s, 0
    while True:
        await asyncio.sleep(max(0.0, min(LOG_POLL_S, last - loop.time())))
        grown, line = await program.call("said")
        now = loop.time()
        if grown != size:
            size, last_output = grown, now
        took = now - began
        recorder.event(RunEvent(now, STARTING_EVENT, program.name, {"seconds": round(took, 1), "said": line}))
        if (took > limits.seconds and now - last_output > LOG_SILENCE_S) or now >= last:
            raise PartDied(
                program.name,
                f"was not ready after {took:.0f} s, and has logged nothing new for {now - last_output:.0f} s; its "
                f"last line: {line or 'none'}",
                remedy="see its log; leases.engine_start_s gives it longer",
            )


def _reading_s(resolved: Resolved) -> float:
    """Whole seconds to read the model; 0 if its shape is unknown."""
    with contextlib.suppress(SpecError):
        return float(run_shape(resolved).parameters * BYTES_PER_PARAMETER // BYTES_PER_S)
    return 0.0
