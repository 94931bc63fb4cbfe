"""How new weights reach the engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollart.entry import SpecEntry

__all__ = ["CollectiveSpec", "WeightStoreSpec", "WeightsSpec"]


class WeightStoreSpec(SpecEntry):
    """A store between the trainer and the engines' hosts: a version is pushed once, in buckets, and pulled by each
    host."""

    kind: Literal["files", "s3"] = Field(
        description="`files`: a directory that the controller and the engines' hosts share; `s3`: an S3 bucket or "
        "anything that speaks its protocol (extra `aws`; credentials, region and AWS_ENDPOINT_URL from each "
        "host's environment; attached servers need none, they get signed URLs)."
    )
    url: str = Field(
        min_length=1,
        description="The directory (relative to the run file), or `s3://BUCKET/PREFIX`. Each run adds its own name.",
    )
    in_flight: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = Field(
        default="auto",
        description="Buckets in flight, at a push and at each host's pull; `auto`: as many as the "
        "look-ahead rule derives from their transfer times, within 4 GiB.",
    )
    bucket_mb: int = Field(
        default=256, ge=1, le=4096, description="Size of a bucket, MB. One that did not change is not sent again."
    )
    local: str | None = Field(
        default=None,
        min_length=1,
        description="Absolute directory of each engine's host that keeps pulled versions, at least two of them; "
        "`pulled` in the run's directory if not given. Attached servers need it.",
    )


class CollectiveSpec(SpecEntry):
    """A broadcast from the trainer's ranks to all engines, concurrent with the write of the version and the rollout. An
    engine that misses it loads the version's files."""

    backend: Literal["auto", "gloo", "nccl"] = Field(
        default="auto",
        description="`nccl` between GPUs, `gloo` by way of host memory; `auto`: nccl where the trainer and all engines "
        "have GPUs.",
    )
    bucket_mb: int = Field(default=64, ge=1, le=4096, description="Size of a bucket, MB.")


class WeightsSpec(SpecEntry):
    """Transfer of a weight version from the trainer to the engines."""

    overlap: bool = Field(
        default=False,
        description="Write a version, and push it to the engines' store, during the next training step; it is current "
        "once it is complete and committed. Without effect under `sync` and `sync_plus`.",
    )
    store: WeightStoreSpec | None = Field(
        default=None,
        description="Engines load versions that their hosts pulled from here; without it from the run's directory.",
    )
    collective: CollectiveSpec | None = Field(
        default=None,
        description="Broadcast versions into the engines' memory; without it, or with `store`, engines load files.",
    )
    update: Literal["all", "delayed", "staggered", "on_divergence"] = Field(
        default="all",
        description="all: every engine pauses, loads and resumes; delayed: each engine first finishes its live "
        "trajectories; staggered: some load while others serve; on_divergence: an engine loads once "
        "the policy has moved by more than `threshold` from its version, or `staleness` requires it. Values other than "
        "`all` need a schedule with a window of groups and `staleness` of at least 1, on_divergence of at least 2.",
    )
    longest_s: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        description="Longest delay of an engine's update, seconds; only with `delayed`, where it is 120.",
    )
    fraction: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Largest share of the engines that load at a time; only with `staggered`, where it is 0.25.",
    )
    threshold: float | None = Field(
        default=None,
        ge=0,
        le=100,
        description="KL from an engine's weights to the current ones, nats per token, beyond which it loads them; with "
        "`on_divergence`, which needs it. The trainer measures it on samples of each batch.",
    )
