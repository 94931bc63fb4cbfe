"""The `Runtime` port on Ray: actors on the nodes of a cluster, chosen by resources and labels.

Ray places, starts and kills actors. This module closes its gaps. Ray waits for ever for a node that does not exist:
here that is a `UsageError` at once. Ray silently queues calls beyond an actor's concurrency: here they wait at the
caller. Ray attaches to any cluster that it finds: here the address is always explicit. Nothing per token or per request
crosses Ray.

Room is reserved as a placement group per bundle, for all bundles of a gang at once. A placement group is all
or nothing, and can only be removed whole, with everything that runs in it; the parts of a run start and end one by one.
So each part has a placement group of its own, and a gang holds some of its groups for a limited time only: if the
others find no room by then, the groups that have room are removed again. Two gangs that each hold half of the resources
that both need therefore never deadlock, and they hold for different times, so one of them succeeds. No placement group
is detached: Ray removes them when the controller ends, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollart import __version__
from rollart.adapters.clusters.program import ADDRESS_METHODS, check_reachable
from rollart.adapters.clusters.ray_host import RayActorHost, pack
from rollart.adapters.clusters.ray_link import (
    CLIENT_SCHEME,
    SILENT_S,
    RayClientLink,
    RayDriverLink,
    check_grpc_server,
    connect_in_thread,
    connection_lost,
    mark_retrieved,
    run_in_daemon_thread,
)
from rollart.adapters.clusters.runtime import (
    EventLog,
    check_feasible,
    feasible_nodes,
    insufficient_capacity,
    matches,
    refuse_reserved,
    reserved_bundle,
)
from rollart.errors import NoPlace, PartDied, ProviderError, UsageError, first_line
from rollart.fleet import ActorSpec, Bundle, Node, RuntimeEvent
from rollart.ports import Handle
from serverless.retries import RAY_ACTOR, RAY_GANG

STOP_S = 8.0
"""Seconds that an actor may take to stop its object: a program gets 5 between SIGTERM and SIGKILL."""

RECHECK_S = 1.0
"""Seconds between two checks, while Ray looks for room, that a node that could hold the actor still exists."""

NODE_ID = "ray.io/node-id"
"""The label that Ray gives each node."""

RESERVED_CALLS = 3
"""Concurrent calls beside those of the caller: `live`, which never returns, the start and the stop."""

HOLD_S = (2.0, 20.0)
"""Seconds that groups with room are held while others of the gang have none: at first, and at most. Ray finds free
resources in milliseconds, in seconds on a busy machine."""

GROUP_POLL_INTERVAL_S = (0.02, 0.5)
"""Seconds between two polls whether groups have room: at first, and at most."""

POLL_INTERVAL_S = 0.5
"""Seconds between two polls of the nodes: Ray does not notify a driver of nodes that join or leave."""

ASK_S = 10.0
"""Seconds for a hint to the cluster, whose result is not needed."""

CLOSE_S = 30.0
"""Seconds for requests to the cluster at the end: a cluster that is gone does not answer."""


class RayRuntime:
    """Owns its actors and the connection to the cluster, one per process. `spawn` waits until Ray finds room for the
    actor; after the death of a node, the next incarnation of its actor goes to any node that its labels allow."""

    def __init__(self, address: str, *, env: Mapping[str, str] | None = None) -> None:
        """`address` of a cluster: `host:port`, `ray://host:port`, or `auto` for the value of RAY_ADDRESS. `env`:
        variables that Ray reads in this process, such as the path of its token."""
        self._address = address
        self._env = dict(env or {})
        self._env_before: dict[str, str | None] = {}
        self._actors: dict[str, RayHandle] = {}
        self.link = RayDriverLink()
        self.groups = RayGroups(lambda function, *args: self.link.run_blocking(function, *args))
        self._nodes: dict[str, Node] = {}
        self._names: dict[str, str] = {}
        """Names of live nodes, by Ray's id."""
        self._leaving: set[str] = set()
        self._events = EventLog()
        self._watcher: asyncio.Task[None] | None = None
        self._poll_lock = asyncio.Lock()
        self._polls = self._answered = 0
        """Number of polls begun, and of the last poll that was answered."""

    async def start(self) -> None:
        """Connect. `ProviderError` if there is no cluster, or it refuses the connection."""
        address = self._address
        if address == "auto":
            address = os.environ.get("RAY_ADDRESS") or address
        await check_grpc_server(address)
        self._env_before = {name: os.environ.get(name) for name in self._env}
        os.environ.update(self._env)
        try:
            self.link = RayClientLink(address) if address.startswith(CLIENT_SCHEME) else RayDriverLink()
            await connect_in_thread(address)
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

    async def reserve(self, gang: Sequence[Bundle], *, wait_s: float) -> None:
        await self.poll_nodes()
        await self.groups.reserve(gang, wait_s=wait_s, nodes=self.nodes)

    async def ask(self, gang: Sequence[Bundle]) -> None:
        """Announce the resources that will be requested to the cluster's autoscaler, if there is one: it adds nodes for
        them, so nothing waits for a node that was never seen. () withdraws the request. The last request of any run on
        the cluster counts."""
        from ray.autoscaler.sdk import request_resources

        wanted = [bundle for bundle in gang if any(bundle.resources.values())]
        resources = [dict(bundle.resources) for bundle in wanted]
        labels = [dict(bundle.labels) for bundle in wanted]
        if not isinstance(self.link, RayClientLink):  # Ray's client lacks this function
            with contextlib.suppress(Exception):  # only a hint: `reserve` waits for the nodes anyway
                async with asyncio.timeout(ASK_S):
                    await self.link.run_blocking(request_resources, None, resources, labels)

    async def release(self, bundle: str) -> None:
        if self.reserved(bundle) and any(handle.spec.bundle == bundle for handle in self._actors.values()):
            raise UsageError(f"an actor is still in bundle {bundle!r}", remedy="kill it first")
        await self.groups.release(bundle)

    def reserved(self, bundle: str) -> bool:
        return bundle in self.groups.bundles

    def events(self) -> AsyncIterator[RuntimeEvent]:
        """Every event since the runtime's start, for as long as it runs."""
        return self._events.read()

    async def close(self) -> None:
        import ray

        self._events.close()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        async with asyncio.TaskGroup() as tasks:
            for handle in list(self._actors.values()):
                tasks.create_task(handle.kill(), name=f"stop {handle.name}")
        with contextlib.suppress(TimeoutError, ProviderError):
            async with asyncio.timeout(CLOSE_S):
                for bundle in self.groups.bundles:
                    await self.groups.release(bundle)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await run_in_daemon_thread(ray.shutdown)
        for name, value in self._env_before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    # For handles.

    def emit(self, event: RuntimeEvent) -> None:
        self._events.emit(event)

    def forget(self, handle: RayHandle) -> None:
        """The actor is dead and will not restart."""
        self._actors.pop(handle.spec.name, None)

    async def feasible(self, spec: ActorSpec) -> None:
        """`UsageError` if no current node, or the actor's bundle, could ever hold it."""
        await self.poll_nodes()
        labels = reserved_bundle(spec, self.groups.bundles).labels if spec.bundle else spec.labels
        feasible_nodes(spec, labels, self.nodes())

    def least_loaded_node(self, handle: RayHandle) -> tuple[str, str]:
        """The node for an actor without a bundle, and Ray's id of it: among the nodes that its labels allow, the one
        with the fewest such actors; nodes that are leaving come last. Ray would choose an arbitrary node, and the same
        one for several actors."""
        held = Counter(other.target_node for other in self._actors.values() if other is not handle)
        ids = {name: ray_id for ray_id, name in self._names.items()}
        candidates = [name for name, node in self._nodes.items() if matches(handle.spec.labels, node.labels)]
        name = min(candidates, key=lambda name: (name in self._leaving, held[name], name))
        return name, ids[name]

    def node_name(self, ray_id: str) -> str:
        """The name of the node of this id; the id of one that is gone."""
        return self._names.get(ray_id, ray_id)

    async def poll_nodes(self) -> None:
        """Poll the nodes. One poll at a time: an older answer must not overwrite a newer one. A caller that waited
        while a poll that began after its call was answered uses that answer: hundreds of actors may start at a time."""
        polls_before = self._polls
        async with self._poll_lock:
            if self._answered > polls_before:
                return
            self._polls = number = self._polls + 1
            self.update_nodes(await self.link.nodes())
            self._answered = number

    def update_nodes(self, rows: Sequence[Mapping[str, Any]]) -> None:
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
            self._nodes[name] = Node(name, dict(row["Labels"]), total)
            self.emit(RuntimeEvent("node_up", name))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            with contextlib.suppress(Exception):  # the head is busy, or gone: poll again
                try:
                    async with asyncio.timeout(SILENT_S):
                        await self.poll_nodes()
                except TimeoutError:
                    self.link.failed(connection_lost(self._address, f"no answer for {SILENT_S:g} s"))
                draining = await self.link.draining()  # preempted, or drained by the cluster's operator
                for name in sorted(name for ray_id, name in self._names.items() if ray_id in draining):
                    if name not in self._leaving:
                        self._leaving.add(name)
                        self.emit(RuntimeEvent("node_leaving", name))


