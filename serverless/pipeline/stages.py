"""The stages of the pipeline: their names, their settings with a switch each, and their counts.

pipeline:
  hedge: {budget: 0.02}
  cache: {enabled: false}
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field, model_validator

from serverless.spec import Settings
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


class StageSpec(Settings):
    """A stage with no setting but its switch."""

    enabled: bool = True


class CacheSpec(StageSpec):
    """Cache of the results of deterministic functions, in a file that persists between runs. Without a file there is no
    cache."""

    max_entries: int = Field(default=200_000, ge=1)
    """Maximum number of entries; the oldest are removed first. An entry takes about 200 bytes on disk."""


class AdmissionSpec(StageSpec):
    """Adapts the calls in flight per function and provider to the provider's capacity, up to the function's
    `concurrency`."""

    latency: bool = True
    """Also reduce the calls in flight when latency rises, before the provider refuses any."""
    latency_factor: float = Field(default=2.0, gt=1.0)
    """Ratio of the latency of recent calls to the usual one for their size that counts as load."""
    max_throttles: int = Field(default=12, ge=0)
    """Maximum refusals per item at one provider. A refused call is not executed and is no attempt; after this number,
    halving has reduced any concurrency to one."""
    wait_s: float = Field(default=0.05, gt=0.0)
    max_wait_s: float = Field(default=5.0, gt=0.0)
    """Bounds of the waits after consecutive refusals without a requested wait: jittered, doubling from the first to the
    second."""


class BatchingSpec(StageSpec):
    """Items per call. Sizes and the wait are the function's own (`batch`). Off: one item per call."""

    by_length: bool = False
    """Only items whose sizes are within a factor of four share a call, so that a long item does not delay short ones.
    """


class HedgeSpec(StageSpec):
    """A second call for a late one; the first answer counts. A hedged item may therefore be executed twice. For a
    function that is not deterministic either answer is valid, and the function must be stateless. Switch hedging off
    (`hedge: false` of the function) where calls are expensive or have side effects."""

    quantile: float = Field(default=0.95, gt=0.0, lt=1.0)
    budget: float = Field(default=0.05, ge=0.0, le=1.0)
    """Maximum extra calls, as a share of the calls made."""
    min_observations: int = Field(default=20, ge=1)
    """Minimum number of answers before the quantile is used."""


class RetrySpec(StageSpec):
    max_attempts: int = Field(default=3, ge=1)
    base_s: float = Field(default=0.05, gt=0.0)
    cap_s: float = Field(default=2.0, gt=0.0)
    budget: float = Field(default=0.1, ge=0.0)
    """Retries earned per item."""
    reserve: float = Field(default=20.0, ge=0.0)
    """Retries before any was earned."""
    lost: bool = False
    """Also retry, on any provider, a call whose connection was lost after it was sent. The call may have been executed
    or still be running: this applies to deterministic functions only, and such calls may be billed twice."""


class BreakerSpec(StageSpec):
    """Stops calls to a failing provider of a function for a while."""

    consecutive: int = Field(default=5, ge=1)
    rate: float = Field(default=0.5, gt=0.0, le=1.0)
    window: int = Field(default=20, ge=1)
    """Calls over which `rate` is taken."""
    open_s: float = Field(default=1.0, gt=0.0)
    max_open_s: float = Field(default=30.0, gt=0.0)
    """The first and the longest pause; each pause is twice the previous one."""
    trials: int = Field(default=3, ge=1)
    """Failed trials in a row of every provider after which waiting items fail instead of waiting further. A run thus
    learns of an outage in seconds (7 s with these pauses), before its items' deadlines."""


class LimitsSpec(Settings):
    """Time limits of single items from observed answers (RollPacker, arXiv 2509.21009, section on rewards): T =
    min(max(min_s, factor * slowest correct answer to the same prompt), max_s)."""

    scope: Literal["declared", "all", "off"] = "declared"
    """declared: functions with a `timeout_floor`, where a timeout is the policy's fault."""
    factor: float = Field(default=1.5, ge=1.0)
    min_s: float = Field(default=2.0, gt=0.0)
    max_s: float = Field(default=30.0, gt=0.0)
    correct: float = 1.0
    """Minimum score of a correct answer."""
    metric: str = "seconds"
    """The metric in which a function reports an item's own time; without it the call's time is used."""

    @model_validator(mode="after")
    def _ordered(self) -> LimitsSpec:
        if self.min_s > self.max_s:
            raise ValueError(f"min_s={self.min_s:g} is more than max_s={self.max_s:g}")
        return self


class PipelineSpec(Settings):
    """The stages of `serverless.pipeline.offload.Offload`, in the order in which an item passes them."""

    dedupe: StageSpec = StageSpec()
    cache: CacheSpec = CacheSpec()
    admission: AdmissionSpec = AdmissionSpec()
    batch: BatchingSpec = BatchingSpec()
    limits: LimitsSpec = LimitsSpec()
    hedge: HedgeSpec = HedgeSpec()
    isolation: StageSpec = StageSpec()
    """Isolate the item that made a shared call fail. Off: all items of the call fail."""
    retry: RetrySpec = RetrySpec()
    breaker: BreakerSpec = BreakerSpec()
    fallback: StageSpec = StageSpec()


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


class RefusingLimit(enum.StrEnum):
    """The limit that refused or delayed a call: one of `Throttle`, or one of these."""

    UNKNOWN = "unknown"
    """The provider does not name it."""
    QUOTA = "quota"
    """The run's own number of concurrent calls at a provider."""
    API = "api"
    """The rate of an API that the function asks."""
    COMPETED = "competed"
    """Of those for concurrency: refusals below a level that the provider had admitted before."""


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
