"""The connection to a Ray cluster: as a driver of it, beside one of its nodes, or through Ray's client (`ray://`).

A driver calls Ray in this process. Through the client each call is a request over the network that waits for its
answer, ids included: those are made on threads of their own, so that a server that hangs holds up nobody. The client's
own reconnection (RAY_CLIENT_RECONNECT_GRACE_PERIOD, 30 s) outlives short breaks. A server that is gone takes the job
and all of its actors with it: every call then fails with a `ProviderError`, at once, which ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, TypeVar

from rollart.adapters.clusters.threads import daemon_thread_future, run_detached, run_in_daemon_thread
from rollart.errors import ProviderError

__all__ = [
    "CLIENT_SCHEME",
    "RayClientLink",
    "RayDriverLink",
    "RayLink",
    "check_grpc_server",
    "connect",
    "connect_in_thread",
    "resolve_address",
]

CLIENT_SCHEME = "ray://"

ANSWER_S = 10.0
"""Seconds that a cluster's address may take to answer. Ray tries for minutes, and cannot be interrupted."""

FRAME = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""HTTP/2's frame of no settings: the fourth byte says what it is. Both sides of gRPC begin with a frame of settings."""

GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + FRAME
"""The start of an HTTP/2 client."""

CONNECTED_S = 60.0
"""Seconds for the connection to a gRPC server that is to be Ray's: it takes up to ten on a busy machine."""

SILENT_S = 60.0
"""Seconds without an answer after which the client's server is lost: longer than its own tries to reconnect."""

DRAIN_S = 2.0
"""Through the client, seconds between two looks which nodes are to go: each is a task on the cluster."""

SERVER_START_FAILED = "Initialization failure from server"
"""What the client server says when the process that it forked for this client ended at once, which happens now and then
for no reason of ours: gRPC under Ray 2.60 does not survive every fork."""

MAX_CONNECT_ATTEMPTS = 4

REMEDY = "check runtime.address and runtime.token of the cluster"

T = TypeVar("T")


class RayDriverLink:
    """This process is a driver of the cluster."""

    async def nodes(self) -> Sequence[Mapping[str, Any]]:
        import ray

        found: Sequence[Mapping[str, Any]] = await run_in_daemon_thread(ray.nodes)
        return found

    async def draining(self) -> set[str]:
        """Ray's ids of nodes that it was told to drain."""
        return await run_in_daemon_thread(_draining_nodes)

    async def do(self, function: Callable[..., T], *args: object) -> T:
        """A call of Ray's that waits for the cluster."""
        return await run_in_daemon_thread(function, *args)

    async def actor(self, kind: type, options: Mapping[str, Any]) -> Any:
        return _create_actor(kind, options)

    async def ask(self, host: Any, method: str, *args: object) -> Any:
        """What the actor's method returns; it is cancelled with its caller."""
        import ray

        ref = getattr(host, method).remote(*args)
        try:
            return await ref
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                ray.cancel(ref)
            raise

    async def stream(self, host: Any, method: str, payload: bytes) -> AsyncGenerator[Any, None]:
        async for ref in host.stream.options(num_returns="streaming").remote(method, payload):
            yield await ref

    def kill(self, host: Any) -> None:
        """Waits for nothing."""
        import ray

        with contextlib.suppress(Exception):
            ray.kill(host)

    def failed(self, error: ProviderError) -> None:
        """Ray ends the calls of a driver by itself."""


class RayClientLink:
    """This process asks a server at the cluster, which is the driver. Owns what is waited for: `failed` ends it."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._open: dict[asyncio.Future[Any], None] = {}
        self._error: ProviderError | None = None
        self._drained: tuple[float, set[str]] = (-DRAIN_S, set())

    async def nodes(self) -> Sequence[Mapping[str, Any]]:
        import ray

        return await self.do(ray.nodes)

    async def draining(self) -> set[str]:
        now = asyncio.get_running_loop().time()
        if now - self._drained[0] >= DRAIN_S:
            self._drained = now, await self.do(_draining_nodes_by_task)
        return self._drained[1]

    async def do(self, function: Callable[..., T], *args: object) -> T:
        def work() -> T:
            self._connected()
            return function(*args)

        return await self._waited(daemon_thread_future(work))

    async def actor(self, kind: type, options: Mapping[str, Any]) -> Any:
        return await self.do(_create_actor, kind, options)

    async def ask(self, host: Any, method: str, *args: object) -> Any:
        import ray

        left, asked = [False], list[Any]()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def settle(answer: Any) -> None:
            if not done.done():
                error = answer.exception()
                done.set_exception(error) if error is not None else done.set_result(answer.result())

        def said(answer: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(settle, answer)

        def work() -> None:
            self._connected()
            ref = getattr(host, method).remote(*args)
            asked.append(ref)
            if left[0]:
                ray.cancel(ref)
            else:
                ref.future().add_done_callback(said)  # waits until the server has given the call its id

        try:
            await self.do(work)
            return await self._waited(done)
        except asyncio.CancelledError:
            done.cancel()
            left[0] = True  # whichever of the two comes last, here or in `work`, sees the other
            if asked:
                run_detached(ray.cancel, asked[0])
            raise

    async def stream(self, host: Any, method: str, payload: bytes) -> AsyncGenerator[Any, None]:
        """Ray's client has no streams: the items are asked for one by one."""
        number = await self.ask(host, "begin", method, payload)
        try:
            while (item := await self.ask(host, "item", number)) is not None:
                yield item
        finally:
            if self._error is None:
                run_detached(lambda: host.leave.remote(number))

    def kill(self, host: Any) -> None:
        import ray

        if self._error is None:
            run_detached(ray.kill, host)

    def failed(self, error: ProviderError) -> None:
        """Nothing is waited for any more: all of it ends with the first such error."""
        self._error = self._error or error
        for waiting in list(self._open):
            if not waiting.done():
                waiting.set_exception(self._error)

    def _connected(self) -> None:
        """A call on what has lost its connection would make a cluster of its own."""
        client: Any = importlib.import_module("ray.util.client").ray
        if not client.is_connected():
            raise ConnectionError("it has disconnected")

    async def _waited(self, waiting: asyncio.Future[T]) -> T:
        """What is waited for, for as long as the server answers."""
        self._open[waiting] = None
        if self._error is not None:
            self.failed(self._error)
        try:
            return await waiting
        except Exception as error:
            if not _is_connection_error(error):
                raise
            first = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
            self.failed(connection_lost(self._address, first.strip()))
            assert self._error is not None
            raise self._error from None
        finally:
            del self._open[waiting]


