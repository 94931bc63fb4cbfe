"""The functions of a run: providers by name (deployment and calls of rewards, with errors translated to the product's),
live scaling by the expected load from the scheduler, and their records in the ledger (the bill of every call, the time
of every worker, and the pipeline's counters).
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import errno
import importlib.util
import os
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from rollart.control.groups import ActiveRollouts
from rollart.errors import ProviderError, RollartError, RunFailed, SpecError, StorageFailed, UsageError, did_you_mean
from rollart.ledger.database import FILE
from rollart.ledger.events import FUNCTION_HEALTH, FUNCTION_REFUSED, OFFLOAD_STAGE
from rollart.ledger.reader import LedgerReader
from rollart.ledger.store import Ledger
from rollart.ports import Recorder, RunEvent
from rollart.settings.cluster import ClusterFunctions, HttpFunction
from rollart.settings.functions import MODELS, settings_model
from rollart.settings.load import builtin, function_layer_settings, load_prices
from rollart.settings.prices import PriceList, gpu_price_parts
from rollart.settings.providers import (
    ALIASES,
    BUILT_IN,
    installed_plugins,
    plugin,
    provider_names,
    with_plugin_prices,
)
from rollart.settings.resolve import Resolved
from rollart.settings.run import DomainSpec
from serverless.analysis.imports import PROVIDED_MODULES, check_declared, undeclared
from serverless.declare import declarations
from serverless.deploy.package import Package, build, read_archive
from serverless.errors import (
    BackendFailed,
    CredentialsMissing,
    ExtraMissing,
    FunctionFailed,
    IndexUnreachable,
    PackageError,
    ServerlessError,
    SpecInvalid,
    UnknownFunction,
)
from serverless.history import OrderedCall
from serverless.meter import LeftProcesses, MeterSink, NullMeter, Saving, TokenBill, WorkerSpan
from serverless.pipeline.offload import Offload
from serverless.providers.base import (
    AttachableBackend,
    Backend,
    DeployedFunction,
    Deployer,
    Reply,
    find_version,
    split_reference,
)
from serverless.providers.plugin import ProviderContext
from serverless.scaling.decisions import StatisticsMeter
from serverless.scaling.scaler import DemandSource, Scaler, ScalerContext, ScalingDecision, ScalingPrices
from serverless.secrets import SecretMissing, Secrets
from serverless.spec import FunctionSpec
from serverless.types import Cause, Invocation
from serverless.workers.remote import WorkerHosts

if TYPE_CHECKING:
    from serverless.deploy.aws_function import AwsSettings
    from serverless.providers.http import Endpoint  # its client is not needed without this provider

CASES = "cases.jsonl"


def is_deployable(provider: str) -> bool:
    """True if functions are deployed to the provider by `deployer`. An `http` host has its functions already."""
    if provider in installed_plugins():
        return plugin(provider).deployer is not None
    return provider in BUILT_IN and provider != "http"


def canonical_provider(name: str) -> str:
    """A provider's name from a name or alias. `UsageError` for an unknown one."""
    found = ALIASES.get(name, name)
    if found not in BUILT_IN and found not in installed_plugins():
        known = [*provider_names(), *ALIASES]
        raise UsageError(f"no provider '{name}' (rule: a provider of functions{did_you_mean(name, known)})")
    return found


