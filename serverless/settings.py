"""How the pipeline treats calls: one part per stage, each with its constants and a switch.

pipeline:
  hedge: {budget: 0.02}
  cache: {enabled: false}
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from serverless.policy.breaker import BreakerPolicy
from serverless.policy.concurrency import ConcurrencyPolicy
from serverless.policy.hedge import HedgePolicy
from serverless.policy.limits import LimitPolicy
from serverless.policy.retry import RetryPolicy

__all__ = [
    "AdmissionSpec",
    "BatchingSpec",
    "BreakerSpec",
    "CacheSpec",
    "HedgeSpec",
    "LimitsSpec",
    "PipelineSpec",
    "RetrySpec",
    "StageSpec",
]


class StageSpec(BaseModel):
    """A stage with nothing to set but whether it is there."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = True


class CacheSpec(StageSpec):
    """Results of deterministic functions, kept in a file between runs. Needs a file: without one there is no cache."""

    max_entries: int = Field(default=200_000, ge=1)
    """Oldest go first. An entry is about 200 bytes on disk."""


class AdmissionSpec(StageSpec):
    """Calls in flight per function and provider: what the provider bears, never more than the function's
    `concurrency`."""

    latency: bool = True
    """Also yield when calls get slower, before the provider refuses any."""
    latency_factor: float = Field(default=2.0, gt=1.0)
    """Recent calls this much slower than usual ones of their size are a sign of load."""
    max_throttles: int = Field(default=12, ge=0)
    """Refusals that one item bears from a provider. A refused call is not executed, so it is no attempt; by then
    halving has passed from any concurrency to one."""
    wait_s: float = Field(default=0.05, gt=0.0)
    max_wait_s: float = Field(default=5.0, gt=0.0)
    """Waits after refusals in a row, where the provider asked for none: jittered, doubling from the first of these."""

    def policy(self, concurrency: int) -> ConcurrencyPolicy | None:
        factor = self.latency_factor if self.latency else None
        return ConcurrencyPolicy(concurrency, self.wait_s, self.max_wait_s, factor) if self.enabled else None


class BatchingSpec(StageSpec):
    """Items per call; sizes and the wait are the function's own (`batch`). Off: one item per call."""

    by_length: bool = False
    """Only items whose sizes are within a factor of four share a call, so that a long one does not hold short ones."""


class HedgeSpec(StageSpec):
    """A second call for one that is late; the first answer counts. So a hedged item is executed twice, on purpose: of a
    function that is not deterministic either answer is as good, and stateless it must be. Switch it off for one whose
    calls cost too much to be made twice, or have effects elsewhere."""

    quantile: float = Field(default=0.95, gt=0.0, lt=1.0)
    budget: float = Field(default=0.05, ge=0.0, le=1.0)
    """Most extra calls, as a share of the calls made."""
    min_observations: int = Field(default=20, ge=1)
    """Answers seen before the quantile is trusted."""

    def policy(self) -> HedgePolicy | None:
        return HedgePolicy(self.quantile, self.budget, self.min_observations) if self.enabled else None


class RetrySpec(StageSpec):
    max_attempts: int = Field(default=3, ge=1)
    base_s: float = Field(default=0.05, gt=0.0)
    cap_s: float = Field(default=2.0, gt=0.0)
    budget: float = Field(default=0.1, ge=0.0)
    """Retries earned per item."""
    reserve: float = Field(default=20.0, ge=0.0)
    """Retries before any was earned."""
    lost: bool = False
    """Also call again, elsewhere or there, where the connection was lost after the call was sent. It may have been
    executed, or still be: deterministic functions only, and they may be billed twice."""

    def policy(self) -> RetryPolicy | None:
        policy = RetryPolicy(self.max_attempts, self.base_s, self.cap_s, self.budget, self.reserve)
        return policy if self.enabled else None


class BreakerSpec(StageSpec):
    """When a provider of a function is left alone, and for how long."""

    consecutive: int = Field(default=5, ge=1)
    rate: float = Field(default=0.5, gt=0.0, le=1.0)
    window: int = Field(default=20, ge=1)
    """Calls over which `rate` is taken."""
    open_s: float = Field(default=1.0, gt=0.0)
    max_open_s: float = Field(default=30.0, gt=0.0)
    """The first pause and the longest; each is twice the one before."""
    trials: int = Field(default=3, ge=1)
    """Failed trials in a row, of every provider of the chain, after which items that wait fail instead of waiting on:
    so a run learns of an outage in seconds (7 s with these pauses), and not from its items' deadlines."""

    def policy(self) -> BreakerPolicy | None:
        policy = BreakerPolicy(self.consecutive, self.rate, self.window, self.open_s, self.max_open_s, self.trials)
        return policy if self.enabled else None


class LimitsSpec(BaseModel):
    """Time limits of single items that follow the answers seen (RollPacker, arXiv 2509.21009, section on rewards):
    T = min(max(min_s, factor * slowest correct answer to the same prompt), max_s)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    scope: Literal["declared", "all", "off"] = "declared"
    """declared: functions with a `timeout_floor`, where running out of time is the policy's doing."""
    factor: float = Field(default=1.5, ge=1.0)
    min_s: float = Field(default=2.0, gt=0.0)
    max_s: float = Field(default=30.0, gt=0.0)
    correct: float = 1.0
    """A score from here on is a correct answer."""
    metric: str = "seconds"
    """The metric in which a function reports an item's own time; without it the call's time stands in."""

    def policy(self, *, declared: bool) -> LimitPolicy | None:
        """`declared`: the function has a `timeout_floor`."""
        if self.scope == "off" or (self.scope == "declared" and not declared):
            return None
        return LimitPolicy(self.factor, self.min_s, self.max_s, self.correct, self.metric)

    @model_validator(mode="after")
    def _ordered(self) -> LimitsSpec:
        if self.min_s > self.max_s:
            raise ValueError(f"min_s={self.min_s:g} is more than max_s={self.max_s:g}")
        return self


class PipelineSpec(BaseModel):
    """Every stage of `serverless.pipeline.Offload`, in the order in which an item meets them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dedupe: StageSpec = StageSpec()
    cache: CacheSpec = CacheSpec()
    admission: AdmissionSpec = AdmissionSpec()
    batch: BatchingSpec = BatchingSpec()
    limits: LimitsSpec = LimitsSpec()
    hedge: HedgeSpec = HedgeSpec()
    isolation: StageSpec = StageSpec()
    """Find the item that made a shared call fail. Off: all of them fail."""
    retry: RetrySpec = RetrySpec()
    breaker: BreakerSpec = BreakerSpec()
    fallback: StageSpec = StageSpec()

    @classmethod
    def none(cls) -> PipelineSpec:
        """Every stage off: one item, one call, one outcome."""
        off = {name: {"enabled": False} for name in cls.model_fields if name != "limits"}
        return cls.model_validate({**off, "limits": {"scope": "off"}})
