"""Workers that run AWS's own runtime, `python -m awslambdaric rollart_handler.handler`, served over the Runtime API.

The process is forked from the zygote under the limits of every local worker and then executes that program, so it is
confined, logged, watched and ended like one; only the calls go over HTTP. Each worker has its own server on a port of
the loopback interface, which distinguishes the workers.

Source: the AWS Lambda developer guide, "Using the Lambda runtime API" (2018-06-01).
"""

from __future__ import annotations

import asyncio
import datetime
import json
import pathlib
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from serverless.deploy.package import HANDLER, Package
from serverless.providers.faults import function_fault
from serverless.types import FaultKind, InfraFault
from serverless.workers.logs import append_end
from serverless.workers.pool import Worker, WorkerFault, WorkerReply, WorkerRequest
from serverless.workers.processes import ProcessWorker

_RUNTIME = "/2018-06-01/runtime/"

_EVENT_BYTES = 6 * 2**20
"""Lambda's limit of an event and of an answer."""


async def start_runtime(
    package: Package, log: pathlib.Path, fork: Callable[[dict[str, Any]], Awaitable[ProcessWorker]]
) -> Worker:
    """Start a worker and wait until the function is loaded. `fork` makes a confined process, which executes the program
    and environment that it is given; the Python of this process must have awslambdaric."""
    began = asyncio.get_running_loop().time()
    server = _Server(package.spec.name)
    environment = {
        "AWS_LAMBDA_RUNTIME_API": await server.open(),
        "PYTHONPATH": "",  # a package contains all its modules
        "AWS_DEFAULT_REGION": "local",
        "AWS_REGION": "local",
    }
    try:
        process = await fork({"exec": [sys.executable, "-m", "awslambdaric", HANDLER], "environment": environment})
    except BaseException:
        server.close()
        raise
    worker = _RuntimeWorker(process, server, log)
    try:
        await worker.ready()
    except BaseException:
        worker.kill()
        raise
    worker.init_s = asyncio.get_running_loop().time() - began
    return worker


class _RuntimeWorker:
    """One process and its server. Implements `pool.Worker`."""

    def __init__(self, process: ProcessWorker, server: _Server, log: pathlib.Path) -> None:
        self.init_s = 0.0
        self._process = process
        self._server = server
        self._log = log
        server.broken = process.kill

    @property
    def alive(self) -> bool:
        return self._process.alive

    async def ready(self) -> None:
        error = await self._or_death(self._server.ready)
        if error is not None:
            fault = InfraFault(FaultKind.CRASH, retryable=False, detail=f"the function did not load: {error}"[:500])
            raise WorkerFault(fault)

    async def call(self, request: WorkerRequest) -> WorkerReply:
        loop = asyncio.get_running_loop()
        try:
            body = json.dumps(request.event).encode()
        except (TypeError, ValueError) as error:
            detail = f"the event has no wire form: {error}"
            return WorkerReply(None, 0.0, InfraFault(FaultKind.ENVIRONMENT, retryable=False, detail=detail))
        size = self._log.stat().st_size if self._log.exists() else 0
        began = loop.time()
        failed, answer = await self._or_death(self._server.ask(request, body))
        run_s = loop.time() - began
        append_end(self._log, size, request.id)
        if failed:
            fault = function_fault(answer, None)
            return WorkerReply(None, run_s, fault, keep=fault.kind is not FaultKind.OUT_OF_MEMORY)
        try:
            return WorkerReply(json.loads(answer), run_s)
        except ValueError as error:
            detail = f"the answer is not JSON: {error}"
            return WorkerReply(None, run_s, InfraFault(FaultKind.BAD_ANSWER, retryable=False, detail=detail))

    def kill(self) -> None:
        self._process.kill()
        self._server.close()

    async def _or_death(self, awaited: asyncio.Future[Any]) -> Any:
        """Await a result. Raises `WorkerFault` if the process ends first."""

        def ended(_: object) -> None:
            awaited.cancel()

        self._process.ended.add_done_callback(ended)
        try:
            return await awaited
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise await self._process.death() from None
        finally:
            self._process.ended.remove_done_callback(ended)


