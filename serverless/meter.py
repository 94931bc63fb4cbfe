"""Cost of functions: backends report calls and worker time to a `MeterSink`.

Conservation: a worker is cold (starting), busy (a call runs in it) or idle from its start to its end, so for every
worker life cold + busy + idle seconds = end - start. Spans are half-open and adjacent without gaps.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Protocol

from serverless.types import Invocation


class WorkerState(enum.StrEnum):
    COLD = "cold"
    BUSY = "busy"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class WorkerSpan:
    """A period of one worker in one state, loop seconds."""

    function: str
    provider: str
    worker: str
    t0: float
    t1: float
    state: WorkerState
    memory_mb: int


@dataclass(frozen=True, slots=True)
class Saving:
    """Items that needed no call: `stage` is "dedupe" or "cache". `billed_s` is their estimated bill at the function's
    mean so far (0 before the first call)."""

    function: str
    stage: str
    t: float
    items: int
    billed_s: float
    memory_mb: int


class MeterSink(Protocol):
    """Receives the reports of backends. Synchronous and cheap."""

    def invocation(self, invocation: Invocation) -> None:
        """A call ended, with or without success. Cancelled calls and failed starts (0 items) are reported too."""

    def worker(self, span: WorkerSpan) -> None: ...

    def saving(self, saving: Saving) -> None: ...


def billed_seconds(seconds: float) -> float:
    """Seconds rounded up to 1 ms, as Lambda does. A failed start is billed too."""
    return math.ceil(round(seconds * 1000.0, 6)) / 1000.0


class NullMeter:
    def invocation(self, invocation: Invocation) -> None: ...

    def worker(self, span: WorkerSpan) -> None: ...

    def saving(self, saving: Saving) -> None: ...
