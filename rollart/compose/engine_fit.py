"""Constants of the performance model from a finished run: of its engines by type of device, and of its trainer."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from placement.calibrate import FREE, Fit, Row, fit
from placement.constants import TrainingConstants
from placement.training import fitted
from placement.types import Device, Role
from rollart.compose.calibrate import ENGINE_FREE, ENGINE_START
from rollart.compose.routing import SERVING
from rollart.errors import UsageError
from rollart.ledger.clock import ENGINE_DID
from rollart.ledger.intervals import State
from rollart.ledger.reader import Reader
from rollart.report.engines import engine_rows
from rollart.spec.planning import problem_of, run_shape
from rollart.spec.resolve import Resolved

__all__ = ["fitted_engines", "fitted_training"]

LEAST_ROWS = 4
"""Of a device: of fewer, none could be held out."""


def fitted_engines(resolved: Resolved, directory: Path) -> list[Fit]:
    """One per type of device that has enough intervals. UsageError if none has."""
    pools = {pool.name: pool.device for pool in problem_of(resolved.run, resolved.cluster, resolved.prices).pools}
    placed = {a.name: (pools[a.pool].name, len(a.devices)) for a in resolved.plan.assignments if a.role in SERVING}
    devices: dict[str, Device] = {device.name: device for device in pools.values()}
    with Reader(directory) as reader:
        rows = engine_rows(reader.events(ENGINE_DID), placed)
    by_device: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_device[row.device].append(row)
    enough = {name: own for name, own in by_device.items() if len(own) >= LEAST_ROWS}
    if not enough:
        most = max(map(len, by_device.values()), default=0)
        raise UsageError(
            f"{directory}: {most} intervals with enough steps on one type of device (rule: {LEAST_ROWS})",
            remedy="a longer run, or one whose engines do more",
        )
    engines = resolved.cluster.engines
    shape, kind = run_shape(resolved.run, resolved.base, engines.dtype), engines.kind
    source = f"counters of run {directory.name}"
    fits = []
    for name, own in sorted(enough.items()):
        free, start = (ENGINE_FREE, ENGINE_START) if devices[name].is_cpu else (FREE, None)
        fits.append(fit(own, shape, devices, free=free, start=start, engine=kind, source=source))
    return fits


def fitted_training(resolved: Resolved, directory: Path) -> TrainingConstants | None:
    """The trainer's constants from the seconds of its steps and, on GPUs, the memory that it reached. None where no
    data sheet states its device, or where it took no step."""
    problem = problem_of(resolved.run, resolved.cluster, resolved.prices, base=resolved.base)
    trainer = next((a for a in resolved.plan.assignments if a.role is Role.TRAINER), None)
    if trainer is None or problem.train is None:
        return None
    pool = next(p for p in problem.pools if p.name == trainer.pool)
    with Reader(directory) as reader:
        busy = sum(i.t1 - i.t0 for i in reader.intervals() if i.role == Role.TRAINER and i.state == State.BUSY)
        steps = [v for v in reader.versions() if v.tokens]
    tokens = sum(v.tokens for v in steps)
    if pool.device.tflops_bf16 is None or not tokens or busy <= 0:
        return None
    peaks = [(m["peak_gb"], m["largest_microbatch"]) for v in steps if "peak_gb" in (m := v.metrics)]
    devices = len(trainer.devices)
    train = replace(problem.train, pool=pool.name, devices=devices, recompute=bool(problem.train.recompute), split=1)
    return fitted(problem, pool, train, seconds_per_token=busy * devices / tokens, peak=max(peaks, default=None))
