"""Which sessions' KV an engine still holds, and how much room is spoken for: estimated, since engines do not say.

An engine keeps the KV of a session between its turns until somebody needs the memory; then the session that was used
least recently loses the end of it, as vLLM frees blocks. Whoever knows what was sent there, and what fits, can follow.
"""

from __future__ import annotations

import math
from collections import OrderedDict

__all__ = ["KvResidency"]

KEPT = 0.5
"""A session that lost more than this share of its KV at once is taken to have lost all: it is routed as a new one."""


class KvResidency:
    """One engine's KV memory, in tokens. Sessions with a request there are never evicted; of the others the least
    recently used goes first.

    `capacity` and `most` (sessions) are infinite until known. A session counts for what it is expected to grow to as
    far as `spoken` is concerned: admitted sessions are not to evict each other later. Invariant: what is held exceeds
    neither bound, unless running sessions alone do.
    """

    __slots__ = ("_busy", "_fresh", "_idle", "_kept", "_wanted", "capacity", "evicted", "most", "spoken", "total")

    def __init__(self) -> None:
        self._idle: OrderedDict[str, int] = OrderedDict()
        self._busy: dict[str, int] = {}
        self._wanted: dict[str, int] = {}
        self._fresh: set[str] = set()
        """Admitted, and no request since."""
        self._kept: dict[str, tuple[int, int]] = {}
        """Seats kept free, and tokens spoken for by each."""
        self.capacity = math.inf
        self.most = math.inf
        self.total = 0
        self.spoken = 0
        self.evicted = 0
        """Sessions that lost their KV to others."""

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    def __contains__(self, session: str) -> bool:
        return session in self._idle or session in self._busy

    @property
    def taken(self) -> int:
        """Sessions here, and seats that are kept for others."""
        return len(self) + sum(seats for seats, _ in self._kept.values()) if self._kept else len(self)

    @property
    def quiet(self) -> bool:
        """Nothing runs here, and nothing is about to."""
        return not self._busy and not self._fresh

    def know(self, capacity: float, most: float = math.inf) -> None:
        """What fits."""
        self.capacity, self.most = capacity, most
        self._shrink()

    def held(self, session: str) -> int:
        """Tokens of the session's KV that are there."""
        found = self._idle.get(session)
        return self._busy.get(session, 0) if found is None else found

    def fill(self) -> float:
        """Share of the memory that is spoken for; 0 while nobody knows how much there is."""
        return self.spoken / self.capacity

    def fits(self, tokens: int, *, share: float = 1.0, sessions: int = 1) -> bool:
        """Whether so many sessions that are to hold so many tokens each find room within that share, evicting nobody.
        One that is alone always does."""
        if not self.taken:
            return True
        return self.spoken + sessions * tokens <= share * self.capacity and self.taken + sessions <= self.most

    def keep(self, name: str, seats: int, tokens: int) -> None:
        """So many seats of so many tokens each are kept free for whoever goes by that name; 0: none any more."""
        before, each = self._kept.pop(name, (0, 0))
        self.spoken += seats * tokens - before * each
        if seats:
            self._kept[name] = seats, tokens

    def admit(self, session: str, wanted: int) -> None:
        """The session lives here from now on, and is expected to hold `wanted` tokens; it has none yet."""
        self.drop(session)
        self._wanted[session] = wanted
        self.spoken += wanted
        self._idle[session] = 0
        self._fresh.add(session)

    def begin(self, session: str, tokens: int) -> None:
        """A request that will hold so many tokens; idle sessions make room."""
        before = self._out(session)
        self._fresh.discard(session)
        self._busy[session] = tokens
        self._in(session, before, tokens)
        self._shrink()

    def end(self, session: str, tokens: int) -> None:
        """It is over: its KV stays, the most recently used. Nothing happens if the session is not here any more."""
        if session not in self._busy:
            return
        before = self._out(session)
        self._idle[session] = tokens
        self._in(session, before, tokens)
        self._shrink()

    def drop(self, session: str) -> None:
        """The session's KV leaves."""
        if session not in self:
            return
        tokens = self._out(session)
        self._fresh.discard(session)
        self.total -= tokens
        self.spoken -= max(tokens, self._wanted.pop(session, 0))

    def clear(self) -> None:
        self._idle.clear()
        self._busy.clear()
        self._wanted.clear()
        self._fresh.clear()
        self._kept.clear()
        self.total = self.spoken = 0

    def _out(self, session: str) -> int:
        found = self._idle.pop(session, None)
        return self._busy.pop(session, 0) if found is None else found

    def _in(self, session: str, before: int, tokens: int) -> None:
        wanted = self._wanted.get(session, 0)
        self.total += tokens - before
        self.spoken += max(tokens, wanted) - max(before, wanted)

    def _shrink(self) -> None:
        """Of the oldest idle session first the end goes."""
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
