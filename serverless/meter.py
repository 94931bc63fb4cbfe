"""Cost of functions: backends report calls and worker time to a `MeterSink`; `Meter` sums them.

Conservation: a worker is cold (starting), busy (a call runs in it) or idle from its start to its end, so for every
worker life cold + busy + idle seconds = end - start. Spans are half-open and adjacent without gaps.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class FunctionUsage:
    """Totals of one function."""

    invocations: int = 0
    items: int = 0
    cold_starts: int = 0
    cold_start_s: float = 0.0
    billed_s: float = 0.0
    gb_s: float = 0.0
    saved_items: int = 0
    saved_s: float = 0.0
    worker_s: dict[WorkerState, float] = field(default_factory=lambda: dict.fromkeys(WorkerState, 0.0))
    statuses: dict[str, int] = field(default_factory=dict)

    @property
    def total_worker_s(self) -> float:
        return sum(self.worker_s.values())


class Meter:
    """Sums calls and worker time by function."""

    def __init__(self) -> None:
        self._usage: dict[str, FunctionUsage] = {}

    @property
    def usage(self) -> Mapping[str, FunctionUsage]:
        return self._usage

    def invocation(self, invocation: Invocation) -> None:
        usage = self._usage.setdefault(invocation.function, FunctionUsage())
        usage.invocations += 1
        usage.items += invocation.items
        usage.cold_starts += invocation.cold_start_s > 0.0
        usage.cold_start_s += invocation.cold_start_s
        usage.billed_s += invocation.billed_s
        usage.gb_s += invocation.billed_s * invocation.memory_mb / 1024.0
        usage.statuses[invocation.status] = usage.statuses.get(invocation.status, 0) + 1

    def worker(self, span: WorkerSpan) -> None:
        self._usage.setdefault(span.function, FunctionUsage()).worker_s[span.state] += span.t1 - span.t0

    def saving(self, saving: Saving) -> None:
        usage = self._usage.setdefault(saving.function, FunctionUsage())
        usage.saved_items += saving.items
        usage.saved_s += saving.billed_s