class RayHandle:
    """A running actor, which is restarted until it is killed. Calls wait for one of `max_concurrency` slots; a call in
    flight when the actor dies fails with `PartDied`. If a restart finds no node that could hold the actor, calls fail
    with `PartDied`, and each of them tries the restart again. An address that a program returns is checked."""

    def __init__(self, runtime: RayRuntime, spec: ActorSpec) -> None:
        self._runtime = runtime
        self.spec = spec
        self._slots = asyncio.Semaphore(spec.max_concurrency)
        self._incarnation: RayIncarnation | None = None
        self.name, self.node = spec.name, ""
        self.target_node = ""
        """The node chosen here for an actor without a bundle."""
        self._revival: asyncio.Task[None] | None = None
        self._gone = self._reached = False
        """`_reached`: an address of the actor's program was reached."""

    async def boot(self) -> None:
        """Start the next incarnation. `UsageError` if no node could hold it; exceptions of its constructor."""
        await self._runtime.feasible(self.spec)
        resources = dict(self.spec.resources)
        scheduling: dict[str, Any]
        if self.spec.bundle:
            scheduling = {"scheduling_strategy": self._runtime.groups.strategy(self.spec.bundle)}
        else:
            self.target_node, ray_id = self._runtime.least_loaded_node(self)
            labels = dict(self.spec.labels)
            scheduling = {
                "label_selector": {**labels, NODE_ID: ray_id},
                "fallback_strategy": [{"label_selector": labels}] if labels else None,
            }
        options = {
            "num_cpus": resources.pop("CPU", 0.0),
            "num_gpus": resources.pop("GPU", 0.0),
            "resources": resources,
            **scheduling,
            "max_concurrency": self.spec.max_concurrency + RESERVED_CALLS,
            "max_restarts": 0,
        }
        host = await self._runtime.link.actor(RayActorHost, options)
        try:
            ok, error, ray_id = await self._boot_response(host)
            if not ok:
                raise pickle.loads(error)
        except BaseException:
            self._runtime.link.kill(host)
            raise
        self.node = self._runtime.node_name(ray_id)
        incarnation = RayIncarnation(host, self.node)
        # The actor outlives the call that started it; it ends by `kill` or by its death, which this task waits for.
        incarnation.watch = asyncio.get_running_loop().create_task(self._watch(incarnation), name=f"end of {self.name}")
        self._incarnation = incarnation

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        payload = pack((args, kwargs))
        async with self._slots:
            incarnation = await self._alive()
            try:
                ok, result = await self._ask(incarnation, "call", method, payload)
            except PartDied:
                self._on_death(incarnation)
                raise
        if not ok:
            raise pickle.loads(result)
        answer = pickle.loads(result)
        if method in ADDRESS_METHODS:
            await check_reachable(self.name, self.node, str(answer), reached=self._reached)
            self._reached = True
        return answer

    async def kill(self) -> None:
        if self._gone:
            return
        self._gone = True  # first, so that a call during the stop does not restart the actor
        if self._incarnation is None and self._revival is not None:  # dead, or restarting
            self._revival.cancel()
            await asyncio.gather(self._revival, return_exceptions=True)
        incarnation, self._incarnation = self._incarnation, None
        try:
            if incarnation is not None:
                await self._stop(incarnation)
        finally:
            if incarnation is not None:
                self._runtime.emit(RuntimeEvent("actor_died", self.name, incarnation.node))
            self._runtime.forget(self)

    async def _boot_response(self, host: Any) -> tuple[bool, bytes, str]:
        """The response of the new actor's `boot`, once Ray has placed it."""
        init = pack((self.spec.args, dict(self.spec.kwargs)))
        boot_call = self._runtime.link.call_method(host, "boot", self.spec.factory, init, __version__)
        booting = asyncio.get_running_loop().create_task(boot_call, name=f"start of {self.name}")
        try:
            while True:
                try:
                    async with asyncio.timeout(RECHECK_S):
                        answer: tuple[bool, bytes, str] = await asyncio.shield(booting)
                        return answer
                except TimeoutError:
                    await self._runtime.feasible(self.spec)
        except _death_errors() as error:
            raise PartDied(self.name, f"it did not start: {first_line(error, 200)}") from None
        finally:
            booting.cancel()

    async def _ask(self, incarnation: RayIncarnation, method: str, *args: object) -> Any:
        """The actor's response. Ray's errors of a dead actor become `PartDied`."""
        try:
            return await self._runtime.link.call_method(incarnation.host, method, *args)
        except _death_errors() as error:
            raise PartDied(self.name, f"its actor on {incarnation.node} died: {first_line(error, 200)}") from None

    async def _alive(self) -> RayIncarnation:
        while True:
            if self._gone:
                raise PartDied(self.name, "the actor is dead and has no restarts left")
            if self._incarnation is not None:
                return self._incarnation
            if self._revival is None or self._revival.done():
                self._revival = asyncio.get_running_loop().create_task(self._revive(), name=f"restart {self.name}")
            revival = self._revival
            await asyncio.shield(revival)

    async def _revive(self) -> None:
        """Retried for longer than Ray takes to notice the death of a node, where it may place the next incarnation."""
        try:
            await RAY_ACTOR.run(self.boot, PartDied)
        except UsageError as error:
            raise NoPlace(self.name, error.message, remedy=error.remedy) from None
        self._runtime.emit(RuntimeEvent("actor_restarted", self.name, self.node))

    async def _watch(self, incarnation: RayIncarnation) -> None:
        """Wait for the death of an incarnation, then restart the actor."""
        try:
            await self._ask(incarnation, "live")
        except PartDied:
            self._on_death(incarnation)
        except ProviderError:  # the connection is lost: every call fails by itself
            return

    def _on_death(self, incarnation: RayIncarnation) -> None:
        """The incarnation died, or is unreachable. It is killed, so that it never runs beside its successor."""
        if self._incarnation is not incarnation:
            return
        self._incarnation = None
        self._runtime.link.kill(incarnation.host)
        self._runtime.emit(RuntimeEvent("actor_died", self.name, incarnation.node))
        self._revival = asyncio.get_running_loop().create_task(self._revive(), name=f"restart {self.name}")
        self._revival.add_done_callback(mark_retrieved)  # the next caller gets the error again

    async def _stop(self, incarnation: RayIncarnation) -> None:
        if incarnation.watch is not None:
            incarnation.watch.cancel()
            await asyncio.gather(incarnation.watch, return_exceptions=True)
        try:
            with contextlib.suppress(Exception):  # killed below, whether the stop succeeds or not
                async with asyncio.timeout(STOP_S):
                    await self._ask(incarnation, "stop")
        finally:
            self._runtime.link.kill(incarnation.host)


