"""Weight updates of the engines behind a gateway: the port, and the update of all engines at once.

All at once: suspend -> update -> resume on every healthy engine (RollArt §1.5, steps 2-4). In-flight requests survive
(pause mode KEEP) and the engine recomputes their KV (I5). Engines that are down are skipped: they load the current
version when they come back. Other policies are in `strategies.rolling_update`.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rollart.errors import EngineError, LeaseExpired
from rollart.leases import Expiry, Leases
from rollart.ledger.intervals import ResourceState
from rollart.model import EngineId, PauseMode, WeightsRef
from rollart.serving.engine_registry import EmitEvent, EngineRegistry, GatewayLimits, RegisteredEngine
from rollart.serving.turns import TurnExecutor


@dataclass(frozen=True, slots=True)
class UpdateContext:
    """The gateway's parts that an update works on. `pause`: the effect on running turns; `suspect` reports an engine
    that failed to load."""

    turns: TurnExecutor
    registry: EngineRegistry
    leases: Leases
    limits: GatewayLimits
    pause: PauseMode
    suspect: Callable[[RegisteredEngine, EngineError | LeaseExpired], None]
    emit: EmitEvent


class WeightUpdates(abc.ABC):
    """Owned by the gateway, which calls `publish` while no other weight transfer runs.

    Invariant of every implementation: no turn begins on an engine whose version is older than the schedule permits, or
    older than the trajectory's first token.
    """

    probes = False
    """True if `measured` is wanted: the divergence of a version from earlier ones, before it is published."""

    def __init__(self, context: UpdateContext) -> None:
        self._turns = context.turns
        self._registry = context.registry
        self._leases = context.leases
        self._limits = context.limits
        self._pause = context.pause
        self._suspect = context.suspect
        self._emit = context.emit

    @abc.abstractmethod
    async def publish(self, weights: WeightsRef, on_version: Callable[[int], None]) -> None:
        """Make the version current; `on_version` runs once, synchronously, when it is."""

    async def run(self) -> None:
        """Background work of the run, until cancelled."""

    async def ready(self, version: int) -> None:
        """Returns when `version` may become current."""

    async def settle(self) -> None:
        """Returns when every engine that serves has the current version."""

    def measured(self, version: int, divergence: Mapping[int, float]) -> None:
        """Record the divergence of the next version from earlier ones: mean KL in nats per token."""

    def ended(self, session: str) -> None:
        """A trajectory ended."""

    def lost(self) -> None:
        """An engine was lost."""

    def alone(self, engine_id: str) -> contextlib.AbstractAsyncContextManager[None]:
        """Exclude updates of this engine while the body runs."""
        return contextlib.nullcontext()

    def loading(self) -> Iterable[int]:
        """Versions that engines are reading: they must not be pruned."""
        return ()

    async def _take_back(self, version: int, engine: str | None = None) -> None:
        """Cancel hand-offs of KV that are not fetched yet: KV never crosses an update."""
        named = () if engine is None else (engine,)
        if taken := await self._turns.pulls.take_back(self._limits.sync_s, *named):
            fields = {} if engine is None else {"engine": engine}
            self._emit("handoffs_taken_back", f"v{version}", count=taken, **fields)


class AllAtOnceUpdates(WeightUpdates):
    """No engine generates until all have the version. An engine that fails is lost; new turns wait at the gate."""

    async def publish(self, weights: WeightsRef, on_version: Callable[[int], None]) -> None:
        self._turns.gate.clear()
        try:
            await self._take_back(weights.version)
            members = self._registry.members
            if ahead := sorted(e for e, m in members.items() if m.version > weights.version):
                raise ValueError(f"engines {ahead} are past version {weights.version}")
            behind = (members[EngineId(e)] for e in sorted(members) if members[e].version < weights.version)
            targets = [m for m in behind if m.healthy]
            async with asyncio.TaskGroup() as group:
                for member in targets:
                    group.create_task(self._load(member, weights), name=f"sync {member.engine.id}")
            self._turns.version = weights.version
            on_version(weights.version)
            async with asyncio.TaskGroup() as group:
                for member in targets:
                    if member.healthy:
                        group.create_task(self._resume(member), name=f"resume {member.engine.id}")
        finally:
            self._turns.gate.set()
            self._turns.notify()

    async def _load(self, member: RegisteredEngine, weights: WeightsRef) -> None:
        member.shares.hold(ResourceState.SYNC)
        try:
            async with self._leases.hold(
                "publish", f"weights v{weights.version} on {member.engine.id}", self._limits.sync_s, Expiry.RESTART_PART
            ):
                await member.engine.pause(self._pause)
                await member.engine.update_weights(weights)
            member.version = weights.version
        except (EngineError, LeaseExpired) as error:
            self._suspect(member, error)

    async def _resume(self, member: RegisteredEngine) -> None:
        try:
            async with self._leases.hold(
                "publish", f"resume of {member.engine.id}", self._limits.sync_s, Expiry.RESTART_PART
            ):
                await member.engine.resume()
            if member.healthy:
                member.shares.release()
        except (EngineError, LeaseExpired) as error:
            self._suspect(member, error)
