"""The parent's side of worker processes: the fork server and one worker.

Channels have no name in the file system and no listening socket: each is a socket pair that is made here and passed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import msgpack

from serverless.sandbox.launch import exited
from serverless.types import FaultKind, InfraFault
from serverless.workers.channel import WorkerChannel, encode_message
from serverless.workers.logs import MaskedLog
from serverless.workers.pool import WorkerFault, WorkerReply, WorkerRequest

_STOP_S = 2.0
"""Seconds a stopping zygote may take to kill and reap its workers before it is killed itself."""

_LEASE_S = 3.0
"""Seconds a zygote may leave a fork unanswered. It answers within milliseconds unless it gets no CPU; a runnable zygote
is given longer."""

_IMPORT_LEASE_S = 60.0
"""Seconds an importing zygote may use no CPU at all: a module may come from a slow file system."""

_CAUSE_S = 1.0
"""Seconds a dead worker's wait status may take to arrive."""

_LAST_FRAME_S = 0.1
"""Seconds after a worker's death in which its channel is read to its end."""

_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""A zygote must be single-threaded: a fork copies no other thread, and locks held by them stay locked."""

_INHERITED_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "ROLLART_LIFE")
"""The only variables of the caller's environment that functions inherit, so that they see no credentials. The last one
marks processes of a run, so that none of them outlives it."""


class ForkServer:
    """Owns the zygote process. Used from one event loop.

    `fork` waits for the zygote's answer and `ready` for its imports; both are unblocked by these or by the zygote's
    death. A dead zygote is noticed at once (its socket closes), ends its workers, and is replaced by the next `fork`. A
    hanging zygote is noticed while a request waits for it, and killed. `cleanup`: the zygote removes `root` when this
    process has ended in any way or has called `close`.
    """

    def __init__(self, root: pathlib.Path, *, preload: Sequence[str], cleanup: bool) -> None:
        self._root = root
        self._preload = list(preload)
        self._cleanup = cleanup
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._keys = 0
        self._forking: dict[int, asyncio.Future[tuple[int, int]]] = {}
        self._watch: asyncio.TimerHandle | None = None
        self._last_activity: tuple[int, frozenset[int]] = (0, frozenset())
        """At the last check: CPU ticks used by the zygote, and its unanswered forks."""
        self._idle_s = 0.0
        self._running: dict[int, asyncio.Future[int]] = {}
        self._preloaded: asyncio.Future[dict[str, str]] | None = None

    @property
    def pid(self) -> int | None:
        """The zygote's process id, None while there is none."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the zygote if there is none. Returns at once; forks wait until its preloads are imported."""
        if self._process is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        source = str(pathlib.Path(__file__).parents[2])
        environment = {k: os.environ[k] for k in _INHERITED_VARIABLES if k in os.environ}
        environment |= dict.fromkeys(_ONE_THREAD, "1") | {"PYTHONPATH": source, "PYTHONUNBUFFERED": "1"}
        cleanup = str(self._root) if self._cleanup else ""
        arguments = ["-m", "serverless.workers._zygote", str(theirs.fileno()), str(os.getpid()), cleanup]
        with theirs, (self._root / "zygote.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=self._root,
                start_new_session=True,
            )
        ours.setblocking(False)
        self._control = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._readable)
        self._preloaded = asyncio.get_running_loop().create_future()
        self._send(["preload", self._preload])
        self._schedule_watch()

    async def ready(self) -> dict[str, str]:
        """Wait for the imports. Returns the failed modules with their errors. Raises `WorkerFault` if the zygote dies
        meanwhile."""
        self.start()
        assert self._preloaded is not None
        return await asyncio.shield(self._preloaded)

    async def fork(
        self,
        order: dict[str, Any],
        gone: Callable[[], None],
        variables: Mapping[str, str] | None = None,
        output: MaskedLog | None = None,
    ) -> ProcessWorker:
        """Fork a worker process, which is not ready yet. Raises `WorkerFault` (retryable) if the zygote dies
        meanwhile. `variables` (announced by the order's key of that name) are sent on the worker's own channel, so that
        the zygote, whose memory every later worker inherits, never has them. `output` is closed with the worker."""
        loop = asyncio.get_running_loop()
        self._keys += 1
        key = self._keys
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        forked: asyncio.Future[tuple[int, int]] = loop.create_future()
        ended: asyncio.Future[int] = loop.create_future()
        if output is not None:
            ended.add_done_callback(lambda _: output.close())
        try:
            with theirs:
                fds = [theirs.fileno(), *([output.fd] if output is not None else [])]
                self.start()
                try:
                    self._send(["fork", key, order], fds)
                except WorkerFault:  # it died, which was not noticed yet: it is replaced once
                    self._died()
                    self.start()
                    self._send(["fork", key, order], fds)
                self._forking[key], self._running[key] = forked, ended
                self._schedule_watch()
            pid, pidfd = await forked
        except BaseException:
            ours.close()
            if output is not None and key not in self._running:
                output.close()
            raise
        framed = "exec" not in order
        if output is None:
            worker = ProcessWorker(pid, pidfd, ended, gone, framed=framed)
        else:
            worker = MaskedWorker(pid, pidfd, ended, gone, framed=framed, output=output)
        await loop.create_unix_connection(lambda: worker, sock=ours)
        if variables:
            worker.send(encode_message(dict(variables)))
        return worker

    async def close(self) -> None:
        """Stop the zygote and all its workers; takes at most about `_STOP_S` seconds."""
        process = self._lose()
        if process is None:
            return
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await exited(process.pid)
        finally:
            process.kill()
            process.wait()

    def _send(self, message: list[Any], fds: list[int] | None = None) -> None:
        """Send a message of a few hundred bytes. A full or closed socket means that the zygote does not answer."""
        assert self._control is not None
        try:
            socket.send_fds(self._control, [msgpack.packb(message)], fds or [])
        except OSError as error:
            detail = f"the zygote takes no orders: {error}"
            raise WorkerFault(InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=detail)) from None

    def _schedule_watch(self) -> None:
        """Schedule a check of the zygote after a lease, unless one is scheduled already."""
        if self._watch is None:
            self._idle_s = 0.0
            self._watch = asyncio.get_running_loop().call_later(_LEASE_S, self._check_progress)

    def _check_progress(self) -> None:
        """Kill a zygote that makes no progress while a request waits for it."""
        self._watch = None
        self._readable()  # its answers may have arrived while this loop was late
        importing = self._preloaded is not None and not self._preloaded.done()
        if self._process is None or not (importing or self._forking):
            return
        try:
            fields = pathlib.Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
            state, cpu = fields[0], int(fields[11]) + int(fields[12])  # `R`, `S`, `T`, …, and ticks in both modes
        except OSError:
            state, cpu = "Z", 0
        (cpu_before, forks_before), self._last_activity = self._last_activity, (cpu, frozenset(self._forking))
        waits = importing or bool(forks_before & self._last_activity[1])
        idle = waits and state != "R" and cpu == cpu_before
        self._idle_s = self._idle_s + _LEASE_S if idle else 0.0
        if state in "Tt" or self._idle_s >= (_IMPORT_LEASE_S if importing else _LEASE_S):
            self._died("the zygote does not answer: it was killed")
        else:
            self._watch = asyncio.get_running_loop().call_later(_LEASE_S, self._check_progress)

    def _readable(self) -> None:
        while self._control is not None:
            try:
                data, fds, _, _ = socket.recv_fds(self._control, 1 << 17, 4)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self._died()
                return
            self._handle(msgpack.unpackb(data), fds)

    def _handle(self, message: list[Any], fds: list[int]) -> None:
        if message[0] == "forked":
            future = self._forking.pop(message[1])
            os.set_inheritable(fds[0], False)
            if future.done():
                os.close(fds[0])
            else:
                future.set_result((message[2], fds[0]))
        elif message[0] == "failed":
            future = self._forking.pop(message[1])
            self._running.pop(message[1])
            if not future.done():
                detail = f"no new process: {message[2]}"
                future.set_exception(WorkerFault(InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=detail)))
        elif message[0] == "exit":
            self._ended(message[1], message[2])
        elif self._preloaded is not None and not self._preloaded.done():
            self._preloaded.set_result(dict(message[1]))

    def _ended(self, key: int, status: int) -> None:
        future = self._running.pop(key, None)
        if future is not None and not future.done():
            future.set_result(status)

    def _died(self, why: str = "the zygote ended") -> None:
        """Kill the zygote's remains before the channel closes, which it would take for the end of this process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._lose(why)

    def _lose(self, why: str = "the zygote ended") -> subprocess.Popen[bytes] | None:
        """Close the channel and fail all requests to this zygote."""
        process, self._process = self._process, None
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
        fault = InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=why)
        if self._preloaded is not None and not self._preloaded.done():
            self._preloaded.set_exception(WorkerFault(fault))
            self._preloaded.exception()  # there may be no waiter
        forking, self._forking = self._forking, {}
        for future in forking.values():
            if not future.done():
                future.set_exception(WorkerFault(fault))
        for key in list(self._running):
            self._ended(key, signal.SIGKILL)
        return process


class ProcessWorker(WorkerChannel):
    """A worker process and its channel. A worker that is not `framed` sends no frames: only its end is observed.
    `ended` holds its wait status."""

    violation = "the worker sent a frame that answers no call of it (does the function write to inherited sockets?)"

    def __init__(
        self,
        pid: int,
        pidfd: int,
        ended: asyncio.Future[int],
        gone: Callable[[], None],
        *,
        framed: bool = True,
    ) -> None:
        super().__init__()
        self.pid = pid
        self.ended = ended
        self._pidfd = pidfd
        self._gone = gone
        self._framed = framed
        if framed:
            self.expect("")

    async def ready(self) -> None:
        """Wait for the end of the init phase. Raises `WorkerFault` if it failed, not retryable if the function's code
        failed."""
        match await self.answer():
            case ["ready", int() | float() as init_s, None]:
                self.init_s = float(init_s)
            case ["ready", int() | float(), str(error)]:
                detail = f"the function did not load: {self._shown(error)}"
                raise WorkerFault(InfraFault(FaultKind.CRASH, retryable=False, detail=detail))
            case _:
                raise self.broke_protocol()

    def _shown(self, text: str) -> str:
        """The text of an error of the function."""
        return text

    def kill(self) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._transport is not None:
            self._transport.abort()

    async def death(self) -> WorkerFault:
        """The cause of the process's death. Retryable, since the cause may be external."""
        detail = "the worker's channel closed"
        try:
            async with asyncio.timeout(_CAUSE_S):
                status = await asyncio.shield(self.ended)
            code = os.waitstatus_to_exitcode(status)
            detail = f"the worker exited with code {code}" if code >= 0 else f"the worker was ended by signal {-code}"
        except TimeoutError:
            pass
        return WorkerFault(InfraFault(FaultKind.CRASH, retryable=True, detail=detail))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # A process that the function left behind may hold the channel open after the worker's death. The last frame,
        # such as the error of a start, may still be unread.
        loop = asyncio.get_running_loop()
        self.ended.add_done_callback(lambda _: loop.call_later(_LAST_FRAME_S, cast(asyncio.Transport, transport).abort))

    def data_received(self, data: bytes) -> None:
        if self._framed:
            super().data_received(data)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._gone()


class MaskedWorker(ProcessWorker):
    """A worker whose function has secrets: they are masked in its output, which is flushed after each call, and in the
    texts of its faults."""

    def __init__(
        self,
        pid: int,
        pidfd: int,
        ended: asyncio.Future[int],
        gone: Callable[[], None],
        *,
        framed: bool = True,
        output: MaskedLog,
    ) -> None:
        super().__init__(pid, pidfd, ended, gone, framed=framed)
        self.output = output

    async def call(self, request: WorkerRequest) -> WorkerReply:
        reply = await super().call(request)
        self.output.flush(request.id)
        if (fault := reply.fault) is not None:
            reply = replace(reply, fault=replace(fault, detail=self._shown(fault.detail)))
        return reply

    def _shown(self, text: str) -> str:
        return self.output.mask.text(text)
