"""The gateway's state: engines with their health, versions, placements, running work and sessions; turns with their
limits; and the routing statistics of domains (assignments by pool, affinity fallbacks, output lengths).

Engines do not report which sessions' KV they hold, so `KvResidency` estimates it: an engine keeps the KV of a session
between its turns until the memory is needed; then the least recently used session loses the end of its KV, as vLLM
frees blocks. The estimate follows from the requests sent to the engine and from its capacity.
"""

from __future__ import annotations

import math
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollart.errors import WrongAnswer
from rollart.fleet import EngineKind, EnginePlacement, EngineRole, KindLoad
from rollart.leases import HeldLease
from rollart.ledger.intervals import EngineShares
from rollart.model import Completion, CompletionChunk, EngineId, Sampling
from rollart.policy.continuing import completion_from_chunks, continuation_sampling, join_completions
from rollart.policy.engine_health import EngineTrust, HandoffCircuitBreaker, wrong_tokens
from rollart.policy.routing import EngineView, HardwareAffinity
from rollart.ports import Engine


class AttemptFailed(Exception):
    """An attempt failed and another engine may succeed."""


class RerouteTurn(Exception):
    """Nothing failed, but the route is invalid: weights changed or an engine drains. The turn is routed again, without
    a limit on attempts."""


class RouteListener(Protocol):
    """Called with the reason for a turn's route, its engine, the engine of its prefill if that is another one, and the
    turns that run on the engine."""

    def __call__(self, why: str, engine: EngineId, prefill: EngineId | None, running: int, /) -> None: ...


def unheard_route(why: str, engine: EngineId, prefill: EngineId | None, running: int, /) -> None:
    """The default `RouteListener`."""


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Seconds that the gateway waits, and the attempts per turn. `engine_s` bounds the wait for an eligible engine: the
    longest restart plus a weight update, independent of the length of a generation.

    `handoff_s` bounds a remote prefill, and the transfer of its KV afterwards: short, since prefilling on the decode
    engine is always possible. `handoffs` = concurrent hand-offs to a decode engine: a fixed number, the look-ahead rule
    (None), or unbounded (0).
    """

    generate_s: float = 120.0
    engine_s: float = 240.0
    sync_s: float = 60.0
    attempts: int = 4
    slots: int = 1_000_000
    """Requests that one engine generates at a time; more wait inside it."""
    handoff_s: float = 10.0
    handoffs: int | None = 0
    vocab: int | None = None
    """Size of the model's vocabulary; None: ids are not token ids (simulations), and are not checked."""


@dataclass(slots=True)
class TurnRequest:
    """One call of `generate`: the request and its progress."""

    id: str
    session: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    spend: Callable[[float], None]
    sent: Callable[[int], None]
    domain: str = ""
    length: int = 0
    holds_handoff_slot: bool = False
    """True if it holds a slot in the hand-off queue of its sticky engine."""
    no_handoff: bool = False
    """True if its hand-off failed: no further hand-off is tried."""
    last: bool = False
    """True if no turn of its trajectory can follow."""
    prompt: str = ""
    """The prompt of its trajectory, for length statistics."""
    long: bool = False
    """True if its trajectory is predicted to be long."""
    begun: bool = False
    """True if an earlier turn of its trajectory was sent."""
    sent_at: float = 0.0
    """Time at which it was sent to the generating engine."""
    sends: int = 0
    reported: int | None = None
    spent: float = 0.0
    kept: Completion | None = None
    """Kept tokens of an earlier attempt: generated on an engine that was then lent, or already streamed."""
    listener: Callable[[CompletionChunk], None] | None = None
    streamed: list[CompletionChunk] = field(default_factory=list)
    """Chunks that the current attempt has streamed."""
    unsure: bool = False
    """True if weights changed during the attempt and its engine reports the versions of tokens only at the end."""
    avoided: set[str] = field(default_factory=set)
    """Engines that answered it wrongly: not used for it while another engine serves."""
    vocab: int | None = None
    experts_from: int | None = None
    """See `GenerateRequest`."""
    adapter: str | None = None
    """See there."""
    why: str = ""
    """The reason for its route."""
    routed: RouteListener = unheard_route

    def begins(self, version: int) -> None:
        """Report the version of its first token, unless older tokens are kept. Each version is reported once: all
        attempts belong to one turn, and any of them may sample the first token."""
        if self.kept is None and self.reported != version:
            self.reported = version
            self.sent(version)

    def keep(self, part: Completion) -> None:
        """Continue on another engine: the tokens so far are appended to the prompt, which is prefilled again."""
        if not part.sampled:
            return
        if self.kept is None and part.spans:
            self.begins(part.spans[0].version)
        self.kept = self.whole(part)
        self.token_ids += part.token_ids
        self.length += part.sampled
        self.sampling = continuation_sampling(self.sampling, part.sampled)

    def whole(self, rest: Completion) -> Completion:
        """The kept tokens and the rest as one completion; the repeated prefill counts."""
        return join_completions(self.kept, rest)

    def receive(self, piece: CompletionChunk) -> None:
        """Stream tokens to the listener: whatever the outcome of the attempt, the completion begins with them. Tokens
        of an unknown version are withheld until the attempt ends, since they may have to be sampled again. WrongAnswer
        for invalid tokens, which ends the attempt."""
        if wrong := wrong_tokens(piece.token_ids, piece.logprobs, self.vocab):
            raise WrongAnswer(wrong)
        self.unsure = self.unsure or piece.version is None
        if self.unsure:
            return
        self.streamed.append(piece)
        if self.listener is not None:
            self.listener(piece)

    def go_on(self, part: Completion | None = None, *, lent: bool = False) -> None:
        """The attempt is over and another one continues after the streamed tokens. `part` is the engine's partial
        completion. Without a listener the turn starts over, unless the engine was `lent`."""
        if self.listener is None:
            if part is not None and lent:
                self.keep(part)
            return
        streamed, self.streamed, self.unsure = completion_from_chunks(self.streamed), [], False
        for span in () if part is None else part.spans:
            at = slice(max(streamed.sampled, span.start), span.end)
            if part is not None and at.start < at.stop:
                self.listener(CompletionChunk(part.token_ids[at], part.logprobs[at], span.version))
        self.keep(streamed if part is None or part.sampled < streamed.sampled else part)


