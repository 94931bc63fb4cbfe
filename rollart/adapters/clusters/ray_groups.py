"""Reservations on Ray: a placement group per group of bundles, all groups of a gang at once.

A placement group is all or nothing, and can only be removed whole, with everything that runs in it; the parts of a run
start and end one by one. So each part has a placement group of its own, and a gang holds some of its groups for a
limited time only: if the others find no room by then, the groups that have room are removed again. Two gangs that each
hold half of the resources that both need therefore never deadlock, and they hold for different times, so one of them
succeeds.

No placement group is detached: Ray removes them when the controller ends, however it ends.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollart.adapters.clusters.gang import check_feasible, insufficient_capacity
from rollart.errors import UsageError
from rollart.fleet import Bundle, BundleGroup
from rollart.ports import Node

HOLD_S = (2.0, 20.0)
"""Seconds that groups with room are held while others of the gang have none: at first, and at most. Ray finds free
resources in milliseconds, in seconds on a busy machine."""

POLL_INTERVAL_S = (0.02, 0.5)
"""Seconds between two polls whether groups have room: at first, and at most."""


@dataclass(slots=True)
class _PlacementGroup:
    """A group that is requested from Ray, and then held; `where` has Ray's id of each bundle's node, None while it has
    none."""

    group: BundleGroup
    ray: Any = None
    where: list[str | None] = field(default_factory=list)
    abandoned: bool = False
    """Abandoned while it is created: `_create_group` removes it."""


class RayGroups:
    """Owns the placement groups of one connection. `reserve` waits until all groups of a gang have room, unblocked by a
    release or by a node that joins."""

    def __init__(
        self, account: Callable[[str, Mapping[str, float], float], None], run_blocking: Callable[..., Awaitable[Any]]
    ) -> None:
        """`account` accounts for resources of the node with this Ray id; `run_blocking` makes a blocking call."""
        self._account = account
        self._run_blocking = run_blocking
        self._held: dict[str, _PlacementGroup] = {}
        self.bundles: dict[str, Node] = {}
        """Reserved resources by bundle. The node is recorded in the group, since it may change."""
        self._random = random.Random(os.getpid())

    def __contains__(self, group: str) -> bool:
        return group in self._held

    def holds(self, group: str, bundle: str) -> bool:
        held = self._held.get(group)
        return held is not None and any(b.name == bundle for b in held.group.bundles)

    def strategy(self, bundle: str) -> Any:
        """Ray's scheduling strategy that places an actor in the bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        for held in self._held.values():
            for index, candidate in enumerate(held.group.bundles):
                if candidate.name == bundle:
                    return PlacementGroupSchedulingStrategy(held.ray, placement_group_bundle_index=index)
        raise UsageError(f"no bundle of the name {bundle!r} is reserved")

    async def reserve(self, gang: Sequence[BundleGroup], *, wait_s: float, nodes: Callable[[], Sequence[Node]]) -> None:
        for group in gang:
            if group.name in self._held or any(b.name in self.bundles for b in group.bundles):
                raise UsageError(f"room for {group.name!r} is reserved already")
        check_feasible(gang, nodes())
        loop = asyncio.get_running_loop()
        end, hold = loop.time() + wait_s, HOLD_S[0]
        while True:
            lacking = await self._try(gang, max(HOLD_S[0], min(hold, end - loop.time())))
            if not lacking:
                return
            if loop.time() >= end:
                raise insufficient_capacity(lacking, wait_s)
            check_feasible(gang, nodes())  # a node that could have held the gang may be gone
            await asyncio.sleep(self._random.uniform(0.1, 1.0))
            hold = min(2.0 * hold * self._random.uniform(0.75, 1.25), HOLD_S[1])

    async def release(self, group: str) -> None:
        held = self._held.pop(group, None)
        if held is None:
            return
        for bundle, node in zip(held.group.bundles, held.where, strict=True):
            del self.bundles[bundle.name]
            if node is not None:
                self._account(node, bundle.resources, -1.0)
        await self._remove([held])

    async def close(self) -> None:
        for group in list(self._held):
            await self.release(group)

    async def follow(self, alive: Container[str]) -> None:
        """Record the new nodes of bundles whose nodes died: Ray moves them by itself, as soon as there is room.
        `alive`: Ray's ids of the live nodes; a node that joins under a dead node's name is a new one."""
        moved = [h for h in self._held.values() if any(node is None or node not in alive for node in h.where)]
        table = await self._run_blocking(_group_table) if moved else {}
        for held in moved:
            nodes_by_bundle = _bundle_nodes(table, held)
            for index, bundle in enumerate(held.group.bundles):
                before, now = held.where[index], nodes_by_bundle[index]
                if before in alive or now is None or now not in alive:
                    continue
                held.where[index] = now
                if held.group.name in self._held:  # not released meanwhile
                    self._account(now, bundle.resources, 1.0)

    async def _try(self, gang: Sequence[BundleGroup], hold_s: float) -> list[Bundle]:
        """Hold the whole gang, or nothing; the bundles of groups that found no room within `hold_s`."""
        loop = asyncio.get_running_loop()
        until, interval = loop.time() + hold_s, POLL_INTERVAL_S[0]
        requested: list[_PlacementGroup] = []
        try:
            # The largest first: Ray assigns room in this order.
            for group in sorted(gang, key=lambda g: -max(sum(b.resources.values()) for b in g.bundles)):
                requested.append(_PlacementGroup(group))
                await self._run_blocking(_create_group, requested[-1])
            while True:
                table = await self._run_blocking(_group_table)
                pending = [held for held in requested if table.get(held.ray.id.hex(), {}).get("state") != "CREATED"]
                if not pending:
                    break
                if loop.time() >= until:
                    return [bundle for held in pending for bundle in held.group.bundles]
                await asyncio.sleep(interval)
                interval = min(1.5 * interval, POLL_INTERVAL_S[1])
            for held in requested:
                held.where = _bundle_nodes(table, held)
                self._held[held.group.name] = held
                for bundle, node in zip(held.group.bundles, held.where, strict=True):
                    total = dict(bundle.resources)
                    self.bundles[bundle.name] = Node("", dict(bundle.labels), total, dict(total))
                    if node is not None:
                        self._account(node, bundle.resources, 1.0)
            requested = []
            return []
        finally:
            if requested:  # not empty on failure only; shielded, so that cancellation does not leak groups
                await asyncio.shield(self._remove(requested))

    async def _remove(self, groups: Sequence[_PlacementGroup]) -> None:
        for held in groups:
            held.abandoned = True  # `_create_group` removes a group that is being created
            if held.ray is not None:
                await self._run_blocking(_remove_group, held)


def _create_group(held: _PlacementGroup) -> None:
    from ray.util.placement_group import placement_group

    held.ray = placement_group(
        [dict(bundle.resources) for bundle in held.group.bundles],
        strategy=held.group.strategy,
        bundle_label_selector=[dict(bundle.labels) for bundle in held.group.bundles],
    )
    if held.abandoned:
        _remove_group(held)


def _remove_group(held: _PlacementGroup) -> None:
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(held.ray)


def _group_table() -> Mapping[str, Any]:
    """Every placement group of the cluster, by its id."""
    from ray.util.placement_group import placement_group_table

    found: Mapping[str, Any] = placement_group_table()
    return found


def _bundle_nodes(table: Mapping[str, Any], held: _PlacementGroup) -> list[str | None]:
    """Ray's id of each bundle's node."""
    row = table.get(held.ray.id.hex(), {})
    nodes = row.get("bundles_to_node_id", {}) if row.get("state") == "CREATED" else {}
    return [nodes.get(index) or None for index in range(len(held.group.bundles))]
