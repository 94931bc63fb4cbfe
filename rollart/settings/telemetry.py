"""What other tools read of a run while it runs (docs/observability.md)."""

from __future__ import annotations

import zlib

from pydantic import Field

from rollart.ports import RELAUNCH_MARK
from rollart.settings.base import SpecEntry


class TelemetrySpec(SpecEntry):
    """A run's figures for other tools."""

    turns: float = Field(default=0.0, ge=0, le=1)
    """Share of the prompts whose trajectories' turns are recorded in the ledger, for `report timeline -o perfetto` and
    for spans."""


def is_traced(group: str, share: float) -> bool:
    """True for `share` of the prompts, by their names: all trajectories of a prompt, also when it is generated
    again."""
    return zlib.crc32(group.partition(RELAUNCH_MARK)[0].encode()) < share * 2**32
