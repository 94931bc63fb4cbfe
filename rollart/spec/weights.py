"""How new weights reach the engines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollart.spec.base import Entry

__all__ = ["WeightsSpec"]


class WeightsSpec(Entry):
    """A version on its way from the trainer to the engines."""

    overlap: bool = Field(
        default=False,
        description="Write a version, and push it to the engines' store, beside the next training step; it is current "
        "once it is complete and committed. Without effect under `sync` and `sync_plus`.",
    )
    update: Literal["all", "delayed", "staggered", "on_divergence"] = Field(
        default="all",
        description="all: every engine stands still, loads, and goes on; delayed: each engine first ends the "
        "trajectories that live on it; staggered: some load while others serve; on_divergence: an engine loads once "
        "the policy has moved by more than `threshold` from its own, or `staleness` asks for it. Others than `all` "
        "need a schedule with a window of groups and `staleness` of at least 1, on_divergence of at least 2.",
    )
    longest_s: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        description="Longest time that an engine puts an update off, seconds; only with `delayed`, where it is 120.",
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
