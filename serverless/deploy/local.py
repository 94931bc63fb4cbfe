"""The control plane of this machine: functions kept under a directory, with versions, a current one, and rollback.

    <root>/deployed/<function>/state.json            the current version and all kept ones, newest first
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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from serverless import keys
from serverless.deploy.package import Package
from serverless.errors import BackendFailed, PackageError, SpecInvalid, UnknownFunction
from serverless.meter import MeterSink
from serverless.providers.base import DeployedFunction, DeploymentChange, LogLine
from serverless.spec import FunctionSpec
from serverless.types import Cause
from serverless.workers import logs
from serverless.workers.local import LocalBackend

KEPT = 5
"""Versions kept after a deployment for rollbacks, the current one included, at a few KB each."""


class _Version(BaseModel):
    """A version. `number` increases and is the provider's own name of it."""

    version: str
    number: int
    created: str
    spec: dict[str, Any]


class _State(BaseModel):
    current: str = ""
    versions: tuple[_Version, ...] = ()
    warm: int | None = None
    concurrency: int | None = None

    def find(self, function: str, version: str) -> _Version:
        """The version of this number, else the only one with this digest prefix."""
        numbered = [one for one in self.versions if str(one.number) == version]
        found = numbered or [one for one in self.versions if one.version.startswith(version)]
        if len(found) == 1:
            return found[0]
        what = "no version" if not found else "more than one version"
        known = ", ".join(f"{one.version[:12]} ({one.number})" for one in self.versions) or "none"
        raise UnknownFunction(f"function {function} has {what} {version}", remedy=f"it has {known}")


class LocalDeployer:
    """Implements `Deployer`. Its `package` returns packages for `LocalBackend.deploy`.

    A deployment is tried in its own worker before it becomes current.
    """

    provider = "local"

    def __init__(self, root: pathlib.Path, *, meter: MeterSink | None = None, allow_unsafe: bool = False) -> None:
        """The trial of a new version is billed to the meter as a SMOKE call. `allow_unsafe`: also try untrusted
        functions that never use the sandbox."""
        self._root = root.resolve()
        self._meter = meter
        self._allow_unsafe = allow_unsafe

    async def plan(self, package: Package) -> DeploymentChange:
        name = package.spec.name
        state = self._read(name)
        if not state.current:
            return DeploymentChange(name, self.provider, (f"create {name} at version {package.version[:12]}",))
        if state.current == package.version:
            return DeploymentChange(name, self.provider, ())
        lines = [f"version {state.current[:12]} becomes {package.version[:12]}"]
        before = FunctionSpec.model_validate(state.find(name, state.current).spec).identity()
        after = package.spec.identity()
        lines += [f"{key}: {before[key]} becomes {after[key]}" for key in after if before[key] != after[key]]
        return DeploymentChange(name, self.provider, tuple(lines))

    async def deploy(self, package: Package) -> DeployedFunction:
        name = package.spec.name
        with self._locked():
            state = self._read(name)
            if state.current == package.version:
                return replace(self._deployed(name, state, state.find(name, state.current)), unchanged=True)
            await _try(package, self._meter, allow_unsafe=self._allow_unsafe)
            package.install(self._directory(name) / package.version)
            made = _Version(
                version=package.version,
                number=1 + max((one.number for one in state.versions), default=0),
                created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                spec=package.spec.model_dump(mode="json"),
            )
            others = tuple(one for one in state.versions if one.version != package.version)
            kept = (made, *others)[:KEPT]
            state = state.model_copy(update={"current": package.version, "versions": kept})
            self._write(name, state)
            for old in self._directory(name).glob("*/"):
                if old.name not in {one.version for one in kept}:
                    shutil.rmtree(old, ignore_errors=True)
            return self._deployed(name, state, made)

    async def functions(self) -> Sequence[DeployedFunction]:
        found = []
        for directory in sorted((self._root / "deployed").glob("*/")):
            state = self._read(directory.name)
            if state.current:
                found.append(self._deployed(directory.name, state, state.find(directory.name, state.current)))
        return found

    async def versions(self, function: str) -> Sequence[DeployedFunction]:
        state = self._known(function)
        return [self._deployed(function, state, one) for one in state.versions]

    async def rollback(self, function: str, version: str = "") -> DeployedFunction:
        with self._locked():
            state = self._known(function)
            if version:
                chosen = state.find(function, version)
            else:
                order = [one.version for one in state.versions]
                older = state.versions[order.index(state.current) + 1 :]
                if not older:
                    raise UnknownFunction(f"function {function} has no version before its current one")
                chosen = older[0]
            state = state.model_copy(update={"current": chosen.version})
            self._write(function, state)
            return self._deployed(function, state, chosen)

    async def scale(
        self, function: str, *, warm: int | None = None, concurrency: int | None = None
    ) -> DeployedFunction:
        with self._locked():
            given = {"warm": warm, "concurrency": concurrency}
            state = self._known(function).model_copy(update={k: v for k, v in given.items() if v is not None})
            deployed = self._deployed(function, state, state.find(function, state.current))
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

    async def delete(self, function: str) -> None:
        with self._locked():
            self._known(function)
            shutil.rmtree(self._directory(function))
            shutil.rmtree(self._root / "logs" / function, ignore_errors=True)

    def package(self, function: str) -> Package:
        """The current version as it was packed, with its current scaling settings.

        Raises `PackageError` if its files differ from the deployed ones.
        """
        state = self._known(function)
        chosen = state.find(function, state.current)
        directory = self._directory(function) / chosen.version
        files = {
            path.relative_to(directory).as_posix(): path.read_bytes()
            for path in sorted(directory.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        }
        spec = FunctionSpec.model_validate(chosen.spec)
        if keys.content_digest(spec.identity(), files) != chosen.version:
            raise PackageError(
                f"the files of {function} {chosen.version[:12]} were changed after it was deployed",
                remedy="deploy it again",
            )
        deployed = self._deployed(function, state, chosen)
        scaled = {"warm": deployed.warm, "concurrency": deployed.concurrency}
        return Package(spec.model_copy(update=scaled), chosen.version, files)

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
        )


async def _try(package: Package, meter: MeterSink | None, *, allow_unsafe: bool) -> None:
    """Load the function and call it with an empty list; the answer must be a list."""
    async with LocalBackend(meter=meter, allow_unsafe=allow_unsafe) as backend:
        await backend.deploy(package)
        deadline_s = package.spec.init_timeout_s + package.spec.timeout_s
        reply = await backend.invoke(package.spec.name, [], deadline_s=deadline_s, cause=Cause.SMOKE)
    if reply.fault is not None:
        raise BackendFailed(
            f"function {package.spec.name} failed its trial call: {reply.fault.detail}",
            remedy="the version before it stays current; run `rollart rewards test` on its source",
        )
    if reply.body != []:
        raise BackendFailed(
            f"function {package.spec.name} answered an empty list with {reply.body!r:.60}",
            remedy="an answer is a list with one entry per item",
        )
