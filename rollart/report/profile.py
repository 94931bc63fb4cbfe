"""Workload profiles of a run, finished or live, from its ledger: input for planning the next run, whose
`placement.profile` names the directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from placement.estimate import ObservedTrajectory, estimate_profiles
from placement.problem import DomainProfile, RewardCost
from rollart.errors import SpecError, UsageError
from rollart.ledger.reader import FinishedRow, InvocationSum, LedgerReader
from rollart.settings.placement import RewardCostSpec
from rollart.settings.planning import MIB_IN_GB, reward_cost
from rollart.settings.prices import function_gpus
from serverless.spec import FunctionSpec
from serverless.types import Cause

MIN_SECONDS = 1e-9
"""The smallest cost that a profile can state, for calls that were billed nothing."""


def measured_profiles(directory: Path) -> Sequence[DomainProfile]:
    """Profiles of the run in a directory. SpecError if there is none."""
    if not directory.is_dir():
        raise SpecError(f"placement.profile: {directory} is no run's directory", remedy="give the directory of a run")
    return profiles_of(directory)


def profiles_of(run_dir: str | Path) -> tuple[DomainProfile, ...]:
    """Profiles of the domains that have finished trajectories, by name; `source` names the run. UsageError if there is
    no ledger or no trajectory has finished."""
    with LedgerReader(run_dir) as reader:
        rows, calls, config = reader.finished(), reader.invocation_sums(), reader.config()
    if not rows:
        raise UsageError(
            f"{run_dir}: no trajectory has finished yet", remedy="wait for the first step, or name another run"
        )
    rewards = _rewards(config, calls)
    seen = observed_trajectories(rows, {name: cost.seconds for name, cost in rewards.items()})
    name = Path(run_dir).name
    return tuple(replace(p, source=f"{p.source} ({name})") for p in estimate_profiles(seen, rewards))


def observed_trajectories(
    rows: Sequence[FinishedRow], reward_s: Mapping[str, float] | None = None
) -> list[ObservedTrajectory]:
    """Rows of the ledger as profiles are estimated from them, in the same order."""
    return [
        ObservedTrajectory(
            domain=row.domain,
            turns=row.turns,
            first_tokens=float(row.first_tokens),
            new_tokens=float(row.tokens - row.action_tokens - row.first_tokens),
            output_tokens=float(row.action_tokens),
            wait_s=row.env_s,
            reset_s=row.reset_s,
            reward_s=(reward_s or {}).get(row.domain),
        )
        for row in rows
    ]


def _rewards(config: Mapping[str, Any], calls: Sequence[InvocationSum]) -> dict[str, RewardCost]:
    """Cost of scoring one trajectory of each domain in function workers. Each function with a GPU has a cost of its
    own; those on cores have one together, with their seconds added up and the memory of the largest."""
    measured: dict[str, _MeasuredFunction] = {}
    for name in {call.function for call in calls}:
        found = _measured_function(name, config, [call for call in calls if call.function == name])
        if found is not None:
            measured[name] = found
    costs = {}
    for domain in config.get("run", {}).get("domains", ()):
        used = [measured[reward["function"]] for reward in domain.get("rewards", ()) if reward["function"] in measured]
        on_cores = [function for function in used if not function.spec.gpu]
        parts = [reward_cost(function.cost, [function.spec]) for function in used if function.spec.gpu]
        if on_cores:
            cost = RewardCostSpec(
                seconds=sum(function.cost.seconds for function in on_cores),
                memory_gb=max(function.cost.memory_gb for function in on_cores),
            )
            parts.append(reward_cost(cost, [function.spec for function in on_cores]))
        if parts:
            costs[domain["name"]] = replace(parts[0], additional=tuple(parts[1:]))
    return costs


@dataclass(frozen=True, slots=True)
class _MeasuredFunction:
    """A function of a run: the settings that decide what its workers cost, and the mean cost of an item."""

    spec: FunctionSpec
    cost: RewardCostSpec


def _measured_function(
    name: str, config: Mapping[str, Any], calls: Sequence[InvocationSum]
) -> _MeasuredFunction | None:
    """Mean billed seconds per item, items per call and seconds of a cold start; None without an answered call. The
    starts of containers with a GPU are no part of the seconds: they are few and long, and a plan counts them apart."""
    answered = [call for call in calls if call.status == "ok" and call.cause != Cause.CHECK]
    scoring = [call for call in answered if call.items]
    items, starts = sum(call.items for call in scoring), sum(call.cold_starts for call in answered)
    if not items:
        return None
    spec = _function_spec(name, config, max(call.memory_mb for call in scoring))
    billed_s = sum(call.billed_s - (call.cold_billed_s if spec.gpu else 0.0) for call in scoring)
    cost = RewardCostSpec(
        seconds=max(MIN_SECONDS, billed_s / items),
        memory_gb=spec.memory_mb * MIB_IN_GB,
        batch=max(1, round(items / sum(call.calls for call in scoring))) if spec.gpu else 1,
        cold_start_s=sum(call.cold_start_s for call in answered) / starts if spec.gpu and starts else None,
    )
    return _MeasuredFunction(spec, cost)


def _function_spec(name: str, config: Mapping[str, Any], memory_mb: int) -> FunctionSpec:
    """The settings of a run's function that decide what its workers cost, as they were in effect."""
    written: Mapping[str, Any] = next(
        (entry for entry in config.get("run", {}).get("functions", ()) if entry["name"] == name), {}
    )
    given = {key: value for key, value in written.items() if value is not None}
    effective = {**given, **config.get("functions", {}).get(name, {})}
    known = {key: effective[key] for key in ("keep_alive_s", "warm") if key in effective}
    return FunctionSpec(
        name=name,
        source=name,
        gpu=function_gpus(config).get(name, ""),
        memory_mb=min(32_768, max(128, memory_mb)),
        concurrency=max(1, known.get("warm", 0)),
        **known,
    )
