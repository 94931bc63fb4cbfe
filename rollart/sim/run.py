"""A whole run over modelled parts: the product's control plane and ledger, with parts that take virtual time.

No decision is made here: scheduling, routing, rewards and publishing are those of the control plane, so that the
shipped code is simulated. `tools.simulate` builds the modelled parts from a plan.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollart.control.control_plane import ControlPlane, ControlSettings, Hooks
from rollart.control.domain import Domain
from rollart.control.training import StepDone
from rollart.fleet import EnginePlacement
from rollart.leases import Expiry, Leases
from rollart.ledger.intervals import EngineShares, ResourceClock
from rollart.ledger.store import Ledger
from rollart.model import EngineId, WeightsRef
from rollart.ports import Clock, Planner, Rewarder
from rollart.sim.environments import ModelledHosts, run_autoscaled_hosts
from rollart.sim.site import BilledDevices, ModelledPart, ModelledSite, PlacedEngine
from rollart.sim.trainers import ModelledTrainer
from rollart.sim.workload import MassTokenizer, mass_of
from rollart.supervise.autoscaling import HostAutoscaler
from rollart.supervise.engines import EngineSupervisor
from rollart.supervise.environment_hosts import EnvironmentHostSupervisor
from rollart.supervise.fleet import EngineFleet
from rollart.supervise.nodes import NodeTracker

HEALTH_POLL_S = 3.0
"""Seconds between health checks of a suspected engine; a restart of a real engine takes about as long."""

PROGRESS_ROWS = 500
"""Ledger rows between two progress callbacks."""

START_LEASE_S = 3600.0
"""Lease of an engine's start: longer than any modelled start."""


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One training step: loop seconds at which its batch was complete, its training ended and its version was served;
    the wait for the batch; the trainer's seconds (of a streamed step some were before its batch was complete), trained
    tokens and trajectories; and the number of samples by lag (versions between their first token and the version that
    they were trained from)."""

    step: int
    began: float
    trained: float
    ended: float
    waited_s: float
    train_s: float
    tokens: int
    trajectories: int
    lags: Counter[int]


class TracedLedger(Ledger):
    """A ledger on virtual time that also hashes all records in order: two runs with the same trace behaved
    identically."""

    def __init__(
        self,
        directory: Path,
        *,
        clock: Clock,
        config: Mapping[str, Any],
        on_time: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`on_time` is called with the loop's seconds every `PROGRESS_ROWS` rows. It is not a timer, since a timer
        would hide a deadlocked run."""
        super().__init__(directory, clock=clock, config=config, inline=True, measure=mass_of)
        self._hash = hashlib.blake2b(digest_size=12)
        write, rows = self._record, 0

        def record(row: Any) -> None:
            nonlocal rows
            self._hash.update(repr(row).encode())
            write(row)
            rows += 1
            if not rows % PROGRESS_ROWS:
                on_time(clock())

        self._record = record

    def worker(self, row: object) -> None:
        """Of functions only the calls are recorded."""

    saving = worker

    @property
    def trace(self) -> str:
        return self._hash.hexdigest()


class MemoryWeights:
    """A weight store that holds nothing but names."""

    def path(self, version: int) -> str:
        return f"v{version:06d}"

    def complete(self, version: int) -> bool:
        return True

    def versions(self) -> list[int]:
        return []

    def prune(self, keep: Sequence[int], checkpoints: Sequence[int] = ()) -> None:
        return None


