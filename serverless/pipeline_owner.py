"""The callbacks of a provider queue into its function queue."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

from serverless.pipeline_entry import PendingItem
from serverless.pipeline_stats import OffloadStage, StageCounts
from serverless.types import InfraFault, Invocation, Outcome

__all__ = ["ProviderQueueCallbacks"]


class ProviderQueueCallbacks(Protocol):
    """All are synchronous. `lane` is the index of the provider queue in the fallback order."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...

    def count(self, stage: OffloadStage) -> StageCounts: ...

    def limit(self, entry: PendingItem) -> float | None:
        """The item's current time limit in seconds, None for none."""

    def receive(self, entry: PendingItem, outcome: Outcome, *, seconds: float | None = None) -> None:
        """Deliver an item's outcome. `seconds` is the duration of its call if a worker gave the outcome, None if the
        provider queue made it."""

    def provider_failed(self, index: int, entry: PendingItem, fault: InfraFault) -> None:
        """This provider cannot serve the item; another one may."""

    def again(self, entry: PendingItem) -> None:
        """Route the item again."""

    def billed(self, invocation: Invocation) -> None: ...

    def provider_unavailable(self, index: int) -> None:
        """The provider queue admits no calls for a while: its breaker opened, its trial is in flight, or its provider
        refuses."""

    def provider_available(self, index: int) -> None:
        """The breaker of the provider queue closed."""
