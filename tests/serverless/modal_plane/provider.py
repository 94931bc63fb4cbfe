"""A plane in a process of its own, and Modal as a provider of the conformance suite."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from serverless.deploy.modal_app import ModalDeployer
from serverless.deploy.package import Package
from serverless.meter import MeterSink
from serverless.providers.base import Backend
from serverless.providers.modal import ModalBackend
from serverless.providers.modal_client import ModalSettings
from tests.serverless.support import Provider

__all__ = ["MISSING", "ModalFunctions", "PlaneProcess", "running_plane"]

MISSING = "" if importlib.util.find_spec("modal") else "modal is not installed: pip install 'modal~=1.6.4'"

_REPOSITORY = pathlib.Path(__file__).parents[3]


@dataclass
class PlaneProcess:
    """A running plane. `environ` are the variables by which a client finds it."""

    process: subprocess.Popen[str]
    environ: dict[str, str]
    http_url: str
    prefixes: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def state(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.http_url}/state", timeout=60) as response:
            state: dict[str, Any] = json.load(response)
        return state

    def pool(self, app: str, version: int = 0) -> dict[str, Any]:
        """Of the reward of an app's deployment, by default the newest that was ever called or published."""
        pools: list[dict[str, Any]] = self.state()["pools"]
        found = [p for p in pools if (p["app"], p["name"]) == (app, "call") and version in (0, p["version"])]
        return max(found, key=lambda p: int(p["version"]))

    def fail(self, method: str, status: str, message: str = "", times: int = 1) -> None:
        """The next requests of a gRPC method fail so."""
        body = json.dumps({"method": method, "status": status, "message": message, "times": times}).encode()
        with urllib.request.urlopen(f"{self.http_url}/fault", data=body, timeout=60):
            pass

    @contextlib.contextmanager
    def held(self, *methods: str) -> Iterator[None]:
        """Requests of these gRPC methods are answered after the block."""
        self._hold(methods)
        try:
            yield
        finally:
            self._hold(())

    def _hold(self, methods: Sequence[str]) -> None:
        with urllib.request.urlopen(f"{self.http_url}/held", data=json.dumps(methods).encode(), timeout=60):
            pass

    def prefix(self) -> str:
        """Apps that no other test of this plane has."""
        return f"t{next(self.prefixes)}-"

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def running_plane() -> Iterator[PlaneProcess]:
    """A plane, with this process's environment pointing to it meanwhile."""
    # A short path: the names of unix sockets have at most 107 bytes.
    root = tempfile.mkdtemp(prefix="mp-")
    command = [sys.executable, "-m", "tests.serverless.modal_plane.server", root, "ak-test", "as-test"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_REPOSITORY)
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        environ = {
            "MODAL_SERVER_URL": ready["server_url"],
            "MODAL_TOKEN_ID": "ak-test",
            "MODAL_TOKEN_SECRET": "as-test",
            "MODAL_ENVIRONMENT": "main",
            "MODAL_CONFIG_PATH": f"{root}/no.toml",
        }
        plane = PlaneProcess(process, environ, ready["http_url"])
        before = {name: os.environ.get(name) for name in environ}
        os.environ.update(environ)
        try:
            yield plane
        finally:
            _forget_client()
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
            plane.stop()
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        shutil.rmtree(root, ignore_errors=True)


def _forget_client() -> None:
    """Modal keeps the client that it made from the environment, whose plane is gone, for the rest of the process."""
    from modal.client import Client

    Client._set_env_client(None)


class ModalFunctions(Provider):
    """Modal over the plane. The meter also gets the trial of each deployment, which starts a first container."""

    name = "modal"
    spans = False
    missing = MISSING

    def __init__(self, plane: PlaneProcess) -> None:
        self.plane = plane
        self.prefix = plane.prefix()

    @contextlib.asynccontextmanager
    async def open(self, packages: Sequence[Package], meter: MeterSink | None = None) -> AsyncIterator[Backend]:
        settings = ModalSettings(prefix=self.prefix)
        async with ModalDeployer(settings) as deployer, ModalBackend(settings, meter=meter) as backend:
            try:
                for one in packages:
                    await backend.deploy(one)
                yield backend
            finally:
                for function in {deployed.function for deployed in await deployer.functions()}:
                    await deployer.delete(function)

    def workers(self, backend: Backend, function: str) -> int | None:
        return len(self.plane.pool(self.prefix + function)["containers"])
