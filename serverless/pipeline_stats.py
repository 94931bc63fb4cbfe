"""What every stage of the pipeline did, cost and saved, and how a function's platform does."""

from __future__ import annotations

import enum
from collections import Counter, deque
from dataclasses import dataclass, field

from serverless.types import FaultKind, InfraFault, ModelFault, Outcome

__all__ = ["FunctionHealth", "OffloadStage", "StageCounts"]

_RECENT = 200
"""Outcomes over which `recent_rate` is taken."""


class OffloadStage(enum.StrEnum):
    """In the order in which an item meets them."""

    VALIDATE = "validate"
    DEDUPE = "dedupe"
    CACHE = "cache"
    ADMISSION = "admission"
    BATCH = "batch"
    LIMITS = "limits"
    HEDGE = "hedge"
    ISOLATION = "isolation"
    RETRY = "retry"
    BREAKER = "breaker"
    FALLBACK = "fallback"
    SCHEMA = "schema"


@dataclass(slots=True)
class StageCounts:
    """One stage of one function since the start.

    `entered` and `acted` are items (of the hedge: calls); `helped` of those acted on, how many it did good: hedges that
    answered first, items that a retry or another provider scored. `waited_s` are item seconds that it added.
    `extra_calls` and `extra_billed_s` are what it caused (a hedge's loser, cancelled, at the seconds that it ran);
    `saved_calls` and `saved_billed_s` are what it made needless, at the function's mean bill of a call or an item.
    """

    entered: int = 0
    acted: int = 0
    helped: int = 0
    waited_s: float = 0.0
    extra_calls: int = 0
    extra_billed_s: float = 0.0
    saved_calls: int = 0
    saved_billed_s: float = 0.0


@dataclass(slots=True)
class FunctionHealth:
    """Outcomes of a function as its callers got them. Every `InfraFault` counts, whatever its kind."""

    outcomes: int = 0
    faults: int = 0
    model_faults: int = 0
    by_kind: Counter[FaultKind] = field(default_factory=Counter)
    _recent: deque[bool] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def note(self, outcome: Outcome) -> None:
        fault = isinstance(outcome, InfraFault)
        if isinstance(outcome, InfraFault):
            self.by_kind[outcome.kind] += 1
        self.outcomes += 1
        self.faults += fault
        self.model_faults += isinstance(outcome, ModelFault)
        self._recent.append(fault)

    @property
    def rate(self) -> float:
        """Share of faults since the start."""
        return self.faults / self.outcomes if self.outcomes else 0.0

    @property
    def recent_rate(self) -> float:
        """The same over the last 200 outcomes."""
        return sum(self._recent) / len(self._recent) if self._recent else 0.0
