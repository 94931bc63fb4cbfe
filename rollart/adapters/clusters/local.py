"""The `Runtime` port on one machine: actors on the controller's loop. No Ray imported.

Arguments and results are copied through pickle, so that sharing bugs show before Ray does.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rollart.adapters.clusters.runtime import (
    EventLog,
    InlineActor,
    PlacementSearch,
    add_resources,
    check_feasible,
    feasible_nodes,
    insufficient_capacity,
    refuse_reserved,
    reserved_bundle,
)
from rollart.errors import PartDied, UsageError
from rollart.fleet import ActorSpec, Bundle, Node, RuntimeEvent
from rollart.ports import Handle


class LocalRuntime:
    """Owns its actors. `reserve` waits until the nodes have room, unblocked by a `release`; calls to one actor wait for
    one of its `max_concurrency` slots. Invariant: `free` = total - reserved on every node, never below 0."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = tuple(nodes)
        self.free = {node.id: dict(node.total) for node in nodes}
        self._bundles: dict[str, Bundle] = {}
        self._bundle_nodes: dict[str, Node] = {}
        self._actors: dict[str, _LocalHandle] = {}
        self._events = EventLog()
        self._changed = asyncio.Event()

    async def start(self) -> None:
        for node in self._nodes:
            self.emit(RuntimeEvent("node_up", node.id))

    def nodes(self) -> Sequence[Node]:
        return self._nodes

    async def spawn(self, spec: ActorSpec) -> Handle:
        if spec.name in self._actors:
            raise UsageError(f"an actor named {spec.name!r} runs already")
        if spec.bundle:
            node = self._bundle_nodes[reserved_bundle(spec, self._bundles).name]
        else:
            node = feasible_nodes(spec, spec.labels, self.nodes())[0]
        handle = self._actors[spec.name] = _LocalHandle(self, spec, node.id)
        self.emit(RuntimeEvent("actor_started", spec.name, node.id))
        return handle

    async def reserve(self, gang: Sequence[Bundle], *, wait_s: float) -> None:
        refuse_reserved(gang, self._bundles)
        check_feasible(gang, self._nodes)
        try:
            async with asyncio.timeout(wait_s):
                while (found := PlacementSearch(gang, self._nodes, self.free).find()) is None:
                    changed = self._changed
                    await changed.wait()
        except TimeoutError:
            lacking = [one for one in gang if PlacementSearch([one], self._nodes, self.free).find() is None]
            raise insufficient_capacity(lacking or gang[:1], wait_s) from None
        for bundle in gang:
            add_resources(self.free[found[bundle.name].id], bundle.resources, -1.0)
            self._bundles[bundle.name], self._bundle_nodes[bundle.name] = bundle, found[bundle.name]

    async def release(self, bundle: str) -> None:
        if bundle not in self._bundles:
            return
        if any(handle.spec.bundle == bundle for handle in self._actors.values()):
            raise UsageError(f"an actor is still in bundle {bundle!r}", remedy="kill it first")
        add_resources(self.free[self._bundle_nodes.pop(bundle).id], self._bundles.pop(bundle).resources, 1.0)
        self._changed.set()
        self._changed = asyncio.Event()

    def reserved(self, bundle: str) -> bool:
        return bundle in self._bundles

    def events(self) -> AsyncIterator[RuntimeEvent]:
        """Every event since the runtime's start, for as long as it runs."""
        return self._events.read()

    async def close(self) -> None:
        async with asyncio.TaskGroup() as tasks:  # concurrently, so that parts that hang do not add up
            for handle in list(self._actors.values()):
                tasks.create_task(handle.kill(), name=f"stop {handle.name}")
        for bundle in list(self._bundles):
            await self.release(bundle)
        self._events.close()

    def emit(self, event: RuntimeEvent) -> None:
        self._events.emit(event)

    def forget(self, handle: _LocalHandle) -> None:
        """The actor is dead."""
        del self._actors[handle.name]


class _LocalHandle:
    """A running actor. Calls wait for a concurrency slot; `kill` fails those in flight with `PartDied`."""

    def __init__(self, runtime: LocalRuntime, spec: ActorSpec, node: str) -> None:
        self._runtime = runtime
        self.spec = spec
        self.name, self.node = spec.name, node
        self._actor = InlineActor(spec.factory, *_copy((spec.args, dict(spec.kwargs))))
        self._slots = asyncio.Semaphore(spec.max_concurrency)
        self._calls = set[asyncio.Task[Any]]()
        self._gone = False

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        async with self._slots:
            if self._gone:
                raise PartDied(self.name, "the actor is dead and has no restarts left")
            async with asyncio.TaskGroup() as tasks:
                work = tasks.create_task(
                    _call(self._actor, method, *_copy((args, kwargs))), name=f"{self.name}.{method}"
                )
                self._calls.add(work)
                work.add_done_callback(self._calls.discard)
        if work.cancelled():
            raise PartDied(self.name, f"it was killed during {method}")
        result, error = work.result()
        if error is not None:
            raise error
        return _copy(result)

    async def kill(self) -> None:
        if self._gone:
            return
        self._gone = True
        for work in self._calls:
            work.cancel()
        await self._actor.kill()
        self._runtime.emit(RuntimeEvent("actor_died", self.name, self.node))
        self._runtime.forget(self)


async def _call(actor: InlineActor, method: str, args: Any, kwargs: Any) -> tuple[Any, Exception | None]:
    try:
        return await actor.call(method, args, kwargs), None
    except Exception as error:
        return None, error


def _copy(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))
