"""The gateway's state of engines and sessions: health, versions, placements, running work and KV locations."""

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
"""Engines sampled when a trajectory is assigned, if there are more than twice as many. The least loaded of a few
sampled engines is nearly as good as the least loaded of all (the power of two choices; Mitzenmacher, 2001), at a cost
that does not depend on the size of the fleet."""

SUSPECT_GRACE_S = 10.0
"""A suspicion younger than this causes no fallback event: one slow turn raises it, and a health check ends it."""


@dataclass(slots=True)
class RegisteredEngine:
    """One engine. `work_s` is the predicted work of the unanswered requests; `clear_at` the time at which all work sent
    so far would be done if it were done sequentially."""

    engine: Engine
    version: int
    shares: EngineShares
    seat: EnginePlacement
    healthy: bool = True
    doubted: bool = False
    doubted_at: float = 0.0
    draining: bool = False
    away: bool = False
    """Its devices are lent to training: its running turns continue on other engines with the tokens they have."""
    asked: frozenset[str] = frozenset()
    """Requests aborted for lending: they continue on other engines even if this one serves again before they end."""
    updating: bool = False
    """New weights load, while other engines serve."""
    delaying: bool = False
    """It delays new weights until its sessions have ended, and takes no new ones."""
    running: int = 0
    awaited: int = 0
    """Slots reserved for members of colocated groups that have not arrived, or are done while their group runs."""
    lent: int = 0
    """Requests on other engines that may still fetch KV from this one."""
    work_s: float = 0.0
    clear_at: float = 0.0
    breaker: HandoffCircuitBreaker = field(default_factory=HandoffCircuitBreaker)
    trust: EngineTrust = field(default_factory=EngineTrust)
    condemned: str = ""
    """The reason to restart it although it responds."""
    sessions: set[str] = field(default_factory=set)
    """Trajectories whose sticky engine this is."""
    guests: set[str] = field(default_factory=set)
    """Trajectories of other engines that were prefilled here last: their prefix KV stays."""
    prefilling: dict[str, HeldLease] = field(default_factory=dict)
    """Leases of the prefills for other engines that it has not answered, by request."""
    kv: KvResidency = field(default_factory=KvResidency)
    """Followed while KV memory bounds concurrency (`runtime.entrance`)."""
    quiet_at: float = 0.0
    """End time of its last request, if trajectories waited for KV memory then."""

    @property
    def serves(self) -> bool:
        return self.healthy and not (self.doubted or self.draining or self.updating)

    @property
    def keeps(self) -> bool:
        """True if KV computed here now can be used later."""
        return self.healthy and not self.draining

    def expect(self, seconds: float, now: float) -> None:
        """Count a sent request with so many seconds of predicted work."""
        self.work_s += seconds
        self.clear_at = max(self.clear_at, now) + seconds

    def done(self, seconds: float, now: float) -> None:
        """Count the end of a request, which was answered or given up."""
        if self.running:
            self.work_s -= seconds
        else:
            self.work_s, self.clear_at = 0.0, now

    def backlog_s(self, now: float, slots: int) -> float:
        """Seconds of queued work. A prefill engine answers when the work is done, so all unanswered work is queued. A
        decode engine works on many turns at once: queued is the work that arrived faster than one second of work per
        second, and the work without a slot."""
        if self.seat.role is EngineRole.PREFILL:
            return self.work_s
        behind = min(max(self.clear_at - now, 0.0), self.work_s)
        return max(behind, self.work_s * (1 - slots / self.running)) if self.running > slots else behind


