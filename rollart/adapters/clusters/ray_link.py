"""The connection to a Ray cluster: as a driver beside one of its nodes, or through Ray's client (`ray://`).

A driver calls Ray in this process. Through the client each call is a request over the network and waits for its answer,
even for ids. Such calls may never return and cannot be interrupted, so they run on threads of their own and a server
that hangs blocks no other call. The client's own reconnection (RAY_CLIENT_RECONNECT_GRACE_PERIOD, 30 s) survives short
interruptions. A lost server takes the job and all of its actors with it: every call then fails at once with a
`ProviderError`, which ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rollart.errors import ProviderError, first_line
from serverless.retries import RAY_CLIENT

T = TypeVar("T")

CLIENT_SCHEME = "ray://"

ANSWER_S = 10.0
"""Seconds that a cluster's address may take to answer. Ray tries for minutes and cannot be interrupted."""

FRAME = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""HTTP/2's empty SETTINGS frame; the fourth byte is the frame type. Both sides of gRPC begin with a SETTINGS frame."""

GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + FRAME
"""The preface of an HTTP/2 client."""

CONNECTED_S = 60.0
"""Seconds for Ray's client to connect to a gRPC server: up to ten on a busy machine."""

SILENT_S = 60.0
"""Seconds without an answer after which the client's server counts as lost: longer than its own reconnection."""

DRAIN_S = 2.0
"""Seconds between two polls of draining nodes through the client: each poll is a task on the cluster."""

SERVER_START_FAILED = "Initialization failure from server"
"""The client server's message if the process that it forked for this client ended at once. That happens occasionally
without a cause here: gRPC under Ray 2.60 does not survive every fork."""

REMEDY = "check runtime.address and runtime.token of the cluster"


class RayDriverLink:
    """This process is a driver of the cluster."""

    async def nodes(self) -> Sequence[Mapping[str, Any]]:
        import ray

        found: Sequence[Mapping[str, Any]] = await self.run_blocking(ray.nodes)
        return found

    async def draining(self) -> set[str]:
        """Ray's ids of nodes that are being drained."""
        return await run_in_daemon_thread(_draining_nodes)

    async def run_blocking(self, function: Callable[..., T], *args: object) -> T:
        """Run a Ray function that waits for the cluster."""
        return await run_in_daemon_thread(function, *args)

    async def actor(self, kind: type, options: Mapping[str, Any]) -> Any:
        return _create_actor(kind, options)

    async def call_method(self, host: Any, method: str, *args: object) -> Any:
        """The result of the actor's method; cancelled with its caller."""
        import ray

        ref = getattr(host, method).remote(*args)
        try:
            return await ref
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                ray.cancel(ref)
            raise

    def kill(self, host: Any) -> None:
        """Does not wait."""
        import ray

        with contextlib.suppress(Exception):
            ray.kill(host)

    def failed(self, error: ProviderError) -> None:
        """Ray itself ends the calls of a driver."""


class RayClientLink(RayDriverLink):
    """This process calls a server at the cluster, which is the driver. Owns the pending calls: `failed` ends them."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._open: dict[asyncio.Future[Any], None] = {}
        self._error: ProviderError | None = None
        self._drained: tuple[float, set[str]] = (-DRAIN_S, set())

    async def draining(self) -> set[str]:
        now = asyncio.get_running_loop().time()
        if now - self._drained[0] >= DRAIN_S:
            self._drained = now, await self.run_blocking(_draining_nodes_by_task)
        return self._drained[1]

    async def run_blocking(self, function: Callable[..., T], *args: object) -> T:
        def work() -> T:
            self._connected()
            return function(*args)

        return await self._waited(run_in_daemon_thread(work))

    async def actor(self, kind: type, options: Mapping[str, Any]) -> Any:
        return await self.run_blocking(_create_actor, kind, options)

    async def call_method(self, host: Any, method: str, *args: object) -> Any:
        import ray

        cancelled, refs = [False], list[Any]()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def settle(answer: Any) -> None:
            if not done.done():
                error = answer.exception()
                done.set_exception(error) if error is not None else done.set_result(answer.result())

        def notify(answer: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, answer)

        def work() -> None:
            self._connected()
            ref = getattr(host, method).remote(*args)
            refs.append(ref)
            if cancelled[0]:
                ray.cancel(ref)
            else:
                ref.future().add_done_callback(notify)  # blocks until the server has assigned the call's id

        try:
            await self.run_blocking(work)
            return await self._waited(done)
        except asyncio.CancelledError:
            done.cancel()
            cancelled[0] = True  # either `work` sees this flag, or `refs` is filled already
            if refs:
                run_detached(ray.cancel, refs[0])
            raise

    def kill(self, host: Any) -> None:
        import ray

        if self._error is None:
            run_detached(ray.kill, host)

    def failed(self, error: ProviderError) -> None:
        """Fail all pending and later calls with the first such error."""
        self._error = self._error or error
        for waiting in list(self._open):
            if not waiting.done():
                waiting.set_exception(self._error)

    def _connected(self) -> None:
        """Refuse calls without a connection: Ray would start a cluster of its own."""
        client: Any = importlib.import_module("ray.util.client").ray
        if not client.is_connected():
            raise ConnectionError("it has disconnected")

    async def _waited(self, waiting: asyncio.Future[T]) -> T:
        """The result of a call, for as long as the server answers."""
        self._open[waiting] = None
        if self._error is not None:
            self.failed(self._error)
        try:
            return await waiting
        except Exception as error:
            if not isinstance(error, (ConnectionError, importlib.import_module("grpc").RpcError)):
                raise  # the server returned it
            last_line = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            self.failed(connection_lost(self._address, last_line.strip()))
            assert self._error is not None
            raise self._error from None
        finally:
            del self._open[waiting]


def run_in_daemon_thread(function: Callable[..., T], *args: object) -> asyncio.Future[T]:
    """As `asyncio.to_thread`, but cancellation abandons the call: neither the end of the loop nor that of the process
    waits for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():  # cancelled, or ended by `RayClientLink.failed`
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, error = None, None
        try:
            result = function(*args)
        except BaseException as problem:
            error = problem
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name=f"{function.__name__}, left behind if it hangs", daemon=True).start()
    return done


