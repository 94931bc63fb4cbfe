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
import hashlib
import importlib
import json
import math
import pathlib
import shlex
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from serverless.analysis.imports import check_declared
from serverless.deploy.changes import spec_lines, weight_lines
from serverless.deploy.dockerfile import IMAGE
from serverless.deploy.images import modal_lines, python_version
from serverless.deploy.modal_entry import VERSION
from serverless.deploy.package import Package, restore_archive, with_record
from serverless.deploy.requirements import index_urls
from serverless.errors import (
    BackendFailed,
    FunctionFailed,
    PackageError,
    ServerlessError,
    SpecInvalid,
    UnknownFunction,
)
from serverless.meter import MeterSink, NullMeter
from serverless.output import LineReader
from serverless.providers import modal_client
from serverless.providers.base import (
    FUNCTION_FAULTS,
    DeployedFunction,
    DeploymentChange,
    LiveVersions,
    LogLine,
    check_canary,
    find_version,
    log_line,
    no_canary,
    previous_version,
)
from serverless.providers.modal_client import (
    PACKAGE,
    PROVIDER,
    DeploymentTags,
    ModalNamespace,
    ModalReply,
    ModalSettings,
    PinnedFunction,
    call_pinned,
    pin,
)
from serverless.secrets import SecretMissing, Secrets
from serverless.spec import FunctionSpec
from serverless.types import Cause, FaultKind, InfraFault

_ENTRY = "serverless.deploy.modal_entry"
_FILES = "serverless.deploy.modal_files"

_SHIPPED = ("deploy/__init__.py", "deploy/modal_entry.py")
"""Files of `serverless` in the container beyond those of every package."""

_BEST_MATCH = "--index-strategy unsafe-best-match"
"""uv compares the versions of all indexes, as pip does: an index of builds has old versions of other packages."""

_START_S = 60.0
"""Start-up allowance of a container beyond the function's own `init_timeout_s`: Modal loads its image first."""

