"""Deploys functions to Modal: `Deployer` over the public Modal client.

A function is the app `<prefix><name>` with one Modal function; each package is a deployment of the app. The app's tags
name the live deployment (`backends.modal_versions`). Callers pin that deployment, so a new one is tried before it
receives calls, and a rollback only moves the tag.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import decimal
import importlib
import json
import math
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from serverless.deploy.modal_entry import VERSION
from serverless.deploy.package import Package
from serverless.errors import BackendFailed, PackageError, ServerlessError, SpecInvalid
from serverless.meter import MeterSink, NullMeter
from serverless.providers import modal_client
from serverless.providers.base import DeployedFunction, DeploymentChange, LogLine, rollback_number
from serverless.providers.modal_client import (
    PROVIDER,
    DeploymentTags,
    ModalNamespace,
    ModalReply,
    ModalSettings,
    PinnedFunction,
    call_pinned,
    pin,
)
from serverless.spec import FunctionSpec
from serverless.types import Cause, FaultKind, InfraFault

_ENTRY = "serverless.deploy.modal_entry"

_SHIPPED = ("deploy/__init__.py", "deploy/modal_entry.py")
"""Files of `serverless` in the container beyond those of every package."""

_START_S = 60.0
"""Start-up allowance of a container beyond the function's own `init_timeout_s`: Modal loads its image first."""

_WINDOW_S = (2, 3600)
"""Modal's bounds of `scaledown_window`, in seconds."""


