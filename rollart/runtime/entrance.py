"""KV-memory admission: trajectories per engine, bounded by its KV memory, and the queue of waiting trajectories.

Prefix KV is useful only while it is resident. If live trajectories need more KV than fits, engines evict blocks that
are needed a moment later, and every turn recomputes its whole context. So a trajectory is assigned to an engine when
its expected final context fits, and from then on its turns never wait here. A trajectory whose KV is evicted
nevertheless queues again, before trajectories that have not begun.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rollart.errors import EngineError, LeaseExpired
from rollart.fleet import EngineRole
from rollart.model import EngineStats
from rollart.policy.concurrency import CONCURRENCY, AimdSettings, ConcurrencyLimits, KvPressure, LimitChange
from rollart.policy.lease import Expiry
from rollart.policy.line import AdmissionQueue
from rollart.runtime.homes import EmitEvent
from rollart.runtime.leases import Leases
from rollart.runtime.members import EngineRegistry, RegisteredEngine, SessionKv
from rollart.runtime.skew import SkewAwareDispatcher
from rollart.runtime.together import ColocatedGroup, GroupColocation
from rollart.runtime.turn import TurnRequest

__all__ = ["ConcurrencySettings", "KvAdmission"]

LENGTH_MEAN_WEIGHT = 0.02
"""Weight of one finished trajectory in its domain's mean length, which covers about the last fifty."""

IDLE_ADMISSION_S = 5.0
"""An engine that was idle for this long accepts one more trajectory even without free KV memory: all of its sessions
wait for environments. After a shorter time it would evict KV that is needed in a moment."""

STATS_S = 10.0
"""Longest wait for an engine's KV usage; an engine that does not answer is asked again at the next interval."""


@dataclass(frozen=True, slots=True)
class ConcurrencySettings:
    """`aimd`: the search for each engine's limit. `expected`: initial estimates of final trajectory lengths in tokens,
    by domain. `skew_aware`: the longest trajectories go first and have reserved engines."""

    aimd: AimdSettings = field(default_factory=AimdSettings)
    expected: Mapping[str, float] = field(default_factory=dict)
    skew_aware: bool = False


@dataclass(slots=True)
class _Waiter:
    turn: TurnRequest
    placed: asyncio.Future[None]