@contextlib.contextmanager
def translated_errors(prefix: str = "") -> Iterator[None]:
    """Translate errors of the function layer into the product's, by who has to fix them. `prefix` is the message's
    prefix."""
    try:
        yield
    except ServerlessError as error:
        kind: type[RollartError] = RunFailed
        if isinstance(error, FunctionFailed):
            kind = UsageError
        elif isinstance(error, CredentialsMissing | ExtraMissing | BackendFailed):
            kind = ProviderError
        elif isinstance(error, SpecInvalid):
            kind = SpecError
        elif isinstance(error, PackageError | UnknownFunction):
            kind = UsageError
        raise kind(prefix + error.message, remedy=error.remedy) from None
    except OSError as error:
        if error.errno in _FULL:  # write() names no file
            shown = f"{error.filename}: " if error.filename else ""
            raise StorageFailed(
                f"{prefix}{shown}{error.strerror}", remedy="free space, or choose another disk"
            ) from None
        if error.filename is None:
            raise
        raise StorageFailed(
            f"{prefix}{error.filename}: {error.strerror}",
            remedy="choose another directory, or change its permissions",
        ) from None


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""A full disk or a used-up quota."""


def packages_in(source: str, *, name: str | None = None, base: Path | None = None) -> list[Package]:
    """The packed rewards of `FILE.py`, or the one of `FILE.py:attribute`, or of an archive `NAME-VERSION.zip`. Their
    code is read, not run.

    `name` renames a single reward. `UsageError` for a file without rewards; packing errors are translated.
    """
    head, _, attribute = source.partition(":")
    with translated_errors():
        if source.endswith(".zip"):
            return [read_archive(Path(base or ".") / source)]
        if (directory := Path(base or ".") / head).is_dir() and not (directory / "__init__.py").is_file():
            raise UsageError(
                f"{head or repr(head)}: a directory without __init__.py", remedy="give a Python file, or a package"
            )
        if attribute or not head.endswith(".py"):
            return [build(_spec(name or _name(attribute or head), source), base=base)]
        declared = _declared(Path(base or ".") / head)
        if name is not None and len(declared) != 1:
            raise UsageError(f"{head} has {len(declared)} rewards: --name is for one", remedy=f"name one: {head}:NAME")
        return [
            build(_spec(name or str(settings.get("name") or _name(found)), f"{head}:{found}"), base=base)
            for found, settings in declared.items()
        ]


def one_package(source: str) -> Package:
    """The only packed reward of `packages_in`. `UsageError` for a file with several."""
    packages = packages_in(source)
    if len(packages) != 1:
        raise UsageError(f"{source} has {len(packages)} rewards", remedy=f"name one: {source}:NAME")
    return packages[0]


def cases_beside(source: str, *, base: str | Path = ".") -> Path:
    """The path of the cases of `FILE.py` or `FILE.py:attribute`: cases.jsonl beside the file, whether it exists."""
    return (Path(base) / source.partition(":")[0]).parent / CASES


def _spec(name: str, source: str) -> FunctionSpec:
    try:
        return FunctionSpec(name=name, source=source)
    except ValidationError:
        raise UsageError(
            f"'{name}' cannot name a function (rule: up to 64 letters, digits, '_', '-')",
            remedy="name it with --name, or `name` of @reward",
        ) from None


def _declared(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """The decorated rewards of a file; a single plain function counts as one."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", remedy="give the path of a Python file with rewards") from None
    declared = declarations(text, filename=str(path))
    if declared:
        return declared
    plain = [
        node.name
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
    ]
    if len(plain) == 1:
        return {plain[0]: {}}
    raise UsageError(
        f"{path} has no function with @reward, and {len(plain)} functions without",
        remedy=f"decorate the reward, or name it: {path}:NAME",
    )


def _name(attribute: str) -> str:
    return attribute.rpartition(".")[2].rpartition("/")[2]


def function_secrets(functions: ClusterFunctions, directory: Path, *, late: bool = False) -> Secrets:
    """The sources of a cluster's secrets, and their values on this machine: those of the environment, else of `.env` in
    `directory`. With `late`, callers send missing ones. SpecError for invalid sources."""
    return Secrets(function_settings("secrets", functions).root, directory=directory, late=late)


def check_secrets(functions: ClusterFunctions, specs: Iterable[FunctionSpec], directory: Path) -> None:
    """ProviderError for the first secret that a function of a run needs from this machine and that it does not have.
    Secrets that a provider stores are looked for when a function is deployed."""
    secrets = function_secrets(functions, directory)
    with translated_errors():
        for spec in specs:
            if names := _secrets_from_here(functions, secrets, spec):
                secrets.require(spec, *names)


def secret_variables(functions: ClusterFunctions, specs: Iterable[FunctionSpec], directory: Path) -> list[str]:
    """The variables of this machine, or of its `.env`, that functions of a run have as secrets."""
    secrets = function_secrets(functions, directory)
    names = (name for spec in specs for name in _secrets_from_here(functions, secrets, spec))
    return sorted({secrets.source(name).env or name for name in names})


def _secrets_from_here(functions: ClusterFunctions, secrets: Secrets, spec: FunctionSpec) -> tuple[str, ...]:
    """The secrets of a function whose values no provider stores. Plugins get those of this machine."""
    sent = "http" in functions.chain and spec.name in functions.http and functions.http[spec.name].send_secrets
    if "local" in functions.chain or sent or not set(BUILT_IN).issuperset(functions.chain):
        return spec.secrets
    return secrets.stored_in_lambda(spec) if "aws_lambda" in functions.chain else ()


