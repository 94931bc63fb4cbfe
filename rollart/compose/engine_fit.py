"""What a finished run's engines say of the performance model's constants: a calibration by type of device."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from placement.calibrate import FREE, Fit, Row, fit
from placement.types import Device
from rollart.compose.calibrate import ENGINE_FREE, ENGINE_START
from rollart.compose.routing import SERVING
from rollart.errors import UsageError
from rollart.ledger.clock import ENGINE_DID
from rollart.ledger.reader import Reader
from rollart.report.engines import engine_rows
from rollart.spec.planning import problem_of, run_shape
from rollart.spec.resolve import Resolved

__all__ = ["fitted_engines"]

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
