"""Simulated devices and machines, on which the product's own fleet and supervision start and stop engines.

A `ModelledSite` bills the devices of a run with elastic engines. A `MachineInventory` has the machines of engines and
environment hosts, which join and leave as a cluster's nodes do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rollart.errors import NoPlace, PartDied, RunFailed
from rollart.fleet import EngineKind, EnginePlacement
from rollart.ledger.intervals import EngineShares, ResourceClock
from rollart.model import EngineId, WeightsRef
from rollart.ports import Engine, Recorder
from rollart.sim.engine import ModelledEngine
from rollart.supervise.fleet import ReservedEngine
from rollart.supervise.nodes import NodeTracker


@dataclass(frozen=True, slots=True)
class BilledDevices:
    """Paid devices: the number of units, their price, and the role and name under which the ledger records them."""

    role: str
    name: str
    units: float
    usd_per_unit_hour: float

    def clock(self, ledger: Recorder, cause: str = "") -> ResourceClock:
        return ResourceClock(
            role=self.role,
            resource=self.name,
            recorder=ledger,
            clock=asyncio.get_running_loop().time,
            units=self.units,
            usd_per_unit_hour=self.usd_per_unit_hour,
            state="idle",
            cause=cause,
        )


@dataclass(frozen=True, slots=True)
class PlacedEngine:
    """An engine with its placement and its paid devices."""

    engine: ModelledEngine
    seat: EnginePlacement
    billed: BilledDevices


@dataclass(eq=False)
class ModelledSite:
    """Implements `EngineSite` over the devices of the plan's engines and unused devices, by pool. `make` creates an
    engine of a kind with a name and a placement; `gone` is called with the name of each cleared engine; `prices` are of
    pools whose unused devices are paid. Invariant: devices held by engines and devices billed as unused add up to
    `devices`. With `machines` engines are placed on these.
    """

    devices: Mapping[str, int]
    make: Callable[[EngineKind], PlacedEngine]
    ledger: Recorder
    start_s: float
    prices: Mapping[str, float]
    gone: Callable[[str], None]
    machines: MachineInventory | None
    others: Mapping[str, int]
    """Devices by pool that parts other than engines hold."""
    shares: dict[EngineId, EngineShares] = field(default_factory=dict, init=False)
    _parts: dict[EngineId, ModelledPart] = field(default_factory=dict, init=False)
    _unused: dict[str, ResourceClock] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.machines is not None:
            self.machines.on_engine_lost = lambda engine: self._parts[engine].die()

    def open(self, places: Sequence[PlacedEngine]) -> list[ModelledPart]:
        """The plan's engines."""
        parts = [self._hold(place, up=True) for place in places]
        for pool in self.devices:
            self._rebill(pool)
        return parts

    def free(self) -> Mapping[str, int]:
        free = dict(self.devices)
        for part in self._parts.values():
            free[part.seat.pool] -= part.seat.tp
        return free

    def resize(self, devices: Mapping[str, int]) -> None:
        self.devices = {p: max(0, devices.get(p, 0) - self.others[p]) for p in self.devices}
        for pool in self.devices:
            self._rebill(pool)

    async def place(self, kind: EngineKind) -> ReservedEngine:
        free = self.free().get(kind.pool, 0)
        if free < kind.tp:
            raise RunFailed(f"pool '{kind.pool}' has {free} free devices (rule: {kind.tp} for a start)")
        place = self.make(kind)
        if self.machines is not None and not self.machines.place_engine(place.engine.id, kind.pool, kind.tp):
            raise RunFailed(f"no machine of pool '{kind.pool}' has {kind.tp} free devices")
        part = self._hold(place, up=False)
        self._rebill(kind.pool)
        return ReservedEngine(part, place.seat)

    async def clear(self, engine_id: EngineId) -> None:
        part = self._parts.pop(engine_id, None)
        if part is None:
            return
        part.engine.fail = True
        if self.machines is not None:
            self.machines.leave(engine_id)
        self.gone(engine_id)
        part.clock.close()
        self._rebill(part.seat.pool)

    def close(self) -> None:
        """Stop billing at the end of the run."""
        for clock in (*(part.clock for part in self._parts.values()), *self._unused.values()):
            clock.close()

    def _hold(self, place: PlacedEngine, *, up: bool) -> ModelledPart:
        engine_id = place.engine.id
        clock = place.billed.clock(self.ledger)
        self.shares[engine_id] = EngineShares(clock, clock=asyncio.get_running_loop().time)
        if self.machines is not None:
            self.machines.place_engine(engine_id, place.seat.pool, place.seat.tp)
        part = ModelledPart(place.engine, place.seat, clock, self.start_s, up, self.machines)
        self._parts[engine_id] = part
        return part

    def _rebill(self, pool: str) -> None:
        old = self._unused.pop(pool, None)
        if old is not None:
            old.close()
        unused = self.free()[pool]
        if unused > 0 and pool in self.prices:
            billed = BilledDevices("unused", f"unused-{pool}", float(unused), self.prices[pool])
            self._unused[pool] = billed.clock(self.ledger, cause="not_in_plan")


@dataclass(slots=True)
class ModelledPart:
    """An engine's process. An engine of the initial plan is up when the run begins; every other start takes `start_s`
    and the transfer of the weights. With `machines` the process dies with its machine, and starts on a machine with
    free devices."""

    engine: ModelledEngine
    seat: EnginePlacement
    clock: ResourceClock
    _start_s: float
    _up: bool
    _machines: MachineInventory | None
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def id(self) -> EngineId:
        return self.engine.id

    async def start(self, weights: WeightsRef) -> Engine:
        if self._up and self.engine.version == weights.version:
            self._up = False
            return self.engine
        machines = self._machines
        if machines is not None and not machines.place_engine(self.id, self.seat.pool, self.seat.tp):
            raise NoPlace(self.id, f"no machine of pool '{self.seat.pool}' has room for it")
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


