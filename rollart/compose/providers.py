"""Function providers by name: where rewards are deployed to and called, and their errors as the product's."""

from __future__ import annotations

import ast
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from rollart.errors import ProviderError, RollartError, RunFailed, SpecError, UsageError
from rollart.spec.cluster import FunctionProvider
from rollart.spec.load import builtin, load_prices
from rollart.spec.prices import PriceList
from rollart.spec.suggest import did_you_mean
from serverless.backends.base import Backend, Deployer
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
from serverless.meter import MeterSink
from serverless.settings import PipelineSpec
from serverless.spec import FunctionSpec

__all__ = [
    "DEPLOYED",
    "PROVIDERS",
    "backend",
    "canonical",
    "deployer",
    "packages_in",
    "pipeline_settings",
    "translated",
    "units_by_provider",
]

PROVIDERS: tuple[str, ...] = get_args(FunctionProvider)
"""By the names that the ledger and the price list have."""

DEPLOYED = ("local", "aws_lambda", "modal")
"""Those that functions are deployed to; an `http` host has them already."""

ALIASES = {"aws": "aws_lambda", "lambda": "aws_lambda"}


def canonical(name: str) -> str:
    """A provider's name from what people call it. `UsageError` for none that is known."""
    found = ALIASES.get(name, name)
    if found not in PROVIDERS:
        raise UsageError(f"no provider '{name}' (rule: one of {', '.join(PROVIDERS)}{did_you_mean(name, PROVIDERS)})")
    return found


@contextlib.contextmanager
def translated(what: str = "") -> Iterator[None]:
    """Errors of the function layer as those of the product, by whose they are to mend. `what` goes before them."""
    try:
        yield
    except ServerlessError as error:
        raise _translate(error, what) from None


def _translate(error: ServerlessError, what: str) -> RollartError:
    kind: type[RollartError] = RunFailed
    if isinstance(error, CredentialsMissing | ExtraMissing | BackendFailed):
        kind = ProviderError
    elif isinstance(error, SpecInvalid):
        kind = SpecError
    elif isinstance(error, PackageError | UnknownFunction):
        kind = UsageError
    return kind(what + error.message, remedy=error.remedy)


def packages_in(source: str, *, name: str | None = None, base: Path | None = None) -> list[Package]:
    """The rewards of `FILE.py`, or the one of `FILE.py:attribute`, packed. Their code is read, not run.

    `name` renames a single one. `UsageError` for a file without rewards; errors of packing are translated.
    """
    head, _, attribute = source.partition(":")
    with translated():
        if attribute or not head.endswith(".py"):
            return [build(FunctionSpec(name=name or _name(attribute or head), source=source), base=base)]
        declared = _declared(Path(base or ".") / head)
        if name is not None and len(declared) != 1:
            raise UsageError(f"{head} has {len(declared)} rewards: --name is for one", remedy=f"name one: {head}:NAME")
        return [
            build(FunctionSpec(name=name or str(settings.get("name") or _name(found)), source=f"{head}:{found}"),
                  base=base)
            for found, settings in declared.items()
        ]  # fmt: skip


