"""The caller's side of function workers on other machines: one connection per machine, and one per worker.

Functions whose workers run on other machines: the pools are in this process, the worker processes there
(`worker_host`).

All decisions stay in this process, as with local workers: the number of workers per function, the routing of calls and
the billing. A machine only forks and runs workers. The loss of a machine therefore loses only its workers: their calls
are repeated on other machines.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any, cast

from serverless.deploy.package import Package
from serverless.errors import BackendFailed
from serverless.frames import FrameDecoder, encode_frame, read_frame
from serverless.meter import MeterSink, NullMeter
from serverless.providers.base import Reply, WorkerLoad
from serverless.types import Cause, FaultKind, InfraFault
from serverless.workers.local import check_isolation
from serverless.workers.pool import Launcher, PoolRegistry, Worker, WorkerFault, WorkerLost, WorkerReply, WorkerRequest

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


class HostLost(Exception):
    """A machine does not answer, or ended; the message is the cause."""


class HostLink:
    """A connected machine that runs workers (`worker_host`).

    Owns the control connection and those of the workers. `deploy` and `ping` wait for the machine's answer; its end
    unblocks them (`HostLost`), and every call of its workers (`WorkerLost`). `notify` is called when a call or a worker
    begins or ends. Invariant: a machine that is `leaving` gets no new worker, and its workers no further call.
    """

    def __init__(self, name: str, address: tuple[str, int], token: str, notify: Callable[[], None]) -> None:
        self.name = name
        self.pid = 0
        self.leaving = False
        self.calls = 0
        self.answered = 0
        """Calls that this incarnation of the machine has answered."""
        self.workers: dict[RemoteWorker, None] = {}
        self._address = address
        self._token = token
        self._notify = notify
        self._cause: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[tuple[str | None, str]]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, name: str, address: str, token: str, *, notify: Callable[[], None] = lambda: None) -> HostLink:
        """Connect to `tcp://host:port`. Raises `HostLost` if no worker host there accepts the token."""
        url = urllib.parse.urlsplit(address)
        link = cls(name, (url.hostname or "", url.port or 0), token, notify)
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, link._writer = await asyncio.open_connection(*link._address)
            _keep_alive(link._writer.get_extra_info("socket"))
            link._writer.write(encode_frame(["hello", token]))
            match await read_frame(reader):
                case ["ok", int(pid)]:
                    link.pid = pid
                case _:
                    raise ValueError("its greeting is none")
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            if link._writer is not None:
                link._writer.close()
            raise HostLost(f"nothing that knows us listens at {address} ({error or type(error).__name__})") from None
        except BaseException:
            if link._writer is not None:
                link._writer.close()
            raise
        # It outlives this call and ends with the connection, which `aclose` closes.
        link._reading = asyncio.get_running_loop().create_task(link._read(reader), name=f"answers of {name}")
        return link

    @property
    def alive(self) -> bool:
        return not self._cause.done()

    @property
    def cause(self) -> str:
        """The cause of the loss; '' while connected."""
        return self._cause.result() if self._cause.done() else ""

    async def lost(self) -> str:
        return await asyncio.shield(self._cause)

    async def ping(self) -> None:
        """Wait for an answer. Raises `HostLost` if the machine ends first."""
        await self._ask("ping")

    async def deploy(self, package: Package) -> None:
        """Deploy a package there. Raises `BackendFailed` if the function cannot run there."""
        spec = package.spec.model_dump(mode="json")
        error, remedy = await self._ask("deploy", spec, package.version, dict(package.files))
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
                await loop.create_connection(lambda: worker, *self._address)
            await worker.ready([self._token, package.version, slot])
        except (ConnectionError, TimeoutError) as error:
            self.lose(f"nothing listens there ({error or type(error).__name__})")
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

    def lose(self, cause: str) -> None:
        """Treat the machine as lost and ignore anything that it may still send. Idempotent."""
        if self._cause.done():
            return
        self._cause.set_result(cause)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(HostLost(cause))
                asked.exception()  # a caller that is cancelled at the same moment never reads it
        for worker in list(self.workers):
            worker.kill()
        if self._writer is not None:
            self._writer.transport.abort()
        self._notify()

    async def aclose(self) -> None:
        self.lose("its connection was closed")
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    def fault(self) -> InfraFault:
        """The fault of a call whose worker was lost with the machine."""
        why = self.cause or "the connection of its worker broke"
        return InfraFault(FaultKind.CRASH, retryable=True, detail=f"{self.name}: {why}")

    def changed(self, calls: int = 0) -> None:
        """Record that a worker's call has begun (1) or ended (-1), or that a worker has ended."""
        self.calls += calls
        self._notify()

    async def _ask(self, what: str, *rest: Any) -> tuple[str | None, str]:
        if self._cause.done() or self._writer is None:
            raise HostLost(self.cause)
        number = next(self._numbers)
        asked: asyncio.Future[tuple[str | None, str]] = asyncio.get_running_loop().create_future()
        self._asked[number] = asked
        try:
            self._writer.write(encode_frame([what, number, *rest]))
            return await asked
        finally:
            del self._asked[number]

    async def _read(self, reader: asyncio.StreamReader) -> None:
        cause = "its connection broke"
        try:
            while True:
                match await read_frame(reader):
                    case [int(number), None | str() as error, str(remedy)]:
                        asked = self._asked.get(number)
                        if asked is not None and not asked.done():
                            asked.set_result((error, remedy))
                    case _:
                        raise ValueError("what nobody asked for")
        except ValueError as error:
            cause = f"it sent {error}"
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self.lose(cause)


