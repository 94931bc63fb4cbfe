"""Functions whose workers run on other machines: the pools are in this process, the worker processes there
(`workers.host`). There is one connection per machine, and one per worker.

All decisions stay in this process, as with local workers: the number of workers per function, the routing of calls and
the billing. A machine only forks and runs workers. The loss of a machine therefore loses only its workers: their calls
are repeated on other machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from serverless.deploy.package import Package
from serverless.errors import BackendFailed
from serverless.hosts import HostChannel, host_and_port
from serverless.meter import MeterSink
from serverless.secrets import Secrets
from serverless.types import FaultKind, InfraFault
from serverless.workers.channel import WorkerChannel, encode_message, read_message
from serverless.workers.local import check_isolation
from serverless.workers.pool import Launcher, PooledBackend, Worker, WorkerFault, WorkerLost, WorkerReply, WorkerRequest


class HostLost(Exception):
    """A machine does not answer, or ended; the message is the cause."""


class HostedBackend(PooledBackend):
    """Functions on the workers of `hosts`, which the caller creates and closes.

    A call is executed at most once on a connected machine. If the machine is lost meanwhile, the call is repeated on
    another, at most twice (`Cause.RETRY`), and any later answer of the first is ignored. While no machine is connected,
    calls wait until their deadline. `launcher` wraps the worker launcher (`providers.rehearsal`).
    """

    def __init__(
        self,
        hosts: WorkerHosts,
        *,
        meter: MeterSink | None = None,
        launcher: Callable[[Launcher], Launcher] = lambda launcher: launcher,
        allow_unsafe: bool = False,
        secrets: Secrets | None = None,
    ) -> None:
        super().__init__(launcher(hosts), "local", meter, room=hosts.room, secrets=secrets)
        self._hosts = hosts
        self._allow_unsafe = allow_unsafe

    async def deploy(self, package: Package) -> None:
        self.secrets.require(package.spec)
        if not self._allow_unsafe:
            check_isolation(package)
        await self._hosts.room()
        await self._hosts.deploy(package)
        await super().deploy(package)


class WorkerHosts:
    """The connected machines and the packages deployed on all of them. Implements `Launcher`.

    The owner of the machines may call `join` and `leave` at any moment; `room` waits until a machine accepts workers. A
    new worker goes to the machine with the fewest workers per `weight`; ties go to the earliest joined. Invariant: a
    machine accepts workers only once it has every package.
    """

    def __init__(self) -> None:
        self.machines: dict[str, HostLink] = {}
        self._packages: dict[str, Package] = {}
        self._changed = asyncio.Event()

    @property
    def links(self) -> list[HostLink]:
        """Links to the machines that accept workers."""
        return [link for link in self.machines.values() if link.alive and not link.leaving]

    async def join(
        self, name: str, address: str, token: str, *, weight: float = 1.0, notify: Callable[[], None] = lambda: None
    ) -> HostLink:
        """Add a machine that serves at `tcp://host:port`. Raises `HostLost` if it does not answer and `BackendFailed`
        if a function cannot run there. `notify`: see `HostLink`."""

        def changed() -> None:
            there = self.machines.get(name)
            if there is not None and not there.alive:
                del self.machines[name]
            self._notify()
            notify()

        link = HostLink(name, address, token, weight=weight, notify=changed)
        await link.open()
        try:
            done: set[str] = set()
            while missing := [one for one in self._packages.values() if one.version not in done]:
                for package in missing:
                    await link.deploy(package)
                    done.add(package.version)
        except BaseException:
            await link.aclose()
            raise
        self.machines[name] = link
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
            await self._changed.wait()

    async def start(self, package: Package, slot: int, gone: Callable[[], None]) -> Worker:
        if not (links := self.links):
            raise WorkerLost(InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail="no machine takes workers"))
        return await min(links, key=lambda link: len(link.workers) / link.weight).worker(package, slot, gone)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


CONNECT_S = 5.0
"""Seconds to connect to a machine that is already connected: its kernel answers, however busy its processes are."""

_SILENT_S = 6
"""Seconds without any acknowledgement from a machine's kernel after which it is considered lost. This is less than a
function's start may take (`init_timeout_s`), so that a vanished machine is not taken for a function that does not load.
"""

_KEEPALIVE_OPTIONS = {
    "TCP_KEEPIDLE": 2,
    "TCP_KEEPINTVL": 1,
    "TCP_KEEPCNT": _SILENT_S - 2,
    "TCP_USER_TIMEOUT": 1000 * _SILENT_S,
    "TCP_NODELAY": 1,
}


class HostLink(HostChannel):
    """A connected machine that runs workers (`workers.host`).

    Owns the control connection and those of the workers. `deploy` and `ping` wait for the machine's answer; its end
    unblocks them (`HostLost`), and every call of its workers (`WorkerLost`). `notify` is called when a call or a worker
    begins or ends. Invariant: a machine that is `leaving` gets no new worker, and its workers no further call.
    """

    def __init__(
        self, name: str, address: str, token: str, *, weight: float = 1.0, notify: Callable[[], None] = lambda: None
    ) -> None:
        """A machine at `tcp://host:port`, not connected yet."""
        super().__init__(name)
        self.pid = 0
        self.weight = weight
        self.leaving = False
        self.calls = 0
        self.answered = 0
        """Calls that this incarnation of the machine has answered."""
        self.workers: dict[RemoteWorker, None] = {}
        self._address = address
        self._token = token
        self._notify = notify

    async def open(self) -> None:
        """Connect. Raises `HostLost` if no worker host there accepts the token."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(CONNECT_S):
                    reader, writer = await asyncio.open_connection(*host_and_port(self._address))
                stack.callback(writer.close)
                _keep_alive(writer.get_extra_info("socket"))
                writer.write(encode_message(["hello", self._token]))
                match await read_message(reader):
                    case ["ok", int(pid)]:
                        self.pid = pid
                    case _:
                        raise ValueError("its greeting is none")
            except (OSError, asyncio.IncompleteReadError, ValueError) as error:
                why = error or type(error).__name__
                raise HostLost(f"nothing that knows us listens at {self._address} ({why})") from None
            stack.pop_all()
        self.listen(reader, writer)

    async def ping(self) -> None:
        """Wait for an answer. Raises `HostLost` if the machine ends first."""
        await self._order("ping")

    async def deploy(self, package: Package) -> None:
        """Deploy a package there. Raises `BackendFailed` if the function cannot run there."""
        spec = package.spec.model_dump(mode="json")
        error, remedy = await self._order("deploy", spec, package.version, dict(package.files))
        if error is not None:
            raise BackendFailed(f"{error} (on {self.name})", remedy=remedy)

    async def worker(self, package: Package, slot: int, gone: Callable[[], None]) -> RemoteWorker:
        """Start a worker of the function there and wait until it is ready. Raises `WorkerFault` if it does not start,
        `WorkerLost` if the machine is lost."""
        loop = asyncio.get_running_loop()
        worker = RemoteWorker(self, gone)
        self.workers[worker] = None
        try:
            async with asyncio.timeout(CONNECT_S):
                await loop.create_connection(lambda: worker, *host_and_port(self._address))
            await worker.ready([self._token, package.version, slot], package.variables)
        except (ConnectionError, TimeoutError) as error:
            self.end(f"nothing listens there ({error or type(error).__name__})")
            raise WorkerLost(self.fault()) from None
        except OSError as error:  # no descriptors: this machine's state, which may pass
            detail = f"no worker could be reached: {error}"
            raise WorkerFault(InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=detail)) from None
        finally:
            if not worker.alive or not worker.started:
                worker.kill()
        if not worker.alive or not self.alive:
            raise WorkerLost(self.fault())
        self._notify()
        return worker

    def leave(self) -> None:
        """Drain the machine: idle workers end now, busy ones after their answer."""
        self.leaving = True
        for worker in list(self.workers):
            if not worker.busy:
                worker.kill()
        self._notify()

    def end(self, cause: str) -> None:
        if not self.alive:
            return
        super().end(cause)
        for worker in list(self.workers):
            worker.kill()
        if self._writer is not None:
            self._writer.transport.abort()
        self._notify()

    def failure(self) -> HostLost:
        return HostLost(self.cause)

    def fault(self) -> InfraFault:
        """The fault of a call whose worker was lost with the machine."""
        why = self.cause or "the connection of its worker broke"
        return InfraFault(FaultKind.CRASH, retryable=True, detail=f"{self.name}: {why}")

    def changed(self, calls: int = 0) -> None:
        """Record that a worker's call has begun (1) or ended (-1), or that a worker has ended."""
        self.calls += calls
        self._notify()

    async def receive(self, reader: asyncio.StreamReader) -> tuple[int, str, tuple[str | None, str]]:
        match await read_message(reader):
            case [int(number), None | str() as error, str(remedy)]:
                return number, "", (error, remedy)
        raise ValueError("a frame that answers no request")

    async def _order(self, what: str, *rest: Any) -> tuple[str | None, str]:
        answer: tuple[str | None, str] = await self.ask(lambda number: encode_message([what, number, *rest]))
        return answer