KEPT = 0.5
"""A session that lost more than this share of its KV at once is assumed to have lost all: it is routed as a new one."""


class KvResidency:
    """One engine's KV memory, in tokens. Sessions with a request in flight are never evicted; of the others the least
    recently used goes first.

    `capacity` and `most` (sessions) are infinite until known. For `reserved` a session counts with its expected final
    size, so that admitted sessions do not evict each other later. Invariant: the held KV exceeds neither bound, unless
    sessions with a request in flight alone exceed it.
    """

    __slots__ = ("_fresh", "_idle", "_kept", "busy", "capacity", "evicted", "most", "reserved", "total", "wanted")

    def __init__(self) -> None:
        self._idle: OrderedDict[str, int] = OrderedDict()
        self.busy: dict[str, int] = {}
        self.wanted: dict[str, int] = {}
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
        return len(self._idle) + len(self.busy)

    def __contains__(self, session: str) -> bool:
        return session in self._idle or session in self.busy

    @property
    def taken(self) -> int:
        """Sessions on this engine, and reserved slots."""
        return len(self) + sum(slots for slots, _ in self._kept.values()) if self._kept else len(self)

    @property
    def quiet(self) -> bool:
        """True if no request is in flight and none is about to start."""
        return not self.busy and not self._fresh

    def set_capacity(self, capacity: float, most: float = math.inf) -> None:
        """Set the capacity."""
        self.capacity, self.most = capacity, most
        self._shrink()

    def held(self, session: str) -> int:
        """Tokens of the session's KV on this engine."""
        found = self._idle.get(session)
        return self.busy.get(session, 0) if found is None else found

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
        self.wanted[session] = wanted
        self.reserved += wanted
        self._idle[session] = 0
        self._fresh.add(session)

    def begin(self, session: str, tokens: int) -> None:
        """A request starts that will hold `tokens` tokens; idle sessions make room."""
        before = self._out(session)
        self._fresh.discard(session)
        self.busy[session] = tokens
        self._in(session, before, tokens)
        self._shrink()

    def end(self, session: str, tokens: int) -> None:
        """The request is over: its KV stays, as the most recently used. No effect if the session is no longer on this
        engine."""
        if session not in self.busy:
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
        self.reserved -= max(tokens, self.wanted.pop(session, 0))

    def clear(self) -> None:
        self._idle.clear()
        self.busy.clear()
        self.wanted.clear()
        self._fresh.clear()
        self._kept.clear()
        self.total = self.reserved = 0

    def _out(self, session: str) -> int:
        found = self._idle.pop(session, None)
        return self.busy.pop(session, 0) if found is None else found

    def _in(self, session: str, before: int, tokens: int) -> None:
        wanted = self.wanted.get(session, 0)
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
    prefill_sessions: set[str] = field(default_factory=set)
    """Trajectories of other engines that were prefilled here last: their prefix KV stays."""
    prefilling: dict[str, HeldLease] = field(default_factory=dict)
    """Leases of the prefills for other engines that it has not answered, by request."""
    kv: KvResidency = field(default_factory=KvResidency)
    """Followed while KV memory bounds concurrency (`serving.kv_admission`)."""
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
    sticky: str | None = None
    cached: dict[str, int] = field(default_factory=dict)
    held: tuple[str, ...] = ()
    """Engines that may hold KV of any version: they are notified when the trajectory is over."""
    returned: Mapping[str, object] | None = None
    prefill_engine: str | None = None
    """The engine that last prefilled for it remotely."""
    was_remote: bool | None = None
    domain: str = ""
    tokens: int = 0
    """Context length after its last turn."""
    prompt: str = ""
    generated: int = 0
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

    def sticky(self, engine_id: str | None, version: int) -> RegisteredEngine | None:
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
        first token, so that versions never decrease along a trajectory; None while no engine qualifies."""
        begun = None if kv is None else kv.begun
        oldest = version - lag if begun is None else max(version - lag, begun)
        sticky = None if kv is None or kv.sticky is None else self.members.get(EngineId(kv.sticky))
        if sticky is not None and sticky.serves and sticky.version >= oldest:
            return sticky.version
        able = [m for m in self.members.values() if m.serves and not m.delaying and m.version >= oldest]
        able = [m for m in able if m.seat.role is not EngineRole.PREFILL] or able
        return max(((m.running < slots, m.version) for m in able), default=(False, None))[1]

    def views(
        self,
        session: str,
        version: int,
        sticky: RegisteredEngine | None,
        cached: Mapping[str, int],
        now: float,
        slots: int,
        takes: Callable[[RegisteredEngine], bool] | None = None,
        followed: bool = False,
    ) -> list[EngineView]:
        """The routing views of engines: `some`, or with a `sticky` engine that one and the prefill engines, since no
        other may be chosen; and always the engines that hold KV of the trajectory.

        `takes`: the filter for sticky engines. `followed`: KV residency is tracked, and only resident KV counts as
        cached."""
        some = {m.engine.id: m for m in self.some(session, version)}
        if sticky is not None:
            some = {e: m for e, m in some.items() if m.seat.role is EngineRole.PREFILL} | {sticky.engine.id: sticky}
        for engine_id in cached:
            holder = self.members.get(EngineId(engine_id))
            if holder is not None and (sticky is None or holder.seat.role is EngineRole.PREFILL):
                some[holder.engine.id] = holder
        if takes is not None:
            some = self._taking(some, version, takes)
        return [
            EngineView(
                e,
                m.running + m.awaited,
                len(m.sessions) + len(m.prefill_sessions) + m.awaited,
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
            assignments = {
                m.engine.id: m
                for m in members
                if m.seat.role is not EngineRole.PREFILL and m.serves and m.version == version and takes(m)
            }
            if assignments:
                return prefills | assignments
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


OUTPUT_MEAN_WEIGHT = 0.05
"""Weight of one turn in a domain's mean output: about twenty turns back, so that it follows a changing policy."""


