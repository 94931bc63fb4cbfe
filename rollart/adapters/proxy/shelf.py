"""The session cache of a standalone proxy: its limits and its eviction order."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from rollart.adapters.proxy.messages import BadRequest
from rollart.adapters.proxy.sessions import ProxySession

__all__ = ["SessionLimits", "SessionCache"]

RETRY_AFTER_S = 5
"""Value of `Retry-After`, seconds, when the cache is full."""

GROWTH_RESERVE = 1.25
"""Existing sessions may grow to this multiple of the token and byte limits, so new sessions are refused first."""

MAX_EVICTED_NAMES = 65_536
"""Maximum remembered names of evicted sessions; a request for one gets an error that explains the eviction."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits on sessions, and on the tokens and bytes of all their turns. A turn counts with all earlier tokens of its
    path, because it stores them. Bytes are an estimate. Sessions that have ended, or were idle for `idle_s`, may be
    evicted."""

    sessions: int = 4096
    tokens: int = 100_000_000
    size: int = 4 * 2**30
    idle_s: float = 3600.0


class SessionCache:
    """Owns the sessions, most recently used last. Invariant: no session is evicted while it is busy, or before it has
    ended or was idle for `idle_s`."""

    def __init__(self, limits: SessionLimits) -> None:
        self.limits = limits
        self.sessions: OrderedDict[str, ProxySession] = OrderedDict()
        self.counts: Counter[str] = Counter()
        self.tokens = self.size = 0
        self._counted: dict[str, tuple[int, int]] = {}
        self._evicted: OrderedDict[str, str] = OrderedDict()

    def count(self, session: ProxySession) -> None:
        """Update the totals after the session gained a turn."""
        tokens, size = self._counted.get(session.name, (0, 0))
        self._counted[session.name] = session.capture.tokens, session.capture.size
        self.tokens += session.capture.tokens - tokens
        self.size += session.capture.size - size

    def remove(self, name: str) -> ProxySession | None:
        """Remove a session without ending it."""
        tokens, size = self._counted.pop(name, (0, 0))
        self.tokens -= tokens
        self.size -= size
        return self.sessions.pop(name, None)

    def eviction_reason(self, name: str) -> str | None:
        """Reason for a session's eviction; None if it was not evicted."""
        return self._evicted.get(name)

    def touch(self, name: str) -> None:
        self.sessions[name].used = asyncio.get_running_loop().time()
        self.sessions.move_to_end(name)

    async def make_room(self, *, begins: bool) -> None:
        """Evict sessions until a request of an existing session, or of a new one (`begins`), has room. BadRequest (503;
        429 for an existing session) if nothing more may be evicted."""
        now = asyncio.get_running_loop().time()
        for session, why in list(self._eviction_order(now)):
            if self._full_reason(1.0, begins) is None:
                break
            if session.busy or self.sessions.get(session.name) is not session:
                continue  # changed while another eviction was awaited
            await self._evict(session, why)
        reason = self._full_reason(1.0 if begins else GROWTH_RESERVE, begins)
        if reason is not None:
            self.counts["refused"] += 1
            raise BadRequest(
                f"the proxy is full: {reason} (rule: end sessions with POST /sessions/ID/end, or DELETE them, or name "
                "more room)",
                status=503 if begins else 429,
                retry_after=RETRY_AFTER_S,
            )

    def metrics(self) -> str:
        """Prometheus text."""
        states = Counter("busy" if s.busy else "ended" if s.ended else "idle" for s in self.sessions.values())
        lines = [f'rollart_proxy_sessions{{state="{state}"}} {states[state]}' for state in ("busy", "idle", "ended")]
        lines += [f"rollart_proxy_tokens {self.tokens}", f"rollart_proxy_bytes {self.size}"]
        limits = (("sessions", self.limits.sessions), ("tokens", self.limits.tokens), ("bytes", self.limits.size))
        lines += [f'rollart_proxy_limit{{of="{resource}"}} {most}' for resource, most in limits]
        given_up = (f'{{why="{why}"}}' for why in ("ended", "idle"))
        lines += [f"rollart_proxy_given_up_total{label} {self.counts[label]}" for label in given_up]
        lines += [f"rollart_proxy_refused_total {self.counts['refused']}"]
        return "\n".join(lines) + "\n"

    def _eviction_order(self, now: float) -> Iterator[tuple[ProxySession, str]]:
        """Sessions in eviction order: ended ones, then those idle too long; least recently used first within each."""
        free = [s for s in self.sessions.values() if not s.busy]
        yield from ((s, "ended") for s in free if s.ended)
        yield from ((s, "idle") for s in free if not s.ended and now - s.used >= self.limits.idle_s)

    def _full_reason(self, share: float, begins: bool) -> str | None:
        if begins and len(self.sessions) >= self.limits.sessions:
            return f"it holds {len(self.sessions)} sessions, of which none has ended or was idle long enough"
        checks = (("tokens", self.tokens, self.limits.tokens), ("bytes", self.size, self.limits.size))
        for resource, held, most in checks:
            if held >= most * share:
                return f"its sessions hold {held} {resource} (rule: below {int(most * share)})"
        return None

    async def _evict(self, session: ProxySession, why: str) -> None:
        self.remove(session.name)
        self._evicted[session.name] = why
        self._evicted.move_to_end(session.name)
        if len(self._evicted) > MAX_EVICTED_NAMES:
            self._evicted.popitem(last=False)
        self.counts[f'{{why="{why}"}}'] += 1
        await session.policy.release()
