"""Which runtime starts the parts: this machine's, or Ray's."""

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
from rollart.adapters.clusters.reach import Reached
from rollart.compose.actors import attached, hosts, nodes, part_room, resource, selector, trainer_shares
from rollart.compose.elastic import present
from rollart.errors import PartDied, SpecError, UsageError
from rollart.fleet import Bundle, BundleGroup
from rollart.ports import ActorSpec, Handle, Node, RunEvent, Runtime
from rollart.spec.fleet import pool_labels
from rollart.spec.resolve import Resolved

__all__ = ["ended", "gang", "joining", "opened", "placed", "tell"]

LOOK_S = 0.25
"""Seconds between two looks whether the nodes of the plan have joined."""

PLACE_S = 60.0
"""Seconds, beside `runtime.wait_s`, that a part may wait for its place: Ray starts a process for it."""

TOLD = {
    "node_up": "node_joined",
    "node_leaving": "node_leaving",
    "node_down": "node_lost",
    "actor_started": "actor_placed",
    "actor_restarted": "actor_placed",
}
"""Events of a cluster that go to the ledger, by their names there."""


@contextlib.asynccontextmanager
async def opened(
    resolved: Resolved, directory: Path, progress: Callable[[RunEvent], None] = lambda _: None
) -> AsyncIterator[tuple[Runtime, Resolved]]:
    """The cluster's runtime, started, and the run as it can begin on the nodes that are there, with room for every part
    of its plan reserved; at the end all of it stops."""
    async with contextlib.AsyncExitStack() as stack:
        spec = resolved.cluster.runtime
        runtime: Runtime
        if spec.backend == "local":
            runtime = LocalRuntime(nodes(resolved))
        else:
            runtime = await _ray(resolved, directory, stack, progress)
        await runtime.start()
        stack.push_async_callback(runtime.close)
        async with _asked_for(resolved, runtime):
            if spec.backend == "ray":
                await _joined(resolved, runtime)
            begun = present(resolved, runtime)
            await runtime.reserve(gang(begun), wait_s=spec.wait_s + PLACE_S)
        yield runtime, begun


def gang(resolved: Resolved) -> list[BundleGroup]:
    """What the plan's parts take, one group each: all of it is reserved before the first of them starts. Servers that
    run already take nothing."""
    there = attached(resolved)
    groups = []
    for a in resolved.plan.assignments:
        if a.name in there:
            continue
        parts = [(a.name, a)]
        if a.role is Role.TRAINER:  # it may take several hosts
            parts = [(share.name, replace(a, devices=share.devices)) for share in trainer_shares(resolved)]
        for name, part in parts:
            groups.append(BundleGroup(name, (Bundle(name, *part_room(resolved, part), about=f"pool '{a.pool}'"),)))
    return groups


async def placed(resolved: Resolved, runtime: Runtime, spec: ActorSpec) -> Handle:
    """The part's actor, in the room that is reserved by its name; where none is, once there is some. `UsageError` if
    there is none in time: what others hold of a shared cluster may stay held, and what is free may lie on too many
    nodes. Whoever ends the actor for good gives its room back: `runtime.release`. A part that takes no device needs no
    room: it runs beside what does, on a node that the plan itself may not wait for."""
    limit = resolved.cluster.runtime.wait_s + PLACE_S
    light = not any(spec.resources.values())
    if light:
        with contextlib.suppress(TimeoutError):  # then the runtime says which nodes there are
            async with asyncio.timeout(resolved.cluster.runtime.wait_s):
                while not any(matches(spec.labels, node.labels) for node in runtime.nodes()):
                    await asyncio.sleep(LOOK_S)
    elif not runtime.reserved(spec.name):
        pools = [f"'{p.name}'" for p in resolved.cluster.pools if selector(resolved, p) == dict(spec.labels)]
        room = Bundle(spec.name, spec.resources, spec.labels, about=f"pool {' or '.join(pools)}")
        await runtime.reserve([BundleGroup(spec.name, (room,))], wait_s=limit)
    try:
        async with asyncio.timeout(limit):
            handle = await runtime.spawn(spec if light else replace(spec, bundle=spec.name))
        return Reached(handle) if resolved.cluster.runtime.backend == "ray" else handle
    except BaseException as error:
        await runtime.release(spec.name)
        if not isinstance(error, TimeoutError):
            raise
        raise UsageError(
            f"{spec.name} did not start within {limit:g} s where {dict(spec.resources)} is reserved for it",
            remedy="see whether the cluster's nodes still answer, or raise runtime.wait_s",
        ) from None


