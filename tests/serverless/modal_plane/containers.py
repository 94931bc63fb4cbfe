"""Containers are processes of the real runtime: `python -m modal._container_entrypoint`, one unix socket each.

A `WorkerPool` serves one function version: it starts containers for waiting inputs up to `max_containers`, keeps
`min_containers`, ends idle ones after `scaledown_window`, and waits longer and longer after starts that failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import pathlib
import re
import shutil
import signal
import sys
import time
from collections import deque

import grpclib.server
from modal_proto import api_pb2

from tests.serverless.modal_plane.state import App, Call, Function, LogEntry, State

__all__ = ["Container", "Pool"]

_MOST_CONTAINERS = 4
"""Container limit of a function without `max_containers`: a workspace's own limit on Modal."""

_STARTS_TRIED = 3
"""Failed starts in a row after which waiting inputs fail with the last start's result."""

_BACKOFF_S = (0.2, 5.0)

_Status = api_pb2.GenericResult


class Container:
    """One process of the runtime. `verdict` is why the plane killed it."""

    def __init__(self, task_id: str, pool: Pool) -> None:
        self.id = task_id
        self.pool = pool
        self.running: dict[str, tuple[Call, float, asyncio.TimerHandle]] = {}
        self.cancelled: list[str] = []
        self.ready = False
        self.stopping = False
        self.verdict: api_pb2.GenericResult | None = None
        self.idle_since = time.monotonic()
        self.born = time.monotonic()
        self.process: asyncio.subprocess.Process | None = None

    def kill(self, verdict: api_pb2.GenericResult | None = None) -> None:
        self.verdict = self.verdict or verdict
        self.stopping = True
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Pool:
    def __init__(self, state: State, app: App, function: Function, servicer: object) -> None:
        self.state = state
        self.app = app
        self.function = function
        self.servicer = servicer
        """Makes a container's gRPC handlers: `servicer(container)`."""
        self.pending: deque[Call] = deque()
        self.containers: dict[str, Container] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.change = asyncio.Condition()
        self.current = True
        self.stopped = False
        self.failures = 0
        self.starts = 0
        self.not_before = 0.0
        self.root = state.root / function.id

    @property
    def minimum(self) -> int:
        return self.function.settings.min_containers if not self.stopped else 0

    @property
    def window(self) -> float:
        return self.function.settings.scaledown_window or 60.0

    async def kick(self) -> None:
        async with self.change:
            self.change.notify_all()

    async def submit(self, call: Call) -> None:
        self.pending.append(call)
        await self.kick()

    async def run(self) -> None:
        """The autoscaler: until the app is stopped."""
        try:
            while not self.stopped:
                self._scale()
                async with self.change:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.1):
                            await self.change.wait()
        finally:
            await self.stop()

    async def stop(self) -> None:
        self.stopped = True
        terminated = _Status(status=_Status.GENERIC_STATUS_TERMINATED, exception="the app was stopped")
        for container in list(self.containers.values()):
            container.kill(terminated)
        while self.pending:
            self.pending.popleft().finish(terminated)
        await asyncio.gather(*self.tasks, return_exceptions=True)
        shutil.rmtree(self.root, ignore_errors=True)

    def _scale(self) -> None:
        alive = [c for c in self.containers.values() if not c.stopping]
        busy = sum(bool(c.running) for c in alive)
        most = self.function.settings.max_containers or _MOST_CONTAINERS
        wanted = max(min(most, busy + len(self.pending)), self.minimum)
        if time.monotonic() < self.not_before:
            return
        for _ in range(wanted - len(alive)):
            if self.failures and len([c for c in alive if not c.ready]):
                return  # one attempt at a time while starts fail
            container = Container(self.state.new_id("ta"), self)
            self.containers[container.id] = container
            alive.append(container)
            self.starts += 1
            task = asyncio.get_running_loop().create_task(self._live(container))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def take(self, container: Container) -> Call | None:
        """The next input for a container, or None: it shall end."""
        container.ready = True
        self.failures = 0
        container.idle_since = time.monotonic()
        while not (container.stopping or self.stopped):
            if self.pending:
                call = self.pending.popleft()
                limit = self.function.definition.timeout_secs
                text = f"Task's current input in {call.input_id} hit its timeout of {limit}s"
                verdict = _Status(status=_Status.GENERIC_STATUS_TIMEOUT, exception=text)
                timer = asyncio.get_running_loop().call_later(limit, container.kill, verdict)
                container.running[call.input_id] = (call, time.time(), timer)
                return call
            others = sum(not c.stopping for c in self.containers.values()) - 1
            if time.monotonic() - container.idle_since > self.window and others >= self.minimum:
                break
            async with self.change:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.1):
                        await self.change.wait()
        container.stopping = True
        return None

    def put(self, container: Container, item: api_pb2.FunctionPutOutputsItem) -> None:
        if (entry := container.running.pop(item.input_id, None)) is not None:
            call, started, timer = entry
            timer.cancel()
            call.finish(item.result, task=container.id, data_format=item.data_format, started=started)

    async def _live(self, container: Container) -> None:
        socket = self.state.root / f"{container.id[-8:]}.sock"
        server = grpclib.server.Server([self.servicer(container)])  # type: ignore[operator]
        await server.start(path=str(socket))
        try:
            await self._start(container, socket)
            assert container.process is not None
            async with asyncio.TaskGroup() as group:
                logs = [
                    group.create_task(self._log(container, container.process.stdout, 1)),
                    group.create_task(self._log(container, container.process.stderr, 2)),
                ]
                watch = group.create_task(self._watch(container))
                code = await container.process.wait()
                watch.cancel()
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(container.process.pid, signal.SIGKILL)
                await asyncio.gather(*logs)
            self._ended(container, code)
        finally:
            container.kill()
            self.containers.pop(container.id, None)
            server.close()
            await server.wait_closed()
            socket.unlink(missing_ok=True)
            await self.kick()

    def _ended(self, container: Container, code: int) -> None:
        text = f"Container exited with code {code}"
        result = container.verdict or _Status(
            status=_Status.GENERIC_STATUS_INTERNAL_FAILURE, exception=text, exitcode=code
        )
        for call, started, timer in container.running.values():
            timer.cancel()
            call.finish(result, task=container.id, started=started)
        if container.ready or (container.stopping and container.verdict is None):
            return
        self.failures += 1
        first, most = _BACKOFF_S
        self.not_before = time.monotonic() + min(most, first * 2 ** (self.failures - 1))
        if self.failures >= _STARTS_TRIED:
            if container.verdict is None:
                result = _Status(status=_Status.GENERIC_STATUS_INIT_FAILURE, exception=text, exitcode=code)
            while self.pending:
                self.pending.popleft().finish(result, task=container.id)

    async def _start(self, container: Container, socket: pathlib.Path) -> None:
        home = self.root / "root"
        if not home.exists():
            self._lay_out()
        arguments = api_pb2.ContainerArguments(
            task_id=container.id,
            function_id=self.function.id,
            app_id=self.app.id,
            function_def=self.function.definition,
            environment_name="main",
            app_layout=api_pb2.AppLayout(
                objects=[api_pb2.Object(object_id=self.function.id, function_handle_metadata=self.function.metadata)],
                function_ids={self.function.name: self.function.id},
            ),
        )
        path = self.state.root / f"{container.id[-8:]}.args"
        path.write_bytes(arguments.SerializeToString())
        variables: dict[str, str] = {}
        for secret in self.function.definition.secret_ids:
            variables |= self.state.secrets[secret]
        container.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "modal._container_entrypoint",
            cwd=home,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_die_with_parent,
            env={
                "PATH": os.environ.get("PATH", ""),
                "PYTHONPATH": str(home),
                "PYTHONDONTWRITEBYTECODE": "1",
                "MODAL_SERVER_URL": f"unix://{socket}",
                "MODAL_CONTAINER_ARGUMENTS_PATH": str(path),
                "MODAL_TASK_ID": container.id,
                "MODAL_IS_REMOTE": "1",
                "MODAL_HEARTBEAT_INTERVAL": "0.5",
                **variables,
            },
        )

    def _lay_out(self) -> None:
        """The files of the function's mounts, with `self.root` for '/'."""
        for mount in self.function.definition.mount_ids:
            for file in self.state.mounts.get(mount, ()):
                target = self.root / file.filename.lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(self.state.files[file.sha256_hex])
        (self.root / "root").mkdir(parents=True, exist_ok=True)

    async def _watch(self, container: Container) -> None:
        """The kernel's part: memory over the limit ends the container; so does a start that takes too long."""
        assert container.process is not None
        resources = self.function.definition.resources
        limit = resources.memory_mb_max or 0
        startup = self.function.definition.startup_timeout_secs or 300
        statm = pathlib.Path(f"/proc/{container.process.pid}/statm")
        while True:
            with contextlib.suppress(OSError, IndexError, ValueError):
                pages = int(statm.read_text().split()[1])
                if limit and pages * os.sysconf("SC_PAGE_SIZE") > limit * 2**20:
                    text = f"Container ran out of memory (limit {limit} MiB)"
                    container.kill(_Status(status=_Status.GENERIC_STATUS_KERNEL_OOM_KILL, exception=text))
            if not container.ready and time.monotonic() - container.born > startup:
                text = f"Container did not start within {startup}s"
                container.kill(_Status(status=_Status.GENERIC_STATUS_INIT_FAILURE, exception=text))
            await asyncio.sleep(0.02)

    async def _log(self, container: Container, stream: asyncio.StreamReader | None, descriptor: int) -> None:
        assert stream is not None
        while chunk := await stream.read(1 << 16):
            for text in re.findall(r"[^\n]*\n|[^\n]+", chunk.decode(errors="replace")):
                self.app.logs.append(LogEntry(time.time(), self.function.id, container.id, descriptor, text))


def _die_with_parent() -> None:
    """PR_SET_PDEATHSIG: a plane that is killed leaves no container behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
