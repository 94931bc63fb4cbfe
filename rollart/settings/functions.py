"""Settings of functions: the effective settings of each reward function, and the models of the function layer's
settings in a cluster spec.

Effective settings are the run's function entry over the `@rollart.reward` of its source. A resolved run keeps the
entries as written and shows the effective settings beside them. A resume reads the sources again: an edit of a
decorator counts there as an edit of the reward's code does.

The models of the mappings under `functions` belong to the function layer. They are imported only if a spec has settings
to check, and none of them needs a provider's library.
"""

from __future__ import annotations

import importlib.machinery
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from rollart.errors import SpecError
from rollart.settings.cluster import ClusterSpec
from rollart.settings.document import KeyPath, read_document
from rollart.settings.providers import plugin
from rollart.settings.run import FunctionEntry
from rollart.user_code import importable
from serverless.deploy.package import settings
from serverless.errors import PackageError, ServerlessError
from serverless.spec import FunctionBatchSpec, FunctionSpec

_BATCH = {"batch_items": "max_items", "batch_wait_ms": "max_wait_ms", "batch_bytes": "max_bytes"}
"""Keys of an entry by those of the function's `batch`."""

_OWN = {"name", "source", "handler", "function", "artefact", *_BATCH}

MODELS: Mapping[str, tuple[str, str]] = {
    "aws_lambda": ("serverless.deploy.aws_function", "AwsSettings"),
    "modal": ("serverless.providers.modal_client", "ModalSettings"),
    "pipeline": ("serverless.pipeline.stages", "PipelineSpec"),
    "scaling": ("serverless.scaling.settings", "ScalingSpec"),
    "secrets": ("serverless.secrets", "SecretSources"),
}
"""Module and name of the model, by key under `functions`."""


def function_spec(entry: FunctionEntry, artefacts: Sequence[str] = ()) -> FunctionSpec:
    """The settings that an entry gives, and no others: `serverless.deploy.package` adds the decorator's.

    `artefacts` are files, in place of the entry's own.
    """
    in_module = not entry.source.endswith(".py") and entry.function is None
    given: dict[str, Any] = {"name": entry.name, "source": entry.source or entry.function, "handler": entry.handler}
    if in_module:
        given = {"name": entry.name, "source": f"{entry.source}:{entry.handler}"}
    given |= {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in entry.model_dump(exclude_none=True, exclude=_OWN).items()
    }
    batch = {theirs: getattr(entry, ours) for ours, theirs in _BATCH.items() if getattr(entry, ours) is not None}
    if batch:
        given["batch"] = FunctionBatchSpec(**batch)
    if entry.image is not None:
        given["image"] = entry.image
    if artefacts:
        given["artefacts"] = tuple(artefacts)
    # Not validated: `warm` may fit the decorator's `concurrency`, which is not known here. `settings` and `build` do.
    return FunctionSpec.model_construct(**given)


class FunctionRelease(BaseModel):
    """The version of a deployed function that a run drew for its entry's `reference`. `number` is the provider's number
    of it, `weights` are those of the alias at that moment by number, `settings` the deployed ones."""

    model_config = ConfigDict(frozen=True)

    reference: str
    provider: str
    version: str
    number: str
    weights: dict[str, float]
    settings: dict[str, Any]


def saved_releases(path: str | Path) -> dict[str, FunctionRelease]:
    """The versions that a run drew, from the file that its directory keeps."""
    found = read_document(path).values.get("releases", {})
    try:
        return {name: FunctionRelease.model_validate(one) for name, one in found.items()}
    except (ValidationError, AttributeError):
        raise SpecError(f"{path}: key 'releases' is damaged (rule: what `rollart launch` wrote)") from None


def released_spec(entry: FunctionEntry, deployed: FunctionSpec) -> FunctionSpec:
    """The effective settings of a deployed function: its own, and those that an entry may set."""
    given = function_spec(entry)
    update = {key: getattr(given, key) for key in given.model_fields_set - {"name", "source", "handler", "batch"}}
    if "batch" in given.model_fields_set:
        update["batch"] = deployed.batch.model_copy(update=given.batch.model_dump(exclude_unset=True))
    try:
        return FunctionSpec.model_validate(deployed.model_copy(update=update).model_dump(exclude_unset=True))
    except ValidationError as error:
        text = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise SpecError(f"function '{entry.name}': {text}") from None


def effective_spec(entry: FunctionEntry, base: str | Path, release: FunctionRelease | None = None) -> FunctionSpec:
    """The effective settings of a function. Its source is read, not run; where there is no source (a spec that is only
    planned), the decorator's settings are missing, as are those of a deployed function before its `release` is drawn.
    SpecError for settings that do not fit together."""
    if entry.function is not None:
        own = {"name": entry.name, "source": entry.function}
        return released_spec(entry, FunctionSpec.model_validate({**own, **(release.settings if release else {})}))
    spec = function_spec(entry)
    try:
        with importable(base):
            return settings(_located(spec, base), base=Path(base))
    except PackageError:
        try:
            return FunctionSpec.model_validate(spec.model_dump(exclude_unset=True))
        except ValidationError as error:
            text = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise SpecError(f"function '{entry.name}': {text}") from None
    except ServerlessError as error:
        raise SpecError(f"function '{entry.name}': {error.message}", remedy=error.remedy) from None


def settings_parts(cluster: ClusterSpec) -> Iterator[tuple[KeyPath, type[BaseModel], Mapping[str, Any]]]:
    """Path, model and values of each mapping that is not empty."""
    for key in MODELS:
        values = getattr(cluster.functions, key)
        if values:
            yield ("functions", key), settings_model(key), values
    for key, given in cluster.functions.plugins.items():
        yield ("functions", key), settings_model(key), given


def settings_model(key: str) -> type[BaseModel]:
    """The model of a key of `MODELS`, or of a plugin."""
    if key not in MODELS:
        return plugin(key).settings
    module, name = MODELS[key]
    found: type[BaseModel] = getattr(import_module(module), name)
    return found


def _located(spec: FunctionSpec, base: str | Path) -> FunctionSpec:
    """A dotted module as its file, found without importing the packages around it."""
    dotted, _, attribute = spec.source.partition(":")
    if spec.handler or "." not in dotted or "/" in dotted or dotted.endswith(".py"):
        return spec
    where, found = None, None
    for n, _part in enumerate(parts := dotted.split("."), 1):
        found = importlib.machinery.PathFinder.find_spec(".".join(parts[:n]), where)
        where = found.submodule_search_locations if found is not None else None
        if found is None or (where is None and n < len(parts)):
            return spec
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        return spec
    return spec.model_copy(update={"source": found.origin, "handler": attribute})
