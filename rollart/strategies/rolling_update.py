"""Rolling updates: engines take new weights one by one, by a policy, while other engines serve the previous version.

With one update of all engines (`serving.weight_updates`) a version is current when every engine has it. Here it is
current once it is complete and committed; engines follow, at most alpha versions behind, and turns go to eligible
engines: a trajectory that begins on an engine with version v has v0 = v, so an engine with n - v > alpha may not
generate for it at all. Such an engine is *blocked* until it is updated, under every policy. The policies differ in
their treatment of the other engines:

- all at once: every engine is suspended, all update, all resume (RollArt §1.5, steps 2-4). No engine serves meanwhile.
- delayed: an engine keeps its weights until its generation iteration ends, or for `longest_s` (AsyncFlow §6.2).
  Requests in flight are not interrupted, and the weights reach the host's memory meanwhile.
- staggered: at most a fraction updates at a time and an engine always serves (AsyncFlow's sub-step asynchrony, proposed
  there and not built).
- on divergence: an engine pulls when the new policy has moved away from its own by more than a threshold, or when alpha
  requires it. AAPS as a pull: a small probe is sent at each publish, weights only to engines that need them.

Policies are pure: engine states in, a plan out. `RollingUpdater` computes a new plan after each publish and each
finished update.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollart.errors import EngineError, LeaseExpired
from rollart.fleet import EngineRole
from rollart.leases import Expiry
from rollart.ledger.events import ENGINE_UPDATED
from rollart.ledger.intervals import ResourceState
from rollart.model import EngineId, WeightsRef
from rollart.serving.engine_registry import RegisteredEngine
from rollart.serving.weight_updates import UpdateContext, WeightUpdates


class UpdateReason(enum.StrEnum):
    """Why an engine updates now."""

    NEW_VERSION = "new_version"
    ALPHA = "alpha"
    """It is blocked, or would be blocked too soon for a trajectory that starts now."""
    IDLE = "idle"
    """Its iteration has ended: an update interrupts nothing."""
    WAITED = "waited"
    """It has delayed the update for the permitted time."""
    DIVERGED = "diverged"
    NEEDED = "needed"
    """The engines with the version of some trajectories' first token left for good: without an update no engine could
    continue these trajectories."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """The planner's view of an engine. `busy` = requests in flight that began before the current version was published;
    `since_s` = seconds since then on the caller's clock."""

    id: str
    version: int
    busy: int = 0
    healthy: bool = True
    updating: bool = False
    since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class VersionProbe:
    """A published version and its distance from earlier versions: mean KL in nats per token, measured by the trainer on
    recent prompts. A version that is not listed counts as far away."""

    version: int
    divergence: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """`update`: engines that load the version now. `drain`: engines that take no new trajectories."""

    update: Mapping[str, UpdateReason]
    drain: frozenset[str] = frozenset()


class UpdatePolicy(Protocol):
    def plan(self, engines: Sequence[EngineState], *, version: int, alpha: int) -> UpdatePlan:
        """The plan while `version` is current. ValueError if an engine is ahead of it."""
        ...


@dataclass(frozen=True, slots=True)
class AllAtOnce:
    """Suspend all, update all, resume all: no engine generates until the last has the version."""

    def plan(self, engines: Sequence[EngineState], *, version: int, alpha: int) -> UpdatePlan:
        return UpdatePlan({e.id: UpdateReason.NEW_VERSION for e in _behind(engines, version)})


@dataclass(frozen=True, slots=True)
class Delayed:
    """Each engine updates when its running requests are done, or after `longest_s`. Until then it starts no new
    trajectories, or its iteration would never end."""

    longest_s: float

    def plan(self, engines: Sequence[EngineState], *, version: int, alpha: int) -> UpdatePlan:
        update: dict[str, UpdateReason] = {}
        drain: set[str] = set()
        for e in _behind(engines, version):
            if version - e.version > alpha:
                update[e.id] = UpdateReason.ALPHA
            elif e.busy == 0:
                update[e.id] = UpdateReason.IDLE
            elif e.since_s >= self.longest_s:
                update[e.id] = UpdateReason.WAITED
            else:
                drain.add(e.id)
        return UpdatePlan(update, frozenset(drain))


@dataclass(frozen=True, slots=True)
class Staggered:
    """At most `fraction` of the healthy engines (at least one) update at a time, and one engine that may generate
    stays.

    Order: oldest version first, then fewest requests in flight, then id. Blocked engines all update at once, since they
    cannot serve anyway. With alpha 0 every publish blocks all engines, so the policy needs alpha >= 1; a single engine
    cannot both update and serve, and updates at once. An engine serves at every moment if each publish waits for
    `may_publish`.
    """

    fraction: float = 0.25

    def plan(self, engines: Sequence[EngineState], *, version: int, alpha: int) -> UpdatePlan:
        behind = _behind(engines, version)
        too_old = {e.id for e in engines if version - e.version > alpha}
        update = {e.id: UpdateReason.ALPHA for e in behind if e.id in too_old}
        healthy = [e for e in engines if e.healthy]
        able = [e for e in healthy if e.id not in too_old and not e.updating]
        # Engines that update although they could serve: only these count against the fraction.
        away = sum(e.updating and e.id not in too_old for e in healthy)
        most = max(int(self.fraction * len(healthy)), 1)
        for e in sorted(behind, key=lambda e: (e.version, e.busy, e.id)):
            if e.id not in update and away < most and (len(able) > 1 or len(healthy) == 1):
                update[e.id] = UpdateReason.NEW_VERSION
                able.remove(e)
                away += 1
        return UpdatePlan(update)


