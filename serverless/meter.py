"""Cost of functions: backends report calls and worker time to a `MeterSink`.

Conservation: a worker is cold (starting), busy (a call runs in it) or idle from its start to its end, so for every
worker life cold + busy + idle seconds = end - start. Spans are half-open and adjacent without gaps.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Protocol

from serverless.types import Invocation, TokenUsage


class WorkerState(enum.StrEnum):
    COLD = "cold"
    BUSY = "busy"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class WorkerSpan:
    """A period of one worker in one state, loop seconds."""

    function: str
    provider: str
    worker: str
    t0: float
    t1: float
    state: WorkerState
    memory_mb: int


@dataclass(frozen=True, slots=True)
class Saving:
    """Items that needed no call: `stage` is "dedupe" or "cache". `billed_s` is their estimated bill at the function's
    mean so far (0 before the first call)."""

    function: str
    stage: str
    t: float
    items: int
    billed_s: float
    memory_mb: int


NO_SCORE = "no_score"
"""Cause of tokens whose answer is no score: a judge refused, was cut off or gave no verdict."""


@dataclass(frozen=True, slots=True)
class TokenBill:
    """Tokens that an answered call of a function consumed at a language model, which its provider bills. Every executed
    call has its own; an item that shares an answer has none. `provider` is the function's.

    `cause` is NO_SCORE, `Cause.HEDGE` for a second execution, or `Cause.CALL`: the repeated request after an answer
    without a score is no overhead itself."""

    function: str
    provider: str
    t: float
    cause: str
    usage: TokenUsage


@dataclass(frozen=True, slots=True)
class LeftProcesses:
    """Processes that outlived their call, by names and ids. They and their worker were ended after the answer, which
    counts."""

    function: str
    worker: str
    t: float
    processes: str


class MeterSink(Protocol):
    """Receives the reports of backends. Synchronous and cheap."""

    def invocation(self, invocation: Invocation) -> None:
        """A call ended, with or without success. Cancelled calls and failed starts (0 items) are reported too."""

    def worker(self, span: WorkerSpan) -> None: ...

    def saving(self, saving: Saving) -> None: ...

    def tokens(self, bill: TokenBill) -> None: ...

    def left(self, left: LeftProcesses) -> None: ...


def billed_seconds(seconds: float) -> float:
    """Seconds rounded up to 1 ms, as Lambda does. A failed start is billed too."""
    return math.ceil(round(seconds * 1000.0, 6)) / 1000.0


class NullMeter:
    def invocation(self, invocation: Invocation) -> None: ...

    def worker(self, span: WorkerSpan) -> None: ...

    def saving(self, saving: Saving) -> None: ...

    def tokens(self, bill: TokenBill) -> None: ...

    def left(self, left: LeftProcesses) -> None: ...
