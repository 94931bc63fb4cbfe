"""Workload profiles of a run, finished or live, from its ledger: input for planning the next run, whose
`placement.profile` names the directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from placement.estimate import ObservedTrajectory, estimate_profiles
from placement.problem import DomainProfile, RewardCost
from rollart.errors import SpecError, UsageError
from rollart.ledger.reader import FinishedRow, InvocationSum, LedgerReader
from rollart.settings.prices import function_gpus
from serverless.spec import gpu_type

MIB_GB = 2**20 / 1e9


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
    """Cost of scoring one trajectory of each domain in function workers: mean billed seconds per item, summed over
    its functions, and the memory of the largest."""
    seconds: dict[str, float] = {}
    memory: dict[str, int] = {}
    for name in {call.function for call in calls}:
        own = [call for call in calls if call.function == name and call.status == "ok"]
        items = sum(call.items for call in own)
        if items:
            seconds[name] = sum(call.billed_s for call in own) / items
            memory[name] = max(call.memory_mb for call in own)
    out, by_function = {}, function_gpus(config)
    for domain in config.get("run", {}).get("domains", ()):
        used = [reward["function"] for reward in domain.get("rewards", ()) if reward["function"] in seconds]
        if used:
            gpu, gpus = gpu_type(next((by_function[name] for name in used if name in by_function), ""))
            out[domain["name"]] = RewardCost(
                sum(seconds[name] for name in used),
                memory_gb=max(memory[name] for name in used) * MIB_GB,
                on_gpu=bool(gpu),
                gpu=gpu,
                gpus=max(1, gpus),
            )
    return out
