"""Engines on the cluster's devices: device assignment, billing, and processes."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from placement.types import Assignment, Role
from rollart.adapters.engines.vllm_host import VllmHost
from rollart.compose.actors import (
    attached_urls,
    engine_actor,
    engine_tolerance,
    idle_devices_clock,
    part_clock,
    required_vllm_options,
)
from rollart.compose.broadcasts import WeightBroadcaster
from rollart.compose.clusters import place_actor
from rollart.compose.devices import free_devices
from rollart.compose.parts import AttachedEngine, EngineProgram, engine_client
from rollart.compose.routing import SERVING_ROLES, engine_placement
from rollart.compose.starts import StartWatcher, engine_start_limits
from rollart.compose.stored import SharedWeightStore
from rollart.errors import RunFailed
from rollart.fleet import EngineKind
from rollart.ledger.clock import EngineShares, ResourceClock
from rollart.ledger.store import Ledger
from rollart.model import EngineId, WeightsRef
from rollart.ports import Handle, Runtime
from rollart.runtime.fleet import ReservedEngine
from rollart.spec.fleet import pools_of
from rollart.spec.resolve import Resolved

__all__ = ["ClusterEngineSite"]


@dataclass(frozen=True, slots=True)
class _PlacedEngine:
    part: EngineProgram | AttachedEngine
    program: Handle | None
    clock: ResourceClock
    host: VllmHost | None = None


class ClusterEngineSite:
    """Implements `EngineSite`. Owns the engines, their clocks, and one clock per pool for paid devices that are idle.

    Called by the fleet, one change at a time. Invariant: no two parts hold the same device, and every device of a pool
    that is not rented is billed at any time.
    """

    def __init__(
        self,
        resolved: Resolved,
        directory: Path,
        ledger: Ledger,
        runtime: Runtime,
        *,
        names: Iterable[str] = (),
        stored: SharedWeightStore | None = None,
        broadcasts: WeightBroadcaster | None = None,
        began: float | None = None,
    ) -> None:
        """`names`: names of parts in earlier lives of the run, not reused for new engines. `stored`: the weight store
        that engines pull from; None: engines read the run's directory. `broadcasts`: sends new versions to engines
        earlier. `began`: start of billing for pools that are not rented; now by default."""
        self._starting = StartWatcher(engine_start_limits(resolved), ledger)
        self._stored, self._broadcasts = stored, broadcasts
        self._resolved = resolved
        self._directory = directory
        self._ledger = ledger
        self._runtime = runtime
        self._pools = {pool.name: pool for pool in pools_of(resolved.cluster, resolved.prices)}
        self._sizes = {name: pool.count for name, pool in self._pools.items()}
        """Present devices by pool."""
        self._resized = False
        self._assignments = {a.name: a for a in resolved.plan.assignments}
        self._engines: dict[EngineId, _PlacedEngine] = {}
        self._idle_clocks: dict[str, ResourceClock] = {}
        self._next: Counter[Role] = Counter()
        for name in (*names, *self._assignments):
            role, _, number = name.rpartition("-")
            if role in SERVING_ROLES and number.isdecimal():
                self._next[Role(role)] = max(self._next[Role(role)], int(number) + 1)
        now = asyncio.get_running_loop().time()
        owned = sum(pool.count * pool.usd_per_device_hour for pool in self._pools.values() if not pool.rented)
        self._usd, self._usd_at = 0.0 if began is None else (now - began) / 3600.0 * owned, now
        self.shares: dict[EngineId, EngineShares] = {}

    async def open(self) -> None:
        """Create the plan's engines by role, without starting them."""
        for role in SERVING_ROLES:
            for assignment in self._resolved.plan.of(role):
                await self._make_engine(assignment)
        for pool in self._pools:
            self._rebill_idle(pool)

    @property
    def parts(self) -> list[EngineProgram | AttachedEngine]:
        return [engine.part for engine in self._engines.values()]

    @property
    def clocks(self) -> list[ResourceClock]:
        """Open clocks, of engines and of idle devices."""
        return [*(engine.clock for engine in self._engines.values()), *self._idle_clocks.values()]

    def free(self) -> Mapping[str, int]:
        return {name: size - len(self._taken(name)) for name, size in self._sizes.items()}

    def where(self) -> Mapping[EngineId, str]:
        """The node of each engine; '' for an engine without a node."""
        return {e: "" if engine.program is None else engine.program.node for e, engine in self._engines.items()}

    def resize(self, devices: Mapping[str, int]) -> None:
        self._accumulate_cost()
        self._resized = True
        self._sizes = {name: min(pool.count, devices.get(name, 0)) for name, pool in self._pools.items()}
        for pool in self._pools:
            self._rebill_idle(pool)

    async def place(self, kind: EngineKind) -> ReservedEngine:
        taken = self._taken(kind.pool)
        pool, free = self._pools[kind.pool], self.free()[kind.pool]
        if self._resized:  # the pool is partial: the runtime knows which nodes have free devices
            pool = replace(pool, device=replace(pool.device, devices_per_host=None))
        devices = free_devices(pool, taken, kind.tp) if kind.tp <= free else None
        if devices is None:
            raise RunFailed(f"pool '{kind.pool}' has {free} free devices, and no {kind.tp} of them in one host")
        role = Role(kind.role)
        assignment = Assignment(role, self._next[role], kind.pool, devices)
        part = await self._make_engine(assignment)
        self._next[role] += 1
        self._rebill_idle(kind.pool)
        return ReservedEngine(part, engine_placement(self._resolved, assignment))

    async def clear(self, engine_id: EngineId) -> None:
        engine = self._engines.pop(engine_id, None)
        if engine is None:
            return
        if self._stored is not None:
            self._stored.leave(engine_id)
        try:
            await engine.part.close()
            if engine.host is not None:
                await engine.host.close()
            if engine.program is not None:
                await engine.program.kill()
                await self._runtime.release(engine_id)
        finally:
            engine.clock.close()
            self._accumulate_cost()
            pool = self._assignments.pop(engine_id).pool
            self._rebill_idle(pool)

    async def close(self) -> None:
        """End of the run: release the engines, whose processes the runtime stops, and end all billing."""
        for engine in self._engines.values():
            await engine.part.close()
            if engine.host is not None:
                await engine.host.close()
        for clock in self.clocks:
            clock.close()

    def spent_usd(self) -> float:
        """Dollars for the cluster's devices since the run's process began, busy or idle."""
        now = asyncio.get_running_loop().time()
        return self._usd + (now - self._usd_at) / 3600.0 * self._usd_per_hour()

    async def _make_engine(self, assignment: Assignment) -> EngineProgram | AttachedEngine:
        name, url = EngineId(assignment.name), attached_urls(self._resolved).get(assignment.name)
        program: Handle | None = None
        host: VllmHost | None = None
        part: EngineProgram | AttachedEngine
        if url is not None:
            if self._stored is not None:
                host = VllmHost(name, url, self._stored.location)
            part = AttachedEngine(
                name,
                url,
                needed=required_vllm_options(self._resolved, assignment),
                tolerance=engine_tolerance(self._resolved),
                local=None if host is None else self._register_puller(host),
                broadcasts=self._broadcasts,
            )
        else:
            actor = engine_actor(self._resolved, self._directory, assignment)
            program = await place_actor(self._resolved, self._runtime, actor)
            local = None if self._stored is None else self._register_puller(program)
            client = engine_client(self._resolved.cluster.engines, engine_tolerance(self._resolved))
            part = EngineProgram(
                name, program, client=client, local=local, broadcasts=self._broadcasts, starting=self._starting
            )
        self._accumulate_cost()
        self._assignments[assignment.name] = assignment
        clock = part_clock(self._resolved, self._ledger, assignment)
        self._engines[part.id] = _PlacedEngine(part, program, clock, host)
        self.shares[part.id] = EngineShares(clock, clock=asyncio.get_running_loop().time)
        return part

    def _register_puller(self, program: Handle | VllmHost) -> Callable[[WeightsRef], Awaitable[str]]:
        """Register the program that pulls new versions ahead of the engine; returns the lookup of a version's local
        path."""
        assert self._stored is not None, "there is a store"
        self._stored.join(program)
        return functools.partial(self._stored.local, program)

    def _taken(self, pool: str) -> set[int]:
        return {device for a in self._assignments.values() if a.pool == pool for device in a.devices}

    def _accumulate_cost(self) -> None:
        """Accumulate the cost at the current rate, before assignments change."""
        self._usd, self._usd_at = self.spent_usd(), asyncio.get_running_loop().time()

    def _usd_per_hour(self) -> float:
        return sum(
            (taken if pool.rented else max(taken, self._sizes[name])) * pool.usd_per_device_hour
            for name, pool in self._pools.items()
            if (taken := len(self._taken(name))) is not None
        )

    def _rebill_idle(self, pool: str) -> None:
        """Restart the clock of the pool's idle devices after their number changed."""
        old = self._idle_clocks.pop(pool, None)
        if old is not None:
            old.close()
        unused = self.free()[pool]
        if unused > 0 and not self._pools[pool].rented:
            self._idle_clocks[pool] = idle_devices_clock(self._resolved, self._ledger, pool, unused)
