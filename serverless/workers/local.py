"""The local function provider: handlers under Lambda's contract in warm processes forked from a zygote.

Workers are processes of one user, with limits on memory, open files, file size and time, and an environment without
credentials. This contains mistakes, not attackers: untrusted code needs a sandbox.
"""

from __future__ import annotations

import ast
import compileall
import importlib.util
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from typing import Any, Literal, Self

from serverless.analysis.imports import imports
from serverless.deploy.package import HANDLER, Package
from serverless.errors import BackendFailed, ExtraMissing, FunctionFailed
from serverless.meter import MeterSink
from serverless.sandbox import required
from serverless.secrets import Secrets, masked
from serverless.types import FaultKind, InfraFault
from serverless.workers.logs import MaskedLog
from serverless.workers.pool import Launcher, PooledBackend, Worker, WorkerFault
from serverless.workers.processes import ForkServer, ProcessWorker

_PRELOADED = (
    "asyncio",
    "importlib.util",
    "inspect",
    "json",
    "serverless.calling",
    "serverless.declare",
    "serverless.errors",
    "serverless.output",
    "serverless.signatures",
    "serverless.types",
    "serverless.usage",
)
"""The modules that the handler file imports."""

Runtime = Literal["rollart", "awslambdaric"]
"""The program that runs the handler inside a worker: rollart's own loop, or AWS's runtime client
(`workers.runtime_api`)."""


class LocalBackend(PooledBackend):
    """Functions in processes of this machine. Owns a directory, the zygotes and, through them, all workers.

    Each distinct set of `preload` modules has its own zygote, so that a plain function does not pay for another
    function's torch import. `deploy` starts the zygote and waits for the function's imports. Workers start with the
    first call, unless the function is `warm`. `root`, if given, keeps packages and logs (`logs/<function>/<slot>.log`).
    Otherwise both are in a private directory that is removed at the end, even if this process is killed. `launcher`
    wraps the worker launcher (`providers.rehearsal`). Raises `ExtraMissing` if `runtime` is not installed.
    """

    def __init__(
        self,
        *,
        meter: MeterSink | None = None,
        root: pathlib.Path | None = None,
        runtime: Runtime = "rollart",
        launcher: Callable[[Launcher], Launcher] = lambda launcher: launcher,
        allow_unsafe: bool = False,
        logs: pathlib.Path | None = None,
        run: str = "",
        secrets: Secrets | None = None,
    ) -> None:
        """`allow_unsafe` permits untrusted functions that never call the sandbox. `logs` is a separate directory for
        the workers' output, which names `run`, the id of the only run that calls them. `secrets`: see
        `PooledBackend`."""
        if runtime == "awslambdaric" and importlib.util.find_spec("awslambdaric") is None:
            raise ExtraMissing("awslambdaric", "providers")
        super().__init__(launcher(self), "local", meter, secrets=secrets)
        self._given = root
        self._root: pathlib.Path | None = None
        self._runtime = runtime
        self._allow_unsafe = allow_unsafe
        self._logs = None if logs is None else logs.resolve()
        self._run = run
        self._zygotes: dict[frozenset[str], ForkServer] = {}

    @property
    def zygote_pids(self) -> tuple[int, ...]:
        """Process ids of the running zygotes, the one without preloads first."""
        zygotes = sorted(self._zygotes.items(), key=lambda entry: sorted(entry[0]))
        return tuple(zygote.pid for _, zygote in zygotes if zygote.pid is not None)

    async def deploy(self, package: Package) -> None:
        self.secrets.require(package.spec)
        await self.install(package)
        await super().deploy(package)

    async def install(self, package: Package) -> None:
        """Install the files that `start` needs of a package. Raises `BackendFailed` if the function cannot run here."""
        _check_requirements(package)
        if not self._allow_unsafe:
            check_isolation(package)
        directory = self._directory(package)
        zygote = self._zygote(package)
        zygote.start()
        if package.spec.preload:  # a failing import is refused here instead of at the first call
            try:
                failed = await zygote.ready()
            except WorkerFault as error:
                raise BackendFailed(f"function {package.spec.name}: {error}", remedy="deploy it again") from None
            for module in package.spec.preload:
                if module in failed:
                    raise FunctionFailed(
                        f"function {package.spec.name} preloads {module}, which cannot be imported here: "
                        f"{failed[module]}",
                        remedy="install it, or take it out of preload",
                    )
        if package.install(directory):
            # Compiled ahead, not executed: otherwise each worker would compile it, which is most of a cold start.
            compileall.compile_dir(directory, quiet=2)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._root = (self._given or pathlib.Path(tempfile.mkdtemp(prefix="rollart-functions-"))).resolve()
        self._root.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            await super().__aexit__(*exc)
        finally:
            zygotes, self._zygotes = self._zygotes, {}
            try:
                for zygote in zygotes.values():
                    await zygote.close()
            finally:
                if self._given is None and self._root is not None:
                    shutil.rmtree(self._root, ignore_errors=True)

    async def start(self, package: Package, slot: int, gone: Callable[[], None]) -> Worker:
        """Launcher: fork a worker and wait until the function is loaded."""
        try:
            if self._runtime == "awslambdaric":
                from serverless.workers.runtime_api import start_runtime

                log = self._log(package.spec.name, slot)
                return await start_runtime(package, log, lambda become: self._fork(package, slot, gone, become))
            process = await self._fork(package, slot, gone)
            try:
                await process.ready()
            except BaseException:
                process.kill()
                raise
            return process
        except OSError as error:  # no descriptors, no disk space: a state of the machine that may pass
            detail = f"no worker could be started: {error}"
            raise WorkerFault(InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=detail)) from None

    async def _fork(
        self, package: Package, slot: int, gone: Callable[[], None], become: dict[str, Any] | None = None
    ) -> ProcessWorker:
        """Fork a confined process of the function, which is not ready yet. `become` holds the program to execute in it
        (`exec`) and its `environment`."""
        log = self._log(package.spec.name, slot)
        log.parent.mkdir(parents=True, exist_ok=True)
        secret_names = [name for name in package.spec.secrets if name in package.variables]
        order = {
            "name": package.spec.name,
            "version": package.version,
            "handler": HANDLER,
            "memory_mb": package.spec.memory_mb,
            "package": str(self._directory(package)),
            "log": str(log),
            "run": self._run,
            "scratch": str(self.root / "scratch" / package.spec.name / str(slot)),
            **({"variables": secret_names} if package.variables else {}),
            **(become or required.order(package.spec.trust, allow_unsafe=self._allow_unsafe)),
        }
        output = MaskedLog(log, masked(package.variables, package.spec.secrets)) if secret_names else None
        return await self._zygote(package).fork(order, gone, package.variables, output)

    def _zygote(self, package: Package) -> ForkServer:
        modules = frozenset(package.spec.preload)
        if modules not in self._zygotes:
            preload = (*_PRELOADED, *package.spec.preload)
            self._zygotes[modules] = ForkServer(self.root, preload=preload, cleanup=self._given is None)
        return self._zygotes[modules]

    def _log(self, function: str, slot: int) -> pathlib.Path:
        return (self._logs or self.root / "logs") / function / f"{slot}.log"

    @property
    def root(self) -> pathlib.Path:
        """The directory of packages and logs."""
        if self._root is None:
            raise BackendFailed("the local backend is not open", remedy="use `async with`")
        return self._root

    def _directory(self, package: Package) -> pathlib.Path:
        return self.root / "functions" / package.version