def deployer(
    provider: str,
    functions: ClusterFunctions,
    *,
    root: Path,
    meter: MeterSink | None = None,
    secrets: Secrets | None = None,
) -> Deployer:
    """The control plane of a provider, not open yet. `root`: directory of local deployments; `meter`: receives the
    bills of trials; `secrets`: by default those of the working directory. SpecError for invalid settings."""
    secrets = secrets or function_secrets(functions, Path.cwd())
    with translated_errors():
        if provider == "local":
            from serverless.deploy.local import LocalDeployer

            return LocalDeployer(root, meter=meter, allow_unsafe=functions.allow_unsafe, secrets=secrets)
        if provider == "aws_lambda":
            from serverless.deploy.aws import AwsDeployer

            return AwsDeployer(function_settings(provider, functions), meter=meter, secrets=secrets)
        if provider == "modal":
            from serverless.deploy.modal_app import ModalDeployer

            return ModalDeployer(function_settings(provider, functions), meter=meter, secrets=secrets)
        if provider in installed_plugins() and (make := plugin(provider).deployer) is not None:
            return _made(provider, make, functions, ProviderContext(meter, root, secrets=secrets))
    raise UsageError(
        f"nothing is deployed to '{provider}'",
        remedy=f"deploy to one of {', '.join(filter(is_deployable, provider_names()))}",
    )


T = TypeVar("T")


def _made(
    provider: str, make: Callable[[Any, ProviderContext], T], functions: ClusterFunctions, context: ProviderContext
) -> T:
    """A part of a plugin. Its unforeseen errors are the provider's."""
    settings = function_settings(provider, functions)
    try:
        return make(settings, context)
    except (ServerlessError, RollartError):
        raise
    except Exception as error:
        raise ProviderError(
            f"provider '{provider}' failed: {type(error).__name__}: {error}", remedy="report it to its author"
        ) from None


@dataclass(frozen=True, slots=True)
class DeploymentTrial:
    """Cost of the trial of a new version: a deployment calls it once before it becomes current."""

    call: Invocation
    usd: float
    billed: bool
    """False for a provider that sends no bill: the dollars are then an equivalent price."""


class TrialMeter(NullMeter):
    """The meter of a deployer. `bills`: its trials, priced by a list; `gpus` are those of functions by name."""

    def __init__(self, prices: PriceList, gpus: Mapping[str, str] | None = None) -> None:
        self._prices, self._gpus = prices, gpus or {}
        self.bills: list[DeploymentTrial] = []

    def invocation(self, invocation: Invocation) -> None:
        call, prices = invocation, self._prices
        gpu = self._gpus.get(call.function, "")
        usd = prices.function_usd(call.provider, billed_s=call.billed_s, memory_mb=call.memory_mb, gpu=gpu)
        self.bills.append(DeploymentTrial(call, usd, prices.billed(call.provider)))


def backend(
    provider: str,
    functions: ClusterFunctions,
    *,
    meter: MeterSink | None = None,
    root: Path | None = None,
    hosts: WorkerHosts | None = None,
    run: str = "",
    secrets: Secrets | None = None,
) -> Backend:
    """The backend for calls, not open yet. `root`: directory for logs of local workers; `hosts`: hosts of local
    workers, if any; `run`: an id of the caller that is unique in the provider's account; without one, a deployment for
    calls does not become current; `secrets`: by default those of the working directory. SpecError for invalid
    settings."""
    secrets = secrets or function_secrets(functions, Path.cwd())
    with translated_errors():
        if provider == "local":
            return _local(functions, meter, root, hosts, run, secrets)
        if provider == "aws_lambda":
            from serverless.providers.aws import AwsLambdaBackend

            return AwsLambdaBackend(function_settings(provider, functions), meter=meter, run=run, secrets=secrets)
        if provider == "modal":
            from serverless.providers.modal import ModalBackend

            settings = function_settings(provider, functions)
            return ModalBackend(settings, meter=meter, current=bool(run), run=run, secrets=secrets)
        if provider == "http":
            from serverless.providers.http import HttpBackend

            return HttpBackend(_endpoints(functions.http), meter=meter, secrets=secrets)
        if provider in installed_plugins():
            context = ProviderContext(meter, root, run, secrets)
            return _made(provider, plugin(provider).backend, functions, context)
    raise UsageError(f"no provider '{provider}' (rule: one of {', '.join(provider_names())})")


