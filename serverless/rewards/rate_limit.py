"""Limits of requests and tokens per minute, shared by the workers of a function on one machine.

The state is a few numbers in a file beside the function's package, under a file lock. Where that directory cannot be
written (Lambda), each worker has a state of its own: the endpoint's refusals and headers then bring them into line.
"""
# ruff: noqa: TID251 - processes share the time of day; a worker has no other clock.

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MINUTE_S = 60.0

_BURST = 0.1
"""The burst as a share of the minute's limit. The steady rate is the rest, so a minute has at most the limit."""

_HOLD_MOST_S = 3600.0
"""Longest announced wait that is believed: the state outlives its worker, and one absurd header would hold it."""


@dataclass(slots=True)
class LimitState:
    """`requests` and `tokens` are what may be taken at time `at`, the begin of the last request, which may be ahead.
    Before `held` none begins."""

    requests: float = 0.0
    tokens: float = 0.0
    at: float = 0.0
    held: float = 0.0


@dataclass(frozen=True, slots=True)
class RateLimit:
    """At most `requests` and `tokens` per minute; 0 for no limit. Pure: the state and the time are arguments.

    Two token buckets; requests begin in order of arrival: `take` reserves at once and returns the waits. Bound: in any
    60 seconds at most `requests` requests begin, and their tokens are at most `tokens` and the largest request.
    """

    requests: float = 0.0
    tokens: float = 0.0

    def take(self, state: LimitState, now: float, *tokens: float, most_s: float) -> tuple[bool, tuple[float, ...]]:
        """Reserve requests of an estimated number of tokens each, all or none: those of one item, of which a part is
        worth nothing. Returns True and the seconds until each may begin. If others make them wait for more than
        `most_s`, nothing is reserved: False and, once, the seconds after which to ask again. Requests that exceed the
        burst are spread over the time that a full bucket needs for them, which is no reason to refuse them."""
        trial = dataclasses.replace(state)
        waits = tuple(self._begin(trial, now, amount) - now for amount in tokens)
        full = LimitState(_shape(self.requests)[0], _shape(self.tokens)[0], now)
        least = [self._begin(full, now, amount) - now for amount in tokens]
        if (others_s := waits[-1] - least[-1]) > most_s:
            return False, (others_s,)
        for field in dataclasses.fields(LimitState):
            setattr(state, field.name, getattr(trial, field.name))
        return True, waits

    def _begin(self, state: LimitState, now: float, tokens: float) -> float:
        """Reserve one request, and return the time at which it begins."""
        begin = max(now, state.held)
        limited = [
            (name, amount, *_shape(limit))
            for name, limit, amount in (("requests", self.requests, 1.0), ("tokens", self.tokens, tokens))
            if limit
        ]
        for name, amount, burst, rate in limited:
            begin = max(begin, state.at, state.at + (min(amount, burst) - getattr(state, name)) / rate)
        for name, amount, burst, rate in limited:
            level = min(burst, getattr(state, name) + (begin - state.at) * rate)
            setattr(state, name, level - amount)
        if limited:
            state.at = begin
        return begin

    def settle(self, state: LimitState, estimated: float, used: float) -> None:
        """Correct a reservation by the tokens that the request really used."""
        if self.tokens:
            state.tokens += estimated - used

    def hold(self, state: LimitState, until: float) -> None:
        """The endpoint refused, or announced that it will: begin nothing before `until`."""
        state.held = max(state.held, until)


def _shape(limit: float) -> tuple[float, float]:
    """Burst and rate per second, with burst + 60 s * rate <= limit (for a limit of 1: fewer than two requests)."""
    burst = max(1.0, limit * _BURST)
    return burst, max(limit - burst, limit / 2.0) / MINUTE_S


_FORM = struct.Struct("=4d")


class SharedLimit:
    """Owns the state of one limit: in a file that other processes share, or in memory. Calls take microseconds."""

    def __init__(
        self, limit: RateLimit, path: pathlib.Path | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._limit = limit
        self._clock = clock
        self._own = LimitState()
        self._file: int | None = None
        if path is not None:
            with contextlib.suppress(OSError):
                self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @property
    def shared(self) -> bool:
        return self._file is not None

    def take(self, *tokens: float, most_s: float) -> tuple[bool, tuple[float, ...]]:
        with self._state() as state:
            return self._limit.take(state, self._clock(), *tokens, most_s=most_s)

    def settle(self, estimated: float, used: float) -> None:
        if self._limit.tokens:
            with self._state() as state:
                self._limit.settle(state, estimated, used)

    def hold(self, seconds: float) -> None:
        with self._state() as state:
            self._limit.hold(state, self._clock() + min(seconds, _HOLD_MOST_S))

    @contextlib.contextmanager
    def _state(self) -> Iterator[LimitState]:
        if self._file is None:
            yield self._own
            return
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            data = os.pread(self._file, _FORM.size, 0)
            state = LimitState(*_FORM.unpack(data)) if len(data) == _FORM.size else LimitState()
            yield state
            os.pwrite(self._file, _FORM.pack(*dataclasses.astuple(state)), 0)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
