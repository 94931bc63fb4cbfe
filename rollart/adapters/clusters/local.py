"""The `Runtime` port on one machine: actors on the controller's loop or in processes of their own. No Ray imported.

Arguments and results are copied through pickle even inline, so that sharing bugs show before Ray does. On a
virtual-time loop it works with inline actors only.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollart.adapters.clusters.process import ProcessActor
from rollart.adapters.clusters.runtime import (
    EventLog,
    InlineActor,
    account,
    bundle_node,
    check_feasible,
    feasible_nodes,
    insufficient_capacity,
    place_bundles,
    refuse_reserved,
)
from rollart.errors import PartDied, UsageError
from rollart.fleet import ActorSpec, BundleGroup, Node, RuntimeEvent
from rollart.ports import Handle


class LocalRuntime:
    """Owns its actors. `spawn` waits until a node has room for the actor, unblocked by a `kill`; calls to one actor
    wait for one of its `max_concurrency` slots. Invariant: free = total - held on every node, never below 0."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = {n.id: Node(n.id, dict(n.labels), dict(n.total), dict(n.total)) for n in nodes}
        self._bundles: dict[str, Node] = {}
        self._groups: dict[str, BundleGroup] = {}
        self._actors: dict[str, _LocalHandle] = {}
        self._objects: dict[str, bytes] = {}
        self._ids = itertools.count()
        self._events = EventLog()
        self._changed = asyncio.Event()

    async def start(self) -> None:
        for node in self._nodes.values():
            self.emit(RuntimeEvent("node_up", node.id))

    def nodes(self) -> Sequence[Node]:
        return tuple(self._nodes.values())

    async def spawn(self, spec: ActorSpec) -> Handle:
        if spec.name in self._actors:
            raise UsageError(f"an actor named {spec.name!r} runs already")
        while (node := self._place(spec)) is None:
            changed = self._changed
            await changed.wait()
        account(node, spec.resources, 1.0)
        handle = _LocalHandle(self, spec, node)
        self._actors[spec.name] = handle
        try:
            await handle.boot()
        except BaseException:
            self.forget(handle)
            raise
        self.emit(RuntimeEvent("actor_started", spec.name, node.id))
        return handle

    async def reserve(self, gang: Sequence[BundleGroup], *, wait_s: float) -> None:
        refuse_reserved(gang, self._groups, self._bundles)
        nodes = list(self._nodes.values())
        check_feasible(gang, nodes)
        try:
            async with asyncio.timeout(wait_s):
                while (found := place_bundles(gang, nodes)) is None:
                    changed = self._changed
                    await changed.wait()
        except TimeoutError:
            raise insufficient_capacity(
                [b for g in gang for b in g.bundles if place_bundles([g], nodes) is None] or gang[0].bundles, wait_s
            ) from None
        for group in gang:
            self._groups[group.name] = group
            for bundle in group.bundles:
                account(found[bundle.name], bundle.resources, 1.0)
                total = dict(bundle.resources)
                self._bundles[bundle.name] = Node(found[bundle.name].id, dict(bundle.labels), total, dict(total))

    async def release(self, group: str) -> None:
        reservation = self._groups.get(group)
        if reservation is None:
            return
        for bundle in reservation.bundles:
            if any(handle.spec.bundle == bundle.name for handle in self._actors.values()):
                raise UsageError(f"an actor is still in bundle {bundle.name!r}", remedy="kill it first")
        del self._groups[group]
        for bundle in reservation.bundles:
            account(self._nodes[self._bundles.pop(bundle.name).id], bundle.resources, -1.0)
        self._notify()

    def reserved(self, group: str) -> bool:
        return group in self._groups

    def events(self) -> AsyncIterator[RuntimeEvent]:
        """Every event since the runtime's start, for as long as it runs."""
        return self._events.read()

    async def put(self, value: Any) -> str:
        ref = f"object-{next(self._ids)}"
        self._objects[ref] = pickle.dumps(value)
        return ref

    async def get(self, ref: str) -> Any:
        if ref not in self._objects:
            raise UsageError(f"no object {ref!r} in this runtime")
        return pickle.loads(self._objects[ref])

    async def close(self) -> None:
        async with asyncio.TaskGroup() as tasks:  # concurrently, so that parts that hang do not add up
            for handle in list(self._actors.values()):
                tasks.create_task(handle.kill(), name=f"stop {handle.name}")
        for group in list(self._groups):
            await self.release(group)
        self._events.close()

    def emit(self, event: RuntimeEvent) -> None:
        self._events.emit(event)

    def forget(self, handle: _LocalHandle) -> None:
        """The actor will not restart: its resources are free."""
        if self._actors.pop(handle.spec.name, None) is None:
            return
        account(handle.held, handle.spec.resources, -1.0)
        self._notify()

    def _place(self, spec: ActorSpec) -> Node | None:
        """The first node with room; None if every node that could hold the actor is full; `UsageError` if no node
        could."""
        if spec.bundle:
            fitting = [bundle_node(spec, self._bundles)]
        else:
            fitting = feasible_nodes(spec, spec.labels, self.nodes())
        for node in fitting:
            if all(node.free.get(k, 0.0) >= v - 1e-9 for k, v in spec.resources.items()):
                return node
        return None

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(slots=True)
class _Incarnation:
    """One incarnation of an actor, and an event that its death sets."""

    actor: ProcessActor | InlineActor
    died: asyncio.Event = field(default_factory=asyncio.Event)


