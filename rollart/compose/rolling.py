"""Rollout settings of a run spec, for the control plane."""

from __future__ import annotations

from rollart.policy.fairness import DriftSettings
from rollart.policy.replication import FilterSettings
from rollart.runtime.sharing import FairnessSettings
from rollart.shares import DomainShare
from rollart.spec.rollout import FairnessSpec, FilterSpec
from rollart.spec.run import RunSpec

__all__ = ["fairness_settings", "filter_settings"]


def fairness_settings(run: RunSpec) -> FairnessSettings | None:
    """Domain shares, if the run asks for them."""
    if not run.fair:
        return None
    spec = run.rollout.fairness or FairnessSpec()
    shares = tuple(DomainShare(d.name, d.weight, d.floor, d.cap) for d in run.domains)
    units = run.batch.trajectories // run.domains[0].group_size
    follow = None if spec.follow is None else DriftSettings(**spec.follow.model_dump())
    return FairnessSettings(shares, int(spec.slack * units + 1e-9), follow)


def filter_settings(spec: FilterSpec) -> FilterSettings:
    """The filter of groups, and the number of additional groups in their place."""
    return FilterSettings(
        spec.zero_variance, spec.max_additional_running_prompts, spec.max_refills, keep=spec.exhausted == "keep"
    )