def _declared(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """The decorated rewards of a file; a single plain function counts as one."""
    try:
        text = path.read_text()
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


def deployer(provider: str, settings: Mapping[str, Any] | None = None, *, root: Path) -> Deployer:
    """The control plane of a provider, not open yet. `root` keeps what is deployed locally. SpecError for settings."""
    with translated():
        if provider == "local":
            from serverless.deploy.local import LocalDeployer

            return LocalDeployer(root)
        if provider == "aws_lambda":
            from serverless.deploy.aws import AwsDeployer

            return AwsDeployer(_aws(settings))
        if provider == "modal":
            from serverless.deploy.modal_app import ModalDeployer

            return ModalDeployer(_modal(settings))
    raise UsageError(f"nothing is deployed to '{provider}'", remedy=f"deploy to one of {', '.join(DEPLOYED)}")


def backend(
    provider: str,
    settings: Mapping[str, Any] | None = None,
    *,
    meter: MeterSink | None = None,
    root: Path | None = None,
    allow_unsafe: bool = False,
) -> Backend:
    """Where calls go, not open yet. `root` keeps logs of local workers. SpecError for settings that are none."""
    with translated():
        if provider == "local":
            from serverless.backends.local import LocalBackend

            return LocalBackend(meter=meter, root=root, allow_unsafe=allow_unsafe)
        if provider == "aws_lambda":
            from serverless.backends.aws_lambda import AwsLambdaBackend

            return AwsLambdaBackend(_aws(settings), meter=meter)
        if provider == "modal":
            from serverless.backends.modal_functions import ModalBackend

            return ModalBackend(_modal(settings), meter=meter)
        if provider == "http":
            from serverless.backends.http import HttpBackend

            return HttpBackend(_endpoints(settings or {}), meter=meter)
    raise UsageError(f"no provider '{provider}' (rule: one of {', '.join(PROVIDERS)})")


def pipeline_settings(given: Mapping[str, Any]) -> PipelineSpec:
    """SpecError for a stage or constant that is not there."""
    try:
        return PipelineSpec.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["functions", "pipeline", *map(str, first["loc"])])
        raise SpecError(f"{where}: {first['msg']} (got {first['input']!r:.60})") from None


def _aws(settings: Mapping[str, Any] | None) -> Any:
    from serverless.deploy.aws_settings import AwsSettings

    return _valid("aws_lambda", AwsSettings, settings)


def _modal(settings: Mapping[str, Any] | None) -> Any:
    from serverless.backends.modal_versions import ModalSettings

    return _valid("modal", ModalSettings, settings)


def _valid(provider: str, model: Any, settings: Mapping[str, Any] | None) -> Any:
    try:
        return model(**(settings or {}))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["functions", provider, *map(str, first["loc"])])
        raise SpecError(f"{where}: {first['msg']} (got {first['input']!r:.60})") from None
    except (TypeError, ValueError) as error:
        raise SpecError(f"functions.{provider}: {error}") from None


def _endpoints(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`{function: {url, token_env | secret_env + key}}`: secrets are named, never written down."""
    from serverless.backends.http import Bearer, Endpoint, Signed

    found = {}
    for function, given in settings.items():
        entry = {"url": given} if isinstance(given, str) else dict(given)
        unknown = set(entry) - {"url", "token_env", "secret_env", "key"}
        if unknown or not isinstance(entry.get("url"), str):
            rule = "url, and token_env or secret_env and key"
            raise SpecError(f"functions.http.{function}: {sorted(entry)} (rule: {rule})")
        auth: Bearer | Signed | None = None
        if "token_env" in entry:
            auth = Bearer(_secret(function, entry["token_env"]))
        elif "secret_env" in entry:
            auth = Signed(str(entry.get("key", "rollart")), _secret(function, entry["secret_env"]))
        try:
            found[function] = Endpoint(entry["url"], auth)
        except ValueError as error:
            raise SpecError(f"functions.http.{function}: {error}") from None
    return found


def _secret(function: str, variable: str) -> str:
    value = os.environ.get(variable, "")
    if not value:
        raise ProviderError(
            f"functions.http.{function}: the environment variable {variable} is not set", remedy=f"export {variable}=…"
        )
    return value


def units_by_provider(
    prices: PriceList | None = None, providers: Sequence[str] | None = None
) -> dict[str, dict[str, float]]:
    """Dollars by unit of every provider of functions in a price list."""
    listed = prices or load_prices(builtin("prices.yaml"))
    found: dict[str, dict[str, float]] = {}
    for entry in listed.prices:
        if entry.unit != "device-hour" and (providers is None or entry.name in providers):
            found.setdefault(entry.name, {})[entry.unit] = entry.usd
    return found
