"""Values of the offload layer: what goes to a function, what comes back, and what the call cost."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["Cause", "FaultKind", "InfraFault", "Invocation", "Item", "ModelFault", "Outcome", "Scored", "Throttle"]


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to score: the list form that reward Lambdas already use (Nova/Bedrock RFT).

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
    """What the platform did wrong."""

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
    """Which limit a THROTTLED call met; each asks for something else of the caller.

    CONCURRENCY  too many calls at once: fewer of them (AIMD), then again
    RATE         too many calls per second: wait, then again
    RESERVED     the function's own configured limit: it will not pass by waiting less than a call takes
    SCALING      the provider cannot start environments fast enough: wait, then again, with the same concurrency
    QUEUE        our own bound on waiting items
    """

    CONCURRENCY = "concurrency"
    RATE = "rate"
    RESERVED = "reserved"
    SCALING = "scaling"
    QUEUE = "queue"


class Cause(enum.StrEnum):
    """Why a call was made. What is not CALL is overhead, and has a line of its own in the cost report."""

    CALL = "call"
    RETRY = "retry"
    HEDGE = "hedge"
    ISOLATION = "isolation"
    """Part of a batch that failed as a whole, to find the item that did it."""
    FALLBACK = "fallback"
    """Made by another provider, after the one before failed."""
    SMOKE = "smoke"
    WARM = "warm"


@dataclass(frozen=True, slots=True)
class Scored:
    """A reward. `steps`, if given, pays parts of it where they were earned: one number per turn or per action
    token, as the function declares; `value` stays the aggregate."""

    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    steps: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelFault:
    """The policy's own output made scoring impossible (it is the policy's fault, so it has a floor as its value)."""

    floor: float
    reason: str


@dataclass(frozen=True, slots=True)
class InfraFault:
    """The platform failed: never a number. The sample is masked, re-queued or its group dropped."""

    kind: FaultKind
    retryable: bool
    detail: str = ""
    throttle: Throttle | None = None
    """Of a THROTTLED one; None where the provider does not name the limit."""
    retry_after_s: float | None = None
    """What the provider asked for, if it did: the wait of the call that it refused."""


Outcome: TypeAlias = Scored | ModelFault | InfraFault


@dataclass(frozen=True, slots=True)
class Invocation:
    """The bill of one call: times are loop seconds, `billed_s` what the provider charges for.

    `provider_id` is the provider's name of the call (a request id), by which its own bill can be checked.
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
    """How long before `t0` it was asked for, where the backend makes calls wait for a worker."""
    cold_billed_s: float | None = None
    """What of `billed_s` was start-up; None: as much of `cold_start_s` as was billed."""

    @property
    def start_billed_s(self) -> float:
        """Billed seconds of start-up."""
        return min(self.billed_s, self.cold_start_s if self.cold_billed_s is None else self.cold_billed_s)
