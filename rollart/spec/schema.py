"""JSON Schema of the specs, for editors (`# yaml-language-server: $schema=…`) and `rollart schema`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from rollart.errors import UsageError
from rollart.spec.cluster import ClusterSpec
from rollart.spec.faults import FaultPlanSpec
from rollart.spec.prices import PriceList
from rollart.spec.run import RunSpec
from rollart.spec.suggest import did_you_mean

__all__ = ["KINDS", "json_schema"]

KINDS: dict[str, type[BaseModel]] = {
    "run": RunSpec,
    "cluster": ClusterSpec,
    "prices": PriceList,
    "faults": FaultPlanSpec,
}
"""Spec models by the name that the command line uses."""


def json_schema(kind: str) -> dict[str, Any]:
    """JSON Schema (2020-12) of a kind of spec. UsageError for a kind that there is not."""
    if kind not in KINDS:
        raise UsageError(
            f"no schema '{kind}'{did_you_mean(kind, KINDS)}", remedy="ask for run, cluster, prices or faults"
        )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"rollart/{kind}.json",
        **KINDS[kind].model_json_schema(),
    }
