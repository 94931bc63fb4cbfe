"""Supervision of the hosts of function workers. The backend assigns calls to workers: the calls of a lost host's
workers are repeated by workers of other hosts, or wait for this one if there is no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rollart.hosted import FunctionHost
from rollart.ledger.intervals import ResourceState
from rollart.supervise.supervisor import HostProcess, HostState, HostSupervisor


class FunctionPart(HostProcess, Protocol):
    """A function host's process."""

    async def start(self, notify: Callable[[], None]) -> FunctionHost:
        """Start the process and connect to it; a process left over from before is killed first. The host then accepts
        workers. `notify` is called when a call or a worker there begins or ends. `PartDied` if the start fails."""


@dataclass(slots=True)
class FunctionHostState(HostState[FunctionPart, FunctionHost]):
    @property
    def load(self) -> int:
        return 0 if self.link is None else self.link.workers

    async def emptied(self) -> None:
        assert self.link is not None, "it serves"
        await self.link.emptied()


class FunctionHostSupervisor(HostSupervisor[FunctionHostState, FunctionPart]):
    """The hosts of a run's function workers. A host that answers a call has proven itself: its restarts are
    forgotten."""

    def adopt(self, part: FunctionPart) -> FunctionHostState:
        return FunctionHostState(part=part)

    async def connect(self, host: FunctionHostState) -> FunctionHost:
        return await host.part.start(lambda: self.started(host))

    def drain(self, host: FunctionHostState) -> None:
        if host.link is not None:
            host.link.leave()

    def started(self, host: FunctionHostState) -> None:
        """Update the clock: the host has started, or a call or a worker there has begun or ended."""
        if host.link is not None:
            host.part.clock.enter(ResourceState.BUSY if host.link.live else ResourceState.IDLE)

    def down(self, host: FunctionHostState, *, served: bool) -> dict[str, int]:
        if not served or host.life is None:
            return {"calls": 0}
        if host.life.answered:
            host.restarts = 0
        return {"calls": host.life.live}
