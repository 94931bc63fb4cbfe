"""A provider of functions from another distribution: its settings, its backend and its control plane.

A backend implements `serverless.providers.base.Backend`; `serverless.workers.pool.PooledBackend` brings queues, scaling
and metering to one that can start workers. `rollart.testing.backends` has the conformance suite.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from serverless.meter import MeterSink
from serverless.providers.base import Backend, Deployer
from serverless.secrets import Secrets


@dataclass(frozen=True, slots=True)
class ProviderContext:
    """`meter` receives bills; `root` is a directory for logs and local state; `run` an id of the calling run that is
    unique in the provider's account, '' outside runs. `secrets.variables(spec)` is the environment of a function's
    workers: its `env`, and the values of its secrets on the calling machine."""

    meter: MeterSink | None = None
    root: pathlib.Path | None = None
    run: str = ""
    secrets: Secrets = field(default_factory=Secrets)


@dataclass(frozen=True, slots=True)
class ListPrice:
    """A price of the provider in dollars per unit ("GB-second", "core-second", "million-requests", "idle-..."), with
    its source and the date on which it was read (YYYY-MM-DD). A price per "gpu-second" or "idle-gpu-second" is that of
    a type of `gpu`, as functions name it ("L4"). ValueError for another unit with a type, or these without one."""

    unit: str
    usd: float
    source: str
    date: str
    gpu: str = ""

    def __post_init__(self) -> None:
        if bool(self.gpu) is not self.unit.endswith("gpu-second"):
            rule = "rule: a GPU type for gpu-second and idle-gpu-second, and for no other unit"
            raise ValueError(f"price per {self.unit} has gpu {self.gpu!r} ({rule})")


@dataclass(frozen=True, slots=True)
class ProviderPlugin:
    """`settings` validates the mapping under `functions.<name>` of a cluster spec. `backend` and `deployer` get the
    valid settings; what they raise is one of `serverless.errors`. Without a deployer, functions are deployed by runs
    alone. `prices` are used where the user's price list has none of this provider."""

    settings: type[BaseModel]
    backend: Callable[[Any, ProviderContext], Backend]
    deployer: Callable[[Any, ProviderContext], Deployer] | None = None
    prices: tuple[ListPrice, ...] = ()
