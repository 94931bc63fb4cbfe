"""What the gateway knows of every engine and every session: health, versions, seats, work under way, who holds what."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from rollart.fleet import EngineKind, EnginePlacement, EngineRole, KindLoad
from rollart.ledger.clock import EngineShares
from rollart.model import EngineId
from rollart.policy.answers import EngineTrust
from rollart.policy.breaker import HandoffCircuitBreaker
from rollart.policy.residency import KvResidency
from rollart.policy.routing import EngineView
from rollart.ports import Engine
from rollart.runtime.leases import HeldLease

__all__ = ["RegisteredEngine", "EngineRegistry", "SessionKv"]


SAMPLED_ENGINES = 16
"""Engines that are looked at for the home of a trajectory, if there are more than twice as many. The least loaded of a
few drawn ones is nearly as good as that of all (the power of two choices; Mitzenmacher, 2001), and costs the same in a
fleet of any size."""

SUSPECT_GRACE_S = 10.0
"""For so long an engine in doubt is no news: one slow turn is enough for a doubt, and a look at the engine ends it."""


@dataclass(slots=True)
class RegisteredEngine:
    """One engine. `work_s` is the predicted work of the requests sent and not answered; `clear_at` when the work sent
    so far would be done if it were done in turn, one second per second."""

    engine: Engine
    version: int
    shares: EngineShares
    seat: EnginePlacement
    healthy: bool = True
    doubted: bool = False
    doubted_at: float = 0.0
    draining: bool = False
    away: bool = False
    """Its devices train for a while: turns that it had begun go on elsewhere with the tokens they have."""
    asked: frozenset[str] = frozenset()
    """Requests that it was to end for that: they go on elsewhere even where it serves again before they end."""
    updating: bool = False
    """New weights load, while other engines serve."""
    delaying: bool = False
    """It puts new weights off until what lives here has ended, and takes nothing new."""
    running: int = 0
    awaited: int = 0
    """Members of groups that live here and have yet to come, or keep their seats though they are done."""
    lent: int = 0
    """Requests elsewhere that may still fetch KV from here."""
    work_s: float = 0.0
    clear_at: float = 0.0
    breaker: HandoffCircuitBreaker = field(default_factory=HandoffCircuitBreaker)
    trust: EngineTrust = field(default_factory=EngineTrust)
    condemned: str = ""
    """Why it has to be restarted, though it answers."""
    sessions: set[str] = field(default_factory=set)
    """Trajectories that live here."""
    guests: set[str] = field(default_factory=set)
    """Trajectories that live elsewhere and were prefilled here last: their prefix KV stays."""
    prefilling: dict[str, HeldLease] = field(default_factory=dict)
    """Leases of the prefills for other engines that it has not answered, by request."""
    kv: KvResidency = field(default_factory=KvResidency)
    """Followed while KV memory bounds concurrency (`runtime.entrance`)."""
    quiet_at: float = 0.0
    """When its last request ended, while others waited for room."""

    @property
    def serves(self) -> bool:
        return self.healthy and not (self.doubted or self.draining or self.updating)

    @property
    def keeps(self) -> bool:
        """Whether KV that is computed here now will be of use."""
        return self.healthy and not self.draining

    def expect(self, seconds: float, now: float) -> None:
        """A request with so much predicted work is sent."""
        self.work_s += seconds
        self.clear_at = max(self.clear_at, now) + seconds

    def done(self, seconds: float, now: float) -> None:
        """It was answered, or given up, and does not run any more."""
        if self.running:
            self.work_s -= seconds
        else:
            self.work_s, self.clear_at = 0.0, now

    def backlog_s(self, now: float, slots: int) -> float:
        """Seconds of work that wait here. A prefill engine answers when the work is done, so all that is unanswered
        waits. An engine that generates works on many turns at once: what waits is what came faster than one second of
        work per second, and what has no slot."""
        if self.seat.role is EngineRole.PREFILL:
            return self.work_s
        behind = min(max(self.clear_at - now, 0.0), self.work_s)
        return max(behind, self.work_s * (1 - slots / self.running)) if self.running > slots else behind


@dataclass(slots=True)
class SessionKv:
    """A trajectory's KV: its home, how many tokens of it lie where, and what a prefill engine needs to fetch it from
    home (`returned`, an opaque value of the engines). All of it is of weights `version`. `begun`: the version of its
    first token, where engines serve different ones."""

    version: int
    begun: int | None = None
    home: str | None = None
    cached: dict[str, int] = field(default_factory=dict)
    held: tuple[str, ...] = ()
    """Engines that may hold any, of whatever version: they are told when the trajectory is over."""
    returned: Mapping[str, object] | None = None
    guest_of: str | None = None
    """The engine that prefilled for its home last."""
    was_remote: bool | None = None
    domain: str = ""
    tokens: int = 0
    """Its context after its last turn."""
    prompt: str = ""
    said: int = 0
    """Tokens that it has generated."""
    whole: bool = False
    """It ended by itself."""

    def lies_at(self, engine_id: str) -> None:
        """From now on the engine may hold some."""
        if engine_id not in self.held:
            self.held += (engine_id,)

    def expire(self, version: int) -> None:
        """`version` is current now: KV of another one is worth nothing."""
        self.version = version
        self.cached.clear()
        self.returned = None


class EngineRegistry:
    """The engines by id, in the order they joined. Synchronous: every change takes effect between two awaits."""

    def __init__(self, seats: Mapping[str, EnginePlacement]) -> None:
        self.members: dict[str, RegisteredEngine] = {}
        self._seats = dict(seats)
        self.roles = False
        """Whether any engine has a role of its own."""
        self.kinds = 0
        self._prefills: list[str] = []
        self._alike: tuple[list[RegisteredEngine], ...] | None = None
        """Members by kind and role; None after a change."""
        self._seated()

    def join(
        self, engine: Engine, *, version: int, shares: EngineShares, seat: EnginePlacement | None
    ) -> RegisteredEngine:
        """An engine that comes back keeps the seat that it has by now."""
        known = self._seats.get(engine.id)
        self.seat(engine.id, seat if known is None and seat is not None else known or EnginePlacement())
        member = self.members[engine.id] = RegisteredEngine(engine, version, shares, self._seats[engine.id])
        self._alike = None
        return member

    def seat(self, engine_id: str, seat: EnginePlacement) -> None:
        self._seats[engine_id] = seat
        member = self.members.get(engine_id)
        if member is not None:
            member.seat = seat
        self._seated()

    def seat_of(self, engine_id: str) -> EnginePlacement | None:
        return self._seats.get(engine_id)

    def leave(self, engine_id: str) -> None:
        """It will not come back."""
        self.members.pop(engine_id, None)
        self._seats.pop(engine_id, None)
        self._seated()

    def home(self, engine_id: str | None, version: int) -> RegisteredEngine | None:
        """The engine, if a trajectory that lives there can have its next turn there."""
        member = None if engine_id is None else self.members.get(engine_id)
        if member is None or member.version != version or not member.serves:
            return None
        return None if member.seat.role is EngineRole.PREFILL else member

    def serve(self, version: int) -> bool:
        """Whether any engine could be a trajectory's home now."""
        return any(
            m.serves and m.version == version and m.seat.role is not EngineRole.PREFILL for m in self.members.values()
        )

    def serving(self, kv: SessionKv | None, version: int, lag: int, slots: int) -> int | None:
        """The version under which a trajectory has its next turn while engines lag behind `version`: its home's, or
        else the newest that an engine with a free slot serves. None older than `lag` publishes, nor than its first
        token (`policy.updates.may_serve`); None while there is no such engine."""
        begun = None if kv is None else kv.begun
        oldest = version - lag if begun is None else max(version - lag, begun)
        home = None if kv is None or kv.home is None else self.members.get(EngineId(kv.home))
        if home is not None and home.serves and home.version >= oldest:
            return home.version
        able = [m for m in self.members.values() if m.serves and not m.delaying and m.version >= oldest]
        able = [m for m in able if m.seat.role is not EngineRole.PREFILL] or able
        return max(((m.running < slots, m.version) for m in able), default=(False, None))[1]

    def views(
        self,
        session: str,
        version: int,
        home: RegisteredEngine | None,
        cached: Mapping[str, int],
        now: float,
        slots: int,
        takes: Callable[[RegisteredEngine], bool] | None = None,
        followed: bool = False,
    ) -> list[EngineView]:
        """Engines as routing sees them: `some`; with a `home` that one and of the others those that prefill, since no
        other may be chosen; and always those that hold KV of the trajectory.

        `takes`: only such engines may be the home. `followed`: what an engine holds is followed, and of what it once
        had only that counts."""
        some = {m.engine.id: m for m in self.some(session, version)}
        if home is not None:
            some = {e: m for e, m in some.items() if m.seat.role is EngineRole.PREFILL} | {home.engine.id: home}
        for engine_id in cached:
            holder = self.members.get(EngineId(engine_id))
            if holder is not None and (home is None or holder.seat.role is EngineRole.PREFILL):
                some[holder.engine.id] = holder
        if takes is not None:
            some = self._taking(some, version, takes)
        return [
            EngineView(
                e,
                m.running + m.awaited,
                len(m.sessions) + len(m.guests) + m.awaited,
                m.serves,
                m.version,
                m.seat,
                m.backlog_s(now, slots),
                min(cached.get(e, 0), m.kv.held(session)) if followed and e in cached else cached.get(e, 0),
                m.breaker.open(now),
                m.kv.fill(),
            )
            for e, m in some.items()
        ]

    def _taking(
        self, some: dict[EngineId, RegisteredEngine], version: int, takes: Callable[[RegisteredEngine], bool]
    ) -> dict[EngineId, RegisteredEngine]:
        """Those that prefill, and of the others those that take the trajectory: of all if none of `some` does."""
        prefills = {e: m for e, m in some.items() if m.seat.role is EngineRole.PREFILL}
        for members in (some.values(), self.members.values()):
            homes = {
                m.engine.id: m
                for m in members
                if m.seat.role is not EngineRole.PREFILL and m.serves and m.version == version and takes(m)
            }
            if homes:
                return prefills | homes
        return {}

    def loads(self, session: str, version: int) -> list[EngineView]:
        """Engines as they are seen while nothing but load decides."""
        return [
            EngineView(m.engine.id, m.running + m.awaited, len(m.sessions) + m.awaited, m.serves, m.version)
            for m in self.some(session, version)
        ]

    def some(self, session: str, version: int) -> Iterable[RegisteredEngine]:
        """Engines to choose from by load: all, or in a large fleet a few of every kind and role, drawn by the session's
        name; all of those of which none drawn serves."""
        if len(self.members) <= 2 * SAMPLED_ENGINES:
            return self.members.values()
        if self._alike is None:
            alike: dict[tuple[EngineKind, EngineRole], list[RegisteredEngine]] = {}
            for member in self.members.values():
                alike.setdefault((member.seat.kind, member.seat.role), []).append(member)
            self._alike = tuple(alike.values())
        seed = zlib.crc32(session.encode())
        return [m for members in self._alike for m in _sample_engines(members, seed, version)]

    def _seated(self) -> None:
        self._alike = None
        seats = self._seats.values()
        self.roles = any(s.role is not EngineRole.ENGINE for s in seats)
        self.kinds = len({s.kind for s in seats})
        self._prefills = [e for e, s in self._seats.items() if s.role is EngineRole.PREFILL]

    def doubts(self, now: float) -> list[EnginePlacement]:
        """Seats of engines that are being looked at and most likely serve again in a moment."""
        return [
            m.seat for m in self.members.values() if m.healthy and m.doubted and now < m.doubted_at + SUSPECT_GRACE_S
        ]

    def load(self, now: float, slots: int) -> dict[EngineKind, KindLoad]:
        """By kind, of every engine that joined and has not left for good."""
        kinds: dict[EngineKind, list[RegisteredEngine]] = {}
        for member in self.members.values():
            kinds.setdefault(member.seat.kind, []).append(member)
        loads = {}
        for kind, members in kinds.items():
            up = [m for m in members if m.serves]
            n = max(len(up), 1)
            loads[kind] = KindLoad(
                len(members), len(up), sum(m.backlog_s(now, slots) for m in up) / n, sum(m.running for m in up) / n
            )
        return loads


def _sample_engines(members: list[RegisteredEngine], seed: int, version: int) -> Iterable[RegisteredEngine]:
    """`SAMPLED_ENGINES` of the members, or all if none of these serves."""
    n = len(members)
    if n <= SAMPLED_ENGINES:
        return members
    step = 1 + seed % (n - 1)
    first = seed // n
    few = [members[i] for i in dict.fromkeys([i % n for i in range(first, first + SAMPLED_ENGINES * step, step)])]
    return few if any(m.serves and m.version == version for m in few) else members
