"""Simulated devices on which the product's own fleet and supervision start and stop engines in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from rollart.errors import PartDied, RunFailed
from rollart.fleet import EngineKind, EnginePlacement
from rollart.ledger.clock import EngineShares, ResourceClock
from rollart.model import EngineId, WeightsRef
from rollart.ports import Engine, Recorder
from rollart.runtime.fleet import ReservedEngine
from rollart.sim.faults import FailableEngine

__all__ = ["SimulatedPart", "SimulatedSite"]


class SimulatedPart:
    """An engine's process. A start takes `start_s` and fails while the site is broken; `die` ends the process."""

    def __init__(self, engine: FailableEngine, site: SimulatedSite) -> None:
        self._engine = engine
        self._site = site
        self._ended = asyncio.Event()
        self.runs = False

    @property
    def id(self) -> EngineId:
        return self._engine.id

    async def start(self, weights: WeightsRef) -> Engine:
        await asyncio.sleep(self._site.start_s)
        if self._site.broken:
            raise PartDied(self.id, "no such device")
        self._engine.restart(weights.version)
        self._ended = asyncio.Event()
        self.runs = True
        return self._engine

    async def wait(self) -> str:
        await self._ended.wait()
        return "its process was killed by SIGKILL"

    def die(self) -> None:
        """Calls to the engine break, as those to a process that is gone."""
        self._engine.fail, self.runs = True, False
        self._ended.set()


class SimulatedSite:
    """Implements `EngineSite` over `devices` by pool. `make` creates an engine with a name; while `broken`, no process
    starts. Invariant: free devices and devices held by engines add up to `devices`.
    """

    def __init__(
        self,
        devices: Mapping[str, int],
        make: Callable[[str], FailableEngine],
        recorder: Recorder,
        *,
        start_s: float = 5.0,
    ) -> None:
        self._devices = dict(devices)
        self._make = make
        self._recorder = recorder
        self.start_s = start_s
        self.broken = False
        self.parts: dict[EngineId, SimulatedPart] = {}
        self.shares: dict[EngineId, EngineShares] = {}
        self._held: dict[EngineId, tuple[EngineKind, ResourceClock]] = {}
        self._made = 0

    def free(self) -> Mapping[str, int]:
        free = dict(self._devices)
        for kind, _ in self._held.values():
            free[kind.pool] -= kind.tp
        return free

    def resize(self, devices: Mapping[str, int]) -> None:
        self._devices = {pool: devices.get(pool, 0) for pool in self._devices}

    async def place(self, kind: EngineKind) -> ReservedEngine:
        free = self.free().get(kind.pool, 0)
        if free < kind.tp:
            raise RunFailed(f"pool {kind.pool} has {free} free devices (rule: {kind.tp} for a start)")
        now = asyncio.get_running_loop().time
        part = SimulatedPart(self._make(f"engine-{self._made}"), self)
        self._made += 1
        clock = ResourceClock(
            role="engine", resource=part.id, recorder=self._recorder, clock=now, units=kind.tp, usd_per_unit_hour=1.0
        )
        self._held[part.id] = kind, clock
        self.parts[part.id], self.shares[part.id] = part, EngineShares(clock, clock=now)
        return ReservedEngine(part, EnginePlacement(kind.pool, role=kind.role, tp=kind.tp))

    async def clear(self, engine_id: EngineId) -> None:
        if engine_id not in self._held:
            return
        self.parts.pop(engine_id).die()
        await asyncio.sleep(0.1)
        _, clock = self._held.pop(engine_id)
        clock.close()

    def close(self) -> None:
        """The run is over: nothing is billed any more."""
        for _, clock in self._held.values():
            clock.close()
