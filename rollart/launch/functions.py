"""The functions of a run: providers by name (deployment and calls of rewards, with errors translated to the product's),
live scaling by the expected load from the scheduler, and their records in the ledger (the bill of every call, the time
of every worker, and the pipeline's counters).
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import ValidationError

from rollart.control.groups import ActiveRollouts
from rollart.errors import ProviderError, RollartError, RunFailed, SpecError, StorageFailed, UsageError, did_you_mean
from rollart.ledger.events import FUNCTION_HEALTH, OFFLOAD_STAGE
from rollart.ledger.store import Ledger
from rollart.ports import Recorder, RunEvent
from rollart.settings.cluster import ClusterFunctions, FunctionProvider, HttpFunction
from rollart.settings.functions import settings_model
from rollart.settings.load import builtin, function_layer_settings, load_prices
from rollart.settings.prices import PriceList
from rollart.settings.resolve import Resolved
from rollart.settings.run import DomainSpec
from serverless.declare import declarations
from serverless.deploy.package import Package, build
from serverless.errors import (
    BackendFailed,
    CredentialsMissing,
    ExtraMissing,
    PackageError,
    ServerlessError,
    SpecInvalid,
    UnknownFunction,
)
from serverless.meter import MeterSink, NullMeter, Saving, WorkerSpan
from serverless.pipeline.offload import Offload
from serverless.providers.base import Backend, Deployer
from serverless.scaling.decisions import StatisticsMeter
from serverless.scaling.scaler import DemandSource, Scaler, ScalerContext, ScalingDecision, ScalingPrices
from serverless.spec import FunctionSpec
from serverless.types import Invocation
from serverless.workers.remote import WorkerHosts

if TYPE_CHECKING:
    from serverless.providers.http import Endpoint  # its client is not needed without this provider

PROVIDERS: tuple[str, ...] = get_args(FunctionProvider)
"""Provider names as in the ledger and the price list."""

DEPLOYABLE_PROVIDERS = ("local", "aws_lambda", "modal")
"""Providers that functions are deployed to; an `http` host has its functions already."""

ALIASES = {"aws": "aws_lambda", "lambda": "aws_lambda"}


def canonical_provider(name: str) -> str:
    """A provider's name from a name or alias. `UsageError` for an unknown one."""
    found = ALIASES.get(name, name)
    if found not in PROVIDERS:
        known = [*PROVIDERS, *ALIASES]
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
        if isinstance(error, CredentialsMissing | ExtraMissing | BackendFailed):
            kind = ProviderError
        elif isinstance(error, SpecInvalid):
            kind = SpecError
        elif isinstance(error, PackageError | UnknownFunction):
            kind = UsageError
        raise kind(prefix + error.message, remedy=error.remedy) from None
    except OSError as error:
        if error.filename is None:
            raise
        raise StorageFailed(
            f"{prefix}{error.filename}: {error.strerror}", remedy="choose another place, or mend its permissions"
        ) from None


def packages_in(source: str, *, name: str | None = None, base: Path | None = None) -> list[Package]:
    """The packed rewards of `FILE.py`, or the one of `FILE.py:attribute`. Their code is read, not run.

    `name` renames a single reward. `UsageError` for a file without rewards; packing errors are translated.
    """
    head, _, attribute = source.partition(":")
    with translated_errors():
        if attribute or not head.endswith(".py"):
            return [build(_spec(name or _name(attribute or head), source), base=base)]
        declared = _declared(Path(base or ".") / head)
        if name is not None and len(declared) != 1:
            raise UsageError(f"{head} has {len(declared)} rewards: --name is for one", remedy=f"name one: {head}:NAME")
        return [
            build(_spec(name or str(settings.get("name") or _name(found)), f"{head}:{found}"), base=base)
            for found, settings in declared.items()
        ]


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


def deployer(provider: str, functions: ClusterFunctions, *, root: Path, meter: MeterSink | None = None) -> Deployer:
    """The control plane of a provider, not open yet. `root`: directory of local deployments; `meter`: receives the
    bills of trials. SpecError for invalid settings."""
    with translated_errors():
        if provider == "local":
            from serverless.deploy.local import LocalDeployer

            return LocalDeployer(root, meter=meter, allow_unsafe=functions.allow_unsafe)
        if provider == "aws_lambda":
            from serverless.deploy.aws import AwsDeployer

            return AwsDeployer(function_settings(provider, functions), meter=meter)
        if provider == "modal":
            from serverless.deploy.modal_app import ModalDeployer

            return ModalDeployer(function_settings(provider, functions), meter=meter)
    raise UsageError(
        f"nothing is deployed to '{provider}'", remedy=f"deploy to one of {', '.join(DEPLOYABLE_PROVIDERS)}"
    )


@dataclass(frozen=True, slots=True)
class DeploymentTrial:
    """Cost of the trial of a new version: a deployment calls it once before it becomes current."""

    call: Invocation
    usd: float
    billed: bool
    """False for a provider that sends no bill: the dollars are then an equivalent price."""


