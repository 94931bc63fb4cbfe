"""The run spec: the model, its task domains and rewards, the schedule and the bounds of training."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rollart.entry import Name, SpecEntry
from rollart.learning import TrainingSpec
from rollart.spec.placement import PlacementSpec
from rollart.spec.rollout import RolloutSpec
from rollart.spec.run_parts import (
    BatchSpec,
    BudgetSpec,
    DomainSpec,
    EvaluationSpec,
    FaultsSpec,
    FunctionEntry,
    LeasesSpec,
    ModelSpec,
    WarmStartSpec,
)
from rollart.spec.weights import WeightsSpec

__all__ = ["LAG", "MAX_STALENESS", "RunSpec"]

LAG = {"sync": 0, "sync_plus": 0, "one_off": 1}
"""Staleness of the schedules whose stages follow each other (those of `policy.schedules`)."""

MAX_STALENESS = 8
"""Largest staleness bound: at 8 versions every loss has degraded on a small task (docs/training.md)."""


class RunSpec(SpecEntry):
    """A training run. Only `name`, `model` and `domains` have no default."""

    name: Name = Field(description="Name of the run; its directory under the runs directory is called after it.")
    seed: int = Field(default=0, ge=0, description="Seed of every random stream, each derived by (seed, id).")
    model: ModelSpec = Field(description="The policy.")
    schedule: Literal["sync", "sync_plus", "one_off", "areal", "rollart", "paced", "roll_flash", "async"] = Field(
        # Not `paced`: on the quickstart `sync_plus` reaches the same success in 20 s, `paced` in 29 s as `rollart` does
        # (means of five seeds, docs/schedules.md).
        default="async",
        description="How rollout, training and weight updates overlap, and how stale trajectories are treated "
        "(docs/schedules.md). async: rollart.",
    )
    staleness: int = Field(
        default=1,
        ge=0,
        le=MAX_STALENESS,
        description="Largest number of versions between a trajectory's first token and the step that trains on it "
        "(α). 0 under `sync` and `sync_plus`, 1 under `one_off`.",
    )
    rollout: RolloutSpec = Field(
        default_factory=RolloutSpec, description="Redundant environments and tail batching (docs/schedules.md)."
    )
    steps: int = Field(default=100, ge=0, description="Training steps; each publishes one policy version.")
    batch: BatchSpec = Field(default_factory=BatchSpec, description="The batch of one training step.")
    domains: list[DomainSpec] = Field(min_length=1, description="Tasks, each with its environment and rewards.")
    functions: list[FunctionEntry] = Field(default_factory=list, description="Reward functions.")
    hw_affinity: dict[str, str] = Field(
        default_factory=dict,
        description="Pool or device type that decodes a domain, by the domain's `tag`; `default` is for the others. "
        "Left out, the placer decides.",
    )
    placement: PlacementSpec = Field(
        default_factory=PlacementSpec, description="Objective and constraints of the plan."
    )
    training: TrainingSpec = Field(default_factory=TrainingSpec, description="Optimizer and loss.")
    weights: WeightsSpec = Field(
        default_factory=WeightsSpec, description="How new weights reach the engines (docs/schedules.md)."
    )
    warm_start: WarmStartSpec | None = Field(
        default=None, description="Imitation of worked examples before the first step."
    )
    evaluation: EvaluationSpec = Field(
        default_factory=EvaluationSpec, description="Episodes that are never trained on."
    )
    leases: LeasesSpec = Field(default_factory=LeasesSpec, description="Deadlines of all waits.")
    faults: FaultsSpec = Field(default_factory=FaultsSpec, description="Tolerance for infrastructure faults.")
    budget: BudgetSpec = Field(default_factory=BudgetSpec, description="Bounds at which the run stops by itself.")

    @model_validator(mode="before")
    @classmethod
    def _lag_of_schedule(cls, data: Any) -> Any:
        """Without `staleness`, a run has the staleness of its schedule."""
        schedule = data.get("schedule") if isinstance(data, dict) else None
        if isinstance(schedule, str) and schedule in LAG and "staleness" not in data:
            return {**data, "staleness": LAG[schedule]}
        return data

    @property
    def fair(self) -> bool:
        """True if domains have shares of the whole run instead of quotas per step."""
        return self.rollout.fairness is not None or any(d.floor > 0 or d.cap < 1 for d in self.domains)

    def domain(self, name: str) -> DomainSpec:
        """The domain of that name; KeyError if there is none."""
        for entry in self.domains:
            if entry.name == name:
                return entry
        raise KeyError(name)

    def function(self, name: str) -> FunctionEntry:
        """The function of that name; KeyError if there is none."""
        for entry in self.functions:
            if entry.name == name:
                return entry
        raise KeyError(name)
