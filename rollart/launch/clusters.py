"""The cluster runtime, processes of this machine or Ray, and elastic plans on it: devices per pool on the present
nodes, the part of the plan that fits at the start, and engines for new nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path

from placement.diff import MoveCosts, diff
from placement.problem import RunningPlan
from placement.types import ROLLOUT_ROLES, Assignment, Deployment, Role
from rollart.adapters.clusters.local import LocalRuntime
from rollart.adapters.clusters.runtime import matches
from rollart.errors import PartDied, SpecError, UsageError
from rollart.fleet import (
    ActorSpec,
    Bundle,
    EngineKind,
    FleetObservation,
    Node,
    Proposal,
    Routes,
)
from rollart.launch.layout import (
    attached_urls,
    host_nodes,
    node_selector,
    part_resources,
    pool_nodes,
    resource_kind,
    trainer_host_parts,
)
from rollart.launch.plan import PlacementPlanner, fleet_move, placement_planner, plan_with
from rollart.model import EngineId
from rollart.ports import Handle, Planner, RunEvent, Runtime
from rollart.settings.planning import pool_labels, pools_of
from rollart.settings.resolve import Resolved
from rollart.supervise.nodes import AvailabilitySettings, NodeTracker


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
    """Devices by pool on the present nodes, at most the pool's count in the spec; None for a static cluster."""
    if resolved.cluster.runtime.elastic is None or resolved.cluster.runtime.backend == "local":
        return None
    total: Counter[str] = Counter()
    for node in runtime.nodes():
        total.update(node_devices(resolved, node))
    return {pool.name: min(pool.count, total[pool.name]) for pool in resolved.cluster.pools}


def fit_to_devices(resolved: Resolved, devices: Mapping[str, int]) -> Resolved:
    """The run reduced to the parts of its plan that fit on these devices: mandatory parts first, then environment hosts
    and engines in plan order. `UsageError` if no engine fits."""
    left, kept = dict(devices), list[Assignment]()
    later = (Role.ENVIRONMENT, *ROLLOUT_ROLES)
    parts = sorted(resolved.plan.assignments, key=lambda a: (a.role in later, a.role in ROLLOUT_ROLES))  # stable
    for part in parts:
        if part.role not in later or len(part.devices) <= left.get(part.pool, 0):
            left[part.pool] = left.get(part.pool, 0) - len(part.devices)
            kept.append(part)
    if len(kept) == len(parts):
        return resolved
    if not any(part.role in ROLLOUT_ROLES for part in kept):
        raise UsageError(
            f"no engine of the plan fits on the nodes that are there ({dict(devices)} devices by pool)",
            remedy="start more nodes, or set a pool's min so that the run waits for them",
        )
    names = {part.name for part in kept}
    return replace(resolved, plan=plan_with(resolved, tuple(a for a in resolved.plan.assignments if a.name in names)))


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
        self._wanted = Counter(a.role for a in parts if a.role in ROLLOUT_ROLES)
        self._sizes = {a.role: len(a.devices) for a in parts if a.role in ROLLOUT_ROLES}
        self._others = Counter(a.pool for a in parts if a.role not in ROLLOUT_ROLES for _ in a.devices)
        device = {p.name: p.device for p in wanted.cluster.pools}
        types = {device[a.pool] for a in parts if a.role in ROLLOUT_ROLES}
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
        """Serving engines; the missing ones; then, if a role has none, one reassigned
        from the largest role, if that has at least two."""
        engines, left = Counter(have), dict(devices)
        for kind, count in have.items():
            left[kind.pool] = left.get(kind.pool, 0) - kind.tp * count
        for role, number in self._wanted.items():
            size = self._sizes[role]
            while sum(n for kind, n in engines.items() if kind.role is role) < number:
                pool = max(self._serve, key=lambda name: left.get(name, 0))
                if left.get(pool, 0) < size:
                    break
                left[pool] -= size
                engines[EngineKind(pool, role, size)] += 1
        for role in self._wanted:
            if not any(n for kind, n in engines.items() if kind.role is role):
                most = max(engines, key=lambda kind: (engines[kind], kind), default=None)
                if most is not None and sum(n for kind, n in engines.items() if kind.role is most.role) > 1:
                    engines[most] -= 1
                    engines[most._replace(role=role)] += 1
        return +engines

    def _rate(self, engines: Counter[EngineKind]) -> float:
        """Rates are unknown: engines count alike, and the rate is 0 if a role has no engine."""
        if any(not any(n for kind, n in engines.items() if kind.role is role) for role in self._wanted):
            return 0.0
        return float(sum(engines.values()))


