"""How long an engine or the trainer may take to start, and what is said of it meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from rollart.errors import PartDied, SpecError
from rollart.ports import Handle, Recorder, RunEvent
from rollart.spec.planning import run_shape
from rollart.spec.resolve import Resolved

__all__ = ["STARTING_EVENT", "StartLimits", "StartWatcher", "engine_start_limits", "trainer_start_s"]

STARTING_EVENT = "engine_starting"
"""The event of an engine that is not there yet: seconds so far, and the last line of its log."""

START_S, VLLM_START_S = 120.0, 300.0
"""For a program without weights to speak of. vLLM compiles kernels and captures graphs: one to four minutes."""

BYTES_PER_PARAMETER, BYTES_PER_S = 4.0, 0.5e9
"""What is read of a model at most, and how fast at least: a network file system in use, or a disk."""

VLLM_START_FACTOR = 4.0
"""A vLLM server that goes on telling what it does gets so many times its time in all."""

LOG_SILENCE_S = 120.0
"""Seconds without a new line after which one that is late is given up. The longest silences are compilations."""

DEADLINE_SHARE = 0.99
"""Share of its longest time after which it is given up with its last line: the lease that ends it then has none."""

LOG_POLL_S = 10.0
"""Between two looks at its log. The embedded engine is there before the first."""


@dataclass(frozen=True, slots=True)
class StartLimits:
    """A start may take `seconds`; one whose log grows `most_s`."""

    seconds: float
    most_s: float


def engine_start_limits(resolved: Resolved) -> StartLimits:
    """What `leases.engine_start_s` says; with `auto` by the kind of engine and the size of the model."""
    given, vllm = resolved.run.leases.engine_start_s, resolved.cluster.engines.kind == "vllm"
    if given != "auto":
        return StartLimits(given, given)
    seconds = (VLLM_START_S if vllm else START_S) + _reading_s(resolved)
    return StartLimits(seconds, VLLM_START_FACTOR * seconds if vllm else seconds)


def trainer_start_s(resolved: Resolved) -> float:
    """Seconds, and as many for a version that it restores."""
    given = resolved.run.leases.engine_start_s
    return START_S + _reading_s(resolved) if given == "auto" else given


class StartWatcher:
    """Watches one start of a program: tells what its log says, and gives it up."""

    def __init__(self, limits: StartLimits, recorder: Recorder) -> None:
        self._limits, self._recorder = limits, recorder

    async def watch(self, program: Handle) -> None:
        """Until it is cancelled. `PartDied` for one that has had its time, with the last line that it said."""
        loop = asyncio.get_running_loop()
        began = news = loop.time()
        last, size = began + DEADLINE_SHARE * self._limits.most_s, 0
        while True:
            await asyncio.sleep(max(0.0, min(LOG_POLL_S, last - loop.time())))
            grown, line = await program.call("said")
            now = loop.time()
            if grown != size:
                size, news = grown, now
            took = now - began
            told = {"seconds": round(took, 1), "said": line}
            self._recorder.event(RunEvent(now, STARTING_EVENT, program.name, told))
            if (took > self._limits.seconds and now - news > LOG_SILENCE_S) or now >= last:
                raise PartDied(
                    program.name,
                    f"was not ready after {took:.0f} s, and has said nothing new for {now - news:.0f} s; its last "
                    f"line: {line or 'none'}",
                    remedy="see its log; leases.engine_start_s gives it longer",
                )


def _reading_s(resolved: Resolved) -> float:
    """Whole seconds to read the model; 0 of one whose shape nobody knows."""
    with contextlib.suppress(SpecError):
        return float(run_shape(resolved.run, resolved.base).parameters * BYTES_PER_PARAMETER // BYTES_PER_S)
    return 0.0