class TrialMeter(NullMeter):
    """The meter of a deployer. `bills`: its trials, priced by a list."""

    def __init__(self, prices: PriceList) -> None:
        self._prices = prices
        self.bills: list[DeploymentTrial] = []

    def invocation(self, invocation: Invocation) -> None:
        call, prices = invocation, self._prices
        usd = prices.function_usd(call.provider, billed_s=call.billed_s, memory_mb=call.memory_mb)
        self.bills.append(DeploymentTrial(call, usd, prices.billed(call.provider)))


def backend(
    provider: str,
    functions: ClusterFunctions,
    *,
    meter: MeterSink | None = None,
    root: Path | None = None,
    hosts: WorkerHosts | None = None,
    run: str = "",
) -> Backend:
    """The backend for calls, not open yet. `root`: directory for logs of local workers; `hosts`: hosts of local
    workers, if any; `run`: an id of the caller that is unique in the provider's account; without one, a deployment for
    calls does not become current. SpecError for invalid settings."""
    with translated_errors():
        if provider == "local":
            return _local(functions, meter, root, hosts)
        if provider == "aws_lambda":
            from serverless.providers.aws import AwsLambdaBackend

            return AwsLambdaBackend(function_settings(provider, functions), meter=meter, run=run)
        if provider == "modal":
            from serverless.providers.modal import ModalBackend

            return ModalBackend(function_settings(provider, functions), meter=meter, current=bool(run))
        if provider == "http":
            from serverless.providers.http import HttpBackend

            return HttpBackend(_endpoints(functions.http), meter=meter)
    raise UsageError(f"no provider '{provider}' (rule: one of {', '.join(PROVIDERS)})")


async def attach_function(backend: Backend, provider: str, function: str, *, root: Path) -> None:
    """Route calls of a function to its current version, which for `local` is below `root`."""
    from serverless.deploy.local import LocalDeployer
    from serverless.providers.base import AttachableBackend

    if provider == "local":
        await backend.deploy(LocalDeployer(root).package(function))
    elif isinstance(backend, AttachableBackend):
        await backend.attach(function)
    else:
        raise UsageError(f"'{function}' cannot be called by its name on '{provider}'", remedy="give its file")


def _local(
    functions: ClusterFunctions, meter: MeterSink | None, root: Path | None, hosts: WorkerHosts | None
) -> Backend:
    """Workers on this machine or on `hosts`, either plain or in imitation of a provider (`rehearse`), with its start
    delay, throttling and overhead."""
    from serverless.workers.local import LocalBackend
    from serverless.workers.pool import PooledBackend
    from serverless.workers.remote import HostedBackend

    local, unsafe = functions.local, functions.allow_unsafe

    def workers(**more: Any) -> PooledBackend:
        if hosts is not None:
            return HostedBackend(hosts, meter=meter, allow_unsafe=unsafe, **more)
        return LocalBackend(meter=meter, root=root, runtime=local.runtime, allow_unsafe=unsafe, **more)

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


_LIBRARIES = {"aws_lambda": ("boto3", "aiobotocore"), "modal": ("modal",)}
_EXTRAS = {"aws_lambda": "aws", "modal": "modal"}


def function_settings(key: str, functions: ClusterFunctions) -> Any:
    """The function layer's own settings under `functions`, validated: `AwsSettings`, `ModalSettings`, `PipelineSpec` or
    `ScalingSpec`. SpecError for invalid ones."""
    return function_layer_settings(settings_model(key), f"functions.{key}", getattr(functions, key))


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
        found[name] = Endpoint(given.url, auth, idempotent=given.idempotent)
    return found


def _secret(function: str, variable: str) -> str:
    value = os.environ.get(variable, "")
    if not value:
        raise ProviderError(
            f"functions.http.{function}: the environment variable {variable} is not set", remedy=f"export {variable}=…"
        )
    return value


def units_by_provider() -> dict[str, dict[str, float]]:
    """Dollars by unit for each function provider in the shipped price list."""
    found: dict[str, dict[str, float]] = {}
    for entry in load_prices(builtin("prices.yaml")).prices:
        if entry.unit != "device-hour":
            found.setdefault(entry.name, {})[entry.unit] = entry.usd
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
    """An idle local worker costs a core of the cluster's own `cpu` pools (the dearest), else the listed price; a
    waiting trajectory costs its share of all devices of the plan."""
    pools = [p.name for p in resolved.cluster.pools if p.device == "cpu"]
    hourly = [resolved.usd_per_device_hour[name] for name in pools if name in resolved.usd_per_device_hour]
    listed = [p.usd for p in resolved.prices.prices if (p.name, p.unit) == ("cpu", "device-hour")]
    core = max(hourly or listed or [0.0]) / 3600.0
    every_second = resolved.plan.usd_per_hour / 3600.0

    def idle(spec: FunctionSpec, provider: str) -> float:
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


def offload_events(offload: Offload, now: float) -> Iterable[RunEvent]:
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
