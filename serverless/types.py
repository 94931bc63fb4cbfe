"""Values of the offload layer: the input of a function, its outcome, and the bill of a call."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = [
    "Cause",
    "FaultKind",
    "InfraFault",
    "Invocation",
    "Item",
    "ModelFault",
    "Outcome",
    "Scored",
    "Throttle",
    "TokenUsage",
]


@dataclass(frozen=True, slots=True)
class Item:
    """One item to score: the list form that reward Lambdas already use (Nova/Bedrock RFT).

    `messages` is the conversation as [{"role", "content"}]; `metadata` is JSON-able.
    """

    id: str
    messages: tuple[Mapping[str, str], ...]
    reference_answer: str | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)

    @property
    def completion(self) -> str:
        """The text of the last assistant message, or ''."""
        for message in reversed(self.messages):
            if message.get("role") == "assistant":
                return message.get("content", "")
        return ""


class FaultKind(enum.StrEnum):
    """The kinds of platform fault."""

    CRASH = "crash"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    BAD_ANSWER = "bad_answer"
    THROTTLED = "throttled"
    UNAVAILABLE = "unavailable"
    DEADLINE = "deadline"
    ENVIRONMENT = "environment"
    ENGINE = "engine"


class Throttle(enum.StrEnum):
    """The limit that a THROTTLED call met; each requires another reaction of the caller.

    CONCURRENCY  too many concurrent calls: reduce them (AIMD), then retry
    RATE         too many calls per second: wait, then retry
    RESERVED     the function's own configured limit: it does not pass before a running call ends
    SCALING      the provider cannot start environments fast enough: wait, then retry with the same concurrency
    QUEUE        our own bound on waiting items
    """

    CONCURRENCY = "concurrency"
    RATE = "rate"
    RESERVED = "reserved"
    SCALING = "scaling"
    QUEUE = "queue"


class Cause(enum.StrEnum):
    """The reason of a call. Every reason other than CALL is overhead, with its own line in the cost report."""

    CALL = "call"
    RETRY = "retry"
    HEDGE = "hedge"
    ISOLATION = "isolation"
    """Part of a batch that failed as a whole, called to find the failing item."""
    FALLBACK = "fallback"
    """Made by another provider after the previous one failed."""
    SMOKE = "smoke"
    WARM = "warm"
    CHECK = "check"
    """Repeated in another order, to see whether answers depend on earlier calls (`serverless.history`)."""


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens that requests to a language model consumed, each in exactly one class; its provider bills them.

    `endpoint` is the host of its API. `input_tokens` are those of prompts at the full price, `cached_tokens` those read
    from the provider's prompt cache, `cache_write_tokens` those written to it at a price of their own.
    """

    endpoint: str
    model: str
    requests: int = 1
    input_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: TokenUsage) -> TokenUsage:
        """The sum of two usages of one model."""
        return TokenUsage(
            self.endpoint,
            self.model,
            self.requests + other.requests,
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.cache_write_tokens + other.cache_write_tokens,
            self.output_tokens + other.output_tokens,
        )


@dataclass(frozen=True, slots=True)
class Scored:
    """A reward. `steps`, if given, assigns parts of it to where they were earned: one number per turn or per action
    token, as the function declares; `value` stays the aggregate."""

    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    steps: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelFault:
    """The policy's own output made scoring impossible. It is the policy's fault, so it has a floor as its value."""

    floor: float
    reason: str


@dataclass(frozen=True, slots=True)
class InfraFault:
    """The platform failed, which never counts as a score. The sample is masked, re-queued or its group dropped."""

    kind: FaultKind
    retryable: bool
    detail: str = ""
    throttle: Throttle | None = None
    """The limit of a THROTTLED call; None where the provider does not name it."""
    retry_after_s: float | None = None
    """The wait that the provider requested when it refused the call, None if it requested none."""


Outcome: TypeAlias = Scored | ModelFault | InfraFault


@dataclass(frozen=True, slots=True)
class Invocation:
    """The bill of one call. Times are loop seconds; `billed_s` are the seconds that the provider charges.

    `provider_id` is the provider's id of the call, by which its own bill can be checked.
    """

    function: str
    provider: str
    worker: str
    t0: float
    t1: float
    cold_start_s: float
    billed_s: float
    memory_mb: int
    items: int
    status: str
    cause: Cause = Cause.CALL
    provider_id: str = ""
    queued_s: float = 0.0
    """Seconds from the request to `t0`, on backends where calls wait for a worker."""
    cold_billed_s: float | None = None
    """The start-up part of `billed_s`; None: as much of `cold_start_s` as was billed."""

    @property
    def start_billed_s(self) -> float:
        """Billed seconds of start-up."""
        return min(self.billed_s, self.cold_start_s if self.cold_billed_s is None else self.cold_billed_s)
