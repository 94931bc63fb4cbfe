"""The figures of a run that other tools collect, by the names of Prometheus's conventions. Pure: a run's sums in,
figures out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from rollart.ledger.events import CONCURRENCY, ENGINE_DID
from rollart.ports import RunEvent
from rollart.report.cost import cost_lines
from rollart.report.functions import REWARD
from rollart.report.rows import RunRows

STEP, EVALUATION = "step", "evaluation"

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunMetric:
    """One name with its values by label values. A counter's name has no `_total`, which Prometheus adds."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: Labels
    values: Mapping[Labels, float]


def figures(rows: RunRows, live: Iterable[RunEvent]) -> Iterator[RunMetric]:
    """Every figure of the run. `live`: its steps, by time."""
    facts = rows.facts
    steps = list(live)
    yield _one("rollart_run_seconds", "counter", "Seconds of the run, over all of its lives.", facts.seconds)
    yield _one("rollart_steps", "counter", "Training steps.", facts.step or 0)
    yield _one("rollart_policy_version", "gauge", "Published version of the policy.", facts.version or 0)
    yield _one("rollart_trained_samples", "counter", "Samples that were trained.", facts.trained_samples)
    yield _one("rollart_trained_tokens", "counter", "Tokens that were trained.", facts.trained_tokens)
    yield _one("rollart_waiting_samples", "gauge", "Finished samples that wait for training.", facts.live_samples)
    yield _one("rollart_live_groups", "gauge", "Groups that are generated or wait for training.", facts.live_groups)
    yield _one("rollart_dropped_groups", "counter", "Groups that were dropped.", facts.dropped_groups)
    yield from _learning(rows, steps)
    yield from _trajectories(rows)
    yield from _engines(rows.events.get(ENGINE_DID, ()))
    yield from _waiting(rows.events.get(CONCURRENCY, ()))
    yield from _functions(rows)
    yield from _resources(rows)


def _one(name: str, kind: Literal["counter", "gauge"], text: str, value: float) -> RunMetric:
    return RunMetric(name, kind, text, (), {(): float(value)})


def _learning(rows: RunRows, steps: list[RunEvent]) -> Iterator[RunMetric]:
    success: dict[Labels, float] = {}
    for event in (*steps[-1:], *rows.events.get(EVALUATION, ())):  # the last of each domain stays
        if event.kind == EVALUATION:
            if isinstance(value := event.fields.get("success"), int | float):
                success[event.subject, "held-out"] = float(value)
            continue
        for name, value in event.fields.items():
            if name.startswith("success.") and isinstance(value, int | float):
                success[name.removeprefix("success."), "train"] = float(value)
    yield RunMetric(
        "rollart_success_ratio",
        "gauge",
        "Share of successful episodes, of the last step or evaluation.",
        ("domain", "of"),
        success,
    )
    metrics = rows.versions[-1].metrics if rows.versions else {}
    shown: dict[Labels, float] = {(name,): float(value) for name, value in metrics.items() if math.isfinite(value)}
    yield RunMetric(
        "rollart_step_metric", "gauge", "Metrics of the last step, as the trainer names them.", ("metric",), shown
    )
    lag: dict[Labels, float] = {
        (of,): shown[f"staleness_{of}",] for of in ("mean", "max") if (f"staleness_{of}",) in shown
    }
    yield RunMetric(
        "rollart_staleness_versions", "gauge", "Versions between a sample's first token and its training.", ("of",), lag
    )


def _trajectories(rows: RunRows) -> Iterator[RunMetric]:
    counts: dict[Labels, float] = defaultdict(float)
    tokens: dict[Labels, float] = defaultdict(float)
    for charge in rows.charges:
        counts[charge.domain, charge.purpose, charge.outcome] += charge.trajectories
        tokens[charge.domain, charge.purpose] += charge.action_tokens
    yield RunMetric(
        "rollart_trajectories",
        "gauge",
        "Trajectories that ended, by what became of them: a waiting one becomes another.",
        ("domain", "purpose", "outcome"),
        counts,
    )
    yield RunMetric(
        "rollart_sampled_tokens", "counter", "Tokens that trajectories sampled.", ("domain", "purpose"), tokens
    )


def _engines(events: Iterable[RunEvent]) -> Iterator[RunMetric]:
    """Counters add up; the last values of the others stay."""
    sums: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))
    last: dict[str, dict[Labels, float]] = defaultdict(dict)
    for event in events:
        for name in ("prompt_tokens", "generated_tokens", "cached_tokens"):
            sums[name][event.subject,] += float(event.fields.get(name) or 0.0)
        for name in ("kv_used", "running"):
            last[name][event.subject,] = float(event.fields.get(name) or 0.0)
    of = ("engine",)
    yield RunMetric("rollart_engine_prompt_tokens", "counter", "Tokens of prompts.", of, sums["prompt_tokens"])
    yield RunMetric("rollart_engine_generated_tokens", "counter", "Sampled tokens.", of, sums["generated_tokens"])
    yield RunMetric(
        "rollart_engine_cached_tokens", "counter", "Tokens of prompts whose KV was cached.", of, sums["cached_tokens"]
    )
    yield RunMetric(
        "rollart_engine_kv_cache_usage_ratio",
        "gauge",
        "Share of the KV memory that requests hold.",
        of,
        last["kv_used"],
    )
    yield RunMetric("rollart_engine_running_requests", "gauge", "Requests in the engine's batch.", of, last["running"])


def _waiting(events: Iterable[RunEvent]) -> Iterator[RunMetric]:
    values: dict[Labels, float] = {}
    for event in events:  # the last stays
        values[()] = float(event.fields.get("waiting") or 0.0)
    yield RunMetric(
        "rollart_admission_waiting_trajectories",
        "gauge",
        "Trajectories that wait for an engine to admit them, at the last publish.",
        (),
        values,
    )


def _functions(rows: RunRows) -> Iterator[RunMetric]:
    sums: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))
    for call in rows.invocations:
        of = (call.function, call.provider)
        sums["calls"][*of, call.status, str(call.cause)] += call.calls
        sums["items"][of] += call.items
        sums["cold"][of] += call.cold_starts
        sums["billed"][of] += call.billed_s
    of_function = ("function", "provider")
    yield RunMetric(
        "rollart_function_calls",
        "counter",
        "Calls; a status other than ok is a fault.",
        (*of_function, "status", "cause"),
        sums["calls"],
    )
    yield RunMetric("rollart_function_items", "counter", "Items in calls.", of_function, sums["items"])
    yield RunMetric(
        "rollart_function_cold_starts", "counter", "Calls that started a worker.", of_function, sums["cold"]
    )
    yield RunMetric("rollart_function_billed_seconds", "counter", "Billed seconds.", of_function, sums["billed"])


def _resources(rows: RunRows) -> Iterator[RunMetric]:
    usd: dict[Labels, float] = defaultdict(float)
    seconds: dict[Labels, float] = defaultdict(float)
    for line in cost_lines(rows):
        usd[line.role,] += line.usd
        if line.role != REWARD:
            seconds[line.role, str(line.state), line.cause] += line.seconds
    yield RunMetric("rollart_cost_usd", "counter", "Billed dollars.", ("role",), usd)
    yield RunMetric(
        "rollart_resource_seconds",
        "counter",
        "Seconds of resources by state, and cause of waste.",
        ("role", "state", "cause"),
        seconds,
    )
