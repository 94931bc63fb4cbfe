"""Shared parts of the serverless tests: packages of the test functions, items, and backends by name."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import pathlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from rollart.sim import loop as virtual
from rollart.testing import backends
from rollart.testing.backends import Books, Provider, item, until
from serverless.deploy.package import Package
from serverless.meter import MeterSink
from serverless.providers.base import Backend
from serverless.providers.http import Bearer, Endpoint, HttpBackend
from serverless.providers.http_server import FunctionHttpServer
from serverless.providers.simulated import Profile, SimulatedBackend
from serverless.workers.host import WorkerHost
from serverless.workers.local import LocalBackend
from serverless.workers.remote import HostedBackend, WorkerHosts

__all__ = ["Books", "Provider", "item", "until"]

T = TypeVar("T")

FUNCTIONS = pathlib.Path(__file__).parent / "functions"


def package(source: str = "behave", **settings: Any) -> Package:
    """A test function, `file` or `file:attribute`, of these tests or of the conformance suite; its name is the
    attribute's unless given."""
    here = (FUNCTIONS / f"{source.partition(':')[0]}.py").exists()
    return backends.package(source, base=FUNCTIONS if here else backends.REWARDS, **settings)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def descendants(pid: int | None = None) -> list[int]:
    own = children(pid if pid is not None else os.getpid())
    return own + [d for c in own for d in descendants(c)]


class Local(Provider):
    """The local backend on a real loop."""

    name = "local"

    @contextlib.asynccontextmanager
    async def open(self, packages: Sequence[Package], meter: MeterSink | None = None) -> AsyncIterator[Backend]:
        async with LocalBackend(meter=meter) as backend:
            for one in packages:
                await backend.deploy(one)
            yield backend


class Http(Provider):
    """The http backend against our own front over the local backend, on real sockets."""

    name = "http"
    spans = False

    @contextlib.asynccontextmanager
    async def open(self, packages: Sequence[Package], meter: MeterSink | None = None) -> AsyncIterator[Backend]:
        async with LocalBackend() as local, FunctionHttpServer(local, token="t") as front:
            endpoints = {p.spec.name: Endpoint(f"{front.url}/functions/{p.spec.name}", Bearer("t")) for p in packages}
            async with _Hosted(endpoints, local, meter) as backend:
                for one in packages:
                    await backend.deploy(one)
                yield backend

    def workers(self, backend: Backend, function: str) -> int | None:
        return None


class _Hosted(HttpBackend):
    """A test deploys at the caller's side and at the host."""

    def __init__(self, endpoints: dict[str, Endpoint], host: Backend, meter: MeterSink | None) -> None:
        super().__init__(endpoints, meter=meter)
        self._host = host

    async def deploy(self, package: Package) -> None:
        await self._host.deploy(package)
        await super().deploy(package)


class Hosted(Provider):
    """Workers on two machines, each reached by sockets alone."""

    name = "hosted"

    @contextlib.asynccontextmanager
    async def open(self, packages: Sequence[Package], meter: MeterSink | None = None) -> AsyncIterator[Backend]:
        hosts = WorkerHosts()
        async with contextlib.AsyncExitStack() as stack:
            for name in ("one", "two"):
                address = await stack.enter_async_context(_machine("the token"))
                link = await hosts.join(name, address, "the token")
                stack.push_async_callback(link.aclose)
            backend = await stack.enter_async_context(HostedBackend(hosts, meter=meter))
            for one in packages:
                await backend.deploy(one)
            yield backend

    def workers(self, backend: Backend, function: str) -> int | None:
        assert isinstance(backend, HostedBackend)
        return backend.load(function).workers


@contextlib.asynccontextmanager
async def _machine(token: str) -> AsyncIterator[str]:
    """A host of workers on this loop; its address."""
    async with LocalBackend() as local:
        host = WorkerHost(local, token)
        server = await asyncio.start_server(host.serve, "127.0.0.1", 0)
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()
        await host.close()


class RuntimeApi(Provider):
    """The local backend with AWS's own runtime client in its workers."""

    name = "awslambdaric"
    missing = "" if importlib.util.find_spec("awslambdaric") else "awslambdaric is not installed"

    @contextlib.asynccontextmanager
    async def open(self, packages: Sequence[Package], meter: MeterSink | None = None) -> AsyncIterator[Backend]:
        async with LocalBackend(meter=meter, runtime="awslambdaric") as backend:
            for one in packages:
                await backend.deploy(one)
            yield backend


class Simulated(Provider):
    """The simulated backend on virtual time, with the functions' code inline."""

    name = "simulated"
    real = False

    def __init__(self, seed: int | None = None, **profile: Any) -> None:
        self.seed = seed
        self.profile = Profile(**profile)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        return virtual.run(main, seed=self.seed)

    @contextlib.asynccontextmanager
    async def open(self, packages: Sequence[Package], meter: MeterSink | None = None) -> AsyncIterator[Backend]:
        callables = {p.spec.name: _callable(p) for p in packages}
        profiles = dict.fromkeys(callables, self.profile)
        async with SimulatedBackend(callables, meter=meter, profiles=profiles, seed=self.seed or 0) as backend:
            for one in packages:
                await backend.deploy(one)
            yield backend


def _callable(one: Package) -> Any:
    """The user's callable of a package, for a backend that runs it inline."""
    import json

    manifest = json.loads(one.files["rollart_manifest.json"])
    scope: dict[str, Any] = {"__name__": "rollart_function"}
    exec(one.files[f"function/{manifest['file']}"], scope)
    return scope[manifest["attribute"]]


PROVIDERS: dict[str, type[Provider]] = {one.name: one for one in (Local, Hosted, Http, RuntimeApi, Simulated)}
"""Everything that the conformance suite runs on."""
