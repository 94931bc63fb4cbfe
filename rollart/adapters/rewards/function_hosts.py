"""Connections to hosts of function workers, for their supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollart.errors import EnvironmentFault, PartDied
from rollart.hosted import HostHealth
from serverless.errors import BackendFailed
from serverless.workers.remote import HostLink, HostLost, WorkerHosts


class FunctionHostConnection:
    """Implements `FunctionHost` over a link. `emptied` waits for the link's workers to end."""

    def __init__(self, link: HostLink, changed: asyncio.Event) -> None:
        """`changed` is set when a call or a worker of the link begins or ends."""
        self._link = link
        self._changed = changed
        self.lost = link.lost
        self.leave = link.leave
        self.aclose = link.aclose

    @classmethod
    async def open(
        cls, hosts: WorkerHosts, name: str, address: str, token: str, *, weight: float, notify: Callable[[], None]
    ) -> FunctionHostConnection:
        """Connect to a host that serves at `tcp://host:port`; it accepts workers from then on. `PartDied` if it does
        not serve, or a function cannot run there."""
        changed = asyncio.Event()

        def on_change() -> None:
            changed.set()
            notify()

        try:
            return cls(await hosts.join(name, address, token, weight=weight, notify=on_change), changed)
        except HostLost as error:
            raise PartDied(name, str(error)) from None
        except BackendFailed as error:
            raise PartDied(name, error.message, remedy=error.remedy) from None

    @property
    def id(self) -> str:
        return self._link.name

    @property
    def live(self) -> int:
        return self._link.calls

    @property
    def answered(self) -> int:
        return self._link.answered

    @property
    def workers(self) -> int:
        return len(self._link.workers)

    async def health(self) -> HostHealth:
        try:
            await self._link.ping()
        except HostLost as error:
            raise EnvironmentFault(self.id, str(error), incident=f"the end of {self.id}") from None
        return HostHealth(self.live)

    async def emptied(self) -> None:
        while self._link.workers or not self._link.leaving:
            self._changed.clear()
            await self._changed.wait()
