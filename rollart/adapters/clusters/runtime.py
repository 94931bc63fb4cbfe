"""The common parts of the local runtime and the Ray runtime: label selectors, the nodes of a gang, the event log.

The search for feasible nodes is pure: the local runtime places by it, and Ray would wait for ever where it finds none.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections import deque
from collections.abc import AsyncIterator, Container, Iterator, Mapping, Sequence
from typing import Any

from rollart.errors import UsageError
from rollart.fleet import ActorSpec, Bundle, Node, RuntimeEvent

MAX_SEARCH_STEPS = 20_000
"""Bundles tried in one search: packing is hard in theory, but gangs are small and uniform in practice."""

SLACK = 1e-9

MAX_EVENTS = 10_000
"""Events that are kept: a reader that is further behind misses the oldest."""


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """True if a node with `labels` satisfies every key of `selector`. A missing label satisfies only negations."""
    return all(_matches_one(wanted, labels.get(key)) for key, wanted in selector.items())


def feasible_nodes(spec: ActorSpec, labels: Mapping[str, str], nodes: Sequence[Node]) -> list[Node]:
    """The nodes with these labels that could hold the actor if they were empty. `UsageError` if there are none."""
    found = [
        n
        for n in nodes
        if matches(labels, n.labels) and all(n.total.get(k, 0.0) >= v for k, v in spec.resources.items())
    ]
    if not found:
        raise UsageError(
            f"{spec.name} asks for {dict(spec.resources)} on {dict(labels)}: no node could ever hold it",
            remedy=_described(nodes),
        )
    return found


def check_feasible(gang: Sequence[Bundle], nodes: Sequence[Node]) -> None:
    """`UsageError` if the gang would not fit on these nodes even if they were empty."""
    for bundle in gang:
        if not any(matches(bundle.labels, n.labels) and _has_capacity(n.total, bundle) for n in nodes):
            raise UsageError(f"{bundle}: no node could ever hold it", remedy=_described(nodes))
    search = PlacementSearch(gang, nodes, {n.id: n.total for n in nodes})
    if search.find() is None and search.steps < MAX_SEARCH_STEPS:
        deepest = search.stuck
        raise UsageError(
            f"the nodes could never hold all of it at once; there is no room beside the others for {deepest}",
            remedy=_described(nodes),
        )


def insufficient_capacity(missing: Sequence[Bundle], wait_s: float) -> UsageError:
    """The error of a reservation that found no room within `wait_s`."""
    return UsageError(
        f"after {wait_s:g} s the cluster has no room for {'; '.join(map(str, missing))}",
        remedy="end what else holds these devices, start more nodes, or raise runtime.wait_s",
    )


def refuse_reserved(gang: Sequence[Bundle], bundles: Container[str]) -> None:
    """`UsageError` if a bundle is reserved already."""
    for bundle in gang:
        if bundle.name in bundles:
            raise UsageError(f"room for {bundle.name!r} is reserved already")


def reserved_bundle(spec: ActorSpec, bundles: Mapping[str, Bundle]) -> Bundle:
    """The bundle that the actor runs in. `UsageError` if there is none, or if it is too small for the actor."""
    found = bundles.get(spec.bundle)
    if found is None:
        raise UsageError(f"{spec.name} asks for the bundle {spec.bundle!r}, and none of that name is reserved")
    if any(found.resources.get(name, 0.0) < amount - SLACK for name, amount in spec.resources.items()):
        raise UsageError(
            f"{spec.name} asks for {dict(spec.resources)} in bundle {spec.bundle!r}, which could never hold it",
            remedy=f"the bundle has {dict(found.resources)}",
        )
    return found


def add_resources(free: dict[str, float], resources: Mapping[str, float], sign: float) -> None:
    """Return resources to the free ones (`sign` 1), or take them (−1)."""
    for name, amount in resources.items():
        free[name] = free.get(name, 0.0) + sign * amount


class InlineActor:
    """The object of an actor in this process, made by the factory `module:attribute`."""

    def __init__(self, factory: str, args: Any, kwargs: Any) -> None:
        module, _, name = factory.partition(":")
        self._instance: Any = getattr(importlib.import_module(module), name)(*args, **kwargs)

    async def call(self, method: str, args: Any, kwargs: Any) -> Any:
        """The result of a method, which may be a coroutine function or a plain one."""
        result = getattr(self._instance, method)(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    async def kill(self) -> None:
        """End the object by its `aclose`, if it has one."""
        close = getattr(self._instance, "aclose", None)
        if close is not None:
            await close()


class EventLog:
    """Any number of readers, each from the oldest event that is kept."""

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self._events: deque[RuntimeEvent] = deque(maxlen=max_events)
        self._count = 0
        self._closed = False
        self._changed = asyncio.Event()

    def emit(self, event: RuntimeEvent) -> None:
        self._events.append(event)
        self._count += 1
        self._notify()

    async def read(self) -> AsyncIterator[RuntimeEvent]:
        """Events until `close`. Waits for `emit`."""
        next_event = 0
        while not self._closed:
            while next_event < self._count:
                next_event = max(next_event, self._count - len(self._events))
                yield self._events[next_event - self._count]
                next_event += 1
            changed = self._changed
            await changed.wait()

    def close(self) -> None:
        self._closed = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _matches_one(wanted: str, actual: str | None) -> bool:
    wanted = wanted.strip()
    if wanted.startswith("!"):
        return not _matches_one(wanted[1:], actual)
    if wanted.startswith("in(") and wanted.endswith(")"):
        return actual in [v.strip() for v in wanted[3:-1].split(",")]
    return actual == wanted


def _described(nodes: Sequence[Node]) -> str:
    """The cluster's nodes with their users' labels."""
    own = {n.id: {k: v for k, v in n.labels.items() if not k.startswith("ray.io/")} for n in nodes}
    return "the cluster has: " + "; ".join(f"{n.id} {own[n.id]} {dict(n.total)}" for n in nodes)


class PlacementSearch:
    """Depth-first search over bundles from the largest on; ties by the order of `nodes`. `stuck` is the first bundle
    that the search never placed."""

    def __init__(self, gang: Sequence[Bundle], nodes: Sequence[Node], free: Mapping[str, Mapping[str, float]]) -> None:
        """`free`: the resources that the nodes have for the gang, by node."""
        self.steps = 0
        self._nodes, self._free = nodes, free
        self._room = {node: dict(amounts) for node, amounts in free.items()}
        self._order = sorted(gang, key=lambda b: -sum(b.resources.values()))
        self._selector_labels = {label for bundle in self._order for label in bundle.labels}
        self._found: dict[str, Node] = {}
        self._depth = -1

    @property
    def stuck(self) -> Bundle:
        return self._order[max(0, self._depth)]

    def find(self) -> Mapping[str, Node] | None:
        """A node with enough free resources for each bundle, by bundle; None if there is no such assignment, or none
        was found in `MAX_SEARCH_STEPS` tries."""
        tries = [self._candidates(self._order[0])] if self._order else []
        while tries and len(self._found) < len(self._order):
            bundle = self._order[len(tries) - 1]
            self._depth = max(self._depth, len(tries) - 1)
            node = next(tries[-1], None)
            self.steps += 1
            if self.steps >= MAX_SEARCH_STEPS:
                return None
            if node is None:  # backtrack: try another node for the previous bundle
                tries.pop()
                if tries:
                    before = self._order[len(tries) - 1]
                    add_resources(self._room[self._found.pop(before.name).id], before.resources, 1.0)
                continue
            add_resources(self._room[node.id], bundle.resources, -1.0)
            self._found[bundle.name] = node
            if len(tries) < len(self._order):
                tries.append(self._candidates(self._order[len(tries)]))
        return dict(self._found) if len(self._found) == len(self._order) else None

    def _candidates(self, bundle: Bundle) -> Iterator[Node]:
        equivalents: set[tuple[object, ...]] = set()
        for node in self._nodes:
            if not matches(bundle.labels, node.labels) or not _has_capacity(self._room[node.id], bundle):
                continue
            # Nodes with equal labels and free resources that the search has not used are interchangeable. Labels that
            # no bundle selects by, such as Ray's node id, would make equal nodes look different.
            labels = [(label, value) for label, value in node.labels.items() if label in self._selector_labels]
            key = (tuple(sorted(labels)), tuple(sorted(self._room[node.id].items())))
            if self._room[node.id] == self._free[node.id] and key in equivalents:
                continue
            equivalents.add(key)
            yield node


def _has_capacity(room: Mapping[str, float], bundle: Bundle) -> bool:
    return all(room.get(name, 0.0) >= amount - SLACK for name, amount in bundle.resources.items())
