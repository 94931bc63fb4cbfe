"""The local function provider: handlers under Lambda's contract in warm processes forked from a zygote.

Isolation is that of processes of one user with limits of memory, open files and file size, a time limit, and an
environment without credentials. It contains mistakes, not attackers: untrusted code needs a sandbox.
"""

from __future__ import annotations

import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from serverless.backends.base import Reply
from serverless.backends.host import PoolHost
from serverless.backends.pool import WorkerFault
from serverless.backends.processes import ForkServer, ProcessWorker
from serverless.deploy.package import HANDLER, Package
from serverless.errors import BackendFailed
from serverless.meter import MeterSink, NullMeter
from serverless.types import Cause, FaultKind, InfraFault

__all__ = ["LocalBackend"]

_PRELOADED = ["asyncio", "importlib.util", "json", "serverless.declare", "serverless.errors", "serverless.types"]
"""What the handler file needs."""


class LocalBackend:
    """Implements `Backend` on this machine. Owns a directory, the zygote and, through it, all workers.

    `root` keeps packages and logs (`logs/<function>/<slot>.log`) when given; otherwise both are private and removed
    at the end, even if this process is killed. Nothing is started before the first call, unless a function is `warm`.
    """

    provider = "local"

    def __init__(self, *, meter: MeterSink | None = None, root: pathlib.Path | None = None) -> None:
        self._given = root
        self._root: pathlib.Path | None = None
        self._host = PoolHost(self, provider=self.provider, meter=meter or NullMeter())
        self._server: ForkServer | None = None

    @property
    def zygote_pid(self) -> int | None:
        return self._server.pid if self._server is not None else None

    def workers(self, function: str) -> int:
        """Workers of a function that exist now."""
        return self._host.pool(function).size

    async def deploy(self, package: Package) -> None:
        _installed(package)
        server, root = self._open()
        server.preload(list(package.spec.preload))
        directory = self._directory(package)
        if not directory.exists():
            partial = root / "functions" / f"{package.version}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            package.write(partial)
            partial.rename(directory)
        self._host.deploy(package)

    async def invoke(
        self, function: str, event: Sequence[dict[str, Any]], *, deadline_s: float, cause: Cause = Cause.CALL
    ) -> Reply:
        return await self._host.pool(function).invoke(event, deadline_s, cause)

    async def __aenter__(self) -> LocalBackend:
        await self._host.open()
        self._root = (self._given or pathlib.Path(tempfile.mkdtemp(prefix="rollart-functions-"))).resolve()
        self._root.mkdir(parents=True, exist_ok=True)
        self._server = ForkServer(self._root, preload=list(_PRELOADED), cleanup=self._given is None)
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            await self._host.close()
        finally:
            server, self._server = self._server, None
            if server is not None:
                await server.close()
            if self._given is None and self._root is not None:
                shutil.rmtree(self._root, ignore_errors=True)

    async def start(self, package: Package, worker: str, slot: int, gone: Callable[[], None]) -> ProcessWorker:
        """Launcher: fork a worker and wait until the function is loaded."""
        try:
            return await self._start(package, slot, gone)
        except OSError as error:  # no descriptors, no disk: the machine's state, which may pass
            detail = f"no worker could be started: {error}"
            raise WorkerFault(InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=detail)) from None

    async def _start(self, package: Package, slot: int, gone: Callable[[], None]) -> ProcessWorker:
        server, root = self._open()
        logs = root / "logs" / package.spec.name
        logs.mkdir(parents=True, exist_ok=True)
        order = {
            "name": package.spec.name,
            "version": package.version,
            "handler": HANDLER,
            "memory_mb": package.spec.memory_mb,
            "package": str(self._directory(package)),
            "log": str(logs / f"{slot}.log"),
            "scratch": str(root / "scratch" / package.spec.name / str(slot)),
        }
        process = await server.fork(order, gone)
        try:
            await process.ready()
        except BaseException:
            process.kill()
            raise
        return process

    def _open(self) -> tuple[ForkServer, pathlib.Path]:
        if self._server is None or self._root is None:
            raise BackendFailed("the local backend is not open", remedy="use `async with`")
        return self._server, self._root

    def _directory(self, package: Package) -> pathlib.Path:
        return self._open()[1] / "functions" / package.version


def _installed(package: Package) -> None:
    """Local functions use this environment: what they require must be in it."""
    for requirement in package.spec.requirements:
        name = re.split(r"[\s<>=!~;\[@]", requirement, maxsplit=1)[0]
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            raise BackendFailed(
                f"function {package.spec.name} requires {requirement}, which is not installed here",
                remedy=f"pip install '{requirement}'",
            ) from None
