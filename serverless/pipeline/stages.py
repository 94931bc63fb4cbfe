"""Counts of the pipeline's stages, and fault rates of a function."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

from serverless.types import FaultKind, InfraFault, ModelFault, Outcome


class OffloadStage(enum.StrEnum):
    """The stages in the order in which an item passes them."""

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

    `entered` and `acted` count items (for hedging: calls). `helped` counts those acted on with success: hedges that
    answered first, items that were scored after a retry or by another provider. `waited_s` are the item seconds of
    delay that the stage added. `extra_calls` and `extra_billed_s` are its added cost (the cancelled attempt of a hedged
    call counts the seconds that it ran). `saved_calls` and `saved_billed_s` are its savings, at the function's mean
    bill per call or item.
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
    """Outcomes of a function as its callers received them. `InfraFault` of every kind counts."""

    outcomes: int = 0
    faults: int = 0
    model_faults: int = 0
    by_kind: Counter[FaultKind] = field(default_factory=Counter)

    def note(self, outcome: Outcome) -> None:
        self.outcomes += 1
        if isinstance(outcome, InfraFault):
            self.faults += 1
            self.by_kind[outcome.kind] += 1
        self.model_faults += isinstance(outcome, ModelFault)

    @property
    def rate(self) -> float:
        """Share of faults since the start."""
        return self.faults / self.outcomes if self.outcomes else 0.0
