"""The KV that a simulated engine keeps for sessions between their turns, with LRU eviction."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["RetainedKv"]


class RetainedKv:
    """Tokens of KV by session. `total` is their sum; `evicted` counts evicted tokens."""

    __slots__ = ("_kept", "evicted", "total")

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[int, str | None]] = OrderedDict()
        self.total = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, session: str, tokens: int, salt: str | None) -> None:
        """Set the session's KV and mark it as most recently used."""
        if session in self._kept:
            self.take(session)
        if tokens > 0:
            self._kept[session] = tokens, salt
            self.total += tokens

    def held(self, session: str, salt: str | None) -> int:
        """Tokens of the session that a request with this salt may use."""
        found = self._kept.get(session)
        return found[0] if found is not None and found[1] == salt else 0

    def claim(self, session: str, salt: str | None) -> int:
        """Remove the session's KV; return the tokens of it that a request with this salt may use."""
        found = self._kept.pop(session, None)
        if found is None:
            return 0
        self.total -= found[0]
        return found[0] if found[1] == salt else 0

    def take(self, session: str) -> int:
        """Remove the session's KV; return its tokens."""
        found = self._kept.pop(session, None)
        if found is None:
            return 0
        self.total -= found[0]
        return found[0]

    def shrink(self, room: float) -> None:
        """Evict until at most `room` tokens are left, from the end of the oldest session, as vLLM frees blocks."""
        room = max(int(room), 0)
        while self.total > room:
            session, (tokens, salt) = self._kept.popitem(last=False)
            gone = min(tokens, self.total - room)
            self.total -= gone
            self.evicted += gone
            if gone < tokens:
                self._kept[session] = tokens - gone, salt
                self._kept.move_to_end(session, last=False)

    def clear(self) -> None:
        self._kept.clear()
        self.total = 0
