"""KV-memory admission: trajectories per engine, bounded by its KV memory, and the queue of waiting trajectories.

Prefix KV is useful only while it is resident. If live trajectories need more KV than fits, engines evict blocks that
are needed a moment later, and every turn recomputes its whole context. So a trajectory is assigned to an engine when
its expected final context fits, and from then on its turns never wait here. A trajectory whose KV is evicted
nevertheless queues again, before trajectories that have not begun.

Limits (`ConcurrencyLimits`). Too few trajectories leave the engine's batch half empty; too many fill the KV cache, and
an engine that preempts computes the same prefill twice. The right number depends on lengths that are unknown in advance
and change while the policy learns, so it is searched for as TCP searches for a window: additive increase,
multiplicative decrease, with hysteresis, by observing the KV cache.

Order (`AdmissionQueue`). Resumed work first, then arrival order or longest first. Longest processing time first (LPT)
minimises the completion time of a set of trajectories (StreamRL, arXiv 2504.15930, §4.3; Graham 1969), but under a
steady stream of arrivals a short item might wait for ever. Items that arrive before the next admission form a wave and
are admitted in exact LPT order. An item of a wave that left S items in the queue has priority once S + `GRACE` items
were admitted since the wave began, so at most 2 S + `GRACE` items precede it.
"""

from __future__ import annotations

import asyncio
import enum
import heapq
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rollart.errors import EngineError, LeaseExpired
from rollart.fleet import EngineRole
from rollart.leases import Expiry, Leases
from rollart.ledger.events import CONCURRENCY
from rollart.model import EngineStats
from rollart.serving.engine_registry import EmitEvent, EngineRegistry, RegisteredEngine, SessionKv, TurnRequest
from rollart.serving.group_colocation import ColocatedGroup, GroupColocation
from rollart.settings.rollout import ConcurrencySpec


class LimitChange(enum.StrEnum):
    """The effect of a decision, and its cause."""

    UP = "up"
    DOWN_PREEMPTED = "down_preempted"
    DOWN_FULL = "down_full"
    HOLD_BAND = "hold_band"
    """KV use is between the two thresholds: the target."""
    HOLD_UNUSED = "hold_unused"
    """The engine has room but runs fewer trajectories than its limit by more than a step: a higher limit would have no
    effect."""
    HOLD_WAITING = "hold_waiting"
    """Requests wait inside an engine with free KV: another limit binds (its batch), and further requests would only
    queue there."""
    HOLD_SETTLING = "hold_settling"
    """The effect of the last decision is not visible yet."""


@dataclass(frozen=True, slots=True)
class KvPressure:
    """An engine's report: share of KV blocks in use, preemptions since it started, requests running and waiting."""

    kv_used: float
    preemptions: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class ConcurrencyDecision:
    """The engine's limit from now on."""

    limit: int
    change: LimitChange


@dataclass(slots=True)
class _Engine:
    limit: int
    preemptions: int
    up_after: float
    down_after: float


@dataclass(slots=True)
class ConcurrencyLimits:
    """One AIMD search per engine; engines do not share a limit, because their hardware and their KV differ.

    Bound: `least` <= limit <= `most`, always. Lowering a limit aborts nothing: the caller admits no trajectory until
    fewer are in flight. An engine whose preemption count falls has restarted: it keeps its limit, and counting
    restarts. Between increases pass a few turns, so that KV use reflects the last one; after a decrease use falls only
    as trajectories end.
    """

    settings: ConcurrencySpec = field(default_factory=ConcurrencySpec)
    _engines: dict[str, _Engine] = field(default_factory=dict)

    def limit(self, engine: str) -> int:
        known = self._engines.get(engine)
        return self.settings.start if known is None else known.limit

    def begin(self, engine: str, limit: int, *, now: float) -> None:
        """Set an engine's initial limit. No effect once the engine was observed."""
        if engine not in self._engines:
            limit = min(max(limit, self.settings.least), self.settings.most)
            self._engines[engine] = _Engine(limit, 0, now, now)

    def observe(self, engine: str, pressure: KvPressure, *, now: float) -> ConcurrencyDecision:
        """Process a report of one engine at `now`; reports may come at any rate."""
        state = self._engines.get(engine)
        if state is None:
            state = self._engines[engine] = _Engine(self.settings.start, pressure.preemptions, now, now)
        preempted = pressure.preemptions > state.preemptions
        # Counted even while settling: preemptions of an engine that drains are those of its old limit.
        state.preemptions = pressure.preemptions
        change = self._classify(pressure, preempted, state.limit)
        if change in (LimitChange.DOWN_PREEMPTED, LimitChange.DOWN_FULL):
            if now < state.down_after:
                return ConcurrencyDecision(state.limit, LimitChange.HOLD_SETTLING)
            state.limit = max(int(state.limit * self.settings.decrease), self.settings.least)
            state.up_after = state.down_after = now + self.settings.settle_s
        elif change is LimitChange.UP:
            if now < state.up_after:
                return ConcurrencyDecision(state.limit, LimitChange.HOLD_SETTLING)
            state.limit = min(state.limit + self.settings.increase, self.settings.most)
            state.up_after = now + self.settings.interval_s
        return ConcurrencyDecision(state.limit, change)

    def _classify(self, pressure: KvPressure, preempted: bool, limit: int) -> LimitChange:
        if preempted:
            return LimitChange.DOWN_PREEMPTED
        if pressure.kv_used >= self.settings.high:
            return LimitChange.DOWN_FULL
        if pressure.kv_used > self.settings.low:
            return LimitChange.HOLD_BAND
        if pressure.waiting > 0:
            return LimitChange.HOLD_WAITING
        if pressure.running + self.settings.increase < limit:
            return LimitChange.HOLD_UNUSED
        return LimitChange.UP


