"""Baselines for a plan: simple mappings, solved on the same model with the same hardware.

Each baseline is a restriction of the problem: one device type, the same mix everywhere, a pool per domain, no
prefill/decode split, or nothing but the split. No baseline can therefore beat the full plan by more than the solver's
gap, and the difference is the value of the plan. The user's constraints (affinity, budget, a running plan) hold for
baselines too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from placement.problem import Problem, Restriction
from placement.solve import solve
from placement.types import Infeasible, Placement

__all__ = ["Baseline", "baselines", "best_baseline", "gain", "single_device_types"]


@dataclass(frozen=True, slots=True)
class Baseline:
    """A restricted problem and its best plan, or the reason that it has none. `name` is its label in tables: "only
    H20"."""

    name: str
    answer: Placement | Infeasible
    device_type: str | None = None
    """Set for the single-type baselines."""

    @property
    def placement(self) -> Placement | None:
        return self.answer if isinstance(self.answer, Placement) else None


def baselines(problem: Problem) -> tuple[Baseline, ...]:
    """Every baseline of the problem: single types by name (if there are several), then the restrictions in order."""
    found = []
    types = single_device_types(problem)
    if len(types) > 1:
        for name in types:
            only = replace(problem, device_types=frozenset({name}))
            found.append(Baseline(f"only {name}", solve(only), device_type=name))
    for restriction in Restriction:
        if restriction is not Restriction.FULL:
            found.append(Baseline(str(restriction), solve(replace(problem, restriction=restriction))))
    return tuple(found)


def single_device_types(problem: Problem) -> tuple[str, ...]:
    """The device types that rollout may use, by name: GPUs where there are any, else CPUs."""
    allowed = [
        pool.device
        for pool in problem.pools
        if problem.device_types is None or pool.device.name in problem.device_types
    ]
    gpus = [device for device in allowed if not device.is_cpu]
    return tuple(sorted({device.name for device in gpus or allowed}))


def gain(placement: Placement, baseline: Placement) -> float:
    """How much better a plan is than another by its own objective: 1.1 is ten per cent more rate (before
    some of it was given up for dollars) or rate per dollar, or as much for a cost that is lower by a factor of 1.1."""
    ours, theirs = placement.worth, baseline.worth
    if theirs <= 0:
        return 1.0 if ours <= 0 else float("inf")
    return ours / theirs


def best_baseline(found: Iterable[Baseline]) -> Baseline | None:
    """The best feasible baseline (ties: the first)."""
    feasible = [b for b in found if b.placement is not None]
    return max(feasible, key=lambda b: b.placement.worth if b.placement else 0.0, default=None)