class RemoteWorker(WorkerChannel):
    """A worker over its own connection: if either end closes it, the worker ends."""

    def __init__(self, link: HostLink, gone: Callable[[], None]) -> None:
        super().__init__()
        self.started = False
        self.busy = False
        self.violation = f"what {link.name} sent is no answer"
        self._link = link
        self._gone = gone

    async def ready(self, hello: Sequence[Any], variables: Mapping[str, str]) -> None:
        """Request the worker and wait for the end of its init phase. Raises `WorkerFault` if that failed."""
        given = encode_message(dict(variables)) if variables else b""
        match await super().ask("", encode_message(["hello", *hello]) + given):
            case ["ready", int() | float() as init_s]:
                self.init_s, self.started = float(init_s), True
            case ["failed", str(kind), str(detail), bool(retryable)]:
                raise WorkerFault(InfraFault(FaultKind(kind), retryable=retryable, detail=detail))
            case _:
                raise self.broke_protocol()

    async def ask(self, request: str, frame: bytes) -> list[Any]:
        self.busy = True
        self._link.changed(1)
        try:
            message = await super().ask(request, frame)
        finally:
            self.busy = False
            self._link.changed(-1)
        self._link.answered += message[:1] in (["ok"], ["fault"])
        return message

    async def call(self, request: WorkerRequest) -> WorkerReply:
        reply = await super().call(request)
        return replace(reply, keep=reply.keep and not self._link.leaving)

    async def death(self) -> WorkerFault:
        return WorkerLost(self._link.fault())

    def kill(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        else:
            self._link.workers.pop(self, None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        _keep_alive(transport.get_extra_info("socket"))

    def connection_lost(self, error: Exception | None) -> None:
        self._link.workers.pop(self, None)
        super().connection_lost(error)
        self._link.changed()
        if self.started:
            self._gone()


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE_OPTIONS.items():
        if (option := getattr(socket, name, None)) is not None:  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