def run_detached(function: Callable[..., object], *args: object) -> None:
    """Call a function without waiting for it. Its exceptions are ignored."""
    run_in_daemon_thread(function, *args).add_done_callback(mark_retrieved)


def mark_retrieved(done: asyncio.Future[Any]) -> None:
    """The exception of a future is no unhandled one if no caller waits for it."""
    if not done.cancelled():
        done.exception()


def connection_lost(address: str, why: str) -> ProviderError:
    return ProviderError(
        f"the connection to the Ray client server at '{address}' is lost, and with it the run's actors: {why[:200]}",
        remedy="see that it runs and can be reached; rollart launch --resume continues the run",
    )


async def check_grpc_server(address: str) -> None:
    """`ProviderError` if no gRPC server listens at `host:port`: Ray would try for minutes to connect to any other
    server. Addresses of another form are left to Ray."""
    host, _, port = address.removeprefix(CLIENT_SCHEME).partition("?")[0].rpartition(":")
    if "/" in host or not host or not port.isdecimal():
        return
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                if os.environ.get("RAY_USE_TLS", "0") in ("", "0"):
                    answer = b""
                    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                        writer.write(GREETING)
                        answer = await reader.readexactly(len(FRAME))
                    if answer[3:4] != FRAME[3:4]:
                        raise ProviderError(
                            f"no Ray cluster at '{address}': the server there does not speak gRPC, as Ray's do",
                            remedy=REMEDY,
                        )
            finally:
                writer.close()
    except OSError as error:  # includes timeouts
        cause = error.strerror or f"no answer within {ANSWER_S:g} s"
        raise ProviderError(f"no Ray cluster at '{address}': {cause}", remedy=REMEDY) from None


async def connect_in_thread(address: str) -> None:
    """Connect on a thread, since it takes seconds, and on the main thread Ray would replace the handler of SIGTERM.
    `ProviderError` if there is no cluster, it refuses the connection, or it does not accept it within `CONNECTED_S`."""
    try:
        async with asyncio.timeout(CONNECTED_S):
            await run_in_daemon_thread(connect, address)
    except TimeoutError:
        raise ProviderError(
            f"no Ray cluster at '{address}': it does not answer Ray's client within {CONNECTED_S:g} s", remedy=REMEDY
        ) from None


def connect(address: str) -> None:
    """`ProviderError` if there is no cluster, or it refuses the connection. Blocks for seconds."""
    import ray

    with contextlib.suppress(ImportError):  # Ray may have read its variables already
        private: Any = importlib.import_module("ray._raylet")
        private.Config.initialize("")
        private.AuthenticationTokenLoader.instance().reset_cache()
    logging.getLogger("ray").setLevel(logging.ERROR)
    with contextlib.suppress(ImportError):
        from ray._private import auto_init_hook, worker

        # Ray prints pages about every dead raylet to stdout, log_to_driver or not; the runtime's events report it.
        worker.print_to_stdstream = lambda *_, **__: None
        auto_init_hook.enable_auto_connect = False  # a call after the connection's end must not start a cluster
    if address.startswith(CLIENT_SCHEME):
        _quieten_client()

    def connect() -> None:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
        if address.startswith(CLIENT_SCHEME):
            _quieten_client()  # again, since Ray sets the levels of its loggers

    try:
        RAY_CLIENT.run_blocking(connect, lambda e: SERVER_START_FAILED in str(e), pause=threading.Event().wait)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise ProviderError(f"no Ray cluster at '{address}': {first_line(error)}", remedy=REMEDY) from None


def _draining_nodes() -> set[str]:
    """Ray has no public API for this."""
    private: Any = importlib.import_module("ray._private.state")
    return set(private.state.get_draining_nodes())


def _create_actor(kind: type, options: Mapping[str, Any]) -> Any:
    import ray

    return ray.remote(kind).options(**options).remote()


def _draining_nodes_by_task() -> set[str]:
    """Ray's client has no API for this at all: a task on the cluster asks."""
    import ray

    found: set[str] = ray.get(ray.remote(num_cpus=0)(_draining_nodes).remote(), timeout=ANSWER_S)
    return found


def _quieten_client() -> None:
    """The error of this module reports a lost connection."""
    for name in ("ray.util.client", "ray.util.client.logsclient"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    threading.excepthook = _unless_channel_closed


def _unless_channel_closed(args: threading.ExceptHookArgs) -> None:
    """gRPC's thread that watches a channel raises when Ray's client closes the channel to reconnect."""
    if not (args.exc_type is ValueError and "Channel closed" in str(args.exc_value)):
        threading.__excepthook__(args)
