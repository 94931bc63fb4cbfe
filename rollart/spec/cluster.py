"""The cluster spec: which devices there are, what they cost, and how parts are cut."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollart.spec.base import Entry, Name
from rollart.spec.prices import PriceEntry

__all__ = ["ClusterFunctions", "ClusterSpec", "EnginesSpec", "PoolSpec", "TrainerSpec"]


class PoolSpec(Entry):
    """Devices of one type in one place."""

    name: Name = Field(description="Name of the pool.")
    device: str = Field(default="cpu", min_length=1, description="`cpu` (a device is a core) or a GPU type like H800.")
    count: int = Field(ge=1, description="Devices in the pool: cores for `cpu`, GPUs otherwise.")
    labels: dict[str, str] = Field(default_factory=dict, description="Labels of the pool.")
    memory_gb: float | None = Field(
        default=None,
        gt=0,
        description="Host memory of the pool (cpu) or of one device; not checked by the one-pool plan.",
    )
    price: float | None = Field(default=None, ge=0, description="Dollars per device-hour, instead of the price list's.")


class EnginesSpec(Entry):
    """Inference engines."""

    count: int = Field(default=1, ge=1, description="Number of engines.")
    device: str | None = Field(default=None, description="Device type they need; any if not given.")
    threads: int = Field(default=1, ge=1, description="Devices of one engine (cores, or GPUs: tensor parallelism).")
    max_slots: int = Field(default=64, ge=1, description="Requests that one engine decodes at a time.")


class TrainerSpec(Entry):
    """The trainer."""

    device: str | None = Field(default=None, description="Device type it needs; any if not given.")
    threads: int = Field(default=1, ge=1, description="Devices of the trainer (cores or GPUs).")


class ClusterFunctions(Entry):
    """Where reward functions run."""

    backend: Literal["local"] = Field(default="local", description="local: warm worker processes on this machine.")


class ClusterSpec(Entry):
    """A fleet. Only `name` and `pools` have no default."""

    name: Name = Field(description="Name of the cluster.")
    pools: list[PoolSpec] = Field(min_length=1, description="Devices by type and place.")
    engines: EnginesSpec = Field(default_factory=EnginesSpec, description="Inference engines.")
    trainer: TrainerSpec = Field(default_factory=TrainerSpec, description="The trainer.")
    functions: ClusterFunctions = Field(default_factory=ClusterFunctions, description="Where reward functions run.")
    prices: str | None = Field(
        default=None, description="Price list file, relative to the cluster file; the shipped one if not given."
    )
    price_list: list[PriceEntry] = Field(
        default_factory=list, description="Prices that add to or replace those of the list, by `name`."
    )
