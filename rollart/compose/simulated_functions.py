"""Reward functions on virtual time: the product's pipeline over simulated workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rollart.adapters.rewards.offload import DomainRewards, OffloadRewarder, RewardTerm
from rollart.compose.faults import function_provider, simulated_function_hosts
from rollart.compose.recording import RecordedRun
from rollart.ports import Rewarder
from rollart.sim import scoring
from rollart.sim.modelled import TracedLedger
from rollart.spec.faults import FaultPlanSpec, FunctionTroubleSpec, matching_names
from rollart.spec.resolve import Resolved
from serverless.backends.simulated import Profile, SimulatedBackend, SimulatedMachines
from serverless.deploy.package import build
from serverless.pipeline import Offload
from serverless.spec import FunctionBatchSpec, FunctionSpec
from serverless.types import FaultKind, Invocation

__all__ = [
    "FunctionBehaviour",
    "SimulatedFunctions",
    "function_behaviours",
    "with_function_faults",
]

COLD_START_S = 0.5
"""Start time of a function worker: between the local pool's milliseconds and Modal's seconds, like Lambda with
Python."""

PLANNED_FAULT_KINDS = (
    FaultKind.THROTTLED,
    FaultKind.CRASH,
    FaultKind.OUT_OF_MEMORY,
    FaultKind.TIMEOUT,
    FaultKind.UNAVAILABLE,
)
"""Kinds of faults with a probability in fault plans, named like its keys."""

SCORE_SOURCE = "rollart.sim.scoring:score"


@dataclass(frozen=True, slots=True)
class FunctionBehaviour:
    """A function, its timing, and the domains that it scores."""

    spec: FunctionSpec
    profile: Profile
    domains: tuple[str, ...]


def function_behaviours(resolved: Resolved, recording: RecordedRun | None) -> list[FunctionBehaviour]:
    """The functions of a run: recorded ones with their recorded call times, else one per domain whose profile has a
    reward. Cold starts on another provider than the recorded one take `COLD_START_S`."""
    if recording is None:
        assert resolved.problem is not None
        costs = {d.name: d.reward for d in resolved.problem.domains if d.reward is not None and not d.reward.on_gpu}
        return [
            FunctionBehaviour(
                _function(name, memory_gb=c.memory_gb), Profile(COLD_START_S, call_s=c.seconds, item_s=0.0), (name,)
            )
            for name, c in costs.items()
        ]
    found = []
    for name, spec in resolved.functions.items():
        seen = recording.functions.get(name)
        domains = tuple(d.name for d in resolved.run.domains if name in (r.function for r in d.rewards))
        if seen is None or not domains:
            continue
        if recording.provider not in resolved.cluster.functions.chain:
            seen = Profile(COLD_START_S, call_s=seen.call_s, item_s=seen.item_s)
        changed = {
            "source": SCORE_SOURCE,
            "handler": "",
            "takes": "samples",
            "deterministic": False,
            "artefacts": (),
            "requirements": (),
            "preload": (),
        }
        found.append(FunctionBehaviour(spec.model_copy(update=changed), seen, domains))
    return found


def with_function_faults(known: list[FunctionBehaviour], plan: FaultPlanSpec | None) -> list[FunctionBehaviour]:
    """The functions with the faults of a plan; the first of several entries for a function counts."""
    found = []
    for one in known:
        entries = () if plan is None else plan.functions
        entry = next((e for e in entries if any(matching_names(p, [one.spec.name]) for p in e.functions)), None)
        found.append(one if entry is None else _with_faults(one, entry))
    return found


def _with_faults(one: FunctionBehaviour, entry: FunctionTroubleSpec) -> FunctionBehaviour:
    faults = {kind: getattr(entry, kind.value) for kind in PLANNED_FAULT_KINDS if getattr(entry, kind.value)}
    cold_s = one.profile.cold_start_s if entry.cold_start_s is None else entry.cold_start_s
    profile = replace(
        one.profile, cold_start_s=cold_s, sigma=entry.spread, faults=faults or None, failed_start=entry.failed_start
    )
    if entry.concurrency is None:
        return replace(one, profile=profile)
    changed = {"concurrency": entry.concurrency, "warm": min(one.spec.warm, entry.concurrency)}
    return replace(one, profile=profile, spec=one.spec.model_copy(update=changed))


class SimulatedFunctions:
    """Context manager of the run's rewarder. A domain without a function takes its environment's reward. `machines`:
    the hosts of its workers, None if faults cannot hit them."""

    def __init__(self, known: list[FunctionBehaviour], resolved: Resolved, ledger: TracedLedger, seed: int) -> None:
        names = simulated_function_hosts(resolved)
        self.machines = SimulatedMachines(names) if names else None
        kind = type("Provider", (SimulatedBackend,), {"provider": function_provider(resolved)})
        meter = _InvocationMeter(ledger)
        self._backend: SimulatedBackend = kind(
            {b.spec.name: scoring.score for b in known},
            meter=meter,
            profiles={b.spec.name: b.profile for b in known},
            seed=seed,
            machines=self.machines,
        )
        self._offload = Offload([build(b.spec) for b in known], self._backend, meter=meter, seed=seed)
        self._plan: Mapping[str, DomainRewards] = {
            d.name: _paid_by([b.spec.name for b in known if d.name in b.domains]) for d in resolved.run.domains
        }

    async def __aenter__(self) -> Rewarder:
        await self._backend.__aenter__()
        await self._offload.__aenter__()
        return OffloadRewarder(self._offload, self._plan)

    async def __aexit__(self, *exc: object) -> None:
        await self._offload.__aexit__(*exc)
        await self._backend.__aexit__(*exc)


def _paid_by(functions: list[str]) -> DomainRewards:
    return DomainRewards(tuple(map(RewardTerm, functions))) if functions else DomainRewards((), 1.0)


def _function(domain: str, *, memory_gb: float) -> FunctionSpec:
    return FunctionSpec(
        name=f"reward-{domain}"[:64],
        source=SCORE_SOURCE,
        takes="samples",
        memory_mb=min(32_768, max(128, round(memory_gb * 1024))),
        concurrency=10_000,
        queue=1_000_000,
        timeout_s=900.0,
        deterministic=False,
        batch=FunctionBatchSpec(max_items=1),
    )


@dataclass(frozen=True, slots=True)
class _InvocationMeter:
    """`MeterSink`."""

    ledger: TracedLedger

    def invocation(self, invocation: Invocation) -> None:
        self.ledger.invocation(invocation)

    def worker(self, span: object) -> None:
        return None

    def saving(self, saving: object) -> None:
        return None