REFERENCE = r"[A-Za-z0-9_-]{1,64}(@[A-Za-z0-9._-]+)?"
"""NAME, NAME@VERSION or NAME@ALIAS: a deployed function, as `split_reference` reads it."""


async def attach_function(backend: Backend, control: Deployer, reference: str, *, draw: float) -> DeployedFunction:
    """Direct calls of a function to the version that a reference names, which is returned. `draw` in [0, 1) chooses by
    the weights of `live`."""
    function, wanted = split_reference(reference)
    chosen = find_version(function, await control.versions(function), wanted, draw=draw)
    if isinstance(backend, AttachableBackend):
        await backend.attach(function, attached_name(chosen))
    else:
        await backend.deploy(await control.package(function, chosen.provider_version))
    return chosen


def attached_name(version: DeployedFunction) -> str:
    """The version's name for `AttachableBackend.attach`: '', the alias `live`, while it gets all of its calls. Lambda
    keeps warm environments for that alias alone."""
    return "" if version.weight == 1.0 else version.provider_version


class LiveVersionCalls:
    """Implements `Backend` for one version of a deployed function whose weight changes: calls go through the alias
    `live` while that names the version alone, else to its number. `backend` is open and stays the caller's, as is
    `version`, which returns the version as it was last read. Any number of tasks may call `invoke`."""

    def __init__(self, backend: Backend, version: Callable[[], DeployedFunction]) -> None:
        self._backend = backend
        self._version = version
        self._attached: str | None = None
        self._attaching = asyncio.Lock()

    @property
    def provider(self) -> str:
        return self._backend.provider

    async def attach(self) -> None:
        """Direct calls to where they belong now. Raises as `AttachableBackend.attach`."""
        assert isinstance(self._backend, AttachableBackend)
        async with self._attaching:
            name = attached_name(self._version())
            if name != self._attached:
                await self._backend.attach(self._version().function, name)
                self._attached = name

    async def deploy(self, package: Package) -> None:
        await self._backend.deploy(package)

    async def invoke(
        self, function: str, event: Sequence[dict[str, Any]], *, deadline_s: float, cause: Cause = Cause.CALL
    ) -> Reply:
        """See `Backend`. Where the change cannot be made, calls go where they went before."""
        if attached_name(self._version()) != self._attached:
            with contextlib.suppress(ServerlessError, TimeoutError):
                async with asyncio.timeout(deadline_s / 2.0):
                    await self.attach()
        return await self._backend.invoke(function, event, deadline_s=deadline_s, cause=cause)

    async def __aenter__(self) -> LiveVersionCalls:
        await self.attach()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """The caller closes the backend."""


@contextlib.asynccontextmanager
async def one_worker(
    chain: Sequence[Backend],
    functions: ClusterFunctions,
    meter: MeterSink | None,
    secrets: Secrets,
    package: Package,
) -> AsyncIterator[OrderedCall]:
    """Calls of a function in one local worker: of the run's own backend where it has one, else of this machine. Raises
    `BackendFailed` if the function cannot run here, also for want of a secret's value. The cause of these calls is
    `check`."""
    from serverless.workers.local import LocalBackend, check_importable
    from serverless.workers.pool import PooledBackend

    async with contextlib.AsyncExitStack() as stack:
        pooled = next((one for one in chain if isinstance(one, PooledBackend)), None)
        if pooled is None:
            if package.spec.gpu:
                raise BackendFailed(f"function {package.spec.name} needs a GPU", remedy="deploy it")
            check_importable(package)
            try:
                secrets.require(package.spec)
            except SecretMissing as error:
                raise BackendFailed(error.message, remedy=error.remedy) from None
            own = LocalBackend(meter=meter, allow_unsafe=functions.allow_unsafe, secrets=secrets)
            pooled = await stack.enter_async_context(own)
            await own.install(package)
        yield await stack.enter_async_context(pooled.one_worker(package, Cause.CHECK))


