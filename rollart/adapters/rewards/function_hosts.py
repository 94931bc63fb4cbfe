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

    def __init__(self) -> None:
        self.resting = False
        self._link: HostLink | None = None
        self._changed = asyncio.Event()

    @classmethod
    async def open(
        cls, hosts: WorkerHosts, name: str, address: str, token: str, *, weight: float, notify: Callable[[], None]
    ) -> FunctionHostConnection:
        """Connect to a host that serves at `tcp://host:port`; it accepts workers from then on. `PartDied` if it does
        not serve, or a function cannot run there."""
        connection = cls()

        def changed() -> None:
            connection._changed.set()
            notify()

        try:
            connection._link = await hosts.join(name, address, token, weight=weight, notify=changed)
        except HostLost as error:
            raise PartDied(name, str(error)) from None
        except BackendFailed as error:
            raise PartDied(name, error.message, remedy=error.remedy) from None
        return connection

    @property
    def id(self) -> str:
        return self._open_link.name

    @property
    def live(self) -> int:
        return 0 if self._link is None else self._link.calls

    @property
    def answered(self) -> int:
        return self._open_link.answered

    @property
    def workers(self) -> int:
        return len(self._open_link.workers)

    async def health(self) -> HostHealth:
        try:
            await self._open_link.ping()
        except HostLost as error:
            raise EnvironmentFault(self.id, str(error), incident=f"the end of {self.id}") from None
        return HostHealth(self.live)

    async def lost(self) -> str:
        return await self._open_link.lost()

    def leave(self) -> None:
        self._open_link.leave()

    async def emptied(self) -> None:
        while self._open_link.workers or not self._open_link.leaving:
            self._changed.clear()
            await self._changed.wait()

    async def aclose(self) -> None:
        await self._open_link.aclose()

    @property
    def _open_link(self) -> HostLink:
        assert self._link is not None, "it was opened"
        return self._link
