"""The worker host of a machine: a program that forks function workers and serves each on its own connection.

`python -m serverless.workers.host [--host ADDRESS] [--port N] [--logs DIR] [--runtime NAME] [--allow-unsafe]`
prints `ready tcp://ADDRESS:PORT`. A client must send SERVERLESS_HOST_TOKEN in its greeting. Frames (`frames`):

  control  in   ["hello", token], then ["deploy", n, spec, version, files] or ["ping", n]
           out  ["ok", pid], then [n, error or None, remedy]
  worker   in   ["hello", token, version, slot], for a function with variables {name: value}, then
                [request id, event, time limit in ms]
           out  ["", "ready", init seconds] or ["", "failed", kind, detail, retryable], then per call the worker's
                answer (`_worker`), or [request id, "died", kind, detail, retryable]

There is one control connection at a time. Its end ends every worker. The end of a worker's connection ends the worker,
and vice versa. So a departed client leaves nothing behind, and a client learns of a death at once. The client
(`hosted`) decides on the number of workers, their functions and their calls.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pathlib
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from serverless import keys
from serverless.deploy.package import Package
from serverless.errors import ServerlessError
from serverless.hosts import GREETING_BYTES, Serving, greeting, run_host, token_matches
from serverless.output import RUN
from serverless.spec import FunctionSpec
from serverless.types import FaultKind, InfraFault
from serverless.workers.channel import encode_message, read_message
from serverless.workers.local import LocalBackend
from serverless.workers.pool import Worker, WorkerFault, WorkerRequest

FUNCTION_HOST_TOKEN = "SERVERLESS_HOST_TOKEN"

_ENDED = (asyncio.IncompleteReadError, ConnectionError, ValueError)
"""Errors of a connection: it closed, it broke, or it sent no valid frame."""


class WorkerHost:
    """Serves connections over an open backend. Owns the deployed packages."""

    def __init__(self, backend: LocalBackend, token: str) -> None:
        self._backend = backend
        self._token = token
        self._packages: dict[str, Package] = {}
        self._controlled = False
        self._workers: set[asyncio.StreamWriter] = set()
        self._connections: set[asyncio.StreamWriter] = set()
        self._ended = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection until it ends."""
        self._connections.add(writer)
        try:
            match await greeting(read_message(reader, largest=GREETING_BYTES)):
                case ["hello", str(token)] if token_matches(token, self._token) and not self._controlled:
                    await self._control(reader, writer)
                case ["hello", str(token), str(version), int(slot)] if (
                    token_matches(token, self._token) and self._controlled
                ):
                    await self._worker(reader, writer, version, slot)
        except (*_ENDED, TimeoutError):
            pass
        finally:
            writer.close()
            self._connections.discard(writer)
            self._ended.set()

    async def close(self) -> None:
        """End every connection and with it every worker."""
        while self._connections:
            for writer in self._connections:
                writer.transport.abort()
            self._ended.clear()
            await self._ended.wait()

    async def _control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._controlled = True
        writer.write(encode_message(["ok", os.getpid()]))
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    match await read_message(reader):
                        case ["ping", int(number)]:
                            writer.write(encode_message([number, None, ""]))
                        case ["deploy", int(number), dict(spec), str(version), dict(files)]:
                            tasks.create_task(self._deploy(writer, number, spec, version, files))
                        case _:
                            raise ValueError("a frame that asks for nothing")
        except* _ENDED:
            pass
        finally:
            self._controlled = False
            for worker in list(self._workers):
                worker.transport.abort()

    async def _deploy(
        self, writer: asyncio.StreamWriter, number: int, spec: dict[str, Any], version: str, files: dict[str, bytes]
    ) -> None:
        error, remedy = None, ""
        try:
            if version not in self._packages:
                package = Package(FunctionSpec.model_validate(spec), version, files)
                if keys.content_digest(package.spec.identity(), files) != version:
                    raise ValueError("its files are not those of its version")
                await self._backend.install(package)
                self._packages[version] = package
        except ServerlessError as failed:
            error, remedy = failed.message, failed.remedy
        except (ValidationError, ValueError, OSError) as failed:
            error = f"a package that could not be laid out: {failed}"
        writer.write(encode_message([number, error, remedy]))

    async def _worker(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, version: str, slot: int
    ) -> None:
        """Serve one worker from its start to its end."""
        requests: asyncio.Queue[WorkerRequest | None] = asyncio.Queue()
        package = self._packages.get(version)
        self._workers.add(writer)
        try:
            if package is not None and (package.spec.env or package.spec.secrets):
                match await read_message(reader):
                    case dict(variables):
                        package = replace(package, variables=variables)
                    case _:
                        raise ValueError("a frame that has no variables")
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(self._life(requests, writer, package, version, slot), name=f"worker {slot}")
                try:
                    while True:
                        match await read_message(reader):
                            case [str(request), list(event), int() | float() as limit_ms]:
                                requests.put_nowait(WorkerRequest(request, event, limit_ms / 1000.0))
                            case _:
                                raise ValueError("a frame that is no call")
                finally:
                    serving.cancel()
        except* _ENDED:
            pass
        finally:
            self._workers.discard(writer)

    async def _life(
        self,
        requests: asyncio.Queue[WorkerRequest | None],
        writer: asyncio.StreamWriter,
        package: Package | None,
        version: str,
        slot: int,
    ) -> None:
        """Run one worker's calls; the caller closes the connection afterwards."""
        worker: Worker | None = None
        current = ""
        try:
            if package is None:
                detail = f"no version {version[:8]} here"
                raise WorkerFault(InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=detail))
            worker = await self._backend.start(package, slot, lambda: requests.put_nowait(None))
            writer.write(encode_message(["", "ready", worker.init_s]))
            while (request := await requests.get()) is not None:
                current = request.id
                answer = await worker.call(request)
                message = ["ok", answer.run_s, answer.body]
                if (fault := answer.fault) is not None:
                    message = ["fault", answer.run_s, *_fault_frame(fault), answer.keep]
                writer.write(encode_message([request.id, *message]))
                await writer.drain()
        except WorkerFault as error:
            writer.write(encode_message([current, "died" if worker else "failed", *_fault_frame(error.fault)]))
        except ConnectionError:
            pass
        finally:
            if worker is not None:
                worker.kill()
            writer.close()


def _fault_frame(fault: InfraFault) -> list[Any]:
    return [str(fault.kind), fault.detail, fault.retryable]


async def _serve(options: argparse.Namespace, serving: Serving) -> None:
    token = os.environ.pop(FUNCTION_HOST_TOKEN, "")
    logs = None if options.logs is None else pathlib.Path(options.logs)
    run = os.environ.get(RUN, "")
    async with LocalBackend(runtime=options.runtime, allow_unsafe=options.allow_unsafe, logs=logs, run=run) as backend:
        host = WorkerHost(backend, token)
        server = await asyncio.start_server(host.serve, options.host, options.port, backlog=1024)
        await serving(options.host, server)
        server.close()
        await host.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="serverless.workers.host")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--logs", help="directory for what workers print; a private one that goes with this program")
    parser.add_argument("--runtime", choices=("rollart", "awslambdaric"), default="rollart")
    parser.add_argument("--allow-unsafe", action="store_true", help="run untrusted functions without the sandbox")
    options = parser.parse_args()
    run_host(lambda serving: _serve(options, serving))


if __name__ == "__main__":
    main()
