"""Work of engines by their own counters: a table, and rows from which constants of the performance model are fitted.
Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from placement.calibrate import Row
from rollart.ports import RunEvent
from rollart.report.rows import RunRows
from rollart.report.tables import Cell, Table, TableColumn

LEAST_STEPS = 20
"""Fewest steps of an interval that gives a row: a mean of fewer is too noisy."""

Sums = Mapping[str, float]


def engines(rows: RunRows) -> Table:
    """A row per engine. `hits`: share of the prompts' tokens whose KV was cached; `pulled`: share whose KV came from
    another engine. `batch` and `step_ms`: of a mean step."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    fullest: dict[str, float] = defaultdict(float)
    for event in rows.engines:
        for name, value in _numbers(event).items():
            sums[event.subject][name] += value
        fullest[event.subject] = max(fullest[event.subject], _numbers(event).get("kv_used", 0.0))
    columns = (
        TableColumn("engine"),
        TableColumn("prompt_tokens", "count"),
        TableColumn("hits", "share"),
        TableColumn("pulled", "share"),
        TableColumn("sampled_tokens", "count"),
        TableColumn("prefill_tokens_per_s", "number"),
        TableColumn("steps", "count"),
        TableColumn("batch", "number"),
        TableColumn("step_ms", "number"),
        TableColumn("kv_used", "share"),
        TableColumn("preemptions", "count"),
    )
    found: list[tuple[Cell, ...]] = []
    for engine, s in sorted(sums.items()):
        prompt, cached, external, steps = s["prompt_tokens"], s["cached_tokens"], s["external_tokens"], s["steps"]
        step = _step_s(s)
        found.append(
            (
                engine,
                int(prompt),
                (cached - external) / prompt if prompt else None,
                external / prompt if prompt else None,
                int(s["generated_tokens"]),
                (prompt - cached) / s["prefill_seconds"] if s["prefill_seconds"] else None,
                int(steps),
                s["generated_tokens"] / steps if steps else None,
                None if step is None else 1000 * step,
                fullest[engine],
                int(s["preemptions"]),
            )
        )
    return Table("engines", "Engines by their own counters", columns, tuple(found), people=bool(found))


def engine_rows(events: Sequence[RunEvent], devices: Mapping[str, tuple[str, int]]) -> list[Row]:
    """Rows for `placement.calibrate.fit`, one per interval in which an engine took enough steps; `devices`: type and
    number of each engine's. A mean step is one of mean batch, context and prompt tokens; an engine that only prefills
    gives the time to a first token, where it computes one prompt at a time."""
    found = []
    for event in events:
        s = _numbers(event)
        seconds, steps, ended = _step_s(s), s.get("steps", 0.0), s.get("ended", 0.0)
        if event.subject not in devices or steps < LEAST_STEPS or not ended or not seconds:
            continue
        device, tp = devices[event.subject]
        computed = max(0.0, s["prompt_tokens"] - s["cached_tokens"])
        if s["generated_tokens"] <= 1.01 * ended and s.get("latencies", 0.0) == 0:
            if steps >= 0.8 * ended and s["prefill_seconds"]:
                seconds, new, cached = s["prefill_seconds"] / ended, computed / ended, s["cached_tokens"] / ended
                found.append(Row("prefill", seconds, device, tp, new=new, cached=cached, weight=ended))
            continue
        context = (s["prompt_tokens"] + s["generated_tokens"] / 2) / ended
        batch = max(1.0, s["generated_tokens"] / steps)
        found.append(Row("step", seconds, device, tp, new=computed / steps, batch=batch, context=context))
    return found


def _step_s(s: Sums) -> float | None:
    """Mean seconds of a step. vLLM counts the time between tokens of a request, which is a step; the embedded engine
    counts its compute time."""
    if s.get("latencies"):
        return s["latency_seconds"] / s["latencies"]
    if not s.get("steps"):
        return None
    return (s["prefill_seconds"] + s["decode_seconds"]) / s["steps"]


def _numbers(event: RunEvent) -> dict[str, float]:
    return {name: float(value) for name, value in event.fields.items() if isinstance(value, int | float)}