_READING = {
    "memory": 128,
    "timeout": 300,
    "scaledown_window": 2,
    "block_network": True,
    "restrict_modal_access": True,
    "include_source": False,
    "_experimental_restrict_output": True,
}
"""The arguments of `app.function` for the function that gives the package back."""

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

    def __init__(
        self, settings: ModalSettings | None = None, *, meter: MeterSink | None = None, secrets: Secrets | None = None
    ) -> None:
        self.settings = settings or ModalSettings()
        self._secrets = secrets or Secrets()
        self._meter = meter or NullMeter()
        self._stack = contextlib.AsyncExitStack()
        self._at: ModalNamespace | None = None
        self._turn = asyncio.Lock()

    async def plan(self, package: Package, *, canary: float = 0.0) -> DeploymentChange:
        """See `Deployer`. The deployed package is read from a container of its own, which is billed for a second."""
        check_declared(package.spec, package.files, PROVIDER)
        name = package.spec.name
        check_canary(name, canary)
        namespace = self.namespace
        before, problem = None, ""
        with modal_client.translate_errors():
            await self._require_secrets(package.spec)
            _, deployments = await namespace.find(name)
            secrets = self._secret_sources(package.spec)
            kept = deployments.matching(package.version, secrets)
            if not deployments.live:
                lines = [f"create app {namespace.app(name)} at version {package.version[:12]}"]
            else:
                weighted = [await self._deployed(name, deployments, n) for n in deployments.weighted]
                lines = [*weight_lines(weighted, package.version, canary)]
                if deployments.live in kept:
                    changes = await self._scaling(name, deployments.live, package.spec)
                    lines += [f"{key} -> {value}" for key, value in changes.items()]
                else:
                    if lines and kept:
                        lines[0] = f"{lines[0]} (kept, no upload)"
                    if secrets != deployments.secrets.get(deployments.live, ""):
                        sources = ", ".join(self._secrets.in_modal(package.spec)) or "none"
                        lines.append(f"modal.Secrets: other ones -> {sources}")
                    try:
                        before = await self.package(name)
                        lines += spec_lines(before.spec, package.spec)
                    except PackageError as error:
                        problem = error.message
        builds = package.spec.requirements or package.spec.image is not None
        if builds and package.version not in deployments.versions.values():
            lines += await asyncio.to_thread(modal_lines, package, self._python)
        return DeploymentChange(name, self.provider, tuple(lines), before, problem)

    async def deploy(self, package: Package, *, canary: float = 0.0, current: bool | None = True) -> DeployedFunction:
        """See `Deployer`. The trial of a new version is billed to the meter as a SMOKE call. With `current` False an
        existing live version stays live, and the new one is not kept for a rollback; with None likewise while there is
        a canary."""
        package.check_pinned()
        check_declared(package.spec, package.files, PROVIDER)
        check_canary(package.spec.name, canary)
        name, namespace = package.spec.name, self.namespace
        async with self._turn:
            with modal_client.translate_errors():
                await self._require_secrets(package.spec)
                app, deployments = await namespace.find(name)
                current = not deployments.canary if current is None else current
                kept = deployments.matching(package.version, self._secret_sources(package.spec))
                if kept:
                    number = next((n for n in deployments.weighted if n in kept), max(kept))
                    if deployments.live and (not current or (canary and number == deployments.live)):
                        return replace(await self._deployed(name, deployments, number), unchanged=current)
                    before = deployments
                    wanted = before.pointed(number, canary if before.live else 0.0)
                    deployments = await self._release(name, app, before, wanted)
                    changes = await self._scaling(name, number, package.spec)
                    if changes:
                        await namespace.function(name, number).autoscaler.update.aio(**changes)
                    unchanged = before == deployments and not changes
                    return replace(await self._deployed(name, deployments, number), unchanged=unchanged)
            return await self._new(package, app, canary=canary, current=current)

    async def functions(self) -> Sequence[DeployedFunction]:
        namespace = self.namespace
        with modal_client.translate_errors():
            found = [(name, (await namespace.get(name))[1]) for name in await namespace.functions()]
            return [await self._deployed(name, tags, number) for name, tags in found for number in tags.weighted]

    async def versions(self, function: str) -> Sequence[DeployedFunction]:
        with modal_client.translate_errors():
            _, deployments = await self.namespace.get(function)
            return await self._all(function, deployments)

    async def package(self, function: str, version: str = "") -> Package:
        namespace = self.namespace
        with modal_client.translate_errors():
            _, deployments = await namespace.get(function)
            number = int(version) if version else deployments.live
            if number not in deployments.versions:
                known = ", ".join(map(str, deployments.versions))
                raise UnknownFunction(f"{function} has no deployment {version} on Modal", remedy=f"it has {known}")
            digest = deployments.versions[number]
            try:
                archive = await namespace.function(function, number, PACKAGE).remote.aio()
            except modal_client.modal_library().exception.NotFoundError:
                raise PackageError(
                    f"{function} {digest[:12]} was deployed without a record of its package", remedy="deploy it again"
                ) from None
        if not isinstance(archive, bytes):
            raise PackageError(f"deployment {number} of {function} answered {archive!r:.60}, not with its package")
        return restore_archive(function, digest, archive)

    async def promote(self, function: str) -> DeployedFunction:
        async with self._turn:
            with modal_client.translate_errors():
                app, deployments = await self.namespace.get(function)
                if not deployments.canary:
                    raise no_canary(function)
                return await self._point(function, app, deployments, deployments.canary)

    async def rollback(self, function: str, version: str = "") -> DeployedFunction:
        async with self._turn:
            with modal_client.translate_errors():
                app, deployments = await self.namespace.get(function)
                if version:
                    versions = await self._all(function, deployments)
                    number = int(find_version(function, versions, version, draw=0.0).provider_version)
                elif deployments.canary:
                    number = deployments.live
                else:
                    versions = await self._all(function, deployments)
                    former = {str(n) for n in deployments.versions if n < deployments.live}
                    number = int(previous_version(function, versions, former).provider_version)
                return await self._point(function, app, deployments, number)

    async def scale(
        self, function: str, *, warm: int | None = None, concurrency: int | None = None
    ) -> DeployedFunction:
        """Scale the live version, until the next deployment of a package that sets these values. A canary gets its
        share of the warm containers, rounded up."""
        if (warm or 0) < 0 or (concurrency is not None and concurrency < 1):
            raise SpecInvalid(f"{function}: warm={warm}, concurrency={concurrency}: not less than 0 and 1")
        wanted = {"min_containers": warm, "max_containers": concurrency}
        async with self._turn:
            with modal_client.translate_errors():
                _, deployments = await self.namespace.get(function)
                for number in deployments.weighted:
                    if warm is not None and number == deployments.canary:
                        wanted["min_containers"] = math.ceil(warm * deployments.weight)
                    handle = self.namespace.function(function, number)
                    await handle.autoscaler.update.aio(**{k: v for k, v in wanted.items() if v is not None})
                return await self._deployed(function, deployments, deployments.live)

    async def logs(self, function: str, *, since_s: float = 3600.0, limit: int = 1000) -> Sequence[LogLine]:
        since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=since_s)
        with modal_client.translate_errors():
            app, _ = await self.namespace.get(function)
            entries = [entry async for entry in app.logs.fetch.aio(since=since)]
        return _lines(LineReader(), entries)[-limit:]

    async def follow(self, function: str, *, since_s: float = 0.0) -> AsyncIterator[LogLine]:
        since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=since_s)
        reader = LineReader()
        with modal_client.translate_errors():
            app, _ = await self.namespace.get(function)
            past = [entry async for entry in app.logs.fetch.aio(since=since)]
            for line in _lines(reader, past):
                yield line
            known = {(entry.timestamp, entry.message) for entry in past}
            async for entry in app.logs.stream.aio():
                # The stream may begin with lines that were fetched, or with older ones.
                if entry.timestamp >= since and (entry.timestamp, entry.message) not in known:
                    for line in _lines(reader, [entry]):
                        yield line

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

    async def _new(self, package: Package, existing: Any, *, canary: float, current: bool) -> DeployedFunction:
        """Deploy a version, try it and make it live, or a canary. On failure the weights stay, and an app without a
        live version is stopped. `existing` is the function's app, None if there is none."""
        name, namespace = package.spec.name, self.namespace
        with modal_client.translate_errors():
            app = await self._publish(package, existing)
            number = (await app.info.aio(refresh=True)).lifecycle.version
        try:
            if number is None:
                raise BackendFailed(f"Modal does not say which deployment of {namespace.app(name)} this is")
            with modal_client.translate_errors():
                target = await pin(namespace, name, number, package.version)
                await self._try(target, package)
                _, before = await namespace.find(name)  # others may have moved it during the trial
                now = datetime.datetime.now(datetime.UTC).timestamp()
                secrets = self._secret_sources(package.spec)
                fresh = before.added(
                    number, package.version, now, keep=self.settings.keep, canary=canary, secrets=secrets
                )
                if before.live and not current:
                    known = replace(before, versions={**before.versions, number: package.version})
                    return await self._deployed(name, known, number)
                bounds = await self._set(name, before.live)
                if canary and "min_containers" in bounds:
                    bounds["min_containers"] = math.ceil(bounds["min_containers"] * canary)
                for option, key in (("warm", "min_containers"), ("concurrency", "max_containers")):
                    if option in package.spec.model_fields_set:
                        bounds[key] = getattr(package.spec, option)
                if bounds:
                    await target.handle.autoscaler.update.aio(**bounds)
                await self._cool(name, before, fresh)
                await app.set_tags.aio(fresh.tags(), client=namespace.client)
                return await self._deployed(name, fresh, number)
        except BaseException:
            with contextlib.suppress(Exception):
                _, after = await namespace.find(name)
                if not after.live:
                    await app.stop.aio(client=namespace.client)
            raise

    async def _publish(self, package: Package, existing: Any) -> Any:
        """Upload and build. The app keeps its tags, so the new deployment receives no calls yet."""
        modal = modal_client.modal_library()
        name, namespace = package.spec.name, self.namespace
        entry, files = importlib.import_module(_ENTRY), importlib.import_module(_FILES)
        with tempfile.TemporaryDirectory(prefix="rollart-modal-") as directory:
            root, build, source = (pathlib.Path(directory, name) for name in ("root", "build", "source"))
            replace(package, files=container_files(package)).write(root)
            replace(package, files=build_files(package)).write(build)
            replace(package, files=source_files(package)).write(source)
            reader = modal.Image.debian_slim(python_version=self._python)
            image = self._image(modal, package.spec, build)
            # `App.deploy` replaces the app's tags by those given here, and Modal has no conditional change of tags: a
            # promotion or rollback by another process between this look-up and the end of `deploy` is undone. So that
            # these are seconds, the images are built before, which may take minutes; `deploy` then finds them built.
            if existing is not None:
                for one in (reader, image):
                    await one.build.aio(existing)
            _, deployments = await namespace.find(name)
            app = modal.App(namespace.app(name), tags=deployments.tags(), include_source=False)
            app.function(image=reader.add_local_dir(source, "/root"), **_READING)(files.package)
            options = container_options(package.spec)
            if package.spec.env:
                options["env"] = dict(package.spec.env)
            if package.spec.secrets:
                options["secrets"] = self._secret_handles(package.spec)
            app.function(image=image.add_local_dir(root, "/root"), **options)(entry.call)
            await app.deploy.aio(
                client=namespace.client, environment_name=namespace.environment or None, tag=package.version[:12]
            )
        return app

    def _image(self, modal: Any, spec: FunctionSpec, build: pathlib.Path) -> Any:
        """The image of a function: its base, or the Dockerfile in `build`, then its requirements."""
        if (build / "Dockerfile").exists():
            (build / "context").mkdir(exist_ok=True)
            image = modal.Image.from_dockerfile(build / "Dockerfile", context_dir=build / "context")
        elif spec.image is not None and spec.image.base:
            image = modal.Image.from_registry(spec.image.base)
        else:
            image = modal.Image.debian_slim(python_version=self._python)
        if spec.image is not None and spec.image.system:
            image = image.apt_install(*sorted(spec.image.system))
        if spec.requirements:
            image = image.uv_pip_install(*spec.requirements, **install_options(spec))
        return image

    @property
    def _python(self) -> str:
        """The minor version of the containers' interpreter."""
        return self.settings.python or python_version()

    def _secret_handles(self, spec: FunctionSpec) -> list[Any]:
        """The `modal.Secret` of each secret. New containers get their present values."""
        kind, namespace = modal_client.modal_library().Secret, self.namespace
        environment = namespace.environment or None
        return [
            kind.from_name(secret, environment_name=environment, required_keys=names, client=namespace.client)
            for secret, names in self._secrets.in_modal(spec).items()
        ]

    def _secret_sources(self, spec: FunctionSpec) -> str:
        """A digest of which `modal.Secret` has which variable, '' without secrets. A deployment keeps the sources that
        it was made with, and the package's version does not have them."""
        if not spec.secrets:
            return ""
        sources = {secret: sorted(names) for secret, names in self._secrets.in_modal(spec).items()}
        return hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()[:32]

    async def _require_secrets(self, spec: FunctionSpec) -> None:
        """Raise `SecretMissing` for a secret that Modal does not have."""
        kinds = modal_client.modal_library().exception
        for name in spec.secrets:
            [secret] = self._secret_handles(spec.model_copy(update={"secrets": (name,)}))
            try:
                await secret.hydrate.aio()
            except (kinds.NotFoundError, kinds.InvalidError, kinds.ConflictError):
                source = self._secrets.source(name).modal or name
                raise SecretMissing(
                    f"function {spec.name} has no value of the secret {name}: Modal has no secret {source} with it",
                    remedy=f"write {name}=… to .env and call modal secret create {source} --from-dotenv .env, or set "
                    f"functions.secrets.{name}.modal",
                ) from None

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
        if answer.fault is not None or not isinstance(answer.body, list):
            reason = answer.fault.detail if answer.fault else f"it answered {answer.body!r:.80}"
            failed = BackendFailed if answer.fault and answer.fault.kind not in FUNCTION_FAULTS else FunctionFailed
            raise failed(
                f"the new version of {target.name} failed its trial: {reason}",
                remedy="the version before it stays; `rollart rewards test` runs it here",
            )

    async def _all(self, name: str, deployments: DeploymentTags) -> list[DeployedFunction]:
        """The versions of a function, newest first."""
        return [await self._deployed(name, deployments, n) for n in sorted(deployments.versions, reverse=True)]

    async def _point(self, name: str, app: Any, deployments: DeploymentTags, number: int) -> DeployedFunction:
        """Make a kept version the only live one."""
        released = await self._release(name, app, deployments, deployments.pointed(number))
        return await self._deployed(name, released, number)

    async def _release(self, name: str, app: Any, before: DeploymentTags, wanted: DeploymentTags) -> DeploymentTags:
        """Set the weights of kept versions, with the container bounds of the previous live one."""
        if wanted == before:
            return before
        warm = (await self._set(name, before.live)).get("min_containers", 0)
        changed = {wanted.live: warm, wanted.canary: math.ceil(warm * wanted.weight)}
        for number in wanted.weighted:
            if number != before.live:
                await self.namespace.function(name, number).autoscaler.update.aio(min_containers=changed[number])
        await self._cool(name, before, wanted)
        await app.set_tags.aio(wanted.tags(), client=self.namespace.client)
        return wanted

    async def _set(self, name: str, number: int) -> dict[str, int]:
        """The current container bounds of a version."""
        if not number:
            return {}
        now = await self.namespace.function(name, number).autoscaler.settings.aio()
        bounds = {"min_containers": now.min_containers, "max_containers": now.max_containers}
        return {key: value for key, value in bounds.items() if value}

    async def _cool(self, name: str, before: DeploymentTags, after: DeploymentTags) -> None:
        """Keep no containers warm for versions that lose their calls. Called before the tags are set, so that a failure
        has changed nothing else."""
        for number in before.weighted:
            if number not in after.weighted:
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
        canary = str(deployments.canary) if deployments.canary else ""
        live = LiveVersions(str(deployments.live), canary, deployments.weight)
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
            weight=live.of(str(number)),
            aliases=live.aliases(str(number)),
            problem=problem,
        )