class ModalDeployer:
    """Implements `Deployer`. Owns a client connection. Its methods may be called by any number of tasks; changes run
    one at a time.

    `warm` becomes `min_containers`, `concurrency` `max_containers` and `keep_alive_s` the `scaledown_window`. Values
    set by `scale` persist across deployments of a package that does not set them. Modal's time limits are whole
    seconds; fractions are rounded up. Untrusted functions get no network and a container per call.
    """

    provider = PROVIDER

    def __init__(self, settings: ModalSettings | None = None, *, meter: MeterSink | None = None) -> None:
        self.settings = settings or ModalSettings()
        self._meter = meter or NullMeter()
        self._stack = contextlib.AsyncExitStack()
        self._at: ModalNamespace | None = None
        self._turn = asyncio.Lock()

    async def plan(self, package: Package) -> DeploymentChange:
        name = package.spec.name
        namespace = self.namespace
        with modal_client.translate_errors():
            _, deployments = await namespace.find(name)
            if not deployments.live:
                lines = [f"create app {namespace.app(name)} at version {package.version[:12]}"]
            elif deployments.versions[deployments.live] != package.version:
                lines = [f"version {deployments.versions[deployments.live][:12]} -> {package.version[:12]}"]
                if package.version in deployments.versions.values():
                    lines = [f"{lines[0]} (kept, no upload)"]
            else:
                changes = await self._scaling(name, deployments.live, package.spec)
                lines = [f"{key} -> {value}" for key, value in changes.items()]
        return DeploymentChange(name, self.provider, tuple(lines))

    async def deploy(self, package: Package, *, current: bool = True) -> DeployedFunction:
        """See `Deployer`. The trial of a new version is billed to the meter as a SMOKE call. With `current` False an
        existing live version stays live, and the new one is not kept for a rollback."""
        check_pinned(package)
        name, namespace = package.spec.name, self.namespace
        async with self._turn:
            with modal_client.translate_errors():
                app, deployments = await namespace.find(name)
                kept = [n for n, digest in deployments.versions.items() if digest == package.version]
                if kept:
                    number = deployments.live if deployments.live in kept else max(kept)
                    if not current and deployments.live:
                        return await self._deployed(name, deployments, number)
                    before, deployments = deployments, await self._point(name, app, deployments, number)
                    changes = await self._scaling(name, number, package.spec)
                    if changes:
                        await namespace.function(name, number).autoscaler.update.aio(**changes)
                    unchanged = before.live == number and not changes
                    return replace(await self._deployed(name, deployments, number), unchanged=unchanged)
            return await self._new(package, deployments, current=current or not deployments.live)

    async def functions(self) -> Sequence[DeployedFunction]:
        namespace = self.namespace
        with modal_client.translate_errors():
            found = [(name, await namespace.get(name)) for name in await namespace.functions()]
            return [await self._deployed(name, deployments, deployments.live) for name, (_, deployments) in found]

    async def versions(self, function: str) -> Sequence[DeployedFunction]:
        with modal_client.translate_errors():
            _, deployments = await self.namespace.get(function)
            return [await self._deployed(function, deployments, n) for n in sorted(deployments.versions, reverse=True)]

    async def rollback(self, function: str, version: str = "") -> DeployedFunction:
        async with self._turn:
            with modal_client.translate_errors():
                app, deployments = await self.namespace.get(function)
                former = [n for n in deployments.versions if n < deployments.live]
                number = rollback_number(function, deployments.versions, former, version, noun="deployment")
                return await self._deployed(function, await self._point(function, app, deployments, number), number)

    async def scale(
        self, function: str, *, warm: int | None = None, concurrency: int | None = None
    ) -> DeployedFunction:
        """Scale the live version, until the next deployment of a package that sets these values."""
        if (warm or 0) < 0 or (concurrency is not None and concurrency < 1):
            raise SpecInvalid(f"{function}: warm={warm}, concurrency={concurrency}: not less than 0 and 1")
        wanted = {"min_containers": warm, "max_containers": concurrency}
        async with self._turn:
            with modal_client.translate_errors():
                _, deployments = await self.namespace.get(function)
                handle = self.namespace.function(function, deployments.live)
                await handle.autoscaler.update.aio(**{k: v for k, v in wanted.items() if v is not None})
                return await self._deployed(function, deployments, deployments.live)

    async def logs(self, function: str, *, since_s: float = 3600.0, limit: int = 1000) -> Sequence[LogLine]:
        since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=since_s)
        with modal_client.translate_errors():
            app, _ = await self.namespace.get(function)
            entries = [entry async for entry in app.logs.fetch.aio(since=since)]
        entries.sort(key=lambda entry: entry.timestamp)
        return [
            LogLine(entry.timestamp.isoformat(timespec="milliseconds"), str(entry.source), entry.message.rstrip("\n"))
            for entry in entries[-limit:]
        ]

    async def delete(self, function: str) -> None:
        async with self._turn:
            with modal_client.translate_errors():
                app, _ = await self.namespace.get(function)
                await app.stop.aio(client=self.namespace.client)

    async def rates(self) -> Mapping[str, decimal.Decimal]:
        """The workspace's price list: US dollars per unit, by Modal's names."""
        with modal_client.translate_errors():
            workspace = modal_client.modal_library().Workspace.from_context(client=self.namespace.client)
            return dict(await workspace.billing.rates.aio())

    async def __aenter__(self) -> ModalDeployer:
        client = await self._stack.enter_async_context(modal_client.open_client())
        self._at = ModalNamespace(client, self.settings.prefix, self.settings.environment)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._at = None
        await self._stack.aclose()

    @property
    def namespace(self) -> ModalNamespace:
        """The namespace for look-ups, while the deployer is open."""
        if self._at is None:
            raise BackendFailed("the modal deployer is not open", remedy="use `async with`")
        return self._at

    async def _new(self, package: Package, deployments: DeploymentTags, *, current: bool) -> DeployedFunction:
        """Deploy a version, try it and make it live. On failure the live version stays, and an app without one is
        stopped."""
        name, namespace = package.spec.name, self.namespace
        with modal_client.translate_errors():
            app = await self._publish(package, deployments)
            number = (await app.info.aio(refresh=True)).lifecycle.version
        try:
            if number is None:
                raise BackendFailed(f"Modal does not say which deployment of {namespace.app(name)} this is")
            with modal_client.translate_errors():
                target = await pin(namespace, name, number, package.version)
                await self._try(target, package)
                now = datetime.datetime.now(datetime.UTC).timestamp()
                fresh = deployments.added(number, package.version, now, keep=self.settings.keep)
                if not current:
                    return await self._deployed(name, replace(fresh, live=deployments.live), number)
                bounds = await self._set(name, deployments.live)
                for option, key in (("warm", "min_containers"), ("concurrency", "max_containers")):
                    if option in package.spec.model_fields_set:
                        bounds[key] = getattr(package.spec, option)
                if bounds:
                    await target.handle.autoscaler.update.aio(**bounds)
                await self._cool(name, deployments.live)
                await app.set_tags.aio(fresh.tags(), client=namespace.client)
                return await self._deployed(name, fresh, number)
        except BaseException:
            if not deployments.live:
                with contextlib.suppress(Exception):
                    await app.stop.aio(client=namespace.client)
            raise

    async def _publish(self, package: Package, deployments: DeploymentTags) -> Any:
        """Upload and build. The app keeps its tags, so the new deployment receives no calls yet."""
        modal = modal_client.modal_library()
        name, namespace = package.spec.name, self.namespace
        entry = importlib.import_module(_ENTRY)
        with tempfile.TemporaryDirectory(prefix="rollart-modal-") as directory:
            replace(package, files=container_files(package)).write(pathlib.Path(directory))
            app = modal.App(namespace.app(name), tags=deployments.tags(), include_source=False)
            image = modal.Image.debian_slim(python_version=self.settings.python or python_version())
            if package.spec.requirements:
                image = image.uv_pip_install(*package.spec.requirements)
            options = container_options(package.spec)
            app.function(image=image.add_local_dir(directory, "/root"), **options)(entry.call)
            await app.deploy.aio(
                client=namespace.client, environment_name=namespace.environment or None, tag=package.version[:12]
            )
        return app

    async def _try(self, target: PinnedFunction, package: Package) -> None:
        """Invoke with an empty list; the answer must be a list."""
        loop = asyncio.get_running_loop()
        t0 = loop.time()
        limit = package.spec.init_timeout_s + package.spec.timeout_s + 2 * _START_S
        answer = ModalReply(fault=InfraFault(FaultKind.TIMEOUT, retryable=False, detail=f"no answer in {limit:g} s"))
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit):
                    answer = await call_pinned(target, [], "smoke")
        finally:
            self._meter.invocation(
                modal_client.bill(target, answer, t0, loop.time(), limit_s=limit, items=0, cause=Cause.SMOKE)
            )
        what = answer.fault.detail if answer.fault else f"it answered {answer.body!r:.80}"
        if answer.fault is not None or not isinstance(answer.body, list):
            raise BackendFailed(
                f"the new version of {target.name} failed its trial: {what}",
                remedy="the version before it stays; `rollart rewards test` runs it here",
            )

    async def _point(self, name: str, app: Any, deployments: DeploymentTags, number: int) -> DeploymentTags:
        """Make a kept version live, with the container bounds of the previous one."""
        if number == deployments.live:
            return deployments
        warm = (await self._set(name, deployments.live)).get("min_containers", 0)
        await self.namespace.function(name, number).autoscaler.update.aio(min_containers=warm)
        await self._cool(name, deployments.live)
        pointed = replace(deployments, live=number)
        await app.set_tags.aio(pointed.tags(), client=self.namespace.client)
        return pointed

    async def _set(self, name: str, number: int) -> dict[str, int]:
        """The current container bounds of a version."""
        if not number:
            return {}
        now = await self.namespace.function(name, number).autoscaler.settings.aio()
        bounds = {"min_containers": now.min_containers, "max_containers": now.max_containers}
        return {key: value for key, value in bounds.items() if value}

    async def _cool(self, name: str, number: int) -> None:
        """Keep no containers warm for a version that is no longer live. Called first, so that a failure has changed
        nothing else."""
        if number:
            with contextlib.suppress(modal_client.modal_library().exception.NotFoundError):
                await self.namespace.function(name, number).autoscaler.update.aio(min_containers=0)

    async def _scaling(self, name: str, number: int, spec: FunctionSpec) -> dict[str, int]:
        """The autoscaler settings that differ from the explicit settings of a spec."""
        now = await self.namespace.function(name, number).autoscaler.settings.aio()
        asked = {
            "warm": ("min_containers", now.min_containers or 0, spec.warm),
            "concurrency": ("max_containers", now.max_containers, spec.concurrency),
            "keep_alive_s": ("scaledown_window", now.scaledown_window, _window(spec)),
        }
        return {
            key: wanted
            for option, (key, current, wanted) in asked.items()
            if option in spec.model_fields_set and current != wanted
        }

    async def _deployed(self, name: str, deployments: DeploymentTags, number: int) -> DeployedFunction:
        namespace, version, problem = self.namespace, deployments.versions[number], ""
        memory_mb: int = 0
        warm: int | None = None
        concurrency: int | None = None
        try:
            with modal_client.translate_errors():
                target = await pin(namespace, name, number, version)
                settings = await target.handle.autoscaler.settings.aio()
            memory_mb = target.memory_mb
            warm, concurrency = settings.min_containers or 0, settings.max_containers or 0
        except ServerlessError as error:  # only the displayed details are missing
            problem = error.message
        return DeployedFunction(
            function=name,
            provider=self.provider,
            version=version,
            provider_version=str(number),
            current=number == deployments.live,
            created=deployments.created(number),
            memory_mb=memory_mb,
            endpoint=f"{namespace.app(name)}@{number}",
            warm=warm,
            concurrency=concurrency,
            problem=problem,
        )


