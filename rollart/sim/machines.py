"""The machines of modelled engines and environment hosts, which join and leave as a cluster's nodes do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rollart.model import EngineId
from rollart.runtime.nodes import NodeTracker

__all__ = ["HostReservation", "SimulatedMachine", "MachineInventory"]


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
        """True if it has a machine: its current one, or a new one with free devices."""
        return self.machines.place_host(self)

    async def found(self) -> None:
        """Wait until it has a machine."""
        changed = asyncio.Event()
        self.on_change = lambda _: changed.set()
        while not self.take():
            changed.clear()
            await changed.wait()

    def leave(self) -> None:
        self.machines.release_host(self)


class MachineInventory:
    """The machines of a run, called by the site that places engines, by environment hosts and by a fault plan.
    `on_engine_lost` is called with each engine that is lost with its machine; `nodes`, if set, is notified of machines
    that join and leave. Invariant: engines and hosts on a machine hold no more devices than it has."""

    def __init__(self, machines: Mapping[str, SimulatedMachine]) -> None:
        self.machines = machines
        self.on_engine_lost: Callable[[EngineId], None] = lambda _: None
        self.nodes: NodeTracker | None = None
        self.tell: Callable[[str, str], None] = lambda *_: None
        self._engine_slots: dict[EngineId, tuple[str, int]] = {}
        self._reservations: dict[HostReservation, None] = {}
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
        if engine in self._engine_slots and self.machines[self._engine_slots[engine][0]].up:
            return True
        self._engine_slots.pop(engine, None)
        fitting = self._fitting(pool, tp)
        if not fitting:
            return False
        self._engine_slots[engine] = (min(fitting, key=lambda name: fitting[name]), tp)
        return True

    def place_host(self, reservation: HostReservation) -> bool:
        """Find a machine for a reservation: its current one, else its first choice, else the fullest machine with
        enough free devices. A reservation without devices goes to the machine with the fewest such. False if there is
        none."""
        self._reservations[reservation] = None
        if reservation.machine:
            return True
        fitting = self._fitting(reservation.pool, reservation.devices)
        if not reservation.devices:
            beside = [other.machine for other in self._reservations if not other.devices]
            fitting = {name: beside.count(name) for name in fitting}
        if fitting:
            reservation.machine = min(fitting, key=lambda name: (name != reservation.first, fitting[name]))
        return bool(reservation.machine)

    def release_host(self, reservation: HostReservation) -> None:
        """It is wanted no more."""
        if reservation in self._reservations:
            del self._reservations[reservation]
            reservation.machine = ""
            self._notify_waiting_hosts()

    def holds(self, engine: EngineId) -> bool:
        return engine in self._engine_slots and self.machines[self._engine_slots[engine][0]].up

    def leave(self, engine: EngineId) -> None:
        self._engine_slots.pop(engine, None)
        self._notify_waiting_hosts()

    def warn(self, name: str) -> None:
        """It is to go."""
        self.machines[name].leaving = True
        self.tell("node_leaving", name)
        if self.nodes is not None:
            self.nodes.leaving(name)

    def go(self, name: str) -> None:
        if not self.machines[name].up:
            return
        self.machines[name].up = False
        for engine in [e for e, (on, _) in self._engine_slots.items() if on == name]:
            self.on_engine_lost(engine)
        lost = [reservation for reservation in self._reservations if reservation.machine == name]
        for reservation in lost:
            reservation.machine = ""
        for reservation in lost:
            reservation.on_change(False)
        self.tell("node_lost", name)
        if self.nodes is not None:
            self.nodes.lost(name)

    def come(self, name: str) -> None:
        machine = self.machines[name]
        if not machine.up:
            machine.up, machine.leaving = True, False
            self.tell("node_joined", name)
            if self.nodes is not None:
                self.nodes.joined(name, {machine.pool: machine.devices})
            self._notify_waiting_hosts()

    def _notify_waiting_hosts(self) -> None:
        """Notify hosts without a machine that devices may be free."""
        for reservation in [reservation for reservation in self._reservations if not reservation.machine]:
            reservation.on_change(True)

    def _fitting(self, pool: str, devices: int) -> dict[str, int]:
        """The free devices of each machine that has at least `devices`."""
        free_devices = {
            name: self._free_devices(name)
            for name, m in self.machines.items()
            if m.up and not m.leaving and m.pool == pool
        }
        return {name: free for name, free in free_devices.items() if free >= devices}

    def _free_devices(self, name: str) -> int:
        machine = self.machines[name]
        engines = sum(tp for on, tp in self._engine_slots.values() if on == name)
        return (
            machine.devices - machine.taken - engines - sum(r.devices for r in self._reservations if r.machine == name)
        )