def container_files(package: Package) -> dict[str, bytes]:
    """The files under a container's root, by relative path: the package, its version and the entry module for calls."""
    ours = pathlib.Path(__file__).parents[1]
    version = {VERSION: package.version.encode()}
    files = {path: data for path, data in package.files.items() if not path.startswith(IMAGE)}
    return {**files, **version, **{f"serverless/{name}": (ours / name).read_bytes() for name in _SHIPPED}}


def source_files(package: Package) -> dict[str, bytes]:
    """The files under the root of the container that gives the package back."""
    ours = pathlib.Path(__file__).parents[1]
    shipped = ("__init__.py", "deploy/__init__.py", "deploy/modal_files.py")
    own = {f"serverless/{name}": (ours / name).read_bytes() for name in shipped}
    return {**own, **with_record(package)}


def build_files(package: Package) -> dict[str, bytes]:
    """The user's Dockerfile and its context, by relative path; none without a Dockerfile."""
    return {path.removeprefix(IMAGE): data for path, data in package.files.items() if path.startswith(IMAGE)}


def install_options(spec: FunctionSpec) -> dict[str, str]:
    """The arguments of `Image.uv_pip_install` beside the requirements."""
    further = [f"--extra-index-url {shlex.quote(url)}" for url in index_urls(spec)]
    return {"extra_options": " ".join([*further, _BEST_MATCH])} if further else {}


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


def _lines(reader: LineReader, entries: Sequence[Any]) -> list[LogLine]:
    """The lines of Modal's log entries, oldest first."""
    found = []
    for entry in sorted(entries, key=lambda entry: entry.timestamp):
        t = entry.timestamp.isoformat(timespec="milliseconds")
        found.append(log_line(reader, t, str(entry.source), entry.message.rstrip("\n")))
    return [line for line in found if line is not None]