class MachineInventory:
    """The machines of a run, called by the site that places engines, by environment hosts and by a fault plan.
    `on_engine_lost` is called with each engine that is lost with its machine; `nodes` is notified of machines that join
    and leave. Invariant: engines and hosts on a machine hold no more devices than it has."""

    def __init__(self, machines: Mapping[str, SimulatedMachine]) -> None:
        self.machines = machines
        self.on_engine_lost: Callable[[EngineId], None] = lambda _: None
        self.nodes: NodeTracker
        """Set before any machine joins or leaves."""
        self.tell: Callable[[str, str], None] = lambda *_: None
        self._engine_slots: dict[EngineId, tuple[str, int]] = {}
        self.reservations: dict[HostReservation, None] = {}
        """The reservations of all wanted hosts, on a machine or not."""

    def there(self) -> dict[str, int]:
        """Devices by pool on machines that are up."""
        found: dict[str, int] = {}
        for machine in self.machines.values():
            found[machine.pool] = found.get(machine.pool, 0) + (machine.devices if machine.up else 0)
        return found

    def where(self) -> Mapping[EngineId, str]:
        return {engine: name for engine, (name, _) in self._engine_slots.items()}

    def place_engine(self, engine: EngineId, pool: str, tp: int) -> bool:
        """Place an engine on the fullest machine with enough free devices, unless it is placed already. False if none
        has enough."""
        if self.holds(engine):
            return True
        self._engine_slots.pop(engine, None)
        fitting = self.fitting(pool, tp)
        if fitting:
            self._engine_slots[engine] = (min(fitting, key=lambda name: fitting[name]), tp)
        return bool(fitting)

    def holds(self, engine: EngineId) -> bool:
        return engine in self._engine_slots and self.machines[self._engine_slots[engine][0]].up

    def leave(self, engine: EngineId) -> None:
        self._engine_slots.pop(engine, None)
        self.notify_waiting_hosts()

    def warn(self, name: str) -> None:
        """It is to go."""
        self.machines[name].leaving = True
        self.tell("node_leaving", name)
        self.nodes.leaving(name)

    def go(self, name: str) -> None:
        if not self.machines[name].up:
            return
        self.machines[name].up = False
        for engine in [e for e, (on, _) in self._engine_slots.items() if on == name]:
            self.on_engine_lost(engine)
        lost = [reservation for reservation in self.reservations if reservation.machine == name]
        for reservation in lost:
            reservation.machine = ""
        for reservation in lost:
            reservation.on_change(False)
        self.tell("node_lost", name)
        self.nodes.lost(name)

    def come(self, name: str) -> None:
        machine = self.machines[name]
        if not machine.up:
            machine.up, machine.leaving = True, False
            self.tell("node_joined", name)
            self.nodes.joined(name, {machine.pool: machine.devices})
            self.notify_waiting_hosts()

    def notify_waiting_hosts(self) -> None:
        """Notify hosts without a machine that devices may be free."""
        for reservation in [reservation for reservation in self.reservations if not reservation.machine]:
            reservation.on_change(True)

    def fitting(self, pool: str, devices: int) -> dict[str, int]:
        """The free devices of each machine that has at least `devices`."""
        free = {
            name: m.devices - m.taken for name, m in self.machines.items() if m.up and not m.leaving and m.pool == pool
        }
        for name, taken in (*self._engine_slots.values(), *((r.machine, r.devices) for r in self.reservations)):
            if name in free:
                free[name] -= taken
        return {name: left for name, left in free.items() if left >= devices}


@dataclass(slots=True)
class SimulatedMachine:
    """`devices` of a pool, of which `taken` belong to parts other than engines and environment hosts."""

    pool: str
    devices: int
    taken: int = 0
    up: bool = True
    leaving: bool = False
    """True if it is about to leave: it gets no new parts."""


@dataclass(slots=True, eq=False)
class HostReservation:
    """The reservation of an environment host on a machine, for as long as the host is wanted: `devices` of a pool (0:
    the host runs beside the parts that hold them). It is lost with its machine, and then sought on others."""

    machines: MachineInventory
    pool: str
    devices: int
    first: str = ""
    """The preferred machine."""
    machine: str = ""
    on_change: Callable[[bool], None] = lambda _: None
    """Called with False when its machine is lost, and with True when devices may be free for it."""

    def take(self) -> bool:
        """Find a machine: its current one, else its first choice, else the fullest machine with enough free devices.
        Without devices it goes to the machine with the fewest such reservations. False if there is none."""
        reservations = self.machines.reservations
        reservations[self] = None
        if not self.machine:
            fitting = self.machines.fitting(self.pool, self.devices)
            if not self.devices:
                beside = [other.machine for other in reservations if not other.devices]
                fitting = {name: beside.count(name) for name in fitting}
            self.machine = min(fitting, key=lambda name: (name != self.first, fitting[name]), default="")
        return bool(self.machine)

    async def found(self) -> None:
        """Wait until it has a machine."""
        changed = asyncio.Event()
        self.on_change = lambda _: changed.set()
        while not self.take():
            changed.clear()
            await changed.wait()

    def leave(self) -> None:
        """It is wanted no more."""
        if self in self.machines.reservations:
            del self.machines.reservations[self]
            self.machine = ""
            self.machines.notify_waiting_hosts()
