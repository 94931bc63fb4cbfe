"""A request inside a simulated engine, and its completion."""

from __future__ import annotations

import asyncio
import enum
from functools import lru_cache

from rollart.model import Completion, FinishReason, GenerateRequest, VersionSpan

__all__ = ["DECODE", "OVER", "PREFILL", "WAITING", "SimulatedJob", "Phase", "completion_of"]


class Phase(enum.IntEnum):
    """The phase of a request. A preempted or recomputed request waits again."""

    WAITING = 0
    PREFILL = 1
    DECODE = 2
    OVER = 3


WAITING, PREFILL, DECODE, OVER = Phase


class SimulatedJob:
    """Mutable, owned by one engine. Token counts are real tokens.

    `done` tokens are generated, counted at its last change of phase; while it decodes, `base` is the engine's service
    when it joined (with `done` tokens) and `end` the one at which it is finished. `marks` are (version, tokens) at each
    change of weights.
    """

    __slots__ = (
        "admitted",
        "arrival",
        "base",
        "cached",
        "done",
        "end",
        "future",
        "marks",
        "new",
        "output",
        "phase",
        "pulled",
        "request",
        "tokens",
    )

    def __init__(
        self, request: GenerateRequest, tokens: int, output: int, arrival: int, future: asyncio.Future[Completion]
    ) -> None:
        self.request = request
        self.tokens = tokens
        self.output = output
        self.arrival = arrival
        self.future = future
        self.phase: Phase = WAITING
        self.done = 0
        self.base = self.end = 0.0
        self.new = self.cached = 0
        self.admitted = False
        """True if the request was admitted before, so that its prefill is a recomputation."""
        self.pulled = False
        self.marks: list[tuple[int, int]] | None = None

    def generated(self, service: float) -> int:
        """Whole tokens so far. A token is there when its step is over."""
        if self.phase is not DECODE:
            return self.done
        return min(self.output, self.done + int(service - self.base + 1e-6))

    def mark(self, version: int, tokens: int) -> None:
        """The weights change: the tokens up to here are of `version`."""
        last = self.marks[-1][1] if self.marks else 0
        if tokens > last:
            self.marks = [*(self.marks or ()), (version, tokens)]


def completion_of(job: SimulatedJob, finish: FinishReason, version: int, tokens: int) -> Completion:
    """One id per policy version, its mass the tokens sampled under it."""
    request = job.request
    if job.marks is None:
        if not tokens:
            return Completion((), (), (), finish, job.tokens, job.cached)
        return Completion(
            (tokens,), _LOGPROB, _single_version_span(version), finish, job.tokens, job.cached, None, tokens
        )
    masses: list[int] = []
    spans: list[VersionSpan] = []
    last = 0
    for of, until in [*job.marks, (version, tokens)]:
        if until > last:
            spans.append(VersionSpan(of, len(masses), len(masses) + 1))
            masses.append(until - last)
            last = until
    assert sum(masses) == tokens, f"{request.request_id}: {masses} for {tokens} tokens"
    logprobs = _LOGPROB * len(masses)
    return Completion(tuple(masses), logprobs, tuple(spans), finish, job.tokens, job.cached, None, tokens)


@lru_cache(maxsize=8)
def _single_version_span(version: int) -> tuple[VersionSpan, ...]:
    return (VersionSpan(version, 0, 1),)


_LOGPROB = (-1.0,)
"""Simulated tokens are not trained on, so that any valid log-probability does."""
