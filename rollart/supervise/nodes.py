"""Availability of the nodes under a run's engines: the devices that a plan may use, and the engines that must leave.

A new node counts after it has stayed for `settle_s`, a delay that doubles with each short life of a node of its pool in
an unbroken series, up to `2**MOST` times. A node that left or is about to leave stops counting at once, but the plan is
reviewed only after `settle_s` without another loss (at most `PATIENCE` times that): the node's engines may be back on
another node by then, without a new plan.

Bound: of a pool whose nodes live shorter than `settle_s * 2**MOST`, one after the other with gaps of at most
`memory_s`, nodes begin to count at most `MOST + 1` times, however long the series lasts: every such life doubles the
required duration of the next, and only `memory_s` without a short life resets it. The counted devices never exceed the
present ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace

from rollart.fleet import EngineKind, FleetMove, FleetMoveKind, KindLoad
from rollart.model import EngineId
from rollart.serving.gateway import Gateway
from rollart.supervise.supervisor import loop_time

MOST = 5
"""Doublings of `settle_s`: with 30 s, a node of a flapping pool must stay for 16 minutes."""

PATIENCE = 4
"""Longest wait of a plan for losses to end, in multiples of `settle_s`: on a large fleet some node is always
leaving."""


@dataclass(frozen=True, slots=True)
class AvailabilitySettings:
    """Seconds. A life is short, and a series unbroken, below `memory_s`."""

    settle_s: float = 30.0
    memory_s: float = 3600.0


@dataclass(slots=True)
class _Node:
    devices: Mapping[str, int]
    """By pool: a node's labels may put it into several."""
    came: float
    counts: float
    leaves: bool = False


@dataclass(slots=True)
class _Series:
    """Consecutive short lives of a pool's nodes."""

    lives: int = 0
    last: float = -math.inf


class NodeAvailability:
    """Values and `now` in, seconds; `now` never falls. Ties: a node whose delay ends at `now` counts."""

    def __init__(self, settings: AvailabilitySettings | None = None) -> None:
        self._settings = settings or AvailabilitySettings()
        self._nodes: dict[str, _Node] = {}
        self._series: dict[str, _Series] = {}
        self._quiet = -math.inf
        self._first_loss = math.inf

    def come(self, node: str, devices: Mapping[str, int], now: float, *, trusted: bool = False) -> None:
        """A node appears with its devices by pool; `trusted`: it counts at once. No effect if the node is present
        already."""
        if node in self._nodes:
            return
        held = [
            s.lives for pool in devices if (s := self._series.get(pool)) and now - s.last <= self._settings.memory_s
        ]
        stays = 0.0 if trusted else self._settings.settle_s * 2 ** min(max(held, default=0), MOST)
        self._nodes[node] = _Node(dict(devices), now, now + stays)

    def warn(self, node: str) -> None:
        """The node is about to leave: its devices stop counting at once."""
        if node in self._nodes:
            self._nodes[node].leaves = True

    def go(self, node: str, now: float) -> None:
        gone = self._nodes.pop(node, None)
        if gone is None:
            return
        if now - gone.came < self._settings.memory_s:
            for pool in gone.devices:
                series = self._series.setdefault(pool, _Series())
                series.lives = series.lives + 1 if gone.came - series.last <= self._settings.memory_s else 1
                series.last = now
        self._first_loss = min(self._first_loss, now)
        self._quiet = min(now + self._settings.settle_s, self._first_loss + PATIENCE * self._settings.settle_s)

    def counted(self, now: float, used: Collection[str] = ()) -> Mapping[str, int]:
        """Devices by pool that a plan may use. Nodes in `used` run work, so they count."""
        total: dict[str, int] = {}
        for name, node in self._nodes.items():
            if not node.leaves and (node.counts <= now or name in used):
                for pool, devices in node.devices.items():
                    total[pool] = total.get(pool, 0) + devices
        return total

    def leaving(self) -> frozenset[str]:
        """Present nodes that are about to leave."""
        return frozenset(name for name, node in self._nodes.items() if node.leaves)

    def ready(self, now: float) -> bool:
        """True if no loss is recent, so that a plan may follow the counted devices."""
        if now < self._quiet:
            return False
        self._first_loss = math.inf
        return True

    def rest(self, now: float) -> None:
        """The plan could not follow: not ready again for the longest wait."""
        self._quiet = now + PATIENCE * self._settings.settle_s

    def wait(self, now: float) -> float:
        """Seconds until `counted` or `ready` may change without a further event; infinite if they will not."""
        times = [n.counts for n in self._nodes.values() if not n.leaves]
        return min((t - now for t in (*times, self._quiet) if t > now), default=math.inf)


