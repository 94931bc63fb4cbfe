"""What a lane asks of the line that it belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

from serverless.pipeline_entry import PendingItem
from serverless.pipeline_stats import OffloadStage, StageCounts
from serverless.types import InfraFault, Invocation, Outcome

__all__ = ["ProviderQueueCallbacks"]


class ProviderQueueCallbacks(Protocol):
    """All synchronous. Lanes are named by their place in the chain."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...

    def count(self, stage: OffloadStage) -> StageCounts: ...

    def limit(self, entry: PendingItem) -> float | None:
        """The item's time limit now, None for none."""

    def receive(self, entry: PendingItem, outcome: Outcome, *, seconds: float | None = None) -> None:
        """An item's outcome; `seconds` of its call if a worker gave it, None for one that the lane made up."""

    def provider_failed(self, lane: int, entry: PendingItem, fault: InfraFault) -> None:
        """This provider cannot serve the item, which says nothing about another."""

    def again(self, entry: PendingItem) -> None:
        """Send an entry on its way once more."""

    def billed(self, invocation: Invocation) -> None: ...

    def shut(self, lane: int) -> None:
        """The lane admits nothing for a while: its breaker opened, its trial is out, or its provider refuses."""

    def back(self, lane: int) -> None:
        """Its breaker closed."""
