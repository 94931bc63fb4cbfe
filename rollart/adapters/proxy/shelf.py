"""How many sessions a proxy of its own keeps, and which it gives up for others."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from rollart.adapters.proxy.messages import BadRequest
from rollart.adapters.proxy.sessions import ProxySession

__all__ = ["SessionLimits", "SessionCache"]

RETRY_AFTER_S = 5
"""What `Retry-After` says where there is no room."""

GROWTH_RESERVE = 1.25
"""Sessions that are here may grow to so much of the budget: who is turned away first is who has not begun."""

MAX_EVICTED_NAMES = 65_536
"""Names of sessions that were given up, so that asking for one is told so."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What is kept: sessions, and tokens and bytes of all of their turns. A turn counts with all tokens before it: it
    holds them. Bytes are an estimate. A session that ended, or that was idle for `idle_s`, may be given up."""

    sessions: int = 4096
    tokens: int = 100_000_000
    size: int = 4 * 2**30
    idle_s: float = 3600.0


class SessionCache:
    """Owns the sessions, those used last at the end. Invariant: none that is busy is given up, and none that has not
    ended and was used within `idle_s`."""

    def __init__(self, limits: SessionLimits) -> None:
        self.limits = limits
        self.sessions: OrderedDict[str, ProxySession] = OrderedDict()
        self.counts: Counter[str] = Counter()
        self.tokens = self.size = 0
        self._counted: dict[str, tuple[int, int]] = {}
        self._gone: OrderedDict[str, str] = OrderedDict()

    def count(self, session: ProxySession) -> None:
        """It has a turn more."""
        tokens, size = self._counted.get(session.name, (0, 0))
        self._counted[session.name] = session.capture.tokens, session.capture.size
        self.tokens += session.capture.tokens - tokens
        self.size += session.capture.size - size

    def take(self, name: str) -> ProxySession | None:
        """It is kept here no more."""
        tokens, size = self._counted.pop(name, (0, 0))
        self.tokens -= tokens
        self.size -= size
        return self.sessions.pop(name, None)

    def why_gone(self, name: str) -> str | None:
        """Why a session is not here any more, if it was given up."""
        return self._gone.get(name)

    def use(self, name: str) -> None:
        self.sessions[name].used = asyncio.get_running_loop().time()
        self.sessions.move_to_end(name)

    async def room(self, *, begins: bool) -> None:
        """Give up what may go until a request has room: of a session that is here, or of one that `begins`. BadRequest
        (503, 429 for a session that is here) where nothing may."""
        now = asyncio.get_running_loop().time()
        for session, why in list(self._given_up_first(now)):
            if self._full(1.0, begins) is None:
                break
            if session.busy or self.sessions.get(session.name) is not session:
                continue  # meanwhile
            await self._give_up(session, why)
        what = self._full(1.0 if begins else GROWTH_RESERVE, begins)
        if what is not None:
            self.counts["refused"] += 1
            raise BadRequest(
                f"the proxy is full: {what} (rule: end sessions with POST /sessions/ID/end, or DELETE them, or name "
                "more room)",
                status=503 if begins else 429,
                retry_after=RETRY_AFTER_S,
            )

    def metrics(self) -> str:
        """Prometheus text."""
        states = Counter("busy" if s.busy else "ended" if s.over else "idle" for s in self.sessions.values())
        lines = [f'rollart_proxy_sessions{{state="{state}"}} {states[state]}' for state in ("busy", "idle", "ended")]
        lines += [f"rollart_proxy_tokens {self.tokens}", f"rollart_proxy_bytes {self.size}"]
        limits = (("sessions", self.limits.sessions), ("tokens", self.limits.tokens), ("bytes", self.limits.size))
        lines += [f'rollart_proxy_limit{{of="{what}"}} {most}' for what, most in limits]
        given_up = (f'{{why="{why}"}}' for why in ("ended", "idle"))
        lines += [f"rollart_proxy_given_up_total{label} {self.counts[label]}" for label in given_up]
        lines += [f"rollart_proxy_refused_total {self.counts['refused']}"]
        return "\n".join(lines) + "\n"

    def _given_up_first(self, now: float) -> Iterator[tuple[ProxySession, str]]:
        """Ended ones, then those that were idle too long; each kind in the order of their last use."""
        free = [s for s in self.sessions.values() if not s.busy]
        yield from ((s, "ended") for s in free if s.over)
        yield from ((s, "idle") for s in free if not s.over and now - s.used >= self.limits.idle_s)

    def _full(self, share: float, begins: bool) -> str | None:
        if begins and len(self.sessions) >= self.limits.sessions:
            return f"it holds {len(self.sessions)} sessions, of which none has ended or was idle long enough"
        checks = (("tokens", self.tokens, self.limits.tokens), ("bytes", self.size, self.limits.size))
        for what, held, most in checks:
            if held >= most * share:
                return f"its sessions hold {held} {what} (rule: below {int(most * share)})"
        return None

    async def _give_up(self, session: ProxySession, why: str) -> None:
        self.take(session.name)
        self._gone[session.name] = why
        self._gone.move_to_end(session.name)
        if len(self._gone) > MAX_EVICTED_NAMES:
            self._gone.popitem(last=False)
        self.counts[f'{{why="{why}"}}'] += 1
        await session.policy.release()