def check_isolation(package: Package) -> None:
    """Refuse untrusted functions that do not run in `serverless.sandbox`: a process of the same user is no
    isolation."""
    if package.spec.trust != "untrusted":
        return
    trees = _trees(package)
    named = {n.module or "" for t in trees for n in ast.walk(t) if isinstance(n, ast.ImportFrom)}
    named |= {a.name for t in trees for n in ast.walk(t) if isinstance(n, ast.Import) for a in n.names}
    if not any(name.startswith(("serverless.sandbox", "serverless.rewards.code_tests")) for name in named):
        raise BackendFailed(
            f"function {package.spec.name} is untrusted and never uses the sandbox",
            remedy="run what the policy wrote with serverless.sandbox, deploy to Modal or Lambda, or allow it "
            "(`functions.allow_unsafe: true` in the cluster spec, `--allow-unsafe` of rewards test and serve)",
        )


def check_importable(package: Package) -> None:
    """Raise `FunctionFailed` for an import that fails on this machine: a requirement, a preloaded module, or a module
    that the function needs to load and that is neither packed nor installed."""
    _check_requirements(package)
    packed = {path.split("/")[1].removesuffix(".py") for path in package.files if path.startswith("function/")}
    wanted = [(module, "preloads") for module in package.spec.preload]
    wanted += [(module, "imports") for _, _, module, needed in imports(package.files) if needed]
    for module, verb in wanted:
        if module.partition(".")[0] not in packed and not module_exists(module.partition(".")[0]):
            raise FunctionFailed(
                f"function {package.spec.name} {verb} {module}, which is neither packed nor installed here",
                remedy="install it, or take it out",
            )


def _trees(package: Package) -> list[ast.Module]:
    """The syntax trees of the function's own files."""
    files = package.files.items()
    return [ast.parse(text) for path, text in files if path.startswith("function/") and path.endswith(".py")]


def module_exists(module: str) -> bool:
    """True if a module of this name can be imported."""
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _check_requirements(package: Package) -> None:
    """Check that the requirements are installed: local functions use this Python environment."""
    for requirement in package.spec.requirements:
        name = re.split(r"[\s<>=!~;\[@]", requirement, maxsplit=1)[0]
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            raise FunctionFailed(
                f"function {package.spec.name} requires {requirement}, which is not installed here",
                remedy=f"pip install '{requirement}'",
            ) from None
