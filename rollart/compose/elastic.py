"""Elastic plans: devices per pool on the present nodes, the part of the plan that fits at the start, and engines for
new nodes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from placement.diff import MoveCosts, diff
from placement.problem import RunningPlan
from placement.types import Assignment, Deployment, Plan, Role
from rollart.adapters.clusters.labels import matches
from rollart.compose.actors import node_selector, resource_kind
from rollart.compose.planner import PlacementPlanner, fleet_move, placement_planner
from rollart.compose.routing import SERVING_ROLES
from rollart.errors import UsageError
from rollart.fleet import EngineKind, EngineRole, FleetObservation, Node, Proposal, Routes
from rollart.model import EngineId
from rollart.policy.presence import AvailabilitySettings
from rollart.ports import Planner, Runtime
from rollart.runtime.nodes import NodeTracker
from rollart.spec.fleet import pools_of
from rollart.spec.resolve import Resolved

__all__ = [
    "FixedCountPlanner",
    "elastic_planner",
    "fit_to_devices",
    "follow_nodes",
    "elastic_nodes",
    "node_devices",
    "fit_to_nodes",
    "present_devices",
    "devices_by_pool",
]


def elastic_nodes(resolved: Resolved, where: Callable[[], Mapping[EngineId, str]]) -> NodeTracker | None:
    """The run's node tracker; None for a static cluster."""
    spec = resolved.cluster.runtime.elastic
    if spec is None:
        return None
    most = {p.name: p.count for p in resolved.cluster.pools}
    return NodeTracker(AvailabilitySettings(settle_s=spec.settle_s), where, most, patience_s=spec.wait_s)


def node_devices(resolved: Resolved, node: Node) -> dict[str, int]:
    """A node's devices by pool."""
    found = {
        pool.name: int(node.total.get(resource_kind(resolved, pool), 0.0))
        for pool in resolved.cluster.pools
        if matches(node_selector(resolved, pool), node.labels)
    }
    return {pool: devices for pool, devices in found.items() if devices}


def devices_by_pool(resolved: Resolved, nodes: Sequence[Node]) -> dict[str, int]:
    """Devices by pool on the nodes, at most the pool's count in the spec."""
    total: Counter[str] = Counter()
    for node in nodes:
        total.update(node_devices(resolved, node))
    return {pool.name: min(pool.count, total[pool.name]) for pool in resolved.cluster.pools}


async def follow_nodes(runtime: Runtime, resolved: Resolved, nodes: NodeTracker) -> None:
    """Report node events to `nodes` while the runtime runs."""
    nodes.found((n.id, node_devices(resolved, n)) for n in runtime.nodes())
    async for event in runtime.events():
        present = {node.id: node for node in runtime.nodes()}
        if event.kind == "node_up" and event.subject in present:
            nodes.joined(event.subject, node_devices(resolved, present[event.subject]))
        elif event.kind == "node_leaving":
            nodes.leaving(event.subject)
        elif event.kind == "node_down":  # a new node of the same name may be up by now; its event comes next
            nodes.lost(event.subject)
        await asyncio.sleep(0)  # a backlog of events must not keep the loop


def present_devices(resolved: Resolved, runtime: Runtime) -> dict[str, int] | None:
    """Devices by pool on the present nodes; None for a static cluster."""
    if resolved.cluster.runtime.elastic is None or resolved.cluster.runtime.backend == "local":
        return None
    return devices_by_pool(resolved, runtime.nodes())


def fit_to_nodes(resolved: Resolved, runtime: Runtime) -> Resolved:
    """The run reduced to the nodes that are present."""
    devices = present_devices(resolved, runtime)
    return resolved if devices is None else fit_to_devices(resolved, devices)


def fit_to_devices(resolved: Resolved, devices: Mapping[str, int]) -> Resolved:
    """The run reduced to the parts of its plan that fit on these devices: mandatory parts first, then environment hosts
    and engines in plan order. `UsageError` if no engine fits."""
    left, kept = dict(devices), list[Assignment]()
    later = (Role.ENVIRONMENT, *SERVING_ROLES)
    parts = sorted(resolved.plan.assignments, key=lambda a: (a.role in later, a.role in SERVING_ROLES))  # stable
    for part in parts:
        if part.role not in later or len(part.devices) <= left.get(part.pool, 0):
            left[part.pool] = left.get(part.pool, 0) - len(part.devices)
            kept.append(part)
    if len(kept) == len(parts):
        return resolved
    if not any(part.role in SERVING_ROLES for part in kept):
        raise UsageError(
            f"no engine of the plan fits on the nodes that are there ({dict(devices)} devices by pool)",
            remedy="start more nodes, or set a pool's min so that the run waits for them",
        )
    names = {part.name for part in kept}
    assignments = tuple(a for a in resolved.plan.assignments if a.name in names)
    return replace(resolved, plan=_plan_with(resolved, assignments))


