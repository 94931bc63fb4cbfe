"""How new weights reach the engines."""

from __future__ import annotations

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
