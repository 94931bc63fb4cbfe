"""Settings of the function layer inside a cluster spec: the model of each mapping under `functions`.

The models belong to the function layer. They are imported only if a spec has settings to check, and none of them needs
a provider's library.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from pydantic import BaseModel, ConfigDict, create_model

from rollart.spec.cluster import ClusterSpec
from rollart.spec.document import KeyPath

__all__ = ["MODELS", "settings_model", "settings_parts"]

MODELS: Mapping[str, tuple[str, str]] = {
    "aws_lambda": ("serverless.deploy.aws_settings", "AwsSettings"),
    "modal": ("serverless.backends.modal_versions", "ModalSettings"),
    "pipeline": ("serverless.settings", "PipelineSpec"),
    "scaling": ("serverless.scaling_spec", "ScalingSpec"),
}
"""Module and name of the model, by key under `functions`."""


def settings_parts(cluster: ClusterSpec) -> Iterator[tuple[KeyPath, type[BaseModel], Mapping[str, Any]]]:
    """Path, model and values of each mapping that is not empty."""
    for key in MODELS:
        values = getattr(cluster.functions, key)
        if values:
            yield ("functions", key), settings_model(key), values


def settings_model(key: str) -> type[BaseModel]:
    """The model of a key of `MODELS`; a dataclass becomes a model with the same fields that forbids others."""
    module, name = MODELS[key]
    found = getattr(import_module(module), name)
    if issubclass(found, BaseModel):
        return typing.cast(type[BaseModel], found)
    hints = typing.get_type_hints(found)
    fields: dict[str, Any] = {
        field.name: (hints[field.name], ... if field.default is dataclasses.MISSING else field.default)
        for field in dataclasses.fields(found)
    }
    return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
