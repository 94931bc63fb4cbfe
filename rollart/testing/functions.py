"""A meter of functions for tests and benchmarks: it sums calls and worker time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from serverless.meter import Saving, WorkerSpan, WorkerState
from serverless.types import Invocation


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