POOL_COUNT_DECAY = 1 / 64
"""Weight of one assignment in a domain's counts: a returning pool is owed a few dozen assignments. Owing it all that it
missed would send every trajectory to it."""


class EmitEvent(Protocol):
    def __call__(self, kind: str, subject: str, **fields: str | int | float | None) -> None: ...


class DomainRoutingStats:
    """Synchronous; updated by `TurnRouter`."""

    def __init__(self, emit: EmitEvent) -> None:
        self._emit = emit
        self._outputs: dict[str, float] = {}
        self.pool_counts: dict[str, dict[str, float]] = {}
        """Assignments since the shares last changed, by domain and pool; recent ones count most."""
        self._fallen: set[str] = set()

    def assigned(
        self,
        domain: str,
        member: RegisteredEngine,
        affinity: HardwareAffinity,
        *,
        preferred: bool,
        doubts: Sequence[EnginePlacement] = (),
    ) -> None:
        """Record an assignment. One event when a domain leaves its preferred pool, and one when it is back; none while
        it only waits for suspected engines (`doubts`)."""
        pool = member.seat.pool
        assignments = self.pool_counts.setdefault(domain, {})
        for other in assignments:
            assignments[other] *= 1 - POOL_COUNT_DECAY
        assignments[pool] = assignments.get(pool, 0.0) + 1
        wanted = affinity.wants(domain)
        if wanted is None or preferred == (domain not in self._fallen):
            return
        if not preferred and any(affinity.rank(domain, seat) == 0 for seat in doubts):
            return
        if preferred:
            self._fallen.discard(domain)
            self._emit("affinity_restored", domain, preferred=wanted)
        else:
            self._fallen.add(domain)
            self._emit("affinity_fallback", domain, preferred=wanted, pool=pool, engine=member.engine.id)

    def answered(self, domain: str, tokens: int) -> None:
        seen = self._outputs.get(domain)
        self._outputs[domain] = tokens if seen is None else seen + OUTPUT_MEAN_WEIGHT * (tokens - seen)

    def output(self, domain: str, most: int) -> float:
        """Expected output tokens of a turn: the domain's recent mean, or at first the maximum."""
        return min(self._outputs.get(domain, most), most)
