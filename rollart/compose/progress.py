"""Fields of the events that are shown during a run."""

from __future__ import annotations

from collections.abc import Mapping

from rollart.runtime.evaluation import EvaluationResult
from rollart.runtime.training import StepDone

__all__ = ["SHOWN_EVENTS", "evaluation_fields", "step_fields"]

EventFields = dict[str, str | int | float | bool | None]

SHOWN_METRICS = (
    "loss",
    "entropy",
    "clip_fraction",
    "approx_kl",
    "grad_norm",
    "staleness_mean",
    "mismatch_gap",
    "stale_gap",
)


def step_fields(done: StepDone, *, steps: int, live: int) -> EventFields:
    """One training step: progress, speed, and results by domain (`success.lake`, `score.lake`)."""
    fields: EventFields = {
        "step": done.step + 1,
        "steps": steps,
        "version": done.version,
        "train_s": done.t1 - done.t0,
        "waited_s": done.waited_s,
        "trained_tokens": done.report.trained_tokens,
        "live": live,
    }
    by_domain: dict[str, list[tuple[float, bool | None]]] = {}
    for group in done.groups:
        for sample in group.samples:
            by_domain.setdefault(sample.domain, []).append((sample.score, sample.success))
    for domain, results in sorted(by_domain.items()):
        judged = [s for _, s in results if s is not None]
        fields[f"success.{domain}"] = sum(judged) / len(judged) if judged else None
        fields[f"score.{domain}"] = sum(v for v, _ in results) / len(results)
    for name in SHOWN_METRICS:
        if name in done.report.metrics:
            fields[name] = done.report.metrics[name]
    return fields


def evaluation_fields(results: Mapping[str, EvaluationResult], version: int) -> EventFields:
    """Held-out success by domain at a version."""
    fields: EventFields = {"version": version}
    for domain, result in sorted(results.items()):
        fields[f"success.{domain}"] = result.rate
        fields[f"episodes.{domain}"] = result.episodes
        fields[f"faults.{domain}"] = result.faults
    return fields


SHOWN_EVENTS = frozenset(
    {
        "affinity_fallback",
        "affinity_restored",
        "engine_drained",
        "engine_given_up",
        "engine_lost",
        "engine_started",
        "no_engine_left",
        "engine_down",
        "engine_starting",
        "handoffs_pull_nothing",
        "prefill_unused",
        "filter_exhausted",
        "function_scaling_failed",
        "group_dropped",
        "host_draining",
        "host_given_up",
        "host_lost",
        "host_quarantined",
        "host_started",
        "infra_fault",
        "lease_expired",
        "prefill_barred",
        "rebalance_failed",
        "rebalance_measured",
        "rebalance_proposed",
        "rebalanced",
        "role_flipped",
        "stalled",
        "trainer_restarted",
        "wrong_answer",
    }
)
"""Part events that are shown at the terminal."""