@dataclass(frozen=True, slots=True)
class OnDivergence:
    """An engine pulls when KL(its version, current) > `threshold` nats, or when it lags by more than alpha - `reserve`.

    `reserve` is the number of further publishes that a trajectory starting on a lagging engine survives: with 0 it may
    be stale at the very next one. So alpha = 1 with reserve 1 pulls every version, and savings begin at alpha = 2.
    """

    probe: VersionProbe
    threshold: float
    reserve: int = 1

    def plan(self, engines: Sequence[EngineState], *, version: int, alpha: int) -> UpdatePlan:
        update = {}
        for e in _behind(engines, version):
            if version - e.version > max(alpha - self.reserve, 0):
                update[e.id] = UpdateReason.ALPHA
            elif not self.probe.divergence.get(e.version, math.inf) <= self.threshold:
                update[e.id] = UpdateReason.DIVERGED
        return UpdatePlan(update)


def may_publish(engines: Sequence[EngineState], *, version: int, alpha: int) -> bool:
    """True if `version` may be published now: it leaves an engine that may generate, or no running update would be
    worth waiting for. With alpha 0 every publish blocks all engines."""
    healthy = [e for e in engines if e.healthy]
    serves = any(not e.updating and version - e.version <= alpha for e in healthy)
    return serves or alpha == 0 or not any(e.updating for e in healthy)


def _behind(engines: Sequence[EngineState], version: int) -> list[EngineState]:
    """The engines that lag and can be updated now. An engine that is down loads the current version when it returns."""
    if ahead := sorted(e.id for e in engines if e.version > version):
        raise ValueError(f"engines {ahead} are past version {version}")
    return [e for e in engines if e.version < version and e.healthy and not e.updating]


@dataclass(slots=True)
class _Iteration:
    """The sessions of each engine when the version became current: a delayed update waits for their end."""

    assignments: dict[str, str] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)

    def ended(self, session: str) -> bool:
        """True if the session was the last one of its engine."""
        engine = self.assignments.pop(session, None)
        if engine is None:
            return False
        self.left[engine] -= 1
        return not self.left[engine]


