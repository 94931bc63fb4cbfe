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
from serverless.providers.faults import decode_answer, function_fault
from serverless.types import FaultKind, InfraFault
from serverless.workers._worker import VARIABLES_FD
from serverless.workers.logs import append_end
from serverless.workers.pool import Worker, WorkerFault, WorkerReply, WorkerRequest
from serverless.workers.processes import MaskedWorker, ProcessWorker

_RUNTIME = "/2018-06-01/runtime/"

_EVENT_BYTES = 6 * 2**20
"""Lambda's limit of an event and of an answer."""


_WITH_VARIABLES = f"""
import ctypes, json, os, runpy
with os.fdopen(int(os.environ.pop("{VARIABLES_FD}"))) as file:
    os.environ.update(json.load(file))
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
runpy.run_module("awslambdaric", run_name="__main__", alter_sys=True)
"""
"""Runs the runtime client with the function's variables, which its command line and initial environment do not have."""


async def start_runtime(
    package: Package, log: pathlib.Path, fork: Callable[[dict[str, Any]], Awaitable[ProcessWorker]]
) -> Worker:
    """Start a worker and wait until the function is loaded. `fork` makes a confined process, which executes the program
    and environment that it is given; the Python of this process must have awslambdaric."""
    began = asyncio.get_running_loop().time()
    worker = _RuntimeWorker(package.spec.name, log)
    environment = {
        "AWS_LAMBDA_RUNTIME_API": await worker.open(),
        "PYTHONPATH": "",  # a package contains all its modules
        "AWS_DEFAULT_REGION": "local",
        "AWS_REGION": "local",
    }
    program = ["-c", _WITH_VARIABLES] if package.variables else ["-m", "awslambdaric"]
    try:
        worker.process = await fork({"exec": [sys.executable, *program, HANDLER], "environment": environment})
        await worker.ready()
    except BaseException:
        worker.kill()
        raise
    worker.init_s = asyncio.get_running_loop().time() - began
    return worker


class _RuntimeWorker:
    """A process and the Runtime API that serves it: hands out one event at a time and takes its answer. Implements
    `pool.Worker`.

    `call` is unblocked by the answer or by the end of the process; the process's own `next` by `call`, and by `kill`.
    The process is killed if it requests an event before it has answered the last one, or answers another request than
    the current one.
    """

    def __init__(self, function: str, log: pathlib.Path) -> None:
        self.init_s = 0.0
        self.process: ProcessWorker | None = None
        self._function = function
        self._log = log
        self._ready: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._asked: asyncio.Queue[tuple[WorkerRequest, bytes] | None] = asyncio.Queue()
        self._taken = False
        self._answer: asyncio.Future[tuple[bool, bytes]] | None = None
        self._current = ""
        self._server: asyncio.Server | None = None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.alive

    async def open(self) -> str:
        """Listen. Returns the address for AWS_LAMBDA_RUNTIME_API."""
        # asyncio sets TCP_NODELAY: with Nagle's algorithm a call takes 40 ms more.
        handler = web.Server(self._handle, access_log=None, handler_cancellation=True)
        self._server = await asyncio.get_running_loop().create_server(handler, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def ready(self) -> None:
        error = await self._or_death(self._ready)
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
        self._answer, self._current = loop.create_future(), request.id
        self._asked.put_nowait((request, body))
        failed, answer = await self._or_death(self._answer)
        run_s = loop.time() - began
        assert self.process is not None
        if isinstance(self.process, MaskedWorker):
            self.process.output.flush(request.id)
        else:
            append_end(self._log, size, request.id)
        if failed:
            fault = function_fault(answer, None)
            return WorkerReply(None, run_s, fault, keep=fault.kind is not FaultKind.OUT_OF_MEMORY)
        parsed, invalid = decode_answer(answer)
        return WorkerReply(parsed, run_s, invalid)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
        self._asked.put_nowait(None)
        if self._server is not None:
            self._server.close()

    async def _or_death(self, awaited: asyncio.Future[Any]) -> Any:
        """Await a result. Raises `WorkerFault` if the process ends first."""

        def ended(_: object) -> None:
            awaited.cancel()

        assert self.process is not None, "it was forked"
        self.process.ended.add_done_callback(ended)
        try:
            return await awaited
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise await self.process.death() from None
        finally:
            self.process.ended.remove_done_callback(ended)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path.removeprefix(_RUNTIME)
        if request.method == "GET" and path == "invocation/next":
            return await self._next()
        if request.method == "POST" and path == "init/error":
            error = json.loads(await request.content.read())
            if not self._ready.done():
                self._ready.set_result(f"{error.get('errorType')}: {error.get('errorMessage')}")
            return web.json_response(status=202, data={"status": "OK"})
        kind, _, rest = path.partition("/")
        key, _, what = rest.partition("/")
        if request.method != "POST" or kind != "invocation" or what not in ("response", "error"):
            return web.json_response(status=404, data={"errorType": "NotFound", "errorMessage": request.path})
        if key != self._current or self._answer is None:
            self._break()
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
        if not self._ready.done():
            self._ready.set_result(None)
        if self._taken:
            self._break()
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

    def _break(self) -> None:
        if self.process is not None:
            self.process.kill()