T = TypeVar("T")

GRACE = 8
"""Later arrivals that may precede an item that found the queue empty: a group."""


@dataclass(slots=True)
class _Wave:
    """`admitted_before`: admissions before the wave; `size`: length of the queue at the end of the wave, None while it
    lasts."""

    admitted_before: int
    size: int | None = None


@dataclass(slots=True)
class _QueuedItem(Generic[T]):
    item: T
    begun: bool
    wave: _Wave
    left: bool = False


@dataclass(slots=True)
class AdmissionQueue(Generic[T]):
    """`longest`: order by length, then by age. Ties: the earlier arrival. Synchronous; O(log n) per call."""

    longest: bool = False
    _by_rank: list[tuple[tuple[float, ...], _QueuedItem[T]]] = field(default_factory=list)
    _by_age: list[tuple[int, int, _QueuedItem[T]]] = field(default_factory=list)
    _seq: int = 0
    _waiting: int = 0
    _gone: int = 0
    _wave: _Wave = field(default_factory=lambda: _Wave(0))

    def __len__(self) -> int:
        return self._waiting

    def add(self, item: T, *, age: int, length: float = 0.0, begun: bool = False) -> None:
        """`age` counts up from the first arrival ever; an item that returns keeps its age."""
        if self._wave.size is not None:
            self._wave = _Wave(self._gone)
        queued = _QueuedItem(item, begun, self._wave)
        rank = (0.0, age) if begun else (1.0, -length if self.longest else 0.0, age)
        self._seq += 1
        self._waiting += 1
        heapq.heappush(self._by_rank, ((*rank, self._seq), queued))
        if self.longest and not begun:
            heapq.heappush(self._by_age, (age, self._seq, queued))

    def head(self) -> T | None:
        """The next item to admit; None if the queue is empty."""
        queued = self._next()
        return None if queued is None else queued.item

    def leave(self) -> T:
        """Remove the head, which was admitted or gave up."""
        queued = self._next()
        if queued is None:
            raise ValueError("the queue is empty (rule: call head first)")
        if self._wave.size is None:
            self._wave.size = self._waiting
        queued.left = True
        self._waiting -= 1
        self._gone += 1
        return queued.item

    def _next(self) -> _QueuedItem[T] | None:
        while self._by_rank and self._by_rank[0][1].left:
            heapq.heappop(self._by_rank)
        if not self._by_rank:
            return None
        first = self._by_rank[0][1]
        if not self.longest or first.begun:
            return first
        while self._by_age[0][2].left:
            heapq.heappop(self._by_age)
        wave = self._by_age[0][2].wave
        overdue = wave.size is not None and self._gone - wave.admitted_before >= wave.size + GRACE
        return self._by_age[0][2] if overdue else first


LENGTH_MEAN_WEIGHT = 0.02
"""Weight of one finished trajectory in its domain's mean length, which covers about the last fifty."""

IDLE_ADMISSION_S = 5.0
"""An engine that was idle for this long accepts one more trajectory even without free KV memory: all of its sessions
wait for environments. After a shorter time it would evict KV that is needed in a moment."""

