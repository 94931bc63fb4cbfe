"""Autoscaling of hosts to the cluster's nodes: as many hosts as the devices allow, and none on a leaving node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from rollart.errors import RollartError
from rollart.ports import Recorder, RunEvent
from rollart.supervise.nodes import NodeTracker
from rollart.supervise.supervisor import HostSupervisor, loop_time

RETRY_S = 30.0
"""Delay after a spawn that found no room: the free devices are spread over too many nodes, or other work holds them."""

LONGEST_S = 3600.0


@dataclass(eq=False)
class HostAutoscaler:
    """A task of the run; `run` never returns. While it runs, it alone spawns and retires hosts of the fleet.

    It waits for nodes that join or leave, for hosts that start or end, and for `RETRY_S` after a spawn that found no
    room. A host on a leaving node is retired as soon as a host elsewhere is up, and a replacement is spawned. The
    number of hosts follows the nodes once these have settled. Bounds: never more hosts than `count` allows for the
    present devices, apart from retiring hosts that finish their work; if a host is up, at least one stays up.
    """

    hosts: HostSupervisor[Any, Any]
    nodes: NodeTracker
    count: Callable[[Mapping[str, int]], int]
    """The number of hosts, at least one, for the devices by pool."""
    recorder: Recorder
    _: KW_ONLY
    what: str
    """The subject of events, the kind of work of the hosts."""
    _spawning: int = field(default=0, init=False)
    _not_before: float = field(default=0.0, init=False)
    _cause: str = field(default="", init=False)
    _woken: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _known: set[str] = field(default_factory=set, init=False)
    _given_up: int = field(default=0, init=False)
    """Hosts that ended without being retired: they are not replaced until there are more devices."""
    _counted: int = field(default=0, init=False)

    async def run(self) -> None:
        self.nodes.follow(self._woken.set)
        self.hosts.on_change = self._woken.set
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    now = loop_time()
                    rest, waits = self._not_before - now, self.nodes.availability.wait(now)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(min(waits, rest if rest > 0 else LONGEST_S, LONGEST_S)):
                            await self._woken.wait()
                    self._woken.clear()
                    for _ in range(self._adjust()):
                        self._spawning += 1
                        tasks.create_task(self._spawn(), name=f"one more host of {self.what}")
        finally:
            self.hosts.on_change = lambda: None

    def _adjust(self) -> int:
        """Retire the hosts that must leave; returns the number of hosts to spawn."""
        here, up, leaving = self.hosts.where(), self.hosts.up(), self.nodes.availability.leaving()
        want, settled = self._wanted(here), self.nodes.availability.ready(loop_time())
        if not settled:  # a lost host may be back on another node once the nodes have settled
            want = min(want, len(here) + self._spawning)
        going = [name for name, node in here.items() if node in leaving]
        staying = [name for name in here if name not in going]
        if settled:
            surplus = len(staying) + self._spawning - want
            going += staying[: max(0, min(surplus, len(staying) - 1))]
        for name in going:
            if any(other in up and other not in going for other in here):
                self.hosts.retire(name)
                self._known.discard(name)
        more = want - self._spawning - sum(name not in going for name in here)
        return more if loop_time() >= self._not_before else 0

    def _wanted(self, here: Collection[str]) -> int:
        counted = max(1, self.count(self.nodes.devices()))
        self._given_up = 0 if counted > self._counted else self._given_up + len(self._known.difference(here))
        self._counted, self._known = counted, set(here)
        return max(1, counted - self._given_up)

    async def _spawn(self) -> None:
        try:
            await self.hosts.spawn()
            self._cause = ""
        except RollartError as error:
            self._not_before = loop_time() + RETRY_S
            if self._cause != error.message:
                self._cause = error.message
                self.recorder.event(RunEvent(loop_time(), "host_not_placed", self.what, {"cause": error.message}))
        finally:
            self._spawning -= 1
            self._woken.set()