class _Server:
    """The Runtime API of one worker: hands out one event at a time and takes its answer.

    `ask` is unblocked by the answer; the worker's own `next` by `ask`, and by `close`. `broken` is called if the worker
    requests an event before it has answered the last one, or answers another request than the current one.
    """

    def __init__(self, function: str) -> None:
        loop = asyncio.get_running_loop()
        self._function = function
        self.ready: asyncio.Future[str | None] = loop.create_future()
        self.broken: Callable[[], None] = lambda: None
        self._taken = False
        self._asked: asyncio.Queue[tuple[WorkerRequest, bytes] | None] = asyncio.Queue()
        self._answer: asyncio.Future[tuple[bool, bytes]] | None = None
        self._current = ""
        self._server: asyncio.Server | None = None

    async def open(self) -> str:
        """Listen. Returns the address for AWS_LAMBDA_RUNTIME_API."""
        # asyncio sets TCP_NODELAY: with Nagle's algorithm a call takes 40 ms more.
        handler = web.Server(self._handle, access_log=None, handler_cancellation=True)
        self._server = await asyncio.get_running_loop().create_server(handler, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    def ask(self, request: WorkerRequest, body: bytes) -> asyncio.Future[tuple[bool, bytes]]:
        """Hand out an event. The result is True if the function failed, and its answer."""
        self._answer = asyncio.get_running_loop().create_future()
        self._current = request.id
        self._asked.put_nowait((request, body))
        return self._answer

    def close(self) -> None:
        self._asked.put_nowait(None)
        if self._server is not None:
            self._server.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path.removeprefix(_RUNTIME)
        if request.method == "GET" and path == "invocation/next":
            return await self._next()
        if request.method == "POST" and path == "init/error":
            error = json.loads(await request.content.read())
            if not self.ready.done():
                self.ready.set_result(f"{error.get('errorType')}: {error.get('errorMessage')}")
            return web.json_response(status=202, data={"status": "OK"})
        kind, _, rest = path.partition("/")
        key, _, what = rest.partition("/")
        if request.method != "POST" or kind != "invocation" or what not in ("response", "error"):
            return web.json_response(status=404, data={"errorType": "NotFound", "errorMessage": request.path})
        if key != self._current or self._answer is None:
            self.broken()
            return web.json_response(status=400, data={"errorType": "InvalidRequestID", "errorMessage": key})
        body = await request.content.read()  # aiohttp's own limit is 1 MB
        if len(body) > _EVENT_BYTES:
            text = f"Response payload size exceeded maximum allowed payload size ({len(body)} > {_EVENT_BYTES} bytes)."
            error = {"errorType": "Function.ResponseSizeTooLarge", "errorMessage": text}
            body, what = json.dumps(error).encode(), "error"
        if not self._answer.done():
            self._answer.set_result((what == "error", body))
        self._current, self._taken = "", False
        return web.json_response(status=202, data={"status": "OK"})

    async def _next(self) -> web.Response:
        if not self.ready.done():
            self.ready.set_result(None)
        if self._taken:
            self.broken()
            error = {"errorType": "Forbidden", "errorMessage": "the worker has not answered its last event"}
            return web.json_response(status=403, data=error)
        self._taken = True
        asked = await self._asked.get()
        if asked is None:
            return web.json_response(status=410, data={"errorType": "Closed", "errorMessage": "the worker ends"})
        request, body = asked
        deadline = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=request.remaining_s)
        headers = {
            "Lambda-Runtime-Aws-Request-Id": request.id,
            "Lambda-Runtime-Deadline-Ms": str(int(deadline.timestamp() * 1000.0)),
            "Lambda-Runtime-Invoked-Function-Arn": f"arn:aws:lambda:local:000000000000:function:{self._function}",
            "Content-Type": "application/json",
        }
        return web.Response(body=body, headers=headers)