class RemoteWorker(asyncio.Protocol):
    """Implements `worker.Worker` over its own connection: if either end closes it, the worker ends, also after a frame
    that does not answer the pending request."""

    def __init__(self, link: HostLink, gone: Callable[[], None]) -> None:
        self.init_s = 0.0
        self.started = False
        self.busy = False
        self._link = link
        self._gone = gone
        self._frames = FrameDecoder()
        self._transport: asyncio.Transport | None = None
        self._asked = ""
        self._reply: asyncio.Future[list[Any]] | None = None

    @property
    def alive(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ready(self, hello: Sequence[Any]) -> None:
        """Request the worker and wait for the end of its init phase. Raises `WorkerFault` if that failed."""
        match await self._ask("", encode_frame(["hello", *hello])):
            case ["ready", int() | float() as init_s]:
                self.init_s, self.started = float(init_s), True
            case ["failed", str(kind), str(detail), bool(retryable)]:
                raise WorkerFault(_fault(kind, detail, retryable))
            case _:
                raise self._broke_protocol()

    async def call(self, request: WorkerRequest) -> WorkerReply:
        try:
            frame = encode_frame([request.id, list(request.event), request.remaining_s * 1000.0])
        except (TypeError, ValueError, OverflowError) as error:
            detail = f"the event has no wire form: {error}"
            return WorkerReply(None, 0.0, InfraFault(FaultKind.ENVIRONMENT, retryable=False, detail=detail))
        self.busy = True
        self._link.changed(1)
        try:
            message = await self._ask(request.id, frame)
        finally:
            self.busy = False
            self._link.changed(-1)
        keep = not self._link.leaving
        match message:
            case ["ok", int() | float() as run_s, body]:
                self._link.answered += 1
                return WorkerReply(body, float(run_s), keep=keep)
            case ["fault", int() | float() as run_s, str(kind), str(detail), bool(retryable), bool(stays)]:
                self._link.answered += 1
                return WorkerReply(None, float(run_s), _fault(kind, detail, retryable), keep and stays)
            case ["died", str(kind), str(detail), bool(retryable)]:
                raise WorkerFault(_fault(kind, detail, retryable))
        raise self._broke_protocol()

    def kill(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        else:
            self._link.workers.pop(self, None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        _keep_alive(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if not self._frames.answer(data, self._asked, self._reply):
            self._broke_protocol()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._link.workers.pop(self, None)
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(ConnectionResetError())
            self._reply.exception()  # a start that is cancelled at the same moment never reads it
        self._link.changed()
        if self.started:
            self._gone()

    async def _ask(self, request: str, frame: bytes) -> list[Any]:
        """Send a request and wait for its answer. Raises `WorkerLost` if the connection ends first."""
        if self._transport is None or self._transport.is_closing():
            raise WorkerLost(self._link.fault())
        self._asked = request
        self._reply = asyncio.get_running_loop().create_future()
        self._transport.write(frame)
        try:
            return await self._reply
        except ConnectionResetError:
            raise WorkerLost(self._link.fault()) from None
        finally:
            self._reply = None

    def _broke_protocol(self) -> WorkerFault:
        """Close a connection that carried an unexpected frame, and fail the pending call."""
        self.kill()
        detail = f"what {self._link.name} sent is no answer"
        fault = WorkerFault(InfraFault(FaultKind.BAD_ANSWER, retryable=True, detail=detail))
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(fault)
            self._reply.exception()
        return fault


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE_OPTIONS.items():
        if (option := getattr(socket, name, None)) is not None:  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _fault(kind: str, detail: str, retryable: bool) -> InfraFault:
    known = kind in FaultKind.__members__.values()
    return InfraFault(FaultKind(kind) if known else FaultKind.CRASH, retryable=retryable, detail=detail)


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
    calls wait until their deadline. `launcher` wraps the worker launcher (`providers.rehearsal`).
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