def container_files(package: Package) -> dict[str, bytes]:
    """The files under a container's root, by relative path: the package, its version and the entry module for calls."""
    ours = pathlib.Path(__file__).parents[1]
    version = {VERSION: package.version.encode()}
    return {**package.files, **version, **{f"serverless/{name}": (ours / name).read_bytes() for name in _SHIPPED}}


def container_options(spec: FunctionSpec) -> dict[str, Any]:
    """The arguments of `app.function`. No container is kept warm before a version has passed its trial."""
    untrusted = spec.trust == "untrusted"
    return {
        "cpu": spec.cpu or None,
        "memory": (spec.memory_mb, spec.memory_mb),
        "gpu": spec.gpu or None,
        "timeout": math.ceil(spec.timeout_s),
        "startup_timeout": math.ceil(spec.init_timeout_s + _START_S),
        "min_containers": 0,
        "max_containers": spec.concurrency,
        "scaledown_window": _window(spec),
        "retries": None,
        "block_network": untrusted,
        "single_use_containers": untrusted,
        "restrict_modal_access": True,
        "include_source": False,
        "_experimental_restrict_output": True,
    }


def _window(spec: FunctionSpec) -> int:
    low, high = _WINDOW_S
    return min(high, max(low, math.ceil(spec.keep_alive_s)))


def python_version() -> str:
    """The minor version of this interpreter, as Modal names it."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def check_pinned(package: Package) -> None:
    """Raise `PackageError` unless every requirement is pinned: otherwise two builds of an image would differ."""
    unpinned = json.loads(package.files["rollart_manifest.json"]).get("unpinned", [])
    if unpinned:
        raise PackageError(
            f"function {package.spec.name} requires {', '.join(unpinned)}, in no exact version",
            remedy="install it here before packing, or pin it with ==",
        )