class _LocalHandle:
    """A running actor. Calls wait for a concurrency slot; a call in flight when the actor dies is retried up to
    `max_task_retries` on the next incarnation, then fails with `PartDied`."""

    def __init__(self, runtime: LocalRuntime, spec: ActorSpec, held: Node) -> None:
        """`held`: the node, or the bundle on it, that the actor's resources are accounted to."""
        self._runtime = runtime
        self.spec = spec
        self.held = held
        self._slots = asyncio.Semaphore(spec.max_concurrency)
        self._incarnation: _Incarnation | None = None
        self._restarts = 0
        self._booted = asyncio.Event()
        self._gone = False

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def node(self) -> str:
        return self.held.id

    async def boot(self) -> None:
        args, kwargs = pickle.loads(pickle.dumps((self.spec.args, dict(self.spec.kwargs))))
        if self.spec.isolation == "process":
            process = ProcessActor(self.spec.factory, args, kwargs, on_exit=self._exited)
            await process.start()
            self._incarnation = _Incarnation(process)
        else:
            self._incarnation = _Incarnation(InlineActor(self.spec.factory, args, kwargs))
        self._booted.set()

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        async with self._slots:
            for _ in range(self.spec.max_task_retries + 1):
                incarnation = await self._alive()
                try:
                    return await self._call_once(incarnation, method, args, kwargs)
                except PartDied as error:
                    last = error
            raise last

    async def stream(self, method: str, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """The items of an async generator method, one by one. Not retried: the caller may have seen items."""
        async with self._slots:
            incarnation = await self._alive()
            args_copy, kwargs_copy = pickle.loads(pickle.dumps((args, kwargs)))
            items = incarnation.actor.stream(method, args_copy, kwargs_copy)
            async for item in items:
                if incarnation.died.is_set():
                    raise PartDied(self.name, "it was killed during a stream")
                yield pickle.loads(pickle.dumps(item))

    async def kill(self, *, restart: bool = False) -> None:
        incarnation, self._incarnation = self._incarnation, None
        if incarnation is None or self._gone:
            return
        self._booted.clear()
        incarnation.died.set()
        await incarnation.actor.kill()
        await self._after_death(restart)

    async def _after_death(self, restart: bool) -> None:
        restarts = restart and (self.spec.max_restarts < 0 or self._restarts < self.spec.max_restarts)
        self._runtime.emit(RuntimeEvent("actor_died", self.name, self.node))
        if not restarts:
            self._gone = True
            self._booted.set()
            self._runtime.forget(self)
            return
        self._restarts += 1
        await self.boot()
        self._runtime.emit(RuntimeEvent("actor_restarted", self.name, self.node))

    async def _exited(self) -> None:
        """The process of a process actor ended unexpectedly."""
        incarnation, self._incarnation = self._incarnation, None
        if incarnation is None:
            return
        self._booted.clear()
        incarnation.died.set()
        await self._after_death(restart=True)

    async def _alive(self) -> _Incarnation:
        while True:
            if self._gone:
                raise PartDied(self.name, "the actor is dead and has no restarts left")
            if self._incarnation is not None:
                return self._incarnation
            await self._booted.wait()

    async def _call_once(self, incarnation: _Incarnation, method: str, args: Any, kwargs: Any) -> Any:
        args_copy, kwargs_copy = pickle.loads(pickle.dumps((args, kwargs)))
        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(
                _call(incarnation.actor, method, args_copy, kwargs_copy), name=f"{self.name}.{method}"
            )
            death = tasks.create_task(_cancel_on(incarnation.died, work), name=f"{self.name} dies")
            try:
                await asyncio.shield(_wait_uncancelled(work))
            finally:
                death.cancel()
                work.cancel()
        if work.cancelled():
            raise PartDied(self.name, f"it was killed during {method}")
        error = work.result()[1]
        if error is not None:
            raise error
        return pickle.loads(pickle.dumps(work.result()[0]))


async def _call(actor: ProcessActor | InlineActor, method: str, args: Any, kwargs: Any) -> tuple[Any, Exception | None]:
    try:
        return await actor.call(method, args, kwargs), None
    except Exception as error:
        return None, error


async def _cancel_on(event: asyncio.Event, work: asyncio.Task[Any]) -> None:
    await event.wait()
    work.cancel()


async def _wait_uncancelled(work: asyncio.Task[Any]) -> None:
    """Wait for the end of `work`, without being cancelled by its cancellation."""
    done = asyncio.Event()
    work.add_done_callback(lambda _: done.set())
    await done.wait()
