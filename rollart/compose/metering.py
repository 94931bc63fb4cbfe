"""Records functions in the ledger: the bill of every call, the time of every worker, and the pipeline's counters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import asdict
from typing import Protocol

from rollart.errors import StorageFailed
from rollart.ledger.reader import FUNCTION_HEALTH, OFFLOAD_STAGE
from rollart.ports import RunEvent
from serverless.meter import Saving, WorkerSpan
from serverless.pipeline import Offload
from serverless.types import Invocation

__all__ = ["LedgerMeter", "offload_events", "record_offload"]


class LedgerWriter(Protocol):
    """The part of a ledger that receives function records."""

    def event(self, event: RunEvent) -> None: ...

    def invocation(self, invocation: Invocation) -> None: ...

    def saving(self, saving: Saving) -> None: ...

    def worker(self, span: WorkerSpan) -> None: ...


class LedgerMeter:
    """`MeterSink` over a ledger. Spans of zero length are omitted.

    A ledger that can no longer write ends the run by itself (`Ledger.watch`). Later reports come from pools and workers
    that are being closed, and must not disturb that.
    """

    def __init__(self, ledger: LedgerWriter) -> None:
        self._ledger = ledger

    def invocation(self, invocation: Invocation) -> None:
        with contextlib.suppress(StorageFailed):
            self._ledger.invocation(invocation)

    def worker(self, span: WorkerSpan) -> None:
        if span.t1 > span.t0:
            with contextlib.suppress(StorageFailed):
                self._ledger.worker(span)

    def saving(self, saving: Saving) -> None:
        with contextlib.suppress(StorageFailed):
            self._ledger.saving(saving)


def record_offload(ledger: LedgerWriter, offload: Offload, now: float) -> None:
    """At the end of a run's life, record work, cost and savings of every pipeline stage, and the health of every
    function."""
    with contextlib.suppress(StorageFailed):
        for event in offload_events(offload, now):
            ledger.event(event)


def offload_events(offload: Offload, now: float) -> Iterable[RunEvent]:
    """The same records as events. Unused stages and functions have none."""
    for function, stages in offload.stages().items():
        for stage, counts in stages.items():
            fields = {k: v for k, v in asdict(counts).items() if v}
            if fields:
                yield RunEvent(now, OFFLOAD_STAGE, function, {"stage": str(stage), **fields})
    for function, health in offload.health().items():
        if not health.outcomes:
            continue
        kinds = {f"fault.{kind}": n for kind, n in sorted(health.by_kind.items())}
        fields = {"outcomes": health.outcomes, "faults": health.faults, "model_faults": health.model_faults, **kinds}
        yield RunEvent(now, FUNCTION_HEALTH, function, fields)
