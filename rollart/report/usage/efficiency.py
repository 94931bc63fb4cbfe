"""Useful arithmetic and memory traffic of engines and trainers, against the datasheets of their devices. Pure.

MFU (model FLOPs utilization; Chowdhery et al., arXiv 2204.02311, appendix B): FLOPs that the model's tokens need, over
what the devices can do in the same time. Padding, recomputed activations, proximal and reference passes, and prefixes
that were prefilled again are not useful. MBU (model bandwidth utilization): bytes of weights and KV that the engine's
steps must read, over what the memory can deliver.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from placement.architecture import DecoderShape, shape_of
from rollart.ledger import events
from rollart.ledger.intervals import ResourceState
from rollart.report.rows import ENGINE_ROLES, RunRows
from rollart.report.tables import Cell, Row, as_number, as_seconds, as_share, ratio, table


@dataclass(frozen=True, slots=True)
class UsefulWork:
    """FLOPs and bytes of memory that a part's tokens needed; bytes are None for trainers. `padding`: share of computed
    tokens that were padding, None where it is not known."""

    flops: float
    bytes: float | None = None
    padding: float | None = None


def engine_counters(rows: RunRows) -> dict[str, dict[str, float]]:
    """The sums of each engine's counters over the run; 0 for one that it does not have."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in rows.events_of(events.ENGINE_DID):
        for name, value in event.fields.items():
            sums[event.subject][name] += float(value) if isinstance(value, int | float) else 0.0
    return sums


def engine_work(shape: DecoderShape, counters: Mapping[str, float]) -> UsefulWork:
    """The work of an engine's counters (fields of `engine_did`, summed): prompts of mean length, of which a part was
    cached, and answers of mean length, in steps of a mean batch."""
    ended, generated, steps = (counters.get(name, 0.0) for name in ("ended", "generated_tokens", "steps"))
    if not ended or not steps:
        return UsefulWork(0.0, 0.0)
    cached, prompt = counters["cached_tokens"] / ended, counters["prompt_tokens"] / ended
    context = prompt + generated / ended / 2
    # A prefill samples the first token itself.
    decoded = max(0.0, generated - ended)
    flops = ended * shape.flops(max(0.0, prompt - cached), cached, 1.0) + decoded * shape.decode_flops(context)
    read = steps * shape.touched_weight_bytes(generated / steps) + decoded * shape.kv_bytes(context)
    return UsefulWork(flops, read)


def trainer_work(shape: DecoderShape, rows: RunRows) -> UsefulWork:
    """Forward and backward passes over the tokens that every published version was trained on, prompts included."""
    flops = real = padded = 0.0
    for version in rows.versions:
        tokens = version.metrics.get("computed_tokens", 0.0)
        if tokens and version.samples:
            length = tokens / (version.samples * max(1, rows.epochs))
            flops += shape.train_flops(tokens, length / 2)
            real += tokens
            padded += tokens / (1.0 - version.metrics.get("padding_share", 0.0))
    return UsefulWork(flops, None, 1.0 - real / padded if padded else None)


@table("efficiency", "Useful arithmetic and memory traffic", optional=True)
def efficiency(rows: RunRows) -> Iterator[Row]:
    """A row per engine and trainer, over all of its devices. `mfu`, `mbu`: while it was busy; `mfu_of_life`: from its
    first second to its last. Empty where no datasheet has the device's figure."""
    shapes = rows.events_of(events.MODEL_SHAPE)
    if not shapes:
        return
    shape = _shape(shapes[-1].fields)
    peaks = {event.subject: event.fields for event in rows.events_of(events.POOL_PEAK)}
    counters = engine_counters(rows)
    busy: dict[str, float] = defaultdict(float)
    life: dict[str, float] = defaultdict(float)
    roles = {}
    for i in rows.intervals:
        roles[i.resource] = i.role
        life[i.resource] += i.seconds
        busy[i.resource] += i.seconds if i.state == ResourceState.BUSY else 0.0
    for part, role in sorted(roles.items()):
        if role in ENGINE_ROLES:
            work, rate = engine_work(shape, counters[part]), "engine_tflops"
        elif role == "trainer":
            work, rate = trainer_work(shape, rows), "trainer_tflops"
        else:
            continue
        pool, devices = rows.placed.get(part, ("", 0))
        peak = peaks.get(pool, {})
        flops, byte = (devices * 1e12 * float(peak.get(name) or math.nan) for name in (rate, "tb_per_s"))
        yield {
            "part": part,
            "devices": f"{devices} x {peak['device']}" if peak else None,
            "busy_s": as_seconds(busy[part]),
            "gflop_per_s": as_number(_rate(work.flops, busy[part], 1e9)),
            "mfu": as_share(_rate(work.flops, busy[part], flops)),
            "mfu_of_life": as_share(_rate(work.flops, life[part], flops)),
            "gb_per_s": as_number(_rate(work.bytes, busy[part], 1e9)),
            "mbu": as_share(_rate(work.bytes, busy[part], byte)),
            "padding": as_share(work.padding),
        }


def _shape(fields: Mapping[str, Cell]) -> DecoderShape:
    return shape_of(
        json.loads(str(fields["config"])),
        weight_bytes_per_parameter=float(fields["weight_bytes"] or 0),
        kv_bytes_per_element=float(fields["kv_bytes"] or 0),
    )


def _rate(amount: float | None, seconds: float, unit: float) -> float | None:
    return None if amount is None or math.isnan(unit) else ratio(amount, seconds * unit)