class RayGroups:
    """Owns the placement groups of one connection, one per bundle. `reserve` waits until all bundles of a gang have
    room, unblocked by a release or by a node that joins."""

    def __init__(self, run_blocking: Callable[..., Awaitable[Any]]) -> None:
        """`run_blocking` makes a blocking call."""
        self._run_blocking = run_blocking
        self._held: dict[str, _PlacementGroup] = {}
        self._random = random.Random(os.getpid())

    @property
    def bundles(self) -> dict[str, Bundle]:
        """The reserved bundles by name."""
        return {name: held.bundle for name, held in self._held.items()}

    def strategy(self, bundle: str) -> Any:
        """Ray's scheduling strategy that places an actor in the bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if bundle not in self._held:
            raise UsageError(f"no bundle of the name {bundle!r} is reserved")
        return PlacementGroupSchedulingStrategy(self._held[bundle].ray, placement_group_bundle_index=0)

    async def reserve(self, gang: Sequence[Bundle], *, wait_s: float, nodes: Callable[[], Sequence[Node]]) -> None:
        refuse_reserved(gang, self._held)
        check_feasible(gang, nodes())
        loop = asyncio.get_running_loop()
        end, hold = loop.time() + wait_s, HOLD_S[0]

        async def attempt() -> None:
            nonlocal hold
            lacking = await self._try(gang, max(HOLD_S[0], min(hold, end - loop.time())))
            if lacking:
                if loop.time() < end:
                    check_feasible(gang, nodes())  # a node that could have held the gang may be gone
                hold = min(2.0 * hold * self._random.uniform(0.75, 1.25), HOLD_S[1])
                raise _GangTooLarge(lacking)

        try:
            await RAY_GANG.run(attempt, _GangTooLarge, within_s=wait_s, rng=self._random)
        except _GangTooLarge as error:
            raise insufficient_capacity(error.lacking, wait_s) from None

    async def release(self, bundle: str) -> None:
        held = self._held.pop(bundle, None)
        if held is not None:
            await self._remove([held])

    async def _try(self, gang: Sequence[Bundle], hold_s: float) -> list[Bundle]:
        """Hold the whole gang, or nothing; the bundles that found no room within `hold_s`."""
        from ray.util.placement_group import placement_group_table

        loop = asyncio.get_running_loop()
        until, interval = loop.time() + hold_s, GROUP_POLL_INTERVAL_S[0]
        requested: list[_PlacementGroup] = []
        try:
            # The largest first: Ray assigns room in this order.
            for bundle in sorted(gang, key=lambda bundle: -sum(bundle.resources.values())):
                requested.append(_PlacementGroup(bundle))
                await self._run_blocking(_create_group, requested[-1])
            while True:
                table = await self._run_blocking(placement_group_table)  # every group of the cluster, by its id
                pending = [held for held in requested if table.get(held.ray.id.hex(), {}).get("state") != "CREATED"]
                if not pending:
                    break
                if loop.time() >= until:
                    return [held.bundle for held in pending]
                await asyncio.sleep(interval)
                interval = min(1.5 * interval, GROUP_POLL_INTERVAL_S[1])
            self._held |= {held.bundle.name: held for held in requested}
            requested = []
            return []
        finally:
            if requested:  # not empty on failure only; shielded, so that cancellation does not leak groups
                await asyncio.shield(self._remove(requested))

    async def _remove(self, groups: Sequence[_PlacementGroup]) -> None:
        from ray.util.placement_group import remove_placement_group

        for held in groups:
            held.abandoned = True  # `_create_group` removes a group that is being created
            if held.ray is not None:
                await self._run_blocking(remove_placement_group, held.ray)


def _name(row: Mapping[str, Any]) -> str:
    """The name that the node was given, or the start of Ray's id: Ray's default name is the node's address."""
    name = str(row.get("NodeName") or "")
    return name if name and name != row["NodeManagerAddress"] else str(row["NodeID"])[:12]


@dataclass(slots=True)
class RayIncarnation:
    """One incarnation: its Ray actor and its node."""

    host: Any
    node: str
    watch: asyncio.Task[None] | None = None


def _death_errors() -> tuple[type[Exception], ...]:
    from ray import exceptions as ray

    return (
        ray.RayActorError,
        ray.NodeDiedError,
        ray.ObjectLostError,
        ray.RaySystemError,
        ray.TaskCancelledError,
        ray.WorkerCrashedError,
    )


class _GangTooLarge(Exception):
    """`lacking` bundles of a gang found no room."""

    def __init__(self, lacking: Sequence[Bundle]) -> None:
        super().__init__()
        self.lacking = lacking


@dataclass(slots=True)
class _PlacementGroup:
    """A bundle's group that is requested from Ray, and then held."""

    bundle: Bundle
    ray: Any = None
    abandoned: bool = False
    """Abandoned while it is created: `_create_group` removes it."""


def _create_group(held: _PlacementGroup) -> None:
    from ray.util.placement_group import placement_group, remove_placement_group

    held.ray = placement_group([dict(held.bundle.resources)], bundle_label_selector=[dict(held.bundle.labels)])
    if held.abandoned:
        remove_placement_group(held.ray)