def _deployments(engines: Counter[EngineKind]) -> list[Deployment]:
    return [Deployment(*kind, count) for kind, count in sorted(engines.items())]


NODE_POLL_S = 0.25
"""Seconds between two checks for nodes of the plan."""

PLACEMENT_S = 60.0
"""Seconds, in addition to `runtime.wait_s`, that the placement of a part may take: Ray starts a process for it."""

LEDGER_EVENTS = {
    "node_up": "node_joined",
    "node_leaving": "node_leaving",
    "node_down": "node_lost",
    "actor_started": "actor_placed",
    "actor_restarted": "actor_placed",
}
"""Cluster events that are recorded, with their names in the ledger."""


@contextlib.asynccontextmanager
async def open_cluster(
    resolved: Resolved, directory: Path, progress: Callable[[RunEvent], None] = lambda _: None
) -> AsyncIterator[tuple[Runtime, Resolved]]:
    """Start the cluster's runtime and reserve resources for every part of the plan. Yields the runtime, and the run
    reduced to the nodes that are present. Everything stops at exit."""
    async with contextlib.AsyncExitStack() as stack:
        spec = resolved.cluster.runtime
        runtime: Runtime
        if spec.backend == "local":
            runtime = LocalRuntime(pool_nodes(resolved))
        else:
            runtime = await _ray_runtime(resolved, directory, stack, progress)
        await runtime.start()
        stack.push_async_callback(runtime.close)
        async with _requested_capacity(resolved, runtime):
            if spec.backend == "ray":
                await wait_for_nodes(resolved, runtime)
            devices = present_devices(resolved, runtime)
            fitted = resolved if devices is None else fit_to_devices(resolved, devices)
            await runtime.reserve(plan_bundles(fitted), wait_s=spec.wait_s + PLACEMENT_S)
        yield runtime, fitted


def plan_bundles(resolved: Resolved) -> list[Bundle]:
    """The bundles of the plan's parts; all are reserved before the first part starts. Attached servers need none."""
    attached, bundles = attached_urls(resolved), list[Bundle]()
    for a in resolved.plan.assignments:
        if a.name in attached:
            continue
        parts = [(a.name, a)]
        if a.role is Role.TRAINER:  # it may take several hosts
            parts = [(share.name, replace(a, devices=share.devices)) for share in trainer_host_parts(resolved)]
        bundles += [Bundle(name, *part_resources(resolved, part), about=f"pool '{a.pool}'") for name, part in parts]
    return bundles


async def place_actor(resolved: Resolved, runtime: Runtime, spec: ActorSpec) -> Handle:
    """Start the part's actor on the resources reserved under its name; without a reservation, reserve them first.
    `UsageError` if resources do not become free in time: other users of a shared cluster may keep theirs, and free ones
    may be spread over too many nodes. The caller that ends the actor for good releases its resources with
    `runtime.release`. A part without devices reserves nothing: it runs beside other parts, on a node that the plan
    itself may not wait for."""
    limit = resolved.cluster.runtime.wait_s + PLACEMENT_S
    light = not any(spec.resources.values())
    if light:
        with contextlib.suppress(TimeoutError):  # the error of `spawn` then lists the nodes
            async with asyncio.timeout(resolved.cluster.runtime.wait_s):
                while not any(matches(spec.labels, node.labels) for node in runtime.nodes()):
                    await asyncio.sleep(NODE_POLL_S)
    elif not runtime.reserved(spec.name):
        pools = [f"'{p.name}'" for p in resolved.cluster.pools if node_selector(resolved, p) == dict(spec.labels)]
        bundle = Bundle(spec.name, spec.resources, spec.labels, about=f"pool {' or '.join(pools)}")
        await runtime.reserve([bundle], wait_s=limit)
    try:
        async with asyncio.timeout(limit):
            return await runtime.spawn(spec if light else replace(spec, bundle=spec.name))
    except BaseException as error:
        await runtime.release(spec.name)
        if not isinstance(error, TimeoutError):
            raise
        raise UsageError(
            f"{spec.name} did not start within {limit:g} s where {dict(spec.resources)} is reserved for it",
            remedy="see whether the cluster's nodes still answer, or raise runtime.wait_s",
        ) from None


async def exit_cause(program: Handle) -> str:
    """Wait for the exit of a `Program` actor's program; the cause as text."""
    try:
        return str(await program.call("wait"))
    except PartDied as error:  # the actor of the program, or its node, died as well
        return error.message


