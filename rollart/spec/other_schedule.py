"""A run under another schedule than its own, without the settings that the other schedule lacks. Pure."""

from __future__ import annotations

from typing import Any

from rollart.spec.run import LAG, RunSpec
from rollart.spec.weights import WeightsSpec

__all__ = ["adapt_to_schedule"]


def adapt_to_schedule(run: RunSpec, schedule: str) -> tuple[RunSpec, tuple[str, ...]]:
    """The run without the settings that its spec could not have under `schedule`, and the names of those settings. Its
    `schedule` and `staleness` are unchanged: the caller of the simulation chooses them."""
    if schedule == run.schedule or {schedule, run.schedule} == {"rollart", "async"}:
        return run, ()
    batches, left = schedule in LAG, []
    rollout: dict[str, Any] = {}
    whole: dict[str, Any] = {}
    if run.rollout.tail_batching is not None and schedule not in ("sync", "sync_plus"):
        left.append("rollout.tail_batching")
        rollout["tail_batching"] = None
    if run.rollout.lending is not None and schedule != "sync_plus":
        left.append("rollout.lending")
        rollout["lending"] = None
    if run.rollout.dispatch != "fifo" and schedule == "sync":
        left.append(f"rollout.dispatch={run.rollout.dispatch}")
        rollout["dispatch"] = "fifo"
    if run.rollout.concurrency.mode == "on" and schedule == "sync":
        left.append("rollout.concurrency")
    if batches and run.weights.update != "all":
        left.append(f"weights.update={run.weights.update}")
        weights = run.weights
        whole["weights"] = WeightsSpec(overlap=weights.overlap, store=weights.store, collective=weights.collective)
    if batches and run.batch.sampler == "deadline":
        left.append("batch.sampler=deadline")
        whole["batch"] = run.batch.model_copy(update={"sampler": "fifo", "deadline_s": None, "least": None})
    if batches and run.batch.sampler == "fifo" and run.batch.tokens is not None:
        left.append("batch.tokens")
        whole["batch"] = run.batch.model_copy(update={"tokens": None})
    if rollout:
        whole["rollout"] = run.rollout.model_copy(update=rollout)
    return run.model_copy(update=whole) if whole else run, tuple(left)
