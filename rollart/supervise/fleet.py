"""Engines that start and end during a run: the `Fleet` port over gateway, supervision and devices."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

from rollart.errors import LeaseExpired, RollartError, RunFailed
from rollart.fleet import EngineKind, EnginePlacement, FleetMove, FleetMoveKind
from rollart.model import EngineId
from rollart.ports import Recorder, RunEvent
from rollart.serving.gateway import Gateway
from rollart.supervise.engines import EnginePart, EngineSupervisor
from rollart.supervise.supervisor import loop_time


@dataclass(frozen=True, slots=True)
class ReservedEngine:
    """An engine that has devices and a unique name, but no process yet."""

    part: EnginePart
    seat: EnginePlacement


class EngineSite(Protocol):
    """The devices that engines run on. It bills the devices of an engine from `place` until `clear` has ended it."""

    def free(self) -> Mapping[str, int]:
        """Free devices by pool; negative if engines hold more devices than the pool has."""

    def resize(self, devices: Mapping[str, int]) -> None:
        """Set the present devices by pool (0 for an absent pool); these are billed."""

    async def place(self, kind: EngineKind) -> ReservedEngine:
        """Reserve free devices and a name that no engine of the run has had. `RollartError` if too few are free."""

    async def clear(self, engine_id: EngineId) -> None:
        """Stop the engine's process for good, if it has one, and free its devices. Bounded in time and idempotent."""


@dataclass(eq=False)
class EngineFleet:
    """Implements `Fleet`. Called by the rebalancer and the resharder; `gone` is called by supervision.

    `apply` waits for the previous move, for the end of a weight update, then for the engine's start or its last turn.
    A failed start leaves nothing behind. A drain is final once it has begun: the engine leaves even if the drain is
    interrupted, because its trajectories have left it already. A turn longer than `drain_s` is repeated elsewhere.
    """

    gateway: Gateway
    supervisor: EngineSupervisor
    site: EngineSite
    recorder: Recorder
    _: KW_ONLY
    drain_s: float
    _moving: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _gone: list[EngineId] = field(default_factory=list, init=False)

    async def apply(self, move: FleetMove) -> None:
        if move.kind is FleetMoveKind.FLIP or move.replicas != 1:
            raise RunFailed(f"{move}: not a move of the fleet (rule: one engine is drained or started)")
        async with self._moving:
            await self._clear()
            if move.kind is FleetMoveKind.DRAIN:
                assert move.before is not None, "a drain has a role before"
                await self._drain(EngineKind(move.pool, move.before, move.tp), move.engine)
            else:
                assert move.after is not None, "a start has a role after"
                await self._start(EngineKind(move.pool, move.after, move.tp))

    def free(self) -> Mapping[str, int]:
        return self.site.free()

    async def resize(self, devices: Mapping[str, int]) -> None:
        async with self._moving:
            await self._clear()
            self.site.resize(devices)
            seats, stable = self.gateway.seats(), self.gateway.stable()
            for engine_id in [e for e in seats if e not in stable]:
                pool = seats[engine_id].pool
                if self.site.free().get(pool, 0) < 0:
                    cause = f"pool '{pool}' has {devices.get(pool, 0)} devices left"
                    if await self.supervisor.abandon(engine_id, cause):
                        await self.site.clear(engine_id)

    def gone(self, engine_id: EngineId) -> None:
        """Supervision gave the engine up. Its devices are freed before the next move."""
        self._gone.append(engine_id)

    async def _clear(self) -> None:
        """Free the devices of engines that were given up. After an error or a cancellation, the next move continues."""
        while self._gone:
            await self.site.clear(self._gone[0])
            self._gone.pop(0)

    async def _start(self, kind: EngineKind) -> None:
        async with self.gateway.moving:
            pass  # not during an update: the engine would load the outgoing version
        placed = await self.site.place(kind)
        engine_id = placed.part.id
        try:
            await self.supervisor.bring_up(placed.part, placed.seat)
            self.supervisor.add(engine_id)
        except BaseException as error:
            await self.supervisor.release(engine_id)
            await self.site.clear(engine_id)
            if isinstance(error, Exception) and not isinstance(error, RollartError):
                raise RunFailed(f"{engine_id} did not start: {type(error).__name__}: {error}") from None
            raise

    async def _drain(self, kind: EngineKind, wanted: EngineId | None) -> None:
        """Drain one engine of the kind. `wanted`: this engine, which may have been retired already."""
        async with self.gateway.moving:
            may = self.gateway.stable() if wanted is None else {wanted}
            engine_id = next((e for e in self.gateway.engines_of(kind) if e in may), None)
            if engine_id is None:
                raise RunFailed(f"no {kind.role} of tp {kind.tp} on {kind.pool} serves: none can be drained")
            self.gateway.retire(engine_id)
        began, late = loop_time(), False
        try:
            # If the engine dies from now on, it is not restarted, and its turns are routed again.
            await self.supervisor.release(engine_id)
            await self.gateway.drain(engine_id, seconds=self.drain_s)
        except LeaseExpired:
            late = True
        finally:
            async with self.gateway.moving:
                self.gateway.leave(engine_id, cause="drained")
            await self.site.clear(engine_id)
        now = loop_time()
        fields: dict[str, str | int | float | bool | None] = {"pool": kind.pool, "role": str(kind.role), "tp": kind.tp}
        fields |= {"seconds": round(now - began, 3), "cut_short": late}
        self.recorder.event(RunEvent(now, "engine_drained", engine_id, fields))