@dataclass
class ModelledRun:
    """A run over modelled parts. Run it once, on a virtual loop; `steps` and the ledger hold its results."""

    domains: Sequence[Domain]
    engines: Sequence[PlacedEngine]
    trainer: ModelledTrainer
    trained_by: BilledDevices
    rewarder: Rewarder
    settings: ControlSettings
    ledger: Ledger
    unused: Sequence[BilledDevices] = ()
    site: ModelledSite | None = None
    """The site that starts and stops engines under supervision and bills unused devices. None: the plan's engines
    stay."""
    planner: Planner | None = None
    nodes: NodeTracker | None = None
    """With a site and a planner: nodes that join and leave, which the plan follows."""
    on_step: Callable[[StepTrace], None] = lambda _: None
    background: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()
    """Coroutines beside the run, such as fault plans; cancelled at its end."""
    hosts: ModelledHosts | None = None
    """Environment hosts; None: environments run in the controller."""
    autoscalers: Callable[[EnvironmentHostSupervisor], Sequence[HostAutoscaler]] | None = None
    """The autoscalers of hosts, if nodes join and leave."""
    restart_s: float = START_LEASE_S
    """Longest wait for the trainer's devices to come back, after which the restart fails."""
    lent_speed: Callable[[EnginePlacement], float] = lambda _: 0.0
    """Training speed of an engine's devices, the trainer's own being 1."""
    steps: list[StepTrace] = field(default_factory=list, init=False)
    ended: float = field(default=0.0, init=False)
    """Loop seconds at the end of the run: devices are paid until then."""
    control: ControlPlane = field(init=False)
    supervisor: EngineSupervisor | None = field(default=None, init=False)
    _leases: Leases = field(init=False)
    _clocks: dict[EngineId, ResourceClock] = field(default_factory=dict, init=False)
    _shares: dict[EngineId, EngineShares] = field(default_factory=dict, init=False)
    _health_checks: dict[EngineId, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _tasks: asyncio.TaskGroup | None = field(default=None, init=False)
    _trainer_clock: ResourceClock = field(init=False)

    async def run(self) -> None:
        now = asyncio.get_running_loop().time
        clocks = [self.trained_by.clock(self.ledger), *(b.clock(self.ledger, cause="not_in_plan") for b in self.unused)]
        self._leases = Leases(self.ledger)
        self._trainer_clock = clocks[0]
        self.control = ControlPlane(
            self.domains,
            tokenizer=MassTokenizer(),
            rewarder=self.rewarder,
            trainer=self.trainer,
            journal=self.ledger,
            weights=MemoryWeights(),
            recorder=self.ledger,
            leases=self._leases,
            trainer_clock=clocks[0],
            planner=self.planner,
            version=0,
            settings=self.settings,
            hooks=Hooks(
                self._recover,
                self._suspect,
                step=self._stepped,
                borrow=self._borrow,
            ),
        )
        parts = await self._populate(clocks)
        try:
            async with asyncio.TaskGroup() as self._tasks:
                around = [self._tasks.create_task(one(), name="background of the run") for one in self.background]
                if self.hosts is not None:
                    fleet = self.hosts.open(self._leases, self.ledger)
                    running = fleet.run() if self.autoscalers is None else run_autoscaled_hosts(fleet, self.autoscalers)
                    around.append(self._tasks.create_task(running, name="environment hosts"))
                await self.control.run(
                    step=0, steps=self.settings.schedule.steps, supervisor=self.supervisor, parts=parts
                )
                for task in (*self._health_checks.values(), *around):
                    task.cancel()
        finally:
            self.ended = now()
            if self.site is not None:
                self.site.close()
            for clock in clocks:
                clock.close()

    async def _populate(self, clocks: list[ResourceClock]) -> list[ModelledPart]:
        """Create the plan's engines: without a site these are all, and on a site the product's fleet may start
        others."""
        gateway, now = self.control.gateway, asyncio.get_running_loop().time
        if self.site is None:
            for place in self.engines:
                clock = self._clocks[place.engine.id] = place.billed.clock(self.ledger)
                clocks.append(clock)
                shares = self._shares[place.engine.id] = EngineShares(clock, clock=now)
                gateway.join(place.engine, version=0, shares=shares, seat=place.seat)
            return []

        def gone(engine_id: EngineId, cause: str) -> None:
            fleet.gone(engine_id)
            self.control.gone(engine_id, cause)

        self.supervisor = EngineSupervisor(
            gateway,
            self._leases,
            self.ledger,
            shares=self.site.shares,
            weights=lambda: WeightsRef(gateway.version, ""),
            start_s=START_LEASE_S,
            on_gone=gone,
            patience_s=0.0 if self.nodes is None else self.nodes.patience_s,
        )
        fleet = EngineFleet(gateway, self.supervisor, self.site, self.ledger, drain_s=self.settings.gateway.generate_s)
        self.control.reshard_by(fleet)
        if self.nodes is not None:
            self.control.move_by(fleet)
            self.control.follow(self.nodes)
        parts = self.site.open(self.engines)
        for part in parts:
            await self.supervisor.bring_up(part, part.seat)
        return parts

    def _borrow(self, engines: Sequence[EngineId]) -> None:
        """Lend these engines' devices to the trainer, and bill their time to it."""
        seats = {p.engine.id: p.seat for p in self.engines}
        self.trainer.borrow(sum(self.lent_speed(seats[e]) for e in engines))
        own = self._trainer_clock
        for clock in own.beside:
            clock.assign("engine")
        own.beside = tuple(self._clocks[e] for e in engines)
        for clock in own.beside:
            clock.assign(self.trained_by.role)
            clock.enter(own.state)

    async def _recover(self) -> None:
        """Restart the trainer: it waits for lost devices, at most for `restart_s`."""
        async with self._leases.hold("trainer", "its start", self.restart_s, Expiry.FAIL_RUN):
            await self.trainer.restore(WeightsRef(self.control.gateway.version, ""))

    def _suspect(self, engine_id: EngineId) -> None:
        if self.supervisor is not None:
            self.supervisor.suspect(engine_id)
            return
        task = self._health_checks.get(engine_id)
        if self._tasks is not None and (task is None or task.done()):
            self._health_checks[engine_id] = self._tasks.create_task(
                self._recover_engine(engine_id), name=f"check {engine_id}"
            )

    async def _recover_engine(self, engine_id: EngineId) -> None:
        """Recover a suspected engine, as supervision does: a healthy engine is trusted again, and a restarted one joins
        with the current weights."""
        engine = next(p.engine for p in self.engines if p.engine.id == engine_id)
        gateway = self.control.gateway
        await asyncio.sleep(HEALTH_POLL_S)
        while not await engine.healthy():
            await asyncio.sleep(HEALTH_POLL_S)
        if not gateway.trust(engine_id):
            await gateway.bring_in(
                engine,
                loaded=engine.version,
                weights=lambda: WeightsRef(gateway.version, ""),
                shares=self._shares[engine_id],
            )

    def _stepped(self, done: StepDone) -> None:
        samples = [s for g in done.groups for s in g.samples]
        trace = StepTrace(
            done.step,
            done.t0,
            done.trained,
            done.t1,
            done.waited_s,
            done.report.seconds,
            sum(mass_of(s.token_ids) for s in samples),
            len(samples),
            Counter(done.version - 1 - s.v0 for s in samples),
        )
        self.steps.append(trace)
        self.on_step(trace)