def _plan_with(resolved: Resolved, assignments: tuple[Assignment, ...]) -> Plan:
    used = Counter(a.pool for a in assignments for _ in a.devices)
    pools = pools_of(resolved.cluster, resolved.prices)
    return replace(
        resolved.plan,
        assignments=assignments,
        idle={pool.name: pool.count - used[pool.name] for pool in pools},
        usd_per_hour=sum((used[p.name] if p.rented else p.count) * p.usd_per_device_hour for p in pools),
    )


def elastic_planner(wanted: Resolved, running: Resolved) -> Planner | None:
    """The planner of a run. `wanted`: the run with its whole plan; `running`: the part that fits on the nodes at the
    start."""
    inner = placement_planner(running)
    if wanted.cluster.runtime.elastic is None or not wanted.cluster.engines.fixed:
        return inner
    return FixedCountPlanner(wanted, inner)


class FixedCountPlanner:
    """Implements `Planner` for a spec that fixes the number of engines: starts as many of them as the nodes can hold.
    Serving engines stay in place; missing ones go to the pools with the most free devices (ties: the pool named first).
    Prices and flows come from `inner`, if present. Single caller: the rebalancer."""

    def __init__(self, wanted: Resolved, inner: PlacementPlanner | None) -> None:
        self._inner = inner
        self._pools = pools_of(wanted.cluster, wanted.prices)
        self._settings = wanted.run.placement.rebalance
        parts = wanted.plan.assignments
        self._wanted = Counter(a.role for a in parts if a.role in SERVING_ROLES)
        self._sizes = {a.role: len(a.devices) for a in parts if a.role in SERVING_ROLES}
        self._others = Counter(a.pool for a in parts if a.role not in SERVING_ROLES for _ in a.devices)
        device = {p.name: p.device for p in wanted.cluster.pools}
        types = {device[a.pool] for a in parts if a.role in SERVING_ROLES}
        self._serve = [p.name for p in self._pools if device[p.name] in types]
        """Pools with the device types of the plan's engines."""

    async def reprice(self, observed: FleetObservation) -> Routes:
        return Routes() if self._inner is None else await self._inner.reprice(observed)

    async def reflow(self, observed: FleetObservation) -> Routes:
        return Routes() if self._inner is None else await self._inner.reflow(observed)

    def adopt(self, proposal: Proposal) -> None:
        if self._inner is not None:
            self._inner.adopt(proposal)

    async def replan(self, observed: FleetObservation, reason: str) -> Proposal | None:
        have = Counter({kind: load.healthy for kind, load in observed.load.items() if load.healthy})
        target = self._target_engines(have, self._devices(observed))
        costs = MoveCosts.of(self._pools, RunningPlan((), restart_s=self._settings.restart_s))
        moves = diff(_deployments(have), _deployments(target), costs=costs)
        if moves:
            now, after = self._rate(have), self._rate(target)
            lost = sum(move.device_seconds for move in moves) / max(1, sum(k.tp * n for k, n in target.items()))
            routes = await self.reprice(observed)
            return Proposal(tuple(map(fleet_move, moves)), routes, now, after, cost=now * lost)
        if self._inner is None:
            return None
        return await self._inner.replan(replace(observed, movable=False), reason)

    def _devices(self, observed: FleetObservation) -> dict[str, int]:
        present = {p.name: p.count for p in self._pools} if observed.devices is None else observed.devices
        return {p.name: min(p.count, present.get(p.name, 0)) - self._others[p.name] for p in self._pools}

    def _target_engines(self, have: Counter[EngineKind], devices: Mapping[str, int]) -> Counter[EngineKind]:
        """Serving engines; if a role has none, one reassigned from the largest role; then the missing engines."""
        engines, left = Counter(have), dict(devices)
        for kind, count in have.items():
            left[kind.pool] = left.get(kind.pool, 0) - kind.tp * count
        for role, number in self._wanted.items():
            size, engine_role = self._sizes[role], EngineRole(role)
            while sum(n for kind, n in engines.items() if kind.role is engine_role) < number:
                pool = max(self._serve, key=lambda name: left.get(name, 0))
                if left.get(pool, 0) < size:
                    break
                left[pool] -= size
                engines[EngineKind(pool, engine_role, size)] += 1
        for role in self._wanted:
            if not any(n for kind, n in engines.items() if kind.role == EngineRole(role)):
                _reassign_engine(engines, EngineRole(role))
        return +engines

    def _rate(self, engines: Counter[EngineKind]) -> float:
        """Rates are unknown: engines count alike, and the rate is 0 if a role has no engine."""
        if any(not any(n for kind, n in engines.items() if kind.role == EngineRole(role)) for role in self._wanted):
            return 0.0
        return float(sum(engines.values()))


def _reassign_engine(engines: Counter[EngineKind], role: EngineRole) -> None:
    """Reassign one engine of the largest role to `role`, if that role has at least two."""
    most = max(engines, key=lambda kind: (engines[kind], kind), default=None)
    if most is not None and sum(n for kind, n in engines.items() if kind.role is most.role) > 1:
        engines[most] -= 1
        engines[most._replace(role=role)] += 1


def _deployments(engines: Counter[EngineKind]) -> list[Deployment]:
    return [Deployment(kind.pool, Role(kind.role), kind.tp, count) for kind, count in sorted(engines.items())]