class KvAdmission:
    """Owns the concurrency limits and the admission queues. `TurnExecutor` awaits `enter` before a turn of a trajectory
    without a sticky engine.

    `enter` waits for free KV memory. It is unblocked by a trajectory that ends or moves, a higher limit, or an engine
    that joins or becomes idle. It returns at once if no engine is eligible at all: the caller waits for engines.
    Trajectories that have begun are admitted before new ones, and otherwise in order of arrival. There is no deadlock:
    turns on sticky engines run regardless of the limits, so trajectories end; and an engine that was idle for
    `IDLE_ADMISSION_S` accepts the head of the queue even without free memory.
    """

    def __init__(
        self,
        settings: ConcurrencySettings,
        roster: EngineRegistry,
        leases: Leases,
        tell: EmitEvent,
        place: Callable[[TurnRequest], bool | None],
    ) -> None:
        """`place` assigns a turn's trajectory to an engine: True if it has an engine, False if it has to wait, None
        if no engine is eligible at all."""
        self._settings = settings
        self._roster = roster
        self._leases = leases
        self._tell = tell
        self._place = place
        self.limits = ConcurrencyLimits(settings.aimd)
        self._final = dict(settings.expected)
        self._facts: dict[str, tuple[float, float]] = {}
        self._came: dict[str, int] = {}
        self._arrivals = 0
        self._lines: dict[bool, AdmissionQueue[_Waiter]] = {
            long: AdmissionQueue(longest=settings.skew_aware) for long in (True, False)[not settings.skew_aware :]
        }
        """Keyed by whether the queue is for long trajectories; a single queue unless dispatch is skew-aware."""
        self._skew = SkewAwareDispatcher() if settings.skew_aware else None
        self._together: GroupColocation | None = None
        self._follow: Callable[[TurnRequest], bool] = lambda _: False
        self._pumping = False
        self._stirred = asyncio.Event()
        self._counted: dict[str, tuple[int, int]] = {}
        self.admitted = self.waited = self.evicted = self.preempted = 0

    async def run(self) -> None:
        """Poll the KV usage of engines while turns run or wait: a permanent timer would hide a deadlock."""
        while True:
            await self._look()
            await asyncio.sleep(self._settings.aimd.interval_s)
            self._stirred.clear()
            if not self.waiting:
                await self._stirred.wait()

    @property
    def waiting(self) -> int:
        return sum(map(len, self._lines.values()))

    async def enter(self, turn: TurnRequest) -> None:
        """Returns when the turn's trajectory has a sticky engine, or when no engine is eligible."""
        unit = None if self._together is None else self._together.unit(turn.session)
        if unit is None:
            await self._line_up(turn)
            return
        while not self._follow(turn):
            if unit.asking is None:
                await self._ask_for(turn, unit)
                return
            with self._leases.note(turn.session, "room for its group"):
                await unit.asking.wait()

    def hold_together(self, together: GroupColocation, follow: Callable[[TurnRequest], bool]) -> None:
        """Admit groups as a whole: one member queues for the others. `follow` gives a turn's trajectory the slot that
        its group reserved, and returns whether there was one."""
        self._together, self._follow = together, follow
        together.on_room = self.pump

    async def _ask_for(self, turn: TurnRequest, unit: ColocatedGroup) -> None:
        """Queue for the whole group; afterwards, whatever the outcome, the other members check again."""
        asking = unit.asking = asyncio.Event()
        try:
            await self._line_up(turn, unit)
        finally:
            unit.asking = None
            asking.set()

    async def _line_up(self, turn: TurnRequest, unit: ColocatedGroup | None = None) -> None:
        came = self._came.get(turn.session)
        again = came is not None
        if came is None:
            came = self._came[turn.session] = self._arrivals
            self._arrivals += 1
        if unit is not None:
            came = unit.age = came if unit.age is None else unit.age
        while True:
            waiter = _Waiter(turn, asyncio.get_running_loop().create_future())
            length = 0.0 if self._skew is None else self._skew.judge(turn, again=again)
            again = True
            self._lines[turn.long].add(waiter, age=came, length=length, begun=turn.begun)
            if self._skew is None:
                self.pump()
            else:  # after all arrivals of this instant, so that the queue can order them by length
                asyncio.get_running_loop().call_soon(self.pump)
            if waiter.placed.done():
                return
            began = asyncio.get_running_loop().time()
            try:
                with self._leases.note(turn.session, "room in an engine's KV memory"):
                    await waiter.placed
            finally:
                waiter.placed.cancel()
            self.waited += asyncio.get_running_loop().time() > began
            if self._place(turn) is not False:
                return

    def pump(self) -> None:
        """KV memory may be free: admit from the head of each queue while it fits."""
        if self._pumping:
            return
        self._pumping = True
        try:
            for line in self._lines.values():
                while (waiter := line.head()) is not None:
                    if not waiter.placed.done():
                        if self._place(waiter.turn) is False:
                            break
                        waiter.placed.set_result(None)
                    line.leave()
        finally:
            self._pumping = False

    def takes(self, member: RegisteredEngine, turn: TurnRequest, seats: int = 1) -> bool:
        """True if the engine accepts this turn's trajectory, or `seats` members of its group."""
        kv = member.kv
        if not kv.taken or (kv.quiet and asyncio.get_running_loop().time() >= member.quiet_at + IDLE_ADMISSION_S):
            return True
        if self._skew is not None and not self._skew.takes(
            member, turn, others_wait=len(self._lines[not turn.long]) > 0
        ):
            return False
        limits = self.limits
        return kv.taken + seats <= limits.limit(member.engine.id) and kv.fits(
            self.wanted(turn.domain, turn.length), share=limits.settings.high, sessions=seats
        )

    def settled(self, turn: TurnRequest, member: RegisteredEngine) -> None:
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
        if self._skew is not None:
            kv.prompt, kv.said = turn.prompt, kv.said + sampled
            self._skew.saw(member, asyncio.get_running_loop().time() - turn.sent_at, sampled)
        member.kv.end(turn.session, turn.length + max(sampled - 1, 0))
        if member.kv.quiet and self.waiting:
            member.quiet_at = asyncio.get_running_loop().time()
            self.pump()

    def forget(self, session: str, kv: SessionKv, *, held: list[RegisteredEngine]) -> None:
        """The trajectory is over: free its KV memory, and record its length."""
        self._came.pop(session, None)
        for member in held:
            member.kv.drop(session)
        if kv.tokens and self._skew is not None:
            self._skew.over(kv, whole=kv.whole)
        if kv.tokens and kv.whole:
            mean = self._final.get(kv.domain)
            self._final[kv.domain] = kv.tokens if mean is None else mean + LENGTH_MEAN_WEIGHT * (kv.tokens - mean)
        self.pump()

    def gave_up(self, session: str) -> None:
        """The trajectory ended before it had any state, because it waited for a weight update."""
        self._came.pop(session, None)

    def joined(self, member: RegisteredEngine) -> None:
        """Restore the known KV capacity of a returning engine."""
        if member.engine.id in self._facts:
            member.kv.set_capacity(*self._facts[member.engine.id])

    def report(self, version: int) -> None:
        """Emit the current limits, and the counts since the last report, to the ledger."""
        limits = sorted(self.limits.limit(m.engine.id) for m in self._homes())
        if not limits:
            return
        self._tell(
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

    def _homes(self) -> list[RegisteredEngine]:
        return [m for m in self._roster.members.values() if m.seat.role is not EngineRole.PREFILL]

    async def _look(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for member in self._roster.members.values():
                if member.healthy:
                    tasks.create_task(self._ask(member), name=f"pressure of {member.engine.id}")
        if self._skew is not None:
            homes = [m for m in self._homes() if m.serves]
            most = max((self.limits.limit(m.engine.id) for m in homes), default=1)
            self._skew.reserve(homes, len(self._came), most)
        self.pump()

    async def _ask(self, member: RegisteredEngine) -> None:
        try:
            with self._leases.hold("concurrency", f"load of {member.engine.id}", STATS_S, Expiry.RETRY):
                stats = await member.engine.stats()
        except (EngineError, LeaseExpired):
            return  # supervision diagnoses the engine
        if stats.kv_tokens is not None:
            self._learn(member, stats.kv_tokens, stats.kv_sessions)
        if member.seat.role is not EngineRole.PREFILL and member.healthy:
            self._judge(member, stats)

    def _learn(self, member: RegisteredEngine, tokens: int, sessions: int | None) -> None:
        name = member.engine.id
        facts = self._facts[name] = float(tokens), float("inf") if sessions is None else float(sessions)
        if (member.kv.capacity, member.kv.most) != facts:
            member.kv.set_capacity(*facts)
        if self._final:
            each = max(statistics.fmean(self._final.values()), 1.0)
            most = min(self._settings.aimd.high * tokens / each, facts[1])
            self.limits.begin(name, int(most), now=asyncio.get_running_loop().time())

    def _judge(self, member: RegisteredEngine, stats: EngineStats) -> None:
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
            self._tell(
                "concurrency_lowered",
                name,
                limit=decision.limit,
                before=before,
                why=str(decision.change),
                kv_used=round(used, 4),
                sessions=len(kv),
            )
