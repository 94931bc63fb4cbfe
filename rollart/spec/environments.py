"""The cluster spec's `environments`: where episodes are played."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rollart.entry import ImportPath, Name, SpecEntry

__all__ = ["UNLESS_QUICK", "EnvironmentsSpec"]

UNLESS_QUICK: Literal["unless_quick"] = "unless_quick"


class EnvironmentsSpec(SpecEntry):
    """Where environments live: in the controller's process, or on separate hosts. See docs/environments.md."""

    workers: Literal["auto", "unless_quick"] | Annotated[int, Field(ge=0, le=100_000)] = Field(
        default=UNLESS_QUICK,
        description="Environment hosts: processes that hold many environments each. 0: environments live in the "
        "controller's process; auto: as many as the plan gives them cores, or as the profiles require "
        "(`core_s`), with slots for all concurrent episodes: redundant, prefetched and held-out ones too; "
        "unless_quick: 0 where every environment of the run declares `quick = True` (it answers at once, without "
        "waiting), else auto. Plans and simulations know no classes, and take unless_quick for 0.",
    )
    pool: Name | None = Field(
        default=None,
        description="Pool whose machines they run on, beside the parts that the plan put there; by default the first "
        "pool of cores. Cores that the plan gave to environments go to hosts first, whatever their pool.",
    )
    per_worker: int = Field(
        default=512,
        ge=1,
        le=1_000_000,
        description="Concurrent environments of one host; further ones wait for a slot, which does not count as a "
        "fault.",
    )
    python: str | None = Field(
        default=None,
        min_length=1,
        description="Python interpreter with the environments' packages, and rollart, installed, relative to the "
        "cluster file; by default the controller's.",
    )
    warm: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="Environments of each domain that a host makes before they are needed, or keeps for reuse.",
    )
    reuse: int = Field(
        default=1,
        ge=1,
        le=1_000_000,
        description="Episodes that one environment plays, reset in between, if it declares itself `reusable`; 1: a new "
        "environment for each episode. No more than `warm` are kept.",
    )
    images: ImportPath | None = Field(
        default=None,
        description="`package.module:Class` that lists and pulls container images on a host, for environments that "
        "name theirs by `images(seed)`.",
    )
    images_args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of that class.")
    images_gb: float | None = Field(
        default=None, gt=0, le=1e6, description="Images that a host keeps, 10^9 bytes; evicted by least recent use."
    )
    pull_s: float = Field(
        default=600.0,
        gt=0,
        le=86400,
        description="Longest wait for an episode's images, which is no part of its reset.",
    )
    memory_gb: Literal["auto"] | Annotated[float, Field(ge=0.1, le=1e6)] = Field(
        default="auto",
        description="Resident memory of one host, 10^9 bytes, with the programs that its environments start: a host "
        "above it gets no more episodes, and is restarted when it holds none, or at once above 1.25 times of it. "
        "auto: an equal share of 70 % of its machine's memory (its container's, if that is limited) for each host "
        "there, but 1 at least. With `workers` 0 the controller reports when it has grown by this much.",
    )
    health_s: float = Field(
        default=15.0,
        ge=0.5,
        le=3600,
        description="A host that is silent, or whose environments are all blocked by one call, for this long is "
        "restarted.",
    )
    start_s: float = Field(
        default=60.0, ge=1, le=86400, description="Longest start of a host, its environments' imports included."
    )
