"""Inputs of a run's router: engine placements, the plan's prices, and predictions to apply them to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from placement.hardware import device_name
from placement.problem import Problem
from placement.roofline import Roofline, RooflinePerformance, transfer_s
from placement.types import ROLLOUT_ROLES, Assignment, Deployment, Device, Placement
from rollart.fleet import EngineKind, EnginePlacement, EngineRole, RoutePrices, Routes
from rollart.policy.routing import PREFILL_RULES, HardwareAffinity, RoutingPolicy
from rollart.serving.kv_admission import ConcurrencySettings, TrajectoryDispatch
from rollart.settings.resolve import Resolved
from rollart.strategies.skew_aware import SkewAwareDispatcher


def engine_placements(resolved: Resolved, roles: Mapping[str, EngineRole] | None = None) -> dict[str, EnginePlacement]:
    """Placement of every engine by id. `roles`: engines whose role has changed since they were named."""
    return {
        a.name: engine_placement(resolved, a, (roles or {}).get(a.name))
        for a in resolved.plan.assignments
        if a.role in ROLLOUT_ROLES
    }


def engine_placement(resolved: Resolved, assignment: Assignment, role: EngineRole | None = None) -> EnginePlacement:
    """An engine's placement; by default with the role of its assignment."""
    device = next(pool.device for pool in resolved.cluster.pools if pool.name == assignment.pool)
    return EnginePlacement(assignment.pool, device_name(device), role or assignment.role, len(assignment.devices))


def make_router(resolved: Resolved) -> RoutingPolicy:
    """The run's router. Without a placement it has no prices: load, affinity and thresholds decide."""
    found, problem = resolved.plan.placement, resolved.problem
    routes = Routes() if found is None or problem is None else routes_of(problem, found)
    return RoutingPolicy(routes, _affinity(resolved), PREFILL_RULES[resolved.run.placement.router])


def routes_of(problem: Problem, found: Placement) -> Routes:
    """Prices, predictions and shares of a placement."""
    prices = found.prices
    engines = {EngineKind(*key): price for key, price in prices.deployments.items()}
    kv = {EngineKind(*key): price for key, price in prices.kv.items()}
    model = PlannedTurnModel.of(problem, found.deployments)
    return Routes(RoutePrices(engines, kv, dict(prices.links), prices.in_flight), model, _shares(found))


def concurrency_settings(resolved: Resolved) -> ConcurrencySettings | None:
    """Bounds on trajectories per engine; None if there are none. `auto` bounds nothing if engine sizes follow
    preemptions, which bounds would prevent. Lengths are those of the profiles, at most the context."""
    rollout = resolved.run.rollout
    spec = rollout.concurrency
    by_itself = resolved.plan.placement is not None and rollout.parallelism is None
    skew_aware = rollout.dispatch == "skew_aware"
    if spec.mode == "off" or (spec.mode == "auto" and not by_itself and not skew_aware):
        return None
    context = float(resolved.run.model.context)
    known = () if resolved.problem is None else resolved.problem.domains
    return ConcurrencySettings(
        spec,
        {d.name: min(d.total_tokens, context) for d in known},
        SkewAwareDispatcher if skew_aware else TrajectoryDispatch,
    )


@dataclass(frozen=True, slots=True)
class PlannedTurnModel:
    """Implements `TurnModel` with the placer's performance model. `batches`: concurrent turns of an engine by kind; for
    another kind the maximum of its pool, else 1."""

    performance: RooflinePerformance
    devices: Mapping[str, Device]
    links: Mapping[tuple[str, str], tuple[float, float]]
    """GB/s and seconds of latency, by pools in sorted order."""
    batches: Mapping[EngineKind, float]
    _made: dict[tuple[str, int], Roofline] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(problem: Problem, deployments: Sequence[Deployment]) -> PlannedTurnModel:
        return PlannedTurnModel(
            problem.performance,
            {pool.name: pool.device for pool in problem.pools},
            {ends: (c.gb_per_s, c.latency_s) for ends, c in problem.kv_channels().items()},
            {EngineKind(d.pool, d.role, d.tp): max(d.batch, 1.0) for d in deployments if d.role in ROLLOUT_ROLES},
        )

    def prefill_s(self, kind: EngineKind, new: float, cached: float) -> float:
        """A prefill engine computes alone; other engines share the fixed cost of a step with their decoding batch."""
        model = self._instance(kind)
        if kind.role is EngineRole.PREFILL:
            return model.prefill_s(new, cached)
        return model.turn_s(self.batch(kind), new, cached, 1.0)

    def decode_s(self, kind: EngineKind, context: float, output: float) -> float:
        batch = self.batch(kind)
        return output * self._instance(kind).decode_step_s(batch, context + output / 2) / batch

    def batch(self, kind: EngineKind) -> float:
        if kind in self.batches:
            return self.batches[kind]
        return max((batch for other, batch in self.batches.items() if other.pool == kind.pool), default=1.0)

    def handoff_s(self, source: EngineKind, target: EngineKind, tokens: float) -> float:
        link = self.links.get((min(source.pool, target.pool), max(source.pool, target.pool)))
        if link is None:
            return math.inf  # no known link
        return transfer_s(self.performance.shape.kv_bytes(tokens), *link)

    def kv_gb(self, tokens: float) -> float:
        return self.performance.shape.kv_bytes(tokens) / 1e9

    def _instance(self, kind: EngineKind) -> Roofline:
        key = (kind.pool, kind.tp)
        if key not in self._made:
            model = self.performance.instance(self.devices[kind.pool], kind.tp)
            assert not isinstance(model, str), f"the plan has engines on {kind.pool} that cannot be: {model}"
            self._made[key] = model
        return self._made[key]


def _shares(found: Placement) -> dict[str, dict[str, float]]:
    """By domain and pool of the decode engine, summing to 1."""
    rates: dict[str, dict[str, float]] = {}
    for flow in found.flows:
        pools = rates.setdefault(flow.domain, {})
        pools[flow.pool] = pools.get(flow.pool, 0.0) + flow.rate
    return {
        domain: {pool: rate / sum(pools.values()) for pool, rate in pools.items()}
        for domain, pools in rates.items()
        if sum(pools.values()) > 0
    }


def _affinity(resolved: Resolved) -> HardwareAffinity:
    """Preferences of the domains that this cluster can satisfy: pools by their name, device types by their canonical
    name."""
    run, pools = resolved.run, resolved.cluster.pools
    names = {pool.name for pool in pools}
    types = {device_name(pool.device) for pool in pools}
    preferred = {}
    for domain in run.domains:
        wanted = run.hw_affinity.get(domain.tag or domain.name, run.hw_affinity.get("default"))
        if wanted is not None and (wanted in names or device_name(wanted) in types):
            preferred[domain.name] = wanted if wanted in names else device_name(wanted)
    return HardwareAffinity(preferred)