STATS_S = 10.0
"""Longest wait for an engine's KV usage; an engine that does not answer is asked again at the next interval."""


class TrajectoryDispatch:
    """The order of waiting trajectories and the engines that may take them. Synchronous; used by `KvAdmission`.

    This one knows no lengths: trajectories are admitted in order of arrival, by any engine. Subclasses predict lengths.
    """

    by_length = False
    """True if long trajectories have a queue of their own, and the longest of a queue goes first."""

    def predict(self, turn: TurnRequest, *, again: bool) -> float:
        """The tokens that the turn's trajectory will generate, by expectation; sets `turn.long`. `again`: repeats an
        earlier prediction."""
        return 0.0

    def takes(self, member: RegisteredEngine, turn: TurnRequest, *, others_wait: bool) -> bool:
        """True if the engine may take this turn's trajectory; `others_wait`: trajectories of the other class wait."""
        return True

    def turn_ended(self, member: RegisteredEngine, seconds: float, tokens: int) -> None:
        """Learn the speed of a turn that generated `tokens` on this engine, at its present batch size."""

    def trajectory_ended(self, kv: SessionKv, *, whole: bool) -> None:
        """Learn the length of a trajectory that finished (`whole`) or was stopped."""

    def reserve(self, engines: Sequence[RegisteredEngine], live: int, limit: int) -> None:
        """Assign engines anew, for `live` trajectories over all engines, at most `limit` per engine."""


@dataclass(frozen=True, slots=True)
class ConcurrencySettings:
    """`aimd`: the search for each engine's limit. `expected`: initial estimates of final trajectory lengths in tokens,
    by domain. `dispatch` makes the order of waiting trajectories."""

    aimd: ConcurrencySpec = field(default_factory=ConcurrencySpec)
    expected: Mapping[str, float] = field(default_factory=dict)
    dispatch: Callable[[], TrajectoryDispatch] = TrajectoryDispatch


@dataclass(slots=True)
class _Waiter:
    turn: TurnRequest
    placed: asyncio.Future[None]


