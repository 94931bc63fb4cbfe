"""Planning constants fitted to a finished run: of its engines by device type, of its trainer, and of its publishes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from placement.calibrate import FREE, Fit, Row, fit
from placement.constants import TrainingConstants
from placement.publish import PublishSpeeds
from placement.training import fit_training_constants
from placement.types import Device, Role
from rollart.compose.calibrate import FITTED_CONSTANTS, INITIAL_CONSTANTS
from rollart.compose.routing import SERVING_ROLES
from rollart.errors import UsageError
from rollart.ledger.clock import ENGINE_DID
from rollart.ledger.intervals import ResourceState
from rollart.ledger.reader import LedgerReader
from rollart.ports import RunEvent
from rollart.report.engines import engine_rows
from rollart.report.rows import ENGINE_ROLES
from rollart.spec.planning import problem_of, run_shape
from rollart.spec.resolve import Resolved

__all__ = ["fit_engines", "fit_publish", "fit_training"]

MIN_ROWS = 4
"""Minimum rows per device: with fewer, none could be held out."""


def fit_engines(resolved: Resolved, directory: Path) -> list[Fit]:
    """One fit per device type with enough intervals. UsageError if there is none."""
    pools = {pool.name: pool.device for pool in problem_of(resolved.run, resolved.cluster, resolved.prices).pools}
    placed = {
        a.name: (pools[a.pool].name, len(a.devices)) for a in resolved.plan.assignments if a.role in SERVING_ROLES
    }
    devices: dict[str, Device] = {device.name: device for device in pools.values()}
    with LedgerReader(directory) as reader:
        rows = engine_rows(reader.events(ENGINE_DID), placed)
    by_device: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_device[row.device].append(row)
    enough = {name: own for name, own in by_device.items() if len(own) >= MIN_ROWS}
    if not enough:
        most = max(map(len, by_device.values()), default=0)
        raise UsageError(
            f"{directory}: {most} intervals with enough steps on one type of device (rule: {MIN_ROWS})",
            remedy="a longer run, or one whose engines do more",
        )
    engines = resolved.cluster.engines
    shape, kind = run_shape(resolved.run, resolved.base, engines.dtype), engines.kind
    source = f"counters of run {directory.name}"
    fits = []
    for name, own in sorted(enough.items()):
        free, start = (FITTED_CONSTANTS, INITIAL_CONSTANTS) if devices[name].is_cpu else (FREE, None)
        fits.append(fit(own, shape, devices, free=free, start=start, engine=kind, source=source))
    return fits


def fit_training(resolved: Resolved, directory: Path) -> TrainingConstants | None:
    """The trainer's constants, from the duration of its steps and, on GPUs, its peak memory. None if no data sheet
    lists its device, or if it took no step."""
    problem = problem_of(resolved.run, resolved.cluster, resolved.prices, base=resolved.base)
    trainer = next((a for a in resolved.plan.assignments if a.role is Role.TRAINER), None)
    if trainer is None or problem.train is None:
        return None
    pool = next(p for p in problem.pools if p.name == trainer.pool)
    with LedgerReader(directory) as reader:
        busy = sum(i.t1 - i.t0 for i in reader.intervals() if i.role == Role.TRAINER and i.state == ResourceState.BUSY)
        steps = [v for v in reader.versions() if v.tokens]
    tokens = sum(v.tokens for v in steps)
    if pool.device.tflops_bf16 is None or not tokens or busy <= 0:
        return None
    peaks = [(m["peak_gb"], m["largest_microbatch"]) for v in steps if "peak_gb" in (m := v.metrics)]
    devices = len(trainer.devices)
    train = replace(problem.train, pool=pool.name, devices=devices, recompute=bool(problem.train.recompute), split=1)
    return fit_training_constants(
        problem, pool, train, seconds_per_token=busy * devices / tokens, peak=max(peaks, default=None)
    )


def fit_publish(resolved: Resolved, directory: Path) -> PublishSpeeds:
    """Medians over the versions of a run. A pull concurrent with its push is no faster than the push."""
    engines = resolved.cluster.engines
    gb = run_shape(resolved.run, resolved.base, engines.dtype).weight_bytes / 1e9
    with LedgerReader(directory) as reader:
        events = {kind: reader.events(kind) for kind in ("weights_pushed", "weights_pulled", "weights_sent")}
        syncs = [i for i in reader.intervals() if i.state == ResourceState.SYNC]
        versions = len(reader.events("step"))
    loads: dict[str, float] = defaultdict(float)
    for interval in syncs:
        if interval.role in ENGINE_ROLES:
            loads[interval.resource] += interval.seconds
    written = math.fsum(i.seconds for i in syncs if i.role == "trainer")
    sent = bool(events["weights_sent"])
    return PublishSpeeds(
        _median(_speeds(events["weights_pushed"], "sent_bytes"))
        or (None if sent else _rate_or_none(gb * versions, written)),
        _median(_speeds(events["weights_pulled"], "received_bytes")),
        None if sent else _median(gb * versions / seconds for seconds in loads.values() if seconds > 0),
        _median(_speeds(events["weights_sent"], "bytes")),
    )


def _speeds(events: Iterable[RunEvent], field: str) -> Iterator[float]:
    for event in events:
        moved, seconds = event.fields.get(field, 0), event.fields.get("seconds", 0)
        if isinstance(moved, int | float) and isinstance(seconds, int | float) and moved > 0 and seconds > 0:
            yield moved / 1e9 / seconds


def _rate_or_none(gb: float, seconds: float) -> float | None:
    return gb / seconds if gb > 0 and seconds > 0 else None


def _median(values: Iterable[float]) -> float | None:
    found = sorted(values)
    return found[len(found) // 2] if found else None
