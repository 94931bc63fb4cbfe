"""Functions whose workers run on other machines: the pools are in this process, the worker processes there
(`worker_host`).

All decisions stay in this process, as with local workers: the number of workers per function, the routing of calls and
the billing. A machine only forks and runs workers. The loss of a machine therefore loses only its workers: their calls
are repeated on other machines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from serverless.backends.base import Reply, WorkerLoad
from serverless.backends.host import PoolRegistry
from serverless.backends.local import check_isolation
from serverless.backends.pool import Launcher, Worker
from serverless.backends.remote import HostLink, HostLost
from serverless.backends.worker import WorkerLost
from serverless.deploy.package import Package
from serverless.meter import MeterSink, NullMeter
from serverless.types import Cause, FaultKind, InfraFault

__all__ = ["HostedBackend", "WorkerHosts"]


class WorkerHosts:
    """The connected machines and the packages deployed on all of them. Implements `Launcher`.

    The owner of the machines may call `join` and `leave` at any moment; `room` waits until a machine accepts workers. A
    new worker goes to the machine with the fewest workers per `weight`; ties go to the earliest joined. Invariant: a
    machine accepts workers only once it has every package.
    """

    def __init__(self) -> None:
        self._links: dict[str, tuple[HostLink, float]] = {}
        self._packages: dict[str, Package] = {}
        self._changed = asyncio.Event()

    @property
    def links(self) -> list[HostLink]:
        """Links to the machines that accept workers."""
        return [link for link, _ in self._links.values() if link.alive and not link.leaving]

    async def join(
        self, name: str, address: str, token: str, *, weight: float = 1.0, notify: Callable[[], None] = lambda: None
    ) -> HostLink:
        """Add a machine that serves at `tcp://host:port`. Raises `HostLost` if it does not answer and `BackendFailed`
        if a function cannot run there. `notify`: see `HostLink`."""

        def changed() -> None:
            there = self._links.get(name)
            if there is not None and not there[0].alive:
                del self._links[name]
            self._notify()
            notify()

        link = await HostLink.open(name, address, token, notify=changed)
        try:
            done: set[str] = set()
            while missing := [one for one in self._packages.values() if one.version not in done]:
                for package in missing:
                    await link.deploy(package)
                    done.add(package.version)
        except BaseException:
            await link.aclose()
            raise
        self._links[name] = link, weight
        self._notify()
        return link

    async def deploy(self, package: Package) -> None:
        """Deploy on every current and future machine. Raises `BackendFailed` if the function cannot run on one of
        them."""
        self._packages[package.spec.name] = package
        results = await asyncio.gather(*(link.deploy(package) for link in self.links), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, HostLost):  # a lost host gets it later
                raise result

    async def room(self) -> None:
        """Wait until a machine accepts workers."""
        while not self.links:
            changed = self._changed
            await changed.wait()

    async def start(self, package: Package, worker: str, slot: int, gone: Callable[[], None]) -> Worker:
        candidates = [(link, weight) for link, weight in self._links.values() if link.alive and not link.leaving]
        if not candidates:
            raise WorkerLost(InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail="no machine takes workers"))
        link, _ = min(candidates, key=lambda place: len(place[0].workers) / place[1])
        return await link.worker(package, slot, gone)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class HostedBackend:
    """Implements `Backend` and `ScalableBackend` over the workers of `hosts`, which the caller creates and closes.

    A call is executed at most once on a connected machine. If the machine is lost meanwhile, the call is repeated on
    another, at most twice (`Cause.RETRY`), and any later answer of the first is ignored. While no machine is connected,
    calls wait until their deadline. `launcher` wraps the worker launcher (`backends.rehearsal`).
    """

    provider = "local"

    def __init__(
        self,
        hosts: WorkerHosts,
        *,
        meter: MeterSink | None = None,
        launcher: Callable[[Launcher], Launcher] = lambda launcher: launcher,
        allow_unsafe: bool = False,
    ) -> None:
        self._hosts = hosts
        self._allow_unsafe = allow_unsafe
        self._pools = PoolRegistry(launcher(hosts), provider=self.provider, meter=meter or NullMeter(), room=hosts.room)

    async def deploy(self, package: Package) -> None:
        if not self._allow_unsafe:
            check_isolation(package)
        await self._hosts.room()
        await self._hosts.deploy(package)
        self._pools.deploy(package)

    async def invoke(
        self, function: str, event: Sequence[dict[str, Any]], *, deadline_s: float, cause: Cause = Cause.CALL
    ) -> Reply:
        return await self._pools.pool(function).invoke(event, deadline_s, cause)

    def load(self, function: str) -> WorkerLoad:
        return self._pools.load(function)

    def keep(self, function: str, workers: int, *, keep_alive_s: float | None = None) -> int:
        """See `ScalableBackend`."""
        return self._pools.keep(function, workers, keep_alive_s)

    async def __aenter__(self) -> HostedBackend:
        await self._pools.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._pools.close()