async def ended(program: Handle) -> str:
    """The cause, in words, once a `Program` actor's program ended."""
    try:
        return str(await program.call("wait"))
    except PartDied as error:  # not the program alone, but the actor that held it, or its node
        return error.message


async def tell(runtime: Runtime, say: Callable[..., None]) -> None:
    """What happens to the cluster, for the ledger and for whoever watches; for as long as it runs."""
    async for event in runtime.events():
        if event.kind in TOLD:
            node = {"node": event.detail} if event.detail else {}
            say(TOLD[event.kind], event.subject, **node)


async def _ray(
    resolved: Resolved, directory: Path, stack: contextlib.AsyncExitStack, progress: Callable[[RunEvent], None]
) -> Runtime:
    import importlib.util

    if importlib.util.find_spec("ray") is None:
        raise SpecError("runtime.backend is 'ray', and Ray is not installed", remedy="pip install 'rollart[ray]'")
    from rollart.adapters.clusters.ray import RayRuntime
    from rollart.adapters.clusters.ray_cluster import PrivateCluster, auth

    spec = resolved.cluster.runtime
    if spec.address not in ("local", "start"):
        return RayRuntime(spec.address, env={} if spec.token is None else auth(Path(spec.token)))
    there = hosts(resolved) if spec.address == "local" else [Node("head", {}, {}, {})]
    cluster = PrivateCluster(directory / "ray", there, health_s=spec.health_s, port=spec.port)
    stack.push_async_callback(cluster.close)
    address = await cluster.start()
    if spec.address == "start":
        now = asyncio.get_running_loop().time()
        for who, command in joining(resolved, address, cluster.token):
            progress(RunEvent(now, "join", who, {"command": command}))
    return RayRuntime(address, env=auth(cluster.token))


def joining(resolved: Resolved, address: str, token: Path) -> list[tuple[str, str]]:
    """For each pool how many hosts should join, in words, and the command that each of them runs. A host that has no
    shared directory needs a copy of the token's file."""
    found: Counter[tuple[str, str]] = Counter()
    by_host = {f"{pool.name}-": pool for pool in resolved.cluster.pools}
    for host in hosts(resolved):
        pool = by_host[host.id.rstrip("0123456789")]
        labels = ",".join(f"{key}={value}" for key, value in pool_labels(pool).items())
        amounts = [f"--num-{kind.lower()}s={host.total.get(kind, 0.0):g}" for kind in ("CPU", "GPU")]
        command = ["ray", "start", f"--address={address}", f"--labels={labels}", *amounts, "--block"]
        env = f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={shlex.quote(str(token))}"
        found[pool.name, f"{env} {shlex.join(command)}"] += 1
    return [(f"on {n} host{'s' * (n > 1)} of pool '{pool}'", command) for (pool, command), n in found.items()]


@contextlib.asynccontextmanager
async def _asked_for(resolved: Resolved, runtime: Runtime) -> AsyncIterator[None]:
    """Where nodes are lacking, an autoscaler hears of them until the plan has its room."""
    if resolved.cluster.runtime.backend != "ray" or not _lacking(resolved, runtime):
        yield
        return
    from rollart.adapters.clusters.ray import RayRuntime

    assert isinstance(runtime, RayRuntime)
    await runtime.ask(gang(resolved))
    try:
        yield
    finally:
        await runtime.ask(())


async def _joined(resolved: Resolved, runtime: Runtime) -> None:
    """Wait until the nodes that are there have the devices of the plan. `UsageError` names the pool that lacks some."""
    limit = resolved.cluster.runtime.wait_s
    try:
        async with asyncio.timeout(limit):
            while _lacking(resolved, runtime):
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        lacking = "; ".join(_lacking(resolved, runtime))
        raise UsageError(
            f"after {limit:g} s the cluster lacks nodes for the plan: {lacking}",
            remedy="start nodes with these labels (ray start --labels), or raise runtime.wait_s",
        ) from None


def _lacking(resolved: Resolved, runtime: Runtime) -> list[str]:
    found = []
    for pool in resolved.cluster.pools:
        kind, labels = resource(resolved, pool), selector(resolved, pool)
        wanted = sum(len(a.devices) for a in resolved.plan.assignments if a.pool == pool.name)
        wanted = wanted if pool.min is None else pool.min
        there = sum(n.total.get(kind, 0.0) for n in runtime.nodes() if matches(labels, n.labels))
        if there < wanted:
            found.append(f"pool '{pool.name}' needs {wanted} {kind} on nodes with {labels}, there are {there:g}")
    return found