@dataclass(eq=False)
class KvAdmission:
    """Owns the concurrency limits and the admission queues. `TurnExecutor` awaits `enter` before a turn of a trajectory
    without a sticky engine.

    `enter` waits for free KV memory. It is unblocked by a trajectory that ends or moves, a higher limit, or an engine
    that joins or becomes idle. It returns at once if no engine is eligible at all: the caller waits for engines.
    Trajectories that have begun are admitted before new ones, and otherwise in order of arrival. There is no deadlock:
    turns on sticky engines run regardless of the limits, so trajectories end; and an engine that was idle for
    `IDLE_ADMISSION_S` accepts the head of the queue even without free memory.

    `assign` assigns a turn's trajectory to an engine: True if it has an engine, False if it has to wait, None if no
    engine is eligible at all. `is_admitted`: it has one already.

    With `colocation`, groups are admitted as a whole: one member queues for the others. `follow_group` gives a turn's
    trajectory the slot that its group reserved, and returns whether there was one.
    """

    settings: ConcurrencySettings
    registry: EngineRegistry
    leases: Leases
    emit: EmitEvent
    assign: Callable[[TurnRequest], bool | None]
    is_admitted: Callable[[TurnRequest], bool]
    colocation: GroupColocation | None
    follow_group: Callable[[TurnRequest], bool]

    def __post_init__(self) -> None:
        self.limits = ConcurrencyLimits(self.settings.aimd)
        self._final = dict(self.settings.expected)
        self._facts: dict[str, tuple[float, float]] = {}
        self.arrival_order: dict[str, int] = {}
        self._arrivals = 0
        self._dispatch = self.settings.dispatch()
        self._queues: dict[bool, AdmissionQueue[_Waiter]] = {
            long: AdmissionQueue(longest=self._dispatch.by_length)
            for long in ((True, False) if self._dispatch.by_length else (False,))
        }
        """Keyed by whether the queue is for long trajectories."""
        if self.colocation is not None:
            self.colocation.on_room = self.pump
        self._pumping = False
        self._stirred = asyncio.Event()
        self._counted: dict[str, tuple[int, int]] = {}
        self.admitted = self.waited = self.evicted = self.preempted = 0

    async def run(self) -> None:
        """Poll the KV usage of engines while turns run or wait: a permanent timer would hide a deadlock."""
        while True:
            await self._poll_once()
            await asyncio.sleep(self.settings.aimd.interval_s)
            self._stirred.clear()
            if not self.waiting:
                await self._stirred.wait()

    @property
    def waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    async def enter(self, turn: TurnRequest) -> None:
        """Returns when the turn's trajectory has a sticky engine, or when no engine is eligible."""
        if self.is_admitted(turn):
            return  # it waited for a weight update; in the queue it would wait for the memory that it holds
        unit = None if self.colocation is None else self.colocation.unit(turn.session)
        if unit is None:
            await self._queue_up(turn)
            return
        while not self.follow_group(turn):
            if unit.asking is None:
                await self._queue_for_group(turn, unit)
                return
            with self.leases.note(turn.session, "room for its group"):
                await unit.asking.wait()

    async def _queue_for_group(self, turn: TurnRequest, unit: ColocatedGroup) -> None:
        """Queue for the whole group; afterwards, whatever the outcome, the other members check again."""
        asking = unit.asking = asyncio.Event()
        try:
            await self._queue_up(turn, unit)
        finally:
            unit.asking = None
            asking.set()

    async def _queue_up(self, turn: TurnRequest, unit: ColocatedGroup | None = None) -> None:
        age = self.arrival_order.get(turn.session)
        again = age is not None
        if age is None:
            age = self.arrival_order[turn.session] = self._arrivals
            self._arrivals += 1
        if unit is not None:
            age = unit.age = age if unit.age is None else unit.age
        while True:
            waiter = _Waiter(turn, asyncio.get_running_loop().create_future())
            length = self._dispatch.predict(turn, again=again)
            again = True
            self._queues[turn.long].add(waiter, age=age, length=length, begun=turn.begun)
            if self._dispatch.by_length:  # after all arrivals of this instant, so that the queue can order them
                asyncio.get_running_loop().call_soon(self.pump)
            else:
                self.pump()
            if waiter.placed.done():
                return
            began = asyncio.get_running_loop().time()
            try:
                with self.leases.note(turn.session, "room in an engine's KV memory"):
                    await waiter.placed
            finally:
                waiter.placed.cancel()
            self.waited += asyncio.get_running_loop().time() > began
            if self.assign(turn) is not False:
                return

    def pump(self) -> None:
        """KV memory may be free: admit from the head of each queue while it fits."""
        if self._pumping:
            return
        self._pumping = True
        try:
            for queue in self._queues.values():
                while (waiter := queue.head()) is not None:
                    if not waiter.placed.done():
                        if self.assign(waiter.turn) is False:
                            break
                        waiter.placed.set_result(None)
                    queue.leave()
        finally:
            self._pumping = False

    def takes(self, member: RegisteredEngine, turn: TurnRequest, seats: int = 1) -> bool:
        """True if the engine accepts this turn's trajectory, or `seats` members of its group."""
        kv = member.kv
        if not kv.taken or (kv.quiet and asyncio.get_running_loop().time() >= member.quiet_at + IDLE_ADMISSION_S):
            return True
        others_wait = any(len(queue) for long, queue in self._queues.items() if long != turn.long)
        if not self._dispatch.takes(member, turn, others_wait=others_wait):
            return False
        limits = self.limits
        return kv.taken + seats <= limits.limit(member.engine.id) and kv.fits(
            self.wanted(turn.domain, turn.length), share=limits.settings.high, sessions=seats
        )

    def assigned(self, turn: TurnRequest, member: RegisteredEngine) -> None:
        """The trajectory was assigned to the engine."""
        self.admitted += 1
        member.kv.admit(turn.session, self.wanted(turn.domain, turn.length))

    def begins(self, turn: TurnRequest, member: RegisteredEngine, output: float) -> None:
        """The turn is sent to its engine; `output` tokens are expected."""
        member.kv.begin(turn.session, turn.length + int(output))
        turn.sent_at = asyncio.get_running_loop().time()
        self._stirred.set()

    def ends(self, kv: SessionKv, turn: TurnRequest, member: RegisteredEngine, sampled: int) -> None:
        kv.domain, kv.tokens = turn.domain, turn.length + sampled
        kv.prompt, kv.generated = turn.prompt, kv.generated + sampled
        self._dispatch.turn_ended(member, asyncio.get_running_loop().time() - turn.sent_at, sampled)
        member.kv.end(turn.session, turn.length + max(sampled - 1, 0))
        if member.kv.quiet and self.waiting:
            member.quiet_at = asyncio.get_running_loop().time()
            self.pump()

    def forget(self, session: str, kv: SessionKv, *, held: list[RegisteredEngine]) -> None:
        """The trajectory is over: free its KV memory, and record its length."""
        self.arrival_order.pop(session, None)
        for member in held:
            member.kv.drop(session)
        if kv.tokens:
            self._dispatch.trajectory_ended(kv, whole=kv.whole)
        if kv.tokens and kv.whole:
            mean = self._final.get(kv.domain)
            self._final[kv.domain] = kv.tokens if mean is None else mean + LENGTH_MEAN_WEIGHT * (kv.tokens - mean)
        self.pump()

    def joined(self, member: RegisteredEngine) -> None:
        """Restore the known KV capacity of a returning engine."""
        if member.engine.id in self._facts:
            member.kv.set_capacity(*self._facts[member.engine.id])

    def report(self, version: int) -> None:
        """Emit the current limits, and the counts since the last report, to the ledger."""
        limits = sorted(self.limits.limit(m.engine.id) for m in self._generating())
        if not limits:
            return
        self.emit(
            CONCURRENCY,
            f"v{version}",
            engines=len(limits),
            least=limits[0],
            median=statistics.median(limits),
            most=limits[-1],
            admitted=self.admitted,
            waited=self.waited,
            waiting=self.waiting,
            evicted=self.evicted,
            preempted=self.preempted,
        )
        self.admitted = self.waited = self.evicted = self.preempted = 0

    def wanted(self, domain: str, tokens: int) -> int:
        """The expected final length in tokens, at least `tokens`. On average a trajectory uses half of it, but
        trajectories that begin at the same time are long at the same time, and a smaller batch is faster."""
        return max(tokens, int(self._final.get(domain, 0.0)))

    def _generating(self) -> list[RegisteredEngine]:
        return [m for m in self.registry.members.values() if m.seat.role is not EngineRole.PREFILL]

    async def _poll_once(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for member in self.registry.members.values():
                if member.healthy:
                    tasks.create_task(self._poll(member), name=f"pressure of {member.engine.id}")
        engines = [m for m in self._generating() if m.serves]
        most = max((self.limits.limit(m.engine.id) for m in engines), default=1)
        self._dispatch.reserve(engines, len(self.arrival_order), most)
        self.pump()

    async def _poll(self, member: RegisteredEngine) -> None:
        try:
            with self.leases.hold("concurrency", f"load of {member.engine.id}", STATS_S, Expiry.RETRY):
                stats = await member.engine.stats()
        except (EngineError, LeaseExpired):
            return  # supervision diagnoses the engine
        if stats.kv_tokens is not None:
            self._learn(member, stats.kv_tokens, stats.kv_sessions)
        if member.seat.role is not EngineRole.PREFILL and member.healthy:
            self._adjust_limit(member, stats)

    def _learn(self, member: RegisteredEngine, tokens: int, sessions: int | None) -> None:
        name = member.engine.id
        facts = self._facts[name] = float(tokens), float("inf") if sessions is None else float(sessions)
        if (member.kv.capacity, member.kv.most) != facts:
            member.kv.set_capacity(*facts)
        if self._final:
            each = max(statistics.fmean(self._final.values()), 1.0)
            most = min(self.settings.aimd.high * tokens / each, facts[1])
            self.limits.begin(name, int(most), now=asyncio.get_running_loop().time())

    def _adjust_limit(self, member: RegisteredEngine, stats: EngineStats) -> None:
        name, kv = member.engine.id, member.kv
        evicted, preempted = self._counted.get(name, (0, 0))
        self._counted[name] = kv.evicted, stats.preemptions
        self.evicted += max(kv.evicted - evicted, 0)
        self.preempted += max(stats.preemptions - preempted, 0)
        before = self.limits.limit(name)
        used = max(stats.kv_used, kv.total / kv.capacity)
        decision = self.limits.observe(
            name,
            KvPressure(min(used, 1.0), stats.preemptions + kv.evicted, len(kv), stats.waiting),
            now=asyncio.get_running_loop().time(),
        )
        if decision.change in (LimitChange.DOWN_PREEMPTED, LimitChange.DOWN_FULL) and decision.limit < before:
            self.emit(
                "concurrency_lowered",
                name,
                limit=decision.limit,
                before=before,
                why=str(decision.change),
                kv_used=round(used, 4),
                sessions=len(kv),
            )
