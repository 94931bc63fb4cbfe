"""Estimate of the sessions whose KV an engine holds, and of its reserved memory: engines do not report either.

An engine keeps the KV of a session between its turns until the memory is needed; then the least recently used session
loses the end of its KV, as vLLM frees blocks. The estimate follows from the requests sent to the engine and from its
capacity.
"""

from __future__ import annotations

import math
from collections import OrderedDict

__all__ = ["KvResidency"]

KEPT = 0.5
"""A session that lost more than this share of its KV at once is assumed to have lost all: it is routed as a new one."""


class KvResidency:
    """One engine's KV memory, in tokens. Sessions with a request in flight are never evicted; of the others the least
    recently used goes first.

    `capacity` and `most` (sessions) are infinite until known. For `reserved` a session counts with its expected final
    size, so that admitted sessions do not evict each other later. Invariant: the held KV exceeds neither bound, unless
    sessions with a request in flight alone exceed it.
    """

    __slots__ = ("_busy", "_fresh", "_idle", "_kept", "_wanted", "capacity", "evicted", "most", "reserved", "total")

    def __init__(self) -> None:
        self._idle: OrderedDict[str, int] = OrderedDict()
        self._busy: dict[str, int] = {}
        self._wanted: dict[str, int] = {}
        self._fresh: set[str] = set()
        """Sessions that were admitted and have sent no request yet."""
        self._kept: dict[str, tuple[int, int]] = {}
        """Reserved slots, and the reserved tokens of each slot, by name."""
        self.capacity = math.inf
        self.most = math.inf
        self.total = 0
        self.reserved = 0
        self.evicted = 0
        """Sessions that lost their KV to others."""

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    def __contains__(self, session: str) -> bool:
        return session in self._idle or session in self._busy

    @property
    def taken(self) -> int:
        """Sessions on this engine, and reserved slots."""
        return len(self) + sum(slots for slots, _ in self._kept.values()) if self._kept else len(self)

    @property
    def quiet(self) -> bool:
        """True if no request is in flight and none is about to start."""
        return not self._busy and not self._fresh

    def set_capacity(self, capacity: float, most: float = math.inf) -> None:
        """Set the capacity."""
        self.capacity, self.most = capacity, most
        self._shrink()

    def held(self, session: str) -> int:
        """Tokens of the session's KV on this engine."""
        found = self._idle.get(session)
        return self._busy.get(session, 0) if found is None else found

    def fill(self) -> float:
        """Reserved share of the memory; 0 while the capacity is unknown."""
        return self.reserved / self.capacity

    def fits(self, tokens: int, *, share: float = 1.0, sessions: int = 1) -> bool:
        """True if `sessions` sessions of `tokens` tokens each fit within that share without an eviction. A session
        always fits on an empty engine."""
        if not self.taken:
            return True
        return self.reserved + sessions * tokens <= share * self.capacity and self.taken + sessions <= self.most

    def keep(self, name: str, slots: int, tokens: int) -> None:
        """Reserve `slots` slots of `tokens` tokens each under a name; 0 ends the reservation."""
        before, each = self._kept.pop(name, (0, 0))
        self.reserved += slots * tokens - before * each
        if slots:
            self._kept[name] = slots, tokens

    def admit(self, session: str, wanted: int) -> None:
        """Assign the session to this engine with an expected size of `wanted` tokens; it has no KV yet."""
        self.drop(session)
        self._wanted[session] = wanted
        self.reserved += wanted
        self._idle[session] = 0
        self._fresh.add(session)

    def begin(self, session: str, tokens: int) -> None:
        """A request starts that will hold `tokens` tokens; idle sessions make room."""
        before = self._out(session)
        self._fresh.discard(session)
        self._busy[session] = tokens
        self._in(session, before, tokens)
        self._shrink()

    def end(self, session: str, tokens: int) -> None:
        """The request is over: its KV stays, as the most recently used. No effect if the session is no longer on this
        engine."""
        if session not in self._busy:
            return
        before = self._out(session)
        self._idle[session] = tokens
        self._in(session, before, tokens)
        self._shrink()

    def drop(self, session: str) -> None:
        """Remove the session's KV."""
        if session not in self:
            return
        tokens = self._out(session)
        self._fresh.discard(session)
        self.total -= tokens
        self.reserved -= max(tokens, self._wanted.pop(session, 0))

    def clear(self) -> None:
        self._idle.clear()
        self._busy.clear()
        self._wanted.clear()
        self._fresh.clear()
        self._kept.clear()
        self.total = self.reserved = 0

    def _out(self, session: str) -> int:
        found = self._idle.pop(session, None)
        return self._busy.pop(session, 0) if found is None else found

    def _in(self, session: str, before: int, tokens: int) -> None:
        wanted = self._wanted.get(session, 0)
        self.total += tokens - before
        self.reserved += max(tokens, wanted) - max(before, wanted)

    def _shrink(self) -> None:
        """Evict from the end of the oldest idle session first."""
        while self._idle and (self.total > self.capacity or len(self) > self.most):
            session = next(iter(self._idle))
            tokens = self._idle[session]
            left = tokens - math.ceil(self.total - self.capacity) if self.total > self.capacity else 0
            if left > KEPT * tokens and len(self) <= self.most:
                self._idle[session] = left
                self._in(session, tokens, left)
                return
            self.drop(session)
            self.evicted += 1