class RollingUpdater(WeightUpdates):
    """Owns the updates of single engines. `publish` is called by the gateway, after `ready` has waited for an engine
    that may serve. `run` owns the tasks and waits for a change of the fleet, for the end of an iteration, or for the
    longest delay of an update. `settle` waits until every engine has the current version.

    Invariants: no turn begins on an engine that is more than alpha publishes behind, or whose version is older than the
    trajectory's first token. One task at a time updates an engine, and an engine joins only while none does.
    """

    def __init__(self, policy: UpdatePolicy, alpha: int, context: UpdateContext) -> None:
        """`alpha`: the permitted lag of engines in publishes."""
        super().__init__(context)
        self._policy = policy
        self._alpha = alpha
        self.probes = isinstance(policy, OnDivergence)
        self._measured = VersionProbe(-1, {})
        """The probe of the next version; the policy has the probe of the current one."""
        self._weights: WeightsRef | None = None
        self._since = 0.0
        self._iteration = _Iteration()
        self._due: float | None = None
        self._locks: dict[str, asyncio.Lock] = {}
        self._loading: dict[str, int] = {}
        self._settling = 0
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Plan and start updates until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            while True:
                changed = self._turns.changed
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._due):
                        await changed.wait()
                self._plan()

    def measured(self, version: int, divergence: Mapping[int, float]) -> None:
        """Record the divergence of the next version from earlier ones: mean KL in nats per token."""
        if self.probes:
            self._measured = VersionProbe(version, divergence)
            self._emit("weights_probe", f"v{version}", **{f"kl_v{v}": round(kl, 6) for v, kl in divergence.items()})

    async def ready(self, version: int) -> None:
        """Returns when `version` may become current: an engine may serve then, or waiting would not yield one."""
        with self._leases.note("publish", f"an engine that serves beside v{version}"):
            while not may_publish(self._states(prefill=False), version=version, alpha=self._alpha):
                await self._turns.changed.wait()

    async def publish(self, weights: WeightsRef, on_version: Callable[[int], None]) -> None:
        self._weights, self._due = weights, None
        if isinstance(self._policy, OnDivergence):
            found = self._measured
            if found.version != weights.version:  # not measured: treated as a large divergence
                found = VersionProbe(weights.version, {})
            self._policy = dataclasses.replace(self._policy, probe=found)
        self._since = asyncio.get_running_loop().time()
        self._iteration = _Iteration()
        for member in self._registry.members.values():
            name = member.engine.id
            self._iteration.left[name] = len(member.sessions)
            self._iteration.assignments |= dict.fromkeys(member.sessions, name)
        self._turns.version = weights.version
        on_version(weights.version)
        self._plan()
        self._turns.notify()

    def ended(self, session: str) -> None:
        """Count an ended trajectory, for which a delayed update may wait."""
        if self._iteration.ended(session) and self._due is not None:
            self._turns.notify()

    def lost(self) -> None:
        self._turns.notify()

    async def settle(self) -> None:
        """Load the current version on every serving engine; returns when all have it."""
        self._settling += 1
        try:
            self._plan()
            while any(m.updating or (m.serves and m.version != self._turns.version) for m in self._members()):
                await self._turns.changed.wait()
        finally:
            self._settling -= 1

    @contextlib.asynccontextmanager
    async def alone(self, engine_id: str) -> AsyncIterator[None]:
        """Exclude updates of this engine while the body runs."""
        async with self._locks.setdefault(engine_id, asyncio.Lock()):
            yield

    def loading(self) -> Iterable[int]:
        """Versions that engines are reading: they must not be pruned."""
        return tuple(self._loading.values())

    def _members(self) -> Iterable[RegisteredEngine]:
        return self._registry.members.values()

    def _states(self, *, prefill: bool) -> list[EngineState]:
        """Prefill engines serve no turn alone, so they are planned separately. A suspected or draining engine counts as
        down."""
        now = asyncio.get_running_loop().time()
        since = math.inf if self._due is not None and now >= self._due else now - self._since
        return [
            EngineState(
                m.engine.id,
                m.version,
                busy=self._iteration.left.get(m.engine.id, 0),
                healthy=m.healthy and not (m.doubted or m.draining),
                updating=m.updating,
                since_s=since,
            )
            for m in self._members()
            if (m.seat.role is EngineRole.PREFILL) is prefill
        ]

    def _plan(self) -> None:
        """Start the updates that are due, and set the lag that may serve meanwhile."""
        if self._weights is None or self._tasks is None:
            return
        version, members = self._turns.version, self._registry.members
        policy: UpdatePolicy = AllAtOnce() if self._settling else self._policy
        waits = False
        for prefill in (False, True):
            states = self._states(prefill=prefill)
            plan = policy.plan(states, version=version, alpha=self._alpha)
            for state in states:
                member = members[EngineId(state.id)]
                member.delaying = state.id in plan.drain
                if state.id in plan.update:
                    self._start(member, self._weights, plan.update[state.id])
            waits = waits or bool(plan.drain)
        if (needed := self._needed(version)) is not None:
            self._start(needed, self._weights, UpdateReason.NEEDED)
        self._due = self._since + policy.longest_s if waits and isinstance(policy, Delayed) else None
        behind = any(m.healthy and m.version < version for m in members.values())
        self._turns.lag = self._alpha if behind else 0

    def _needed(self, version: int) -> RegisteredEngine | None:
        """The engine that must load at once, because a trajectory began with a newer version than any engine has: the
        engine with the fewest sessions. None if an engine is lost, since it returns with the current version."""
        if any(not m.healthy for m in self._members()):
            return None
        able = [m for m in self._members() if m.seat.role is not EngineRole.PREFILL and not (m.draining or m.doubted)]
        if not able or any(m.updating for m in able) or (held := max(m.version for m in able)) >= version:
            return None
        begun = (kv.begun for kv in self._turns.sessions.values())
        if not any(v0 is not None and v0 > held for v0 in begun):
            return None
        return min(able, key=lambda m: (len(m.sessions), m.engine.id))

    def _start(self, member: RegisteredEngine, weights: WeightsRef, why: UpdateReason) -> None:
        assert self._tasks is not None, "planned while `run` runs"
        member.updating = True
        member.shares.hold(ResourceState.SYNC)
        self._tasks.create_task(self._update(member, weights, why), name=f"sync {member.engine.id}")

    async def _update(self, member: RegisteredEngine, weights: WeightsRef, why: UpdateReason) -> None:
        name, now = member.engine.id, asyncio.get_running_loop().time
        began, before = now(), member.version
        self._loading[name] = weights.version
        try:
            async with (
                self.alone(name),
                self._leases.hold(
                    "publish", f"weights v{weights.version} on {name}", self._limits.sync_s, Expiry.RESTART_PART
                ),
            ):
                await self._take_back(weights.version, name)
                await member.engine.pause(self._pause)
                await member.engine.update_weights(weights)
                member.version = weights.version
                await member.engine.resume()
            if member.healthy:  # an engine that was lost meanwhile stays down
                member.shares.release()
                seconds = round(now() - began, 6)
                fields = {"version": weights.version, "skipped": max(weights.version - before - 1, 0)}
                fields |= {"bytes": weights.bytes}
                self._emit(ENGINE_UPDATED, name, **fields, reason=str(why), seconds=seconds)
        except (EngineError, LeaseExpired) as error:
            self._suspect(member, error)
        finally:
            del self._loading[name]
            member.updating = False
        self._plan()
        self._turns.notify()