def _local(
    functions: ClusterFunctions,
    meter: MeterSink | None,
    root: Path | None,
    hosts: WorkerHosts | None,
    run: str,
    secrets: Secrets,
) -> Backend:
    """Workers on this machine or on `hosts`, either plain or in imitation of a provider (`rehearse`), with its start
    delay, throttling and overhead."""
    from serverless.workers.local import LocalBackend
    from serverless.workers.pool import PooledBackend
    from serverless.workers.remote import HostedBackend

    local, unsafe = functions.local, functions.allow_unsafe

    def workers(**more: Any) -> PooledBackend:
        if hosts is not None:
            return HostedBackend(hosts, meter=meter, allow_unsafe=unsafe, secrets=secrets, **more)
        runtime = local.runtime
        return LocalBackend(
            meter=meter, root=root, runtime=runtime, allow_unsafe=unsafe, run=run, secrets=secrets, **more
        )

    if local.rehearse is None:
        return workers()
    from serverless.providers.rehearsal import PLATFORMS, RehearsedBackend, RehearsedLauncher

    platform = PLATFORMS[local.rehearse]
    inner = workers(launcher=lambda own: RehearsedLauncher(own, platform, seed=local.seed))
    return RehearsedBackend(inner, platform, seed=local.seed)


def check_providers(functions: ClusterFunctions, names: Collection[str] = ()) -> None:
    """Check everything about the run's providers that is known without asking them: settings, client libraries, named
    secrets, and the URLs of the run's functions. `SpecError` or `ProviderError`. Credentials are tested only when a
    provider is called."""
    function_settings("pipeline", functions)
    for name in functions.chain:
        backend(name, functions)
        for library in _LIBRARIES.get(name, ()):
            if importlib.util.find_spec(library) is None:
                raise ProviderError(f"{library} is not installed", remedy=f"pip install 'rollart[{_EXTRAS[name]}]'")

    if "http" in functions.chain and (without := sorted(set(names) - functions.http.keys())):
        raise SpecError(
            f"functions.http has no URL for function '{without[0]}' (rule: one for each function of the run)",
            remedy=f"give it one; functions with a URL: {', '.join(functions.http) or 'none'}",
        )
    function_settings("scaling", functions)


def import_warnings(package: Package, providers: Iterable[str]) -> Iterator[str]:
    """Imports that may fail at a provider: those in functions, under `except ImportError`, or of a function with a
    container image of its own."""
    for provider in providers:
        if provider in PROVIDED_MODULES:
            found = undeclared(package.files, package.spec.requirements, provided=PROVIDED_MODULES[provider])
            unsure = (one for one in found if not one.needed or package.spec.image is not None)
            yield from (f"{one}: on {provider} the import may fail" for one in unsure)


def check_targets(package: Package, functions: ClusterFunctions) -> None:
    """Raise the function layer's errors for a package that a provider of the run would refuse, without asking it."""
    if "aws_lambda" in functions.chain:
        from serverless.deploy.aws_function import aws_function

        aws_function(package, function_settings("aws_lambda", functions))
    if "modal" in functions.chain:
        package.check_pinned()
        check_declared(package.spec, package.files, "modal")


def build_lines(package: Package, functions: ClusterFunctions) -> Iterator[str]:
    """The archives and images that a launch would build of a package with requirements or an image, with their sizes
    from the indexes' metadata; without an answer of the indexes, a line that says so. Raises `PackageError` for
    requirements without wheels there, and for code that does not fit; no provider is asked."""
    spec = package.spec
    if not spec.requirements and spec.image is None:
        return
    for provider in ("aws_lambda", "modal"):
        if provider not in functions.chain:
            continue
        try:
            lines = _provider_build_lines(provider, package, functions)
        except IndexUnreachable as error:
            lines = [f"its wheels are not checked: {error}"]
        yield f"{spec.name} on {provider}: {'; '.join(lines)}"


def _provider_build_lines(provider: str, package: Package, functions: ClusterFunctions) -> list[str]:
    if provider == "aws_lambda":
        from serverless.deploy.aws_function import aws_function

        return aws_function(package, _aws(functions)).build_lines()
    from serverless.deploy.images import modal_lines

    return modal_lines(package, function_settings("modal", functions).python)


def _aws(functions: ClusterFunctions) -> AwsSettings:
    settings: AwsSettings = function_settings("aws_lambda", functions)
    return settings


_LIBRARIES = {"aws_lambda": ("boto3", "aiobotocore"), "modal": ("modal",)}
_EXTRAS = {"aws_lambda": "aws", "modal": "modal"}


