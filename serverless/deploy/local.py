"""The control plane of this machine: functions kept under a directory, with versions, a current one, and rollback.

    <root>/deployed/<function>/state.json            the current version, a canary, and all kept ones, newest first
    <root>/deployed/<function>/<digest>/             a version's files
    <root>/logs/<function>/<slot>.log                the output of its workers (`LocalBackend(root=root)`)

Processes may share a root: changes happen under a lock, and `state.json` is replaced whole.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import pathlib
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from serverless.deploy.changes import spec_lines, weight_lines
from serverless.deploy.package import Package, check_digest
from serverless.errors import BackendFailed, FunctionFailed, PackageError, SpecInvalid, UnknownFunction
from serverless.meter import MeterSink
from serverless.providers.base import (
    FUNCTION_FAULTS,
    DeployedFunction,
    DeploymentChange,
    LiveVersions,
    LogLine,
    check_canary,
    find_version,
    no_canary,
    previous_version,
)
from serverless.secrets import Secrets
from serverless.spec import FunctionSpec
from serverless.types import Cause
from serverless.workers import logs
from serverless.workers.local import LocalBackend

KEPT = 5
"""Versions kept after a deployment for rollbacks, the current one included, at a few KB each."""


class _Version(BaseModel):
    """A version. `number` is the provider's own name of it, the same as long as it is kept. `activation` is the place
    of its last deployment among those of all versions, by which a rollback finds the one before; 0, in a state of an
    earlier release, is the place of its number."""

    version: str
    number: int
    created: str
    spec: dict[str, Any]
    activation: int = 0

    @property
    def rank(self) -> int:
        return self.activation or self.number


class _State(BaseModel):
    """`current` and `canary` are digests; the canary gets the share `weight` of the calls, the current version the
    rest."""

    current: str = ""
    canary: str = ""
    weight: float = 0.0
    versions: tuple[_Version, ...] = ()
    warm: int | None = None
    concurrency: int | None = None

    def find(self, digest: str) -> _Version:
        return next(one for one in self.versions if one.version == digest)

    def pointed(self, current: str, canary: str = "", weight: float = 0.0) -> _State:
        return self.model_copy(update={"current": current, "canary": canary, "weight": weight})


class LocalDeployer:
    """Implements `Deployer`. Its `package` returns packages for `LocalBackend.deploy`.

    A deployment is tried in its own worker before it becomes current.
    """

    provider = "local"

    def __init__(
        self,
        root: pathlib.Path,
        *,
        meter: MeterSink | None = None,
        allow_unsafe: bool = False,
        secrets: Secrets | None = None,
    ) -> None:
        """The trial of a new version is billed to the meter as a SMOKE call. `allow_unsafe`: also try untrusted
        functions that never use the sandbox. `secrets`: see `PooledBackend`."""
        self._secrets = secrets or Secrets()
        self._root = root.resolve()
        self._meter = meter
        self._allow_unsafe = allow_unsafe

    async def plan(self, package: Package, *, canary: float = 0.0) -> DeploymentChange:
        name = package.spec.name
        check_canary(name, canary)
        self._secrets.require(package.spec)
        state = self._read(name)
        if not state.current:
            return DeploymentChange(name, self.provider, (f"create {name} at version {package.version[:12]}",))
        lines = weight_lines(self._all(name, state), package.version, canary)
        if state.current == package.version:
            return DeploymentChange(name, self.provider, lines)
        try:
            before = await self.package(name)
        except PackageError as error:
            return DeploymentChange(name, self.provider, lines, problem=error.message)
        return DeploymentChange(name, self.provider, (*lines, *spec_lines(before.spec, package.spec)), before)

    async def deploy(self, package: Package, *, canary: float = 0.0) -> DeployedFunction:
        name = package.spec.name
        check_canary(name, canary)
        self._secrets.require(package.spec)
        with self._locked():
            state = self._read(name)
            found = {one.version: one for one in state.versions}
            split = canary > 0.0 and state.current not in ("", package.version)
            wanted = state.pointed(package.version)
            if split:
                wanted = state.pointed(state.current, package.version, canary)
            elif canary and state.current == package.version:
                wanted = state
            if wanted == state:
                return replace(self._deployed(name, state, found[package.version]), unchanged=True)
            if package.version not in (state.current, state.canary):
                left = "the version before it stays current" if state.current else "nothing is deployed"
                await _try(package, self._meter, self._secrets, left, allow_unsafe=self._allow_unsafe)
                package.install(self._directory(name) / package.version)
                known = found.get(package.version) or _Version(
                    version=package.version,
                    number=1 + max((one.number for one in state.versions), default=0),
                    created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                    spec={},
                )
                last = {
                    "activation": 1 + max((one.rank for one in state.versions), default=0),
                    "spec": package.spec.model_dump(mode="json"),
                }
                found[package.version] = known.model_copy(update=last)
            newest = sorted(found.values(), key=lambda one: -one.rank)
            named = (wanted.current, wanted.canary)
            kept = tuple(one for n, one in enumerate(newest) if n < KEPT or one.version in named)
            state = wanted.model_copy(update={"versions": kept})
            self._write(name, state)
            for old in self._directory(name).glob("*/"):
                if old.name not in {one.version for one in kept}:
                    shutil.rmtree(old, ignore_errors=True)
            return self._deployed(name, state, found[package.version])

    async def functions(self) -> Sequence[DeployedFunction]:
        found: list[DeployedFunction] = []
        for directory in sorted((self._root / "deployed").glob("*/")):
            versions = self._all(directory.name, self._read(directory.name))
            found += sorted((one for one in versions if one.weight), key=lambda one: not one.current)
        return found

    async def versions(self, function: str) -> Sequence[DeployedFunction]:
        return self.kept(function)

    async def promote(self, function: str) -> DeployedFunction:
        with self._locked():
            state = self._known(function)
            if not state.canary:
                raise no_canary(function)
            return self._point(function, state, state.canary)

    async def rollback(self, function: str, version: str = "") -> DeployedFunction:
        with self._locked():
            state = self._known(function)
            versions = self._all(function, state)
            if version:
                chosen = find_version(function, versions, version, draw=0.0).version
            elif state.canary:
                chosen = state.current
            else:
                rank = state.find(state.current).rank
                former = {str(one.number) for one in state.versions if one.rank < rank}
                chosen = previous_version(function, versions, former).version
            return self._point(function, state, chosen)

    async def scale(
        self, function: str, *, warm: int | None = None, concurrency: int | None = None
    ) -> DeployedFunction:
        with self._locked():
            given = {"warm": warm, "concurrency": concurrency}
            state = self._known(function).model_copy(update={k: v for k, v in given.items() if v is not None})
            deployed = self._deployed(function, state, state.find(state.current))
            least, most = deployed.warm or 0, deployed.concurrency or 0
            if not 0 <= least <= most or most < 1:
                raise SpecInvalid(
                    f"function {function}: warm={least} and concurrency={most} do not fit",
                    remedy="keep 0 <= warm <= concurrency, and concurrency at least 1",
                )
            self._write(function, state)
            return deployed

    async def logs(self, function: str, *, since_s: float = 3600.0, limit: int = 1000) -> Sequence[LogLine]:
        # The logs may belong to a backend with this root whose function was not deployed here.
        if not (self._root / "logs" / function).is_dir():
            self._known(function)
        return logs.read(self._root / "logs", function, since_s=since_s, limit=limit)

    async def follow(self, function: str, *, since_s: float = 0.0) -> AsyncIterator[LogLine]:
        if not (self._root / "logs" / function).is_dir():
            self._known(function)
        async for line in logs.follow(self._root / "logs" / function, since_s=since_s):
            yield line

    async def delete(self, function: str) -> None:
        with self._locked():
            self._known(function)
            shutil.rmtree(self._directory(function))
            shutil.rmtree(self._root / "logs" / function, ignore_errors=True)

    def kept(self, function: str) -> list[DeployedFunction]:
        """See `versions`."""
        return self._all(function, self._known(function))

    async def package(self, function: str, version: str = "") -> Package:
        """See `Deployer`. The package has the current scaling settings."""
        state = self._known(function)
        known = find_version(function, self._all(function, state), version, draw=0.0) if version else None
        chosen = state.find(known.version if known else state.current)
        directory = self._directory(function) / chosen.version
        files = {
            path.relative_to(directory).as_posix(): path.read_bytes()
            for path in sorted(directory.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        }
        deployed = self._deployed(function, state, chosen)
        scaled = {"warm": deployed.warm, "concurrency": deployed.concurrency}
        spec = FunctionSpec.model_validate(chosen.spec).model_copy(update=scaled)
        return check_digest(Package(spec, chosen.version, files))

    async def __aenter__(self) -> LocalDeployer:
        self._root.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(self, *exc: object) -> None: ...

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Serialise changes across processes; a concurrent one is refused at once."""
        self._root.mkdir(parents=True, exist_ok=True)
        with (self._root / "deploy.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BackendFailed(
                    f"another deployment changes {self._root}", remedy="try again when it has ended"
                ) from None
            yield

    def _directory(self, function: str) -> pathlib.Path:
        return self._root / "deployed" / function

    def _known(self, function: str) -> _State:
        state = self._read(function)
        if not state.current:
            known = ", ".join(d.parent.name for d in sorted((self._root / "deployed").glob("*/state.json"))) or "none"
            raise UnknownFunction(f"no function {function!r} is deployed", remedy=f"deployed: {known}")
        return state

    def _all(self, function: str, state: _State) -> list[DeployedFunction]:
        """The versions, the last deployed one first."""
        newest = sorted(state.versions, key=lambda one: -one.rank)
        return [self._deployed(function, state, one) for one in newest]

    def _point(self, function: str, state: _State, version: str) -> DeployedFunction:
        """Make a version the only current one."""
        state = state.pointed(version)
        self._write(function, state)
        return self._deployed(function, state, state.find(version))

    def _read(self, function: str) -> _State:
        try:
            return _State.model_validate_json((self._directory(function) / "state.json").read_text())
        except FileNotFoundError:
            return _State()

    def _write(self, function: str, state: _State) -> None:
        path = self._directory(function) / "state.json"
        partial = path.with_suffix(".partial")
        with partial.open("w") as file:
            file.write(state.model_dump_json(indent=1))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    def _deployed(self, function: str, state: _State, one: _Version) -> DeployedFunction:
        live = LiveVersions(state.current, state.canary, state.weight)
        return DeployedFunction(
            function=function,
            provider=self.provider,
            version=one.version,
            provider_version=str(one.number),
            current=one.version == state.current,
            created=one.created,
            memory_mb=one.spec["memory_mb"],
            endpoint=str(self._directory(function) / one.version),
            warm=one.spec["warm"] if state.warm is None else state.warm,
            concurrency=one.spec["concurrency"] if state.concurrency is None else state.concurrency,
            weight=live.of(one.version),
            aliases=live.aliases(one.version),
        )


async def _try(package: Package, meter: MeterSink | None, secrets: Secrets, kept: str, *, allow_unsafe: bool) -> None:
    """Load the function and call it with an empty list; the answer must be an empty list. `kept` says what a failure
    leaves deployed. Raises `FunctionFailed`, or another `BackendFailed` if this machine is at fault."""
    async with LocalBackend(meter=meter, allow_unsafe=allow_unsafe, secrets=secrets) as backend:
        await backend.deploy(package)
        deadline_s = package.spec.init_timeout_s + package.spec.timeout_s
        reply = await backend.invoke(package.spec.name, [], deadline_s=deadline_s, cause=Cause.SMOKE)
    if reply.fault is not None:
        failed = FunctionFailed if reply.fault.kind in FUNCTION_FAULTS else BackendFailed
        raise failed(
            f"function {package.spec.name} failed its trial call: {reply.fault.detail}",
            remedy=f"{kept}; run `rollart rewards test` on its source",
        )
    if reply.body != []:
        raise FunctionFailed(
            f"function {package.spec.name} answered an empty list with {reply.body!r:.60}",
            remedy=f"{kept}; an answer is a list with one entry per item",
        )
