"""The `Runtime` port on Ray: actors on the nodes of a cluster, chosen by resources and labels.

Ray places, starts and kills actors. This module closes its gaps. Ray waits for ever for a node that does not exist:
here that is a `UsageError` at once. Ray silently queues calls beyond an actor's concurrency: here they wait at the
caller. Ray attaches to any cluster that it finds: here the address is always explicit. Nothing per token or per request
crosses Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from rollart.adapters.clusters.events import EventLog
from rollart.adapters.clusters.gang import bundle_node
from rollart.adapters.clusters.labels import matches
from rollart.adapters.clusters.ray_groups import RayGroups
from rollart.adapters.clusters.ray_handle import RayHandle
from rollart.adapters.clusters.ray_host import pack, unpack
from rollart.adapters.clusters.ray_link import (
    CLIENT_SCHEME,
    SILENT_S,
    RayClientLink,
    RayDriverLink,
    RayLink,
    check_grpc_server,
    connect_in_thread,
    connection_lost,
    resolve_address,
)
from rollart.adapters.clusters.threads import run_in_daemon_thread
from rollart.errors import ProviderError, UsageError
from rollart.fleet import BundleGroup
from rollart.ports import ActorSpec, Handle, Node, RuntimeEvent

POLL_INTERVAL_S = 0.5
"""Seconds between two polls of the nodes: Ray does not notify a driver of nodes that join or leave."""


ASK_S = 10.0
"""Seconds for a hint to the cluster, whose result is not needed."""

CLOSE_S = 30.0
"""Seconds for requests to the cluster at the end: a cluster that is gone does not answer."""


class RayRuntime:
    """Owns its actors and the connection to the cluster, one per process. `spawn` waits until Ray finds room for the
    actor; after the death of a node, the next incarnation of its actor goes to any node that its labels allow.

    Invariant: free = total - reserved - held by our other actors on every live node.
    """

    def __init__(self, address: str, *, env: Mapping[str, str] | None = None) -> None:
        """`address` of a cluster: `host:port`, `ray://host:port`, or `auto` for the value of RAY_ADDRESS. `env`:
        variables that Ray reads in this process, such as the path of its token."""
        self._address = address
        self._env = dict(env or {})
        self._env_before: dict[str, str | None] = {}
        self._actors: dict[str, RayHandle] = {}
        self.link: RayLink = RayDriverLink()
        self.groups = RayGroups(self._account, lambda function, *args: self.link.run_blocking(function, *args))
        self._nodes: dict[str, Node] = {}
        self._names: dict[str, str] = {}
        """Names of live nodes, by Ray's id."""
        self._leaving: set[str] = set()
        self._objects: dict[str, Any] = {}
        self._ids = itertools.count()
        self._events = EventLog()
        self._watcher: asyncio.Task[None] | None = None
        self._poll_lock = asyncio.Lock()
        self._polls = self._answered = 0
        """Number of polls begun, and of the last poll that was answered."""

    async def start(self) -> None:
        """Connect. `ProviderError` if there is no cluster, or it refuses the connection."""
        address = resolve_address(self._address)
        await check_grpc_server(address)
        self._env_before = {name: os.environ.get(name) for name in self._env}
        os.environ.update(self._env)
        try:
            self.link = RayClientLink(address) if address.startswith(CLIENT_SCHEME) else RayDriverLink()
            await self._connect(address)
            await self.poll_nodes()
        except Exception:
            await self.close()
            raise
        self._watcher = asyncio.get_running_loop().create_task(self._watch(), name="nodes of the cluster")

    def nodes(self) -> Sequence[Node]:
        return tuple(self._nodes[name] for name in sorted(self._nodes))

    async def spawn(self, spec: ActorSpec) -> Handle:
        if spec.name in self._actors:
            raise UsageError(f"an actor named {spec.name!r} runs already")
        handle = RayHandle(self, spec)
        self._actors[spec.name] = handle
        try:
            await handle.boot()
        except BaseException:
            self._actors.pop(spec.name, None)
            raise
        self.emit(RuntimeEvent("actor_started", spec.name, handle.node))
        return handle

    async def reserve(self, gang: Sequence[BundleGroup], *, wait_s: float) -> None:
        await self.poll_nodes()
        await self.groups.reserve(gang, wait_s=wait_s, nodes=self.nodes)

    async def ask(self, gang: Sequence[BundleGroup]) -> None:
        """Announce the resources that will be requested to the cluster's autoscaler, if there is one: it adds nodes for
        them, so nothing waits for a node that was never seen. () withdraws the request. The last request of any run on
        the cluster counts."""
        from ray.autoscaler.sdk import request_resources

        wanted = [bundle for group in gang for bundle in group.bundles if any(bundle.resources.values())]
        resources = [dict(bundle.resources) for bundle in wanted]
        labels = [dict(bundle.labels) for bundle in wanted]
        if isinstance(self.link, RayDriverLink):  # Ray's client lacks this function
            with contextlib.suppress(Exception):  # only a hint: `reserve` waits for the nodes anyway
                async with asyncio.timeout(ASK_S):
                    await self.link.run_blocking(request_resources, None, resources, labels)

    async def release(self, group: str) -> None:
        for handle in self._actors.values():
            if self.groups.holds(group, handle.spec.bundle):
                raise UsageError(f"an actor is still in bundle {handle.spec.bundle!r}", remedy="kill it first")
        await self.groups.release(group)

    def reserved(self, group: str) -> bool:
        return group in self.groups

    def events(self) -> AsyncIterator[RuntimeEvent]:
        """Every event since the runtime's start, for as long as it runs."""
        return self._events.read()

    async def put(self, value: Any) -> str:
        import ray

        ref = f"object-{next(self._ids)}"
        self._objects[ref] = await self.link.run_blocking(ray.put, pack(value))
        return ref

    async def get(self, ref: str) -> Any:
        import ray

        if ref not in self._objects:
            raise UsageError(f"no object {ref!r} in this runtime")
        return unpack(await self.link.run_blocking(ray.get, self._objects[ref]))

    async def close(self) -> None:
        self._events.close()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        async with asyncio.TaskGroup() as tasks:
            for handle in list(self._actors.values()):
                tasks.create_task(handle.kill(), name=f"stop {handle.name}")
        with contextlib.suppress(TimeoutError, ProviderError):
            async with asyncio.timeout(CLOSE_S):
                await self.groups.close()
        self._objects.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._disconnect()
        for name, value in self._env_before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    async def _connect(self, address: str) -> None:
        await connect_in_thread(address)

    async def _disconnect(self) -> None:
        import ray

        await run_in_daemon_thread(ray.shutdown)

    # For handles.

    def emit(self, event: RuntimeEvent) -> None:
        self._events.emit(event)

    def forget(self, handle: RayHandle) -> None:
        """The actor will not restart."""
        self._actors.pop(handle.spec.name, None)

    async def feasible(self, spec: ActorSpec) -> None:
        """`UsageError` if no current node, or the actor's bundle, could ever hold it."""
        await self.poll_nodes()
        labels = bundle_node(spec, self.groups.bundles).labels if spec.bundle else spec.labels
        if not any(
            matches(labels, n.labels) and all(n.total.get(k, 0.0) >= v for k, v in spec.resources.items())
            for n in self._nodes.values()
        ):
            available = "; ".join(f"{n.id} {_user_labels(n.labels)} {dict(n.total)}" for n in self.nodes())
            raise UsageError(
                f"{spec.name} asks for {dict(spec.resources)} on {dict(labels)}: no node could ever hold it",
                remedy=f"the cluster has: {available}",
            )

    def least_loaded_node(self, handle: RayHandle) -> tuple[str, str]:
        """The node for an actor that takes no resources, and Ray's id of it: among the nodes that its labels allow, the
        one with the fewest such actors; nodes that are leaving come last. Ray would choose an arbitrary node, and the
        same one for several actors."""
        held = Counter(other.target_node for other in self._actors.values() if other is not handle)
        ids = {name: ray_id for ray_id, name in self._names.items()}
        candidates = [name for name, node in self._nodes.items() if matches(handle.spec.labels, node.labels)]
        name = min(candidates, key=lambda name: (name in self._leaving, held[name], name))
        return name, ids[name]

    def acquire_resources(self, ray_id: str, spec: ActorSpec) -> str:
        """Account for an actor that Ray placed on the node of this id; the node's name."""
        if not spec.bundle:
            self._account(ray_id, spec.resources, 1.0)
        return self._names.get(ray_id, ray_id)

    def return_resources(self, ray_id: str, spec: ActorSpec) -> None:
        if not spec.bundle:
            self._account(ray_id, spec.resources, -1.0)

    async def poll_nodes(self) -> None:
        """Poll the nodes. One poll at a time: an older answer must not overwrite a newer one. A caller that waited
        while a poll that began after its call was answered uses that answer: hundreds of actors may start at a time."""
        polls_before = self._polls
        async with self._poll_lock:
            if self._answered > polls_before:
                return
            self._polls = number = self._polls + 1
            self._update_nodes(await self.link.nodes())
            self._answered = number

    def _update_nodes(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """A node that joins under the name of a dead one is a new node."""
        alive = {str(row["NodeID"]): row for row in rows if row["Alive"]}
        for ray_id in [ray_id for ray_id in self._names if ray_id not in alive]:
            name = self._names.pop(ray_id)
            del self._nodes[name]
            self._leaving.discard(name)
            self.emit(RuntimeEvent("node_down", name))
        for ray_id, row in sorted(alive.items(), key=lambda item: (_name(item[1]), item[0])):
            if ray_id in self._names:
                continue
            name = _name(row)
            name = f"{name}-{ray_id[:12]}" if name in self._nodes else name
            total = {k: v for k, v in row["Resources"].items() if not k.startswith(("node:", "object_store", "memory"))}
            self._names[ray_id] = name
            self._nodes[name] = Node(name, dict(row["Labels"]), total, dict(total))
            self.emit(RuntimeEvent("node_up", name))

    def _account(self, ray_id: str, resources: Mapping[str, float], sign: float) -> None:
        node = self._nodes.get(self._names.get(ray_id, ""))
        for name, amount in resources.items() if node is not None else ():
            node.free[name] -= sign * amount  # type: ignore[index, union-attr]

    async def _report_leaving(self) -> None:
        """Report nodes that are about to leave: preempted, or drained by the cluster's operator."""
        draining = await self.link.draining()
        for name in sorted(name for ray_id, name in self._names.items() if ray_id in draining):
            if name not in self._leaving:
                self._leaving.add(name)
                self.emit(RuntimeEvent("node_leaving", name))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            with contextlib.suppress(Exception):  # the head is busy, or gone: poll again
                try:
                    async with asyncio.timeout(SILENT_S):
                        await self.poll_nodes()
                except TimeoutError:
                    self.link.failed(connection_lost(self._address, f"no answer for {SILENT_S:g} s"))
                await self.groups.follow(self._names)
                await self._report_leaving()


def _name(row: Mapping[str, Any]) -> str:
    """The name that the node was given, or the start of Ray's id: Ray's default name is the node's address."""
    name = str(row.get("NodeName") or "")
    return name if name and name != row["NodeManagerAddress"] else str(row["NodeID"])[:12]


def _user_labels(labels: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in labels.items() if not k.startswith("ray.io/")}