def function_settings(key: str, functions: ClusterFunctions) -> Any:
    """The function layer's own settings under `functions`, validated: `AwsSettings`, `ModalSettings`, `PipelineSpec` or
    `ScalingSpec`. SpecError for invalid ones."""
    given = getattr(functions, key) if key in MODELS else functions.plugins.get(key, {})
    return function_layer_settings(settings_model(key), f"functions.{key}", given)


def _endpoints(functions: Mapping[str, HttpFunction]) -> dict[str, Endpoint]:
    """The URLs with their secrets, which specs name and never contain."""
    from serverless.providers.http import Bearer, Endpoint, Signed

    found = {}
    for name, given in functions.items():
        auth: Bearer | Signed | None = None
        if given.token_env is not None:
            auth = Bearer(_secret(name, given.token_env))
        elif given.secret_env is not None:
            auth = Signed(given.key, _secret(name, given.secret_env))
        found[name] = Endpoint(given.url, auth, idempotent=given.idempotent, send_secrets=given.send_secrets)
    return found


def _secret(function: str, variable: str) -> str:
    value = os.environ.get(variable, "")
    if not value:
        raise ProviderError(
            f"functions.http.{function}: the environment variable {variable} is not set", remedy=f"export {variable}=…"
        )
    return value


def units_by_provider(prices: PriceList | None = None) -> dict[str, dict[str, float]]:
    """Dollars by unit for each function provider, of a price list, by default the shipped one, and of installed plugins
    that can be imported."""
    listed = load_prices(builtin("prices.yaml")) if prices is None else prices
    for name in installed_plugins():
        with contextlib.suppress(ProviderError):
            listed = with_plugin_prices(listed, [name])
    found: dict[str, dict[str, float]] = {}
    for entry in listed.prices:
        if entry.unit == "device-hour" or entry.of_tokens:
            continue
        provider, unit = entry.name, str(entry.unit)
        if unit.endswith("gpu-second"):  # `modal-L4`: of a type of the provider's
            provider, kind = gpu_price_parts(provider)
            unit = f"{unit}:{kind}"
        found.setdefault(provider, {})[unit] = entry.usd
    return found


PROVISIONED_FILE = "provisioned.json"
"""File in the run's directory with the provisioned levels from before the run changed them, until they are restored."""


class TrajectoryDemand(DemandSource):
    """Kinds are domains, and a domain's functions are those of its rewards."""

    def __init__(self, rolling: ActiveRollouts, domains: Iterable[DomainSpec]) -> None:
        self._rolling = rolling
        self._kinds: dict[str, tuple[str, ...]] = {}
        for domain in domains:
            for use in domain.rewards:
                self._kinds[use.function] = (*self._kinds.get(use.function, ()), domain.name)

    def live(self) -> Mapping[str, Sequence[float]]:
        return self._rolling.began()

    def ended(self) -> Iterable[tuple[str, float]]:
        return self._rolling.ended()

    def kinds(self, function: str) -> Collection[str]:
        return self._kinds.get(function, ())


def scaling_prices(resolved: Resolved, live: Callable[[], int]) -> ScalingPrices:
    """An idle worker costs its provider's idle price, a local one a core of the cluster's own `cpu` pools (the
    dearest), else the listed price; a waiting trajectory costs its share of all devices of the plan."""
    pools = [p.name for p in resolved.cluster.pools if p.device == "cpu"]
    hourly = [resolved.usd_per_device_hour[name] for name in pools if name in resolved.usd_per_device_hour]
    listed = resolved.prices.device_price("cpu")
    core = max(hourly or [0.0 if listed is None else listed.usd]) / 3600.0
    every_second = resolved.plan.usd_per_hour / 3600.0

    def idle(spec: FunctionSpec, provider: str) -> float:
        if resolved.prices.billed(provider) and resolved.prices.charges_idle(provider):
            return resolved.prices.idle_usd(provider, seconds=1.0, memory_mb=spec.memory_mb, gpu=spec.gpu)
        return core * (spec.cpu or 1.0)

    return ScalingPrices(idle, lambda: every_second / max(1, live()))