@dataclass(slots=True)
class SessionKv:
    """A trajectory's KV: its sticky engine, the cached tokens by engine, and the opaque value that a prefill engine
    needs to fetch it from the sticky engine (`returned`). All of it is of weights `version`. `begun`: the version of
    its first token, if engines serve different ones."""

    version: int
    begun: int | None = None
    home: str | None = None
    cached: dict[str, int] = field(default_factory=dict)
    held: tuple[str, ...] = ()
    """Engines that may hold KV of any version: they are notified when the trajectory is over."""
    returned: Mapping[str, object] | None = None
    guest_of: str | None = None
    """The engine that last prefilled for it remotely."""
    was_remote: bool | None = None
    domain: str = ""
    tokens: int = 0
    """Context length after its last turn."""
    prompt: str = ""
    said: int = 0
    """Tokens that the trajectory has generated."""
    whole: bool = False
    """True if the trajectory ended by itself."""

    def lies_at(self, engine_id: str) -> None:
        """Record that the engine may hold some of the trajectory's KV from now on."""
        if engine_id not in self.held:
            self.held += (engine_id,)

    def expire(self, version: int) -> None:
        """Forget KV of other versions than `version`, which is current now."""
        self.version = version
        self.cached.clear()
        self.returned = None


class EngineRegistry:
    """The engines by id, in the order they joined. Synchronous: every change takes effect between two awaits."""

    def __init__(self, seats: Mapping[str, EnginePlacement]) -> None:
        self.members: dict[str, RegisteredEngine] = {}
        self._seats = dict(seats)
        self.roles = False
        """True if any engine has a specific role (prefill or decode)."""
        self.kinds = 0
        self._prefills: list[str] = []
        self._alike: tuple[list[RegisteredEngine], ...] | None = None
        """Members by kind and role; None after a change."""
        self._seated()

    def join(
        self, engine: Engine, *, version: int, shares: EngineShares, seat: EnginePlacement | None
    ) -> RegisteredEngine:
        """Add an engine. A returning engine keeps its current placement."""
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
        """Remove an engine for good."""
        self.members.pop(engine_id, None)
        self._seats.pop(engine_id, None)
        self._seated()

    def home(self, engine_id: str | None, version: int) -> RegisteredEngine | None:
        """The sticky engine, if it can serve the trajectory's next turn."""
        member = None if engine_id is None else self.members.get(engine_id)
        if member is None or member.version != version or not member.serves:
            return None
        return None if member.seat.role is EngineRole.PREFILL else member

    def serve(self, version: int) -> bool:
        """True if any engine can be a sticky engine now."""
        return any(
            m.serves and m.version == version and m.seat.role is not EngineRole.PREFILL for m in self.members.values()
        )

    def serving(self, kv: SessionKv | None, version: int, lag: int, slots: int) -> int | None:
        """The version of a trajectory's next turn while engines lag behind `version`: the version of its sticky engine,
        or else the newest version of an engine with a free slot. Never older than `lag` publishes, nor than its
        first token (`policy.updates.may_serve`); None while no engine qualifies."""
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
        """The routing views of engines: `some`, or with a `home` that engine and the prefill engines, since no other
        may be chosen; and always the engines that hold KV of the trajectory.

        `takes`: the filter for sticky engines. `followed`: KV residency is tracked, and only resident KV counts as
        cached."""
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
        """The prefill engines, and the engines that accept the trajectory: of all engines if none of `some` does."""
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
        """The routing views of engines while load alone decides."""
        return [
            EngineView(m.engine.id, m.running + m.awaited, len(m.sessions) + m.awaited, m.serves, m.version)
            for m in self.some(session, version)
        ]

    def some(self, session: str, version: int) -> Iterable[RegisteredEngine]:
        """Candidates by load: all engines, or in a large fleet a sample of every kind and role, seeded by the session's
        name; all engines of a kind if none of its sample serves."""
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
        """Placements of suspected engines that most likely serve again in a moment."""
        return [
            m.seat for m in self.members.values() if m.healthy and m.doubted and now < m.doubted_at + SUSPECT_GRACE_S
        ]

    def load(self, now: float, slots: int) -> dict[EngineKind, KindLoad]:
        """The load by kind, over every engine that joined and has not left for good."""
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