RayLink = RayDriverLink | RayClientLink


def connection_lost(address: str, why: str) -> ProviderError:
    return ProviderError(
        f"the connection to the Ray client server at '{address}' is lost, and with it the run's actors: {why[:200]}",
        remedy="see that it runs and can be reached; rollart launch --resume continues the run",
    )


def resolve_address(address: str) -> str:
    """`auto` is what RAY_ADDRESS names, if it names something."""
    return os.environ.get("RAY_ADDRESS") or address if address == "auto" else address


async def check_grpc_server(address: str) -> None:
    """`ProviderError` if no gRPC server listens at `host:port`: Ray would try to speak to any other for minutes. An
    address of another form is Ray's to understand."""
    host, _, port = address.removeprefix(CLIENT_SCHEME).partition("?")[0].rpartition(":")
    if "/" in host or not host or not port.isdecimal():
        return
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                if os.environ.get("RAY_USE_TLS", "0") in ("", "0"):
                    await _check_http2_preface(reader, writer, address)
            finally:
                writer.close()
    except OSError as error:  # a timeout too
        cause = error.strerror or f"no answer within {ANSWER_S:g} s"
        raise ProviderError(f"no Ray cluster at '{address}': {cause}", remedy=REMEDY) from None


async def _check_http2_preface(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        writer.write(GREETING)
        answer = await reader.readexactly(len(FRAME))
        if answer[3] == FRAME[3]:
            return
    raise ProviderError(
        f"no Ray cluster at '{address}': the server there does not speak gRPC, as Ray's do", remedy=REMEDY
    )


async def connect_in_thread(address: str) -> None:
    """Connect in a thread: it takes seconds, and in the main thread Ray would take SIGTERM from whoever handles it.
    `ProviderError` when there is no cluster, it refuses us, or it has not let us in within `CONNECTED_S`."""
    try:
        async with asyncio.timeout(CONNECTED_S):
            await run_in_daemon_thread(connect, address)
    except TimeoutError:
        raise ProviderError(
            f"no Ray cluster at '{address}': it does not answer Ray's client within {CONNECTED_S:g} s", remedy=REMEDY
        ) from None


def connect(address: str) -> None:
    """`ProviderError` when there is no cluster, or it refuses us. Blocks for seconds."""
    import ray

    with contextlib.suppress(ImportError):  # whoever imported Ray before us made it read its variables then
        private: Any = importlib.import_module("ray._raylet")
        private.Config.initialize("")
        private.AuthenticationTokenLoader.instance().reset_cache()
    logging.getLogger("ray").setLevel(logging.ERROR)
    with contextlib.suppress(ImportError):
        from ray._private import auto_init_hook, worker

        # Ray prints pages about every raylet that dies to our stdout, log_to_driver or not: our events say it.
        worker.print_to_stdstream = lambda *_, **__: None
        auto_init_hook.enable_auto_connect = False  # a call after the connection's end must not make a cluster
    if address.startswith(CLIENT_SCHEME):
        _quieten_client()
    for again in reversed(range(MAX_CONNECT_ATTEMPTS)):
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
            if address.startswith(CLIENT_SCHEME):
                _quieten_client()  # now, since it sets the levels of its own loggers
            return
        except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            if again and SERVER_START_FAILED in str(error):
                continue
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise ProviderError(f"no Ray cluster at '{address}': {first}", remedy=REMEDY) from None


def _quieten_client() -> None:
    """Our error says what broke the connection."""
    for name in ("ray.util.client", "ray.util.client.logsclient"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    threading.excepthook = _unless_channel_closed


def _unless_channel_closed(args: threading.ExceptHookArgs) -> None:
    """The thread in which gRPC watches a channel raises when Ray's client closes the channel to connect again."""
    if not (args.exc_type is ValueError and "Channel closed" in str(args.exc_value)):
        threading.__excepthook__(args)


def _create_actor(kind: type, options: Mapping[str, Any]) -> Any:
    import ray

    return ray.remote(kind).options(**options).remote()


def _draining_nodes() -> set[str]:
    """No public interface of Ray's says it."""
    private: Any = importlib.import_module("ray._private.state")
    return set(private.state.get_draining_nodes())


def _draining_nodes_by_task() -> set[str]:
    """The client has no such interface at all: a task of ours on the cluster looks."""
    import ray

    found: set[str] = ray.get(ray.remote(num_cpus=0)(_draining_nodes).remote(), timeout=ANSWER_S)
    return found


def _is_connection_error(error: Exception) -> bool:
    """Whether it says that the server is gone, and not what it answered."""
    return isinstance(error, (ConnectionError, importlib.import_module("grpc").RpcError))
