"""Availability of the nodes under a run's engines: the devices that a plan may use, and the engines that must leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from rollart.fleet import EngineKind, FleetMove, FleetMoveKind, KindLoad
from rollart.model import EngineId
from rollart.policy.presence import AvailabilitySettings, NodeAvailability
from rollart.runtime.gateway import Gateway

__all__ = ["NodeTracker"]


class NodeTracker:
    """Tracks the nodes of a cluster. The cluster watcher reports node changes on the event loop; the rebalancer reads
    reasons to plan and departures, and the host autoscalers read devices. `where`: the node of each engine, '' for an
    engine without one. `most`: the maximum number of devices by pool, those of the first plan."""

    def __init__(
        self,
        settings: AvailabilitySettings,
        where: Callable[[], Mapping[EngineId, str]],
        most: Mapping[str, int],
        *,
        patience_s: float = 0.0,
    ) -> None:
        """`patience_s`: how long a run without any engine waits for a node."""
        self.patience_s = patience_s
        self._presence = NodeAvailability(settings)
        self._where = where
        self._most = most
        self._planned = dict(most)
        self._warned: frozenset[str] = frozenset()
        self._failed = False
        self._wakes: list[Callable[[], None]] = []

    def follow(self, wake: Callable[[], None]) -> None:
        """Call `wake` at once, and at every change from now on."""
        self._wakes.append(wake)
        wake()

    def wake(self) -> None:
        for wake in self._wakes:
            wake()

    def found(self, nodes: Iterable[tuple[str, Mapping[str, int]]]) -> None:
        """The initial nodes, which count at once, with the devices by pool of each."""
        for node, devices in nodes:
            self._presence.come(node, devices, _now(), trusted=True)
        self.wake()

    def joined(self, node: str, devices: Mapping[str, int]) -> None:
        """A node joined, with its devices by pool. A node of no pool is ignored."""
        if devices:
            self._presence.come(node, devices, _now())
            self.wake()

    def leaving(self, node: str) -> None:
        """The node will leave: it is preempted, or drained by the cluster's operator."""
        self._presence.warn(node)
        self.wake()

    def lost(self, node: str) -> None:
        self._presence.go(node, _now())
        self.wake()

    def devices(self) -> dict[str, int]:
        """The devices by pool that a plan may use now."""
        counted = self._presence.counted(_now(), frozenset(self._where().values()))
        return {pool: min(most, counted.get(pool, 0)) for pool, most in self._most.items()}

    def wait(self) -> float:
        """Seconds until a reason to replan may arise without a node event."""
        return self._presence.wait(_now())

    def settled(self) -> bool:
        """True if a plan may follow the present nodes."""
        return self._presence.ready(_now())

    def doomed(self) -> frozenset[str]:
        """Nodes that will leave."""
        return self._presence.leaving()

    def reason(self) -> str:
        """The reason to revise the plan, once for each change; '' if there is none."""
        leaving, counted = self._presence.leaving(), self.devices()
        told = sorted(f"{node} is to go" for node in leaving - self._warned)
        self._warned = leaving
        if not told and not self._presence.ready(_now()):
            return ""
        if self._failed:
            told.append("the last change of nodes is still to be followed")
        before, self._planned, self._failed = self._planned, counted, False
        told += [f"{pool} has {n} devices after {before[pool]}" for pool, n in counted.items() if n != before[pool]]
        return ", ".join(told)

    def retry(self) -> None:
        """The last change of the plan failed: its reason is reported again after a while."""
        self._failed = True
        self._presence.rest(_now())

    def load(self, gateway: Gateway) -> Mapping[EngineKind, KindLoad]:
        """Engines to plan with, by kind: restarting engines count as healthy, engines on leaving nodes do not count."""
        found = {kind: replace(load, healthy=load.engines) for kind, load in gateway.load().items()}
        for engine in self._doomed(gateway):
            seat = gateway.seat_of(engine)
            if seat is not None and seat.kind in found:
                load = found[seat.kind]
                found[seat.kind] = replace(load, engines=load.engines - 1, healthy=load.healthy - 1)
        return found

    def departures(self, gateway: Gateway) -> list[FleetMove]:
        """Drains of engines on leaving nodes, except the last serving engine: it stays as long as its node."""
        moves = []
        for engine in self._doomed(gateway):
            seat = gateway.seat_of(engine)
            if seat is not None and gateway.spare(engine):
                gateway.retire(engine)
                moves.append(FleetMove(FleetMoveKind.DRAIN, seat.pool, seat.tp, 1, seat.role, engine=engine))
        return moves

    def _doomed(self, gateway: Gateway) -> list[EngineId]:
        leaving, stable = self._presence.leaving(), gateway.stable()
        return [engine for engine, node in self._where().items() if node in leaving and engine in stable]


def _now() -> float:
    return asyncio.get_running_loop().time()
