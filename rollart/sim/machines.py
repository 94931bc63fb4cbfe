"""Hosts under modelled engines that come and go, as a cluster's nodes do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rollart.model import EngineId
from rollart.runtime.nodes import Nodes

__all__ = ["Machine", "Machines"]


@dataclass(slots=True)
class Machine:
    """`devices` of a pool, of which `taken` are other parts' than engines."""

    pool: str
    devices: int
    taken: int = 0
    up: bool = True


class Machines:
    """Called by the site, which seats engines, and by a fault plan. `died` is told which engine a machine took with it,
    and `nodes`, once there are some, what came and went. Invariant: engines on a machine hold no more than it has."""

    def __init__(self, machines: Mapping[str, Machine]) -> None:
        self.machines = machines
        self.died: Callable[[EngineId], None] = lambda _: None
        self.nodes: Nodes | None = None
        self.tell: Callable[[str, str], None] = lambda *_: None
        self._on: dict[EngineId, tuple[str, int]] = {}

    def there(self) -> dict[str, int]:
        """Devices by pool on machines that are up."""
        found: dict[str, int] = {}
        for machine in self.machines.values():
            found[machine.pool] = found.get(machine.pool, 0) + (machine.devices if machine.up else 0)
        return found

    def where(self) -> Mapping[EngineId, str]:
        return {engine: name for engine, (name, _) in self._on.items()}

    def seat(self, engine: EngineId, pool: str, tp: int) -> bool:
        """Whether there is room for it, on the fullest machine that has some, or where it sits already."""
        if engine in self._on and self.machines[self._on[engine][0]].up:
            return True
        self._on.pop(engine, None)
        room = {name: self._room(name) for name, m in self.machines.items() if m.up and m.pool == pool}
        fitting = [name for name, free in room.items() if free >= tp]
        if not fitting:
            return False
        self._on[engine] = (min(fitting, key=lambda name: room[name]), tp)
        return True

    def holds(self, engine: EngineId) -> bool:
        return engine in self._on and self.machines[self._on[engine][0]].up

    def leave(self, engine: EngineId) -> None:
        self._on.pop(engine, None)

    def warn(self, name: str) -> None:
        """It is to go."""
        self.tell("node_leaving", name)
        if self.nodes is not None:
            self.nodes.leaving(name)

    def go(self, name: str) -> None:
        if not self.machines[name].up:
            return
        self.machines[name].up = False
        for engine in [e for e, (on, _) in self._on.items() if on == name]:
            self.died(engine)
        self.tell("node_lost", name)
        if self.nodes is not None:
            self.nodes.lost(name)

    def come(self, name: str) -> None:
        machine = self.machines[name]
        if not machine.up:
            machine.up = True
            self.tell("node_joined", name)
            if self.nodes is not None:
                self.nodes.joined(name, {machine.pool: machine.devices})

    def _room(self, name: str) -> int:
        machine = self.machines[name]
        return machine.devices - machine.taken - sum(tp for on, tp in self._on.values() if on == name)
