"""Rolling updates: engines take new weights one by one, by a policy, while other engines serve the previous version.

With one update of all engines (`Gateway`) a version is current when every engine has it. Here it is current once it is
complete and committed; engines follow, at most alpha versions behind, and turns go to eligible engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from rollart.errors import EngineError, LeaseExpired
from rollart.fleet import EngineRole
from rollart.ledger.intervals import ResourceState
from rollart.model import EngineId, PauseMode, WeightsRef
from rollart.policy.lease import Expiry
from rollart.policy.updates import (
    ENGINE_UPDATED,
    AllAtOnce,
    Delayed,
    EngineState,
    OnDivergence,
    UpdatePolicy,
    UpdateReason,
    VersionProbe,
    may_publish,
)
from rollart.runtime.homes import EmitEvent
from rollart.runtime.leases import Leases
from rollart.runtime.members import EngineRegistry, RegisteredEngine
from rollart.runtime.turns import GatewayLimits, TurnExecutor

__all__ = ["UpdateRule", "RollingUpdater"]


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """The update policy, and the permitted lag of engines in publishes."""

    policy: UpdatePolicy
    alpha: int


@dataclass(slots=True)
class _Iteration:
    """The sessions of each engine when the version became current: a delayed update waits for their end."""

    homes: dict[str, str] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)

    def ended(self, session: str) -> bool:
        """True if the session was the last one of its engine."""
        engine = self.homes.pop(session, None)
        if engine is None:
            return False
        self.left[engine] -= 1
        return not self.left[engine]


class RollingUpdater:
    """Owns the updates of single engines. `publish` is called by the gateway, after `ready` has waited for an engine
    that may serve. `run` owns the tasks and waits for a change of the fleet, for the end of an iteration, or for the
    longest delay of an update. `settle` waits until every engine has the current version.

    Invariants: no turn begins on an engine that is more than alpha publishes behind, or whose version is older than the
    trajectory's first token. One task at a time updates an engine, and an engine joins only while none does.
    """

    def __init__(
        self,
        rule: UpdateRule,
        turns: TurnExecutor,
        roster: EngineRegistry,
        leases: Leases,
        *,
        limits: GatewayLimits,
        pause: PauseMode,
        suspect: Callable[[RegisteredEngine, EngineError | LeaseExpired], None],
        tell: EmitEvent,
    ) -> None:
        self._policy = rule.policy
        self._alpha = rule.alpha
        self._turns = turns
        self._roster = roster
        self._leases = leases
        self._limits = limits
        self._pause = pause
        self._suspect = suspect
        self._tell = tell
        self._measured = VersionProbe(-1, "", {})
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

    @property
    def probes(self) -> bool:
        """True if the policy needs the divergence of a version from earlier ones."""
        return isinstance(self._policy, OnDivergence)

    def measured(self, version: int, divergence: Mapping[int, float]) -> None:
        """Record the divergence of the next version from earlier ones: mean KL in nats per token."""
        if self.probes:
            self._measured = VersionProbe(version, "", divergence)
            self._tell("weights_probe", f"v{version}", **{f"kl_v{v}": round(kl, 6) for v, kl in divergence.items()})

    async def ready(self, version: int) -> None:
        """Returns when `version` may become current: an engine may serve then, or waiting would not yield one."""
        with self._leases.note("publish", f"an engine that serves beside v{version}"):
            while not may_publish(self._states(prefill=False), version=version, alpha=self._alpha):
                await self._turns.changed.wait()

    def publish(self, weights: WeightsRef, on_version: Callable[[int], None]) -> None:
        """Make the version current."""
        self._weights, self._due = weights, None
        if isinstance(self._policy, OnDivergence):
            found = self._measured
            if found.version != weights.version:  # not measured: treated as a large divergence
                found = VersionProbe(weights.version, "", {})
            self._policy = dataclasses.replace(self._policy, probe=found)
        self._since = asyncio.get_running_loop().time()
        self._iteration = _Iteration()
        for member in self._roster.members.values():
            name = member.engine.id
            self._iteration.left[name] = len(member.sessions)
            self._iteration.homes |= dict.fromkeys(member.sessions, name)
        self._turns.version = weights.version
        on_version(weights.version)
        self._plan()
        self._turns.notify()

    def ended(self, session: str) -> None:
        """Count an ended trajectory, for which a delayed update may wait."""
        if self._iteration.ended(session) and self._due is not None:
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
        return self._roster.members.values()

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
        version, members = self._turns.version, self._roster.members
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
        if not self._turns.began_after(held):
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
                taken = await self._turns.pulls.take_back(self._limits.sync_s, name)
                if taken:
                    self._tell("handoffs_taken_back", f"v{weights.version}", count=taken, engine=name)
                await member.engine.pause(self._pause)
                await member.engine.update_weights(weights)
                member.version = weights.version
                await member.engine.resume()
            if member.healthy:  # an engine that was lost meanwhile stays down
                member.shares.release()
                seconds = round(now() - began, 6)
                told = {"version": weights.version, "skipped": max(weights.version - before - 1, 0)}
                told |= {"bytes": weights.bytes}
                self._tell(ENGINE_UPDATED, name, **told, reason=str(why), seconds=seconds)
        except (EngineError, LeaseExpired) as error:
            self._suspect(member, error)
        finally:
            del self._loading[name]
            member.updating = False
        self._plan()
        self._turns.notify()