@dataclass(eq=False)
class NodeTracker:
    """Tracks the nodes of a cluster. The cluster watcher reports node changes on the event loop; the rebalancer reads
    reasons to plan and departures, and the host autoscalers read devices. `where`: the node of each engine, '' for an
    engine without one. `most`: the maximum number of devices by pool, those of the first plan."""

    settings: AvailabilitySettings
    where: Callable[[], Mapping[EngineId, str]]
    most: Mapping[str, int]
    _: KW_ONLY
    patience_s: float = 0.0
    """How long a run without any engine waits for a node."""

    def __post_init__(self) -> None:
        self.availability = NodeAvailability(self.settings)
        self._planned = dict(self.most)
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
            self.availability.come(node, devices, loop_time(), trusted=True)
        self.wake()

    def joined(self, node: str, devices: Mapping[str, int]) -> None:
        """A node joined, with its devices by pool. A node of no pool is ignored."""
        if devices:
            self.availability.come(node, devices, loop_time())
            self.wake()

    def leaving(self, node: str) -> None:
        """The node will leave: it is preempted, or drained by the cluster's operator."""
        self.availability.warn(node)
        self.wake()

    def lost(self, node: str) -> None:
        self.availability.go(node, loop_time())
        self.wake()

    def devices(self) -> dict[str, int]:
        """The devices by pool that a plan may use now."""
        counted = self.availability.counted(loop_time(), frozenset(self.where().values()))
        return {pool: min(most, counted.get(pool, 0)) for pool, most in self.most.items()}

    def reason(self) -> str:
        """The reason to revise the plan, once for each change; '' if there is none."""
        leaving, counted = self.availability.leaving(), self.devices()
        told = sorted(f"{node} is to go" for node in leaving - self._warned)
        self._warned = leaving
        if not told and not self.availability.ready(loop_time()):
            return ""
        if self._failed:
            told.append("the last change of nodes is still to be followed")
        before, self._planned, self._failed = self._planned, counted, False
        told += [f"{pool} has {n} devices after {before[pool]}" for pool, n in counted.items() if n != before[pool]]
        return ", ".join(told)

    def retry(self) -> None:
        """The last change of the plan failed: its reason is reported again after a while."""
        self._failed = True
        self.availability.rest(loop_time())

    def load(self, gateway: Gateway) -> Mapping[EngineKind, KindLoad]:
        """Engines to plan with, by kind: restarting engines count as healthy, engines on leaving nodes do not count."""
        found = {kind: replace(load, healthy=load.engines) for kind, load in gateway.load().items()}
        for engine in self._doomed(gateway):
            seat = gateway.registry.seat_of(engine)
            if seat is not None and seat.kind in found:
                load = found[seat.kind]
                found[seat.kind] = replace(load, engines=load.engines - 1, healthy=load.healthy - 1)
        return found

    def departures(self, gateway: Gateway) -> list[FleetMove]:
        """Drains of engines on leaving nodes, except the last serving engine: it stays as long as its node."""
        moves = []
        for engine in self._doomed(gateway):
            seat = gateway.registry.seat_of(engine)
            if seat is not None and gateway.spare(engine):
                gateway.retire(engine)
                moves.append(FleetMove(FleetMoveKind.DRAIN, seat.pool, seat.tp, 1, seat.role, engine=engine))
        return moves

    def _doomed(self, gateway: Gateway) -> list[EngineId]:
        leaving, stable = self.availability.leaving(), gateway.stable()
        return [engine for engine, node in self.where().items() if node in leaving and engine in stable]
