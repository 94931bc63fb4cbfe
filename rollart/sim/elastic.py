"""Elastic modelled engines: devices on which the product's own fleet and supervision start and stop engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rollart.errors import NoPlace, PartDied, RunFailed
from rollart.fleet import EngineKind, EnginePlacement
from rollart.ledger.clock import EngineShares, ResourceClock
from rollart.model import EngineId, WeightsRef
from rollart.ports import Engine, Recorder
from rollart.runtime.fleet import ReservedEngine
from rollart.sim.engines import ModelledEngine
from rollart.sim.machines import MachineInventory

__all__ = ["BilledDevices", "ModelledPart", "ModelledSite", "PlacedEngine"]


@dataclass(frozen=True, slots=True)
class BilledDevices:
    """Paid devices: the number of units, their price, and the role and name under which the ledger records them."""

    role: str
    name: str
    units: float
    usd_per_unit_hour: float

    def clock(self, ledger: Recorder, state: str = "idle", cause: str = "") -> ResourceClock:
        now = asyncio.get_running_loop().time
        return ResourceClock(
            role=self.role,
            resource=self.name,
            recorder=ledger,
            clock=now,
            units=self.units,
            usd_per_unit_hour=self.usd_per_unit_hour,
            state=state,
            cause=cause,
        )


@dataclass(frozen=True, slots=True)
class PlacedEngine:
    """An engine with its placement and its paid devices."""

    engine: ModelledEngine
    seat: EnginePlacement
    billed: BilledDevices


class ModelledPart:
    """An engine's process. An engine of the initial plan is up when the run begins; every other start takes `start_s`
    and the transfer of the weights. With `machines` the process dies with its machine, and starts on a machine with
    free devices."""

    def __init__(
        self,
        engine: ModelledEngine,
        seat: EnginePlacement,
        *,
        start_s: float,
        up: bool,
        machines: MachineInventory | None = None,
    ) -> None:
        self.engine = engine
        self._seat = seat
        self._start_s = start_s
        self._up = up
        self._machines = machines
        self._ended = asyncio.Event()

    @property
    def id(self) -> EngineId:
        return self.engine.id

    async def start(self, weights: WeightsRef) -> Engine:
        if self._up and self.engine.version == weights.version:
            self._up = False
            return self.engine
        machines = self._machines
        if machines is not None and not machines.place_engine(self.id, self._seat.pool, self._seat.tp):
            raise NoPlace(self.id, f"no machine of pool '{self._seat.pool}' has room for it")
        await asyncio.sleep(self._start_s)
        if machines is not None and not machines.holds(self.id):
            raise PartDied(self.id, "its machine is gone")
        self._ended = asyncio.Event()
        self.engine.restart(weights.version)
        await self.engine.update_weights(weights)
        return self.engine

    async def wait(self) -> str:
        await self._ended.wait()
        return "its machine is gone"

    def die(self) -> None:
        """End the process, as when its machine dies."""
        self.engine.fail = True
        self._ended.set()


class ModelledSite:
    """Implements `EngineSite` over the devices of the plan's engines and unused devices, by pool. `make` creates an
    engine of a kind with a name and a placement; `gone` is called with the name of each cleared engine; `prices` are of
    pools whose unused devices are paid. Invariant: devices held by engines and devices billed as unused add up to
    `devices`. With `machines` engines are placed on these.
    """

    def __init__(
        self,
        devices: Mapping[str, int],
        make: Callable[[EngineKind], PlacedEngine],
        ledger: Recorder,
        *,
        start_s: float,
        prices: Mapping[str, float],
        gone: Callable[[str], None] = lambda _: None,
        others: Mapping[str, int] | None = None,
        machines: MachineInventory | None = None,
    ) -> None:
        """`others`: devices by pool that parts other than engines hold."""
        self._devices = dict(devices)
        self._others = others or {}
        self._machines = machines
        self._parts: dict[EngineId, ModelledPart] = {}
        if machines is not None:
            machines.on_engine_lost = lambda engine: self._parts[engine].die()
        self._make = make
        self._ledger = ledger
        self._start_s = start_s
        self._prices = prices
        self._gone = gone
        self.places: dict[EngineId, PlacedEngine] = {}
        self.shares: dict[EngineId, EngineShares] = {}
        self._clocks: dict[EngineId, ResourceClock] = {}
        self._unused: dict[str, ResourceClock] = {}

    def open(self, places: list[PlacedEngine]) -> list[ModelledPart]:
        """The plan's engines."""
        parts = [self._hold(place, up=True) for place in places]
        for pool in self._devices:
            self._rebill(pool)
        return parts

    def free(self) -> Mapping[str, int]:
        free = dict(self._devices)
        for place in self.places.values():
            free[place.seat.pool] -= place.seat.tp
        return free

    def resize(self, devices: Mapping[str, int]) -> None:
        self._devices = {p: max(0, devices.get(p, 0) - self._others.get(p, 0)) for p in self._devices}
        for pool in self._devices:
            self._rebill(pool)

    async def place(self, kind: EngineKind) -> ReservedEngine:
        free = self.free().get(kind.pool, 0)
        if free < kind.tp:
            raise RunFailed(f"pool '{kind.pool}' has {free} free devices (rule: {kind.tp} for a start)")
        place = self._make(kind)
        if self._machines is not None and not self._machines.place_engine(place.engine.id, kind.pool, kind.tp):
            raise RunFailed(f"no machine of pool '{kind.pool}' has {kind.tp} free devices")
        part = self._hold(place, up=False)
        self._rebill(kind.pool)
        return ReservedEngine(part, place.seat)

    async def clear(self, engine_id: EngineId) -> None:
        place = self.places.pop(engine_id, None)
        if place is None:
            return
        place.engine.fail = True
        self._parts.pop(engine_id)
        if self._machines is not None:
            self._machines.leave(engine_id)
        self._gone(engine_id)
        self._clocks.pop(engine_id).close()
        self._rebill(place.seat.pool)

    def close(self) -> None:
        """Stop billing at the end of the run."""
        for clock in (*self._clocks.values(), *self._unused.values()):
            clock.close()

    def _hold(self, place: PlacedEngine, *, up: bool) -> ModelledPart:
        engine_id = place.engine.id
        clock = self._clocks[engine_id] = place.billed.clock(self._ledger)
        self.places[engine_id] = place
        self.shares[engine_id] = EngineShares(clock, clock=asyncio.get_running_loop().time)
        if self._machines is not None:
            self._machines.place_engine(engine_id, place.seat.pool, place.seat.tp)
        part = ModelledPart(place.engine, place.seat, start_s=self._start_s, up=up, machines=self._machines)
        self._parts[engine_id] = part
        return part

    def _rebill(self, pool: str) -> None:
        old = self._unused.pop(pool, None)
        if old is not None:
            old.close()
        unused = self.free()[pool]
        if unused > 0 and pool in self._prices:
            billed = BilledDevices("unused", f"unused-{pool}", float(unused), self._prices[pool])
            self._unused[pool] = billed.clock(self._ledger, cause="not_in_plan")