async def record_cluster_events(runtime: Runtime, emit: Callable[..., None]) -> None:
    """Record cluster events while the runtime runs."""
    async for event in runtime.events():
        if event.kind in LEDGER_EVENTS:
            node = {"node": event.detail} if event.detail else {}
            emit(LEDGER_EVENTS[event.kind], event.subject, **node)


async def _ray_runtime(
    resolved: Resolved, directory: Path, stack: contextlib.AsyncExitStack, progress: Callable[[RunEvent], None]
) -> Runtime:
    import importlib.util

    if importlib.util.find_spec("ray") is None:
        raise SpecError("runtime.backend is 'ray', and Ray is not installed", remedy="pip install 'rollart[ray]'")
    from rollart.adapters.clusters.ray import RayRuntime
    from rollart.adapters.clusters.ray_cluster import TOKEN, auth_environment, private_cluster

    spec = resolved.cluster.runtime
    if spec.address not in ("local", "start"):
        return RayRuntime(spec.address, env={} if spec.token is None else auth_environment(Path(spec.token)))
    nodes = host_nodes(resolved) if spec.address == "local" else [Node("head", {}, {})]
    directory = directory / "ray"
    cluster = private_cluster(directory, nodes, health_s=spec.health_s, port=spec.port)
    address = await stack.enter_async_context(cluster)
    if spec.address == "start":
        now = asyncio.get_running_loop().time()
        for hosts, command in join_commands(resolved, address, directory / TOKEN):
            progress(RunEvent(now, "join", hosts, {"command": command}))
    return RayRuntime(address, env=auth_environment(directory / TOKEN))


def join_commands(resolved: Resolved, address: str, token: Path) -> list[tuple[str, str]]:
    """For each pool the number of hosts that should join, as text, and the command for each of them. A host without the
    shared directory needs a copy of the token file."""
    found: Counter[tuple[str, str]] = Counter()
    by_host = {f"{pool.name}-": pool for pool in resolved.cluster.pools}
    for host in host_nodes(resolved):
        pool = by_host[host.id.rstrip("0123456789")]
        labels = ",".join(f"{key}={value}" for key, value in pool_labels(pool).items())
        amounts = [f"--num-{kind.lower()}s={host.total.get(kind, 0.0):g}" for kind in ("CPU", "GPU")]
        command = ["ray", "start", f"--address={address}", f"--labels={labels}", *amounts, "--block"]
        env = f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={shlex.quote(str(token))}"
        found[pool.name, f"{env} {shlex.join(command)}"] += 1
    return [(f"on {n} host{'s' * (n > 1)} of pool '{pool}'", command) for (pool, command), n in found.items()]


@contextlib.asynccontextmanager
async def _requested_capacity(resolved: Resolved, runtime: Runtime) -> AsyncIterator[None]:
    """Announce the plan's bundles to an autoscaler while nodes are missing, until the body ends."""
    if resolved.cluster.runtime.backend != "ray" or not _missing_capacity(resolved, runtime):
        yield
        return
    from rollart.adapters.clusters.ray import RayRuntime

    assert isinstance(runtime, RayRuntime)
    await runtime.ask(plan_bundles(resolved))
    try:
        yield
    finally:
        await runtime.ask(())


async def wait_for_nodes(resolved: Resolved, runtime: Runtime) -> None:
    """Wait until the present nodes have the devices of the plan. `UsageError` names the pool that lacks devices."""
    limit = resolved.cluster.runtime.wait_s
    try:
        async with asyncio.timeout(limit):
            while _missing_capacity(resolved, runtime):
                await asyncio.sleep(NODE_POLL_S)
    except TimeoutError:
        lacking = "; ".join(_missing_capacity(resolved, runtime))
        raise UsageError(
            f"after {limit:g} s the cluster lacks nodes for the plan: {lacking}",
            remedy="start nodes with these labels (ray start --labels), or raise runtime.wait_s",
        ) from None


def _missing_capacity(resolved: Resolved, runtime: Runtime) -> list[str]:
    found = []
    for pool in resolved.cluster.pools:
        kind, labels = resource_kind(resolved, pool), node_selector(resolved, pool)
        wanted = sum(len(a.devices) for a in resolved.plan.assignments if a.pool == pool.name)
        wanted = wanted if pool.min is None else pool.min
        present = sum(n.total.get(kind, 0.0) for n in runtime.nodes() if matches(labels, n.labels))
        if present < wanted:
            found.append(f"pool '{pool.name}' needs {wanted} {kind} on nodes with {labels}, there are {present:g}")
    return found
