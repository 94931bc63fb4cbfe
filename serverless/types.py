"""Values of the offload layer: what goes to a function, what comes back, and what the call cost."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["FaultKind", "InfraFault", "Invocation", "Item", "ModelFault", "Outcome", "Scored"]


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


Outcome: TypeAlias = Scored | ModelFault | InfraFault


@dataclass(frozen=True, slots=True)
class Invocation:
    """The bill of one call: times are loop seconds, `billed_s` what the provider charges for."""

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