def make_scaler(
    resolved: Resolved,
    offload: Offload,
    chain: Sequence[Backend],
    *,
    seen: StatisticsMeter,
    rolling: ActiveRollouts,
    live: Callable[[], int],
    events: Recorder,
    directory: Path,
) -> Scaler:
    """The run's scaler, not open yet. `live`: number of live trajectories. Every change is an event of kind
    `function_scaled`, a change that a provider refused one of kind `function_scaling_failed`."""

    def emit(scaled: ScalingDecision) -> None:
        fields: dict[str, str | int | float | bool | None] = {
            "provider": scaled.provider,
            "from": scaled.before,
            "to": scaled.after,
            "why": scaled.why,
        }
        kind = "function_scaling_failed" if scaled.failed else "function_scaled"
        if scaled.failed:
            fields["detail"] = scaled.failed
        events.event(RunEvent(scaled.t, kind, scaled.function, fields))

    def route(function: str) -> str:
        states = offload.providers(function)
        return next((provider for provider, (state, _) in states.items() if state != "open"), "")

    around = ScalerContext(
        demand=TrajectoryDemand(rolling, resolved.run.domains),
        prices=scaling_prices(resolved, live),
        waiting=offload.waiting_for,
        route=route,
        tell=emit,
        remember=directory / PROVISIONED_FILE,
    )
    settings = function_settings("scaling", resolved.cluster.functions)
    return Scaler(offload.functions, chain, seen=seen, meter=seen, settings=settings, around=around)


class LedgerMeter:
    """`MeterSink` over a ledger. Spans of zero length are omitted.

    A ledger that can no longer write ends the run by itself (`Ledger.watch`). Later reports come from pools and workers
    that are being closed, and must not disturb that.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._left: set[str] = set()
        """Functions whose processes outlived a call."""

    def invocation(self, invocation: Invocation) -> None:
        with contextlib.suppress(StorageFailed):
            self._ledger.invocation(invocation)

    def worker(self, span: WorkerSpan) -> None:
        if span.t1 > span.t0:
            with contextlib.suppress(StorageFailed):
                self._ledger.worker(span)

    def saving(self, saving: Saving) -> None:
        with contextlib.suppress(StorageFailed):
            self._ledger.saving(saving)

    def tokens(self, bill: TokenBill) -> None:
        with contextlib.suppress(StorageFailed):
            self._ledger.tokens(bill)

    def left(self, left: LeftProcesses) -> None:
        """An event for the first of each function."""
        if left.function not in self._left:
            self._left.add(left.function)
            with contextlib.suppress(StorageFailed):
                self._ledger.left(left)


def runs_beside(directory: Path, provider: str) -> list[str]:
    """Names of the other runs beside a run's directory that called a provider and were active since the run began, by
    the files of their ledgers."""
    began, found = 0.0, list[str]()
    with contextlib.suppress(OSError):
        began = (directory / "resolved.yaml").stat().st_mtime
    for ledger in sorted(directory.resolve().parent.glob(f"*/{FILE}")):
        other = ledger.parent
        if other == directory.resolve():
            continue
        with contextlib.suppress(OSError, RollartError):
            if max(file.stat().st_mtime for file in other.glob(f"{FILE}*")) >= began:
                with LedgerReader(other) as reader:
                    if any(call.provider == provider for call in reader.invocation_sums()):
                        found.append(other.name)
    return found


def offload_events(offload: Offload, now: float, directory: Path | None = None) -> Iterable[RunEvent]:
    """At the end of a run's life, events with work, cost and savings of every pipeline stage, and the health of every
    function. Unused stages and functions have none."""
    for function, stages in offload.stages().items():
        for stage, counts in stages.items():
            fields = {k: v for k, v in asdict(counts).items() if v}
            if fields:
                yield RunEvent(now, OFFLOAD_STAGE, function, {"stage": str(stage), **fields})
    for function, health in offload.health().items():
        if not health.outcomes:
            continue
        kinds = {f"fault.{kind}": n for kind, n in sorted(health.by_kind.items())}
        fields = {"outcomes": health.outcomes, "faults": health.faults, "model_faults": health.model_faults, **kinds}
        yield RunEvent(now, FUNCTION_HEALTH, function, fields)
    for function, providers in offload.refusals().items():
        for provider, limits in providers.items():
            if limits:
                beside = runs_beside(directory, provider) if directory is not None else []
                named = {"beside": ", ".join(beside)} if beside else {}
                yield RunEvent(now, FUNCTION_REFUSED, function, {"provider": provider, **limits, **named})
