"""The cluster runtime: processes of this machine, or Ray."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

from placement.types import Role
from rollart.adapters.clusters.labels import matches
from rollart.adapters.clusters.local import LocalRuntime
from rollart.adapters.clusters.reach import ReachabilityCheckedHandle
from rollart.compose.actors import (
    attached_urls,
    host_nodes,
    node_selector,
    part_resources,
    pool_nodes,
    resource_kind,
    trainer_host_parts,
)
from rollart.compose.elastic import fit_to_nodes
from rollart.errors import PartDied, SpecError, UsageError
from rollart.fleet import Bundle, BundleGroup, Node
from rollart.ports import ActorSpec, Handle, RunEvent, Runtime
from rollart.spec.fleet import pool_labels
from rollart.spec.resolve import Resolved

__all__ = ["exit_cause", "plan_bundles", "join_commands", "open_cluster", "place_actor", "record_cluster_events"]

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
                await _wait_for_nodes(resolved, runtime)
            fitted = fit_to_nodes(resolved, runtime)
            await runtime.reserve(plan_bundles(fitted), wait_s=spec.wait_s + PLACEMENT_S)
        yield runtime, fitted


def plan_bundles(resolved: Resolved) -> list[BundleGroup]:
    """The bundles of the plan's parts, one group each; all are reserved before the first part starts. Attached servers
    need none."""
    attached = attached_urls(resolved)
    groups = []
    for a in resolved.plan.assignments:
        if a.name in attached:
            continue
        parts = [(a.name, a)]
        if a.role is Role.TRAINER:  # it may take several hosts
            parts = [(share.name, replace(a, devices=share.devices)) for share in trainer_host_parts(resolved)]
        for name, part in parts:
            groups.append(BundleGroup(name, (Bundle(name, *part_resources(resolved, part), about=f"pool '{a.pool}'"),)))
    return groups


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
        await runtime.reserve([BundleGroup(spec.name, (bundle,))], wait_s=limit)
    try:
        async with asyncio.timeout(limit):
            handle = await runtime.spawn(spec if light else replace(spec, bundle=spec.name))
        return ReachabilityCheckedHandle(handle) if resolved.cluster.runtime.backend == "ray" else handle
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
    from rollart.adapters.clusters.ray_cluster import PrivateCluster, auth_environment

    spec = resolved.cluster.runtime
    if spec.address not in ("local", "start"):
        return RayRuntime(spec.address, env={} if spec.token is None else auth_environment(Path(spec.token)))
    nodes = host_nodes(resolved) if spec.address == "local" else [Node("head", {}, {}, {})]
    cluster = PrivateCluster(directory / "ray", nodes, health_s=spec.health_s, port=spec.port)
    stack.push_async_callback(cluster.close)
    address = await cluster.start()
    if spec.address == "start":
        now = asyncio.get_running_loop().time()
        for hosts, command in join_commands(resolved, address, cluster.token):
            progress(RunEvent(now, "join", hosts, {"command": command}))
    return RayRuntime(address, env=auth_environment(cluster.token))


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


async def _wait_for_nodes(resolved: Resolved, runtime: Runtime) -> None:
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
