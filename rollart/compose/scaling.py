"""Live scaling of a run's functions: expected load from the scheduler, and the cost of idle workers and of waiting."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from rollart.adapters.rewards.offload import DomainRewards
from rollart.errors import SpecError
from rollart.ports import RunEvent
from rollart.runtime.groups import ActiveRollouts
from rollart.spec.load import value_problem
from rollart.spec.resolve import Resolved
from serverless.backends.base import Backend
from serverless.pipeline import Offload
from serverless.scaling import Scaler, ScalerContext, ScalingDecision, ScalingPrices
from serverless.scaling_seen import StatisticsMeter
from serverless.scaling_spec import ScalingSpec
from serverless.spec import FunctionSpec

__all__ = ["TrajectoryDemand", "scaling_prices", "make_scaler", "scaling_settings"]

PROVISIONED_FILE = "provisioned.json"
"""File in the run's directory with the provisioned levels from before the run changed them, until they are restored."""


def scaling_settings(given: Mapping[str, Any]) -> ScalingSpec:
    """SpecError for an unknown setting or an invalid value."""
    try:
        return ScalingSpec.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["functions", "scaling", *(str(key) for key in first["loc"] if key not in _BRANCHES)])
        raise SpecError(value_problem(first, where)) from None


_BRANCHES = ("float", "constrained-float", "literal['auto']")
"""Location parts that pydantic adds for a value that is a number or "auto"."""


class TrajectoryDemand:
    """Implements `serverless.scaling.DemandSource`: kinds are domains, and a domain's functions are those of its
    rewards."""

    def __init__(self, rolling: ActiveRollouts, plan: Mapping[str, DomainRewards]) -> None:
        self._rolling = rolling
        self._kinds: dict[str, tuple[str, ...]] = {}
        for domain, rewards in plan.items():
            for term in rewards.terms:
                self._kinds[term.function] = (*self._kinds.get(term.function, ()), domain)

    def live(self) -> Mapping[str, Sequence[float]]:
        return self._rolling.began()

    def ended(self) -> Iterable[tuple[str, float]]:
        return self._rolling.ended()

    def kinds(self, function: str) -> Collection[str]:
        return self._kinds.get(function, ())


def scaling_prices(resolved: Resolved, live: Callable[[], int]) -> ScalingPrices:
    """An idle local worker costs a core of the cluster's own `cpu` pools (the dearest), else the listed price; a
    waiting trajectory costs its share of all devices of the plan."""
    pools = [p.name for p in resolved.cluster.pools if p.device == "cpu"]
    hourly = [resolved.usd_per_device_hour[name] for name in pools if name in resolved.usd_per_device_hour]
    listed = [p.usd for p in resolved.prices.prices if (p.name, p.unit) == ("cpu", "device-hour")]
    core = max(hourly or listed or [0.0]) / 3600.0
    every_second = resolved.plan.usd_per_hour / 3600.0

    def idle(spec: FunctionSpec, provider: str) -> float:
        return core * (spec.cpu or 1.0)

    return ScalingPrices(idle, lambda: every_second / max(1, live()))


class RunEventSink(Protocol):
    """Receiver of scaling events."""

    def event(self, event: RunEvent) -> None: ...


def make_scaler(
    resolved: Resolved,
    offload: Offload,
    chain: Sequence[Backend],
    *,
    seen: StatisticsMeter,
    rolling: ActiveRollouts,
    plan: Mapping[str, DomainRewards],
    live: Callable[[], int],
    events: RunEventSink,
    directory: Path,
) -> Scaler:
    """The run's scaler, not open yet. `live`: number of live trajectories. Every change is an event of kind
    `function_scaled`, a change that a provider refused one of kind `function_scaling_failed`."""

    def emit(scaled: ScalingDecision) -> None:
        fields: dict[str, str | int | float | bool | None] = {
            "provider": scaled.provider,
            "from": scaled.before,
            "to": scaled.after,
            "why": scaled.why,
        }
        kind = "function_scaled"
        if scaled.failed:
            kind, fields = "function_scaling_failed", {**fields, "detail": scaled.failed}
        events.event(RunEvent(scaled.t, kind, scaled.function, fields))

    def route(function: str) -> str:
        states = offload.providers(function)
        return next((provider for provider, (state, _) in states.items() if state != "open"), "")

    around = ScalerContext(
        demand=TrajectoryDemand(rolling, plan),
        prices=scaling_prices(resolved, live),
        waiting=offload.waiting_for,
        route=route,
        tell=emit,
        remember=directory / PROVISIONED_FILE,
    )
    settings = scaling_settings(resolved.cluster.functions.scaling)
    return Scaler(offload.functions, chain, seen=seen, meter=seen, settings=settings, around=around)
