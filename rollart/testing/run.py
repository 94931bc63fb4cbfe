"""The product's own control plane on simulated parts, for tests of the invariants and measurements of the controller.
Works on the virtual loop and, with parts that take no time, on a real one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from rollart.control.admission import SchedulerSettings
from rollart.control.buffer import BatchDeadline, SampleColumn
from rollart.control.control_plane import ControlPlane, ControlSettings, Hooks
from rollart.control.domain import Domain
from rollart.control.training import StepDone, all_samples
from rollart.control.trajectory import UNTRACED, AttemptTrace, TrajectoryState, WaitLimits
from rollart.fleet import EngineKind, EnginePlacement
from rollart.launch.strategies import StrategySettings
from rollart.leases import Leases
from rollart.ledger.intervals import EngineShares, ResourceClock
from rollart.model import EngineId, WeightsRef
from rollart.policy.routing import RoutingPolicy
from rollart.policy.schedules import resolve
from rollart.ports import Fleet, Journal, Planner, Recorder, Recovered, Tokenizer
from rollart.serving.engine_registry import GatewayLimits
from rollart.serving.kv_admission import ConcurrencySettings
from rollart.settings.rollout import FilterSpec, RedundancySpec, TailBatchingSpec
from rollart.settings.run import EvaluationSpec, StopSpec
from rollart.sim.environments import ModelledHosts
from rollart.sim.run import MemoryWeights
from rollart.strategies.fairness import FairnessSettings
from rollart.strategies.lending import LendingSettings
from rollart.strategies.rolling_update import RollingUpdater, UpdatePolicy
from rollart.strategies.token_budget import BatchTruncation
from rollart.strategies.tp_change import ReshardSettings
from rollart.supervise.engines import EnginePart, EngineSupervisor
from rollart.supervise.fleet import EngineFleet
from rollart.supervise.rebalance import RebalanceSettings
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.parts import (
    SimulatedEngine,
    SimulatedEnvironment,
    SimulatedRewarder,
    SimulatedSite,
    SimulatedTrainer,
    WordTokenizer,
)


@dataclass
class SimulatedRun:
    """Build with `make_simulated_run`, run with `run`; afterwards everything that happened is in the parts.

    With a `site` the run starts the engines of `kinds` there, under supervision, and its rebalancer may drain and start
    others; `engines` is not used then.
    """

    domains: Sequence[Domain]
    alpha: int
    steps: int
    engines: list[SimulatedEngine]
    trainer: SimulatedTrainer
    rewarder: SimulatedRewarder
    journal: Journal
    recorder: Recorder
    schedule: str = "rollart"
    max_attempts: int = 3
    max_fault_rate: float = 1.0
    token_budget: int | None = None
    cut_tokens: int | None = None
    due: BatchDeadline | None = None
    columns: Sequence[SampleColumn] = ()
    overlap: bool = False
    pace_s: float = 1e9
    updates: UpdatePolicy | None = None
    redundancy: RedundancySpec = field(default_factory=RedundancySpec)
    tail: TailBatchingSpec | None = None
    filter: FilterSpec = field(default_factory=FilterSpec)
    fairness: FairnessSettings | None = None
    prefetch: int | Literal["auto"] = 0
    waits: WaitLimits = field(default_factory=WaitLimits)
    evaluation: EvaluationSpec = field(default_factory=EvaluationSpec)
    stop_when: Sequence[StopSpec] = ()
    limits: GatewayLimits = field(default_factory=GatewayLimits)
    router: RoutingPolicy = field(default_factory=RoutingPolicy)
    seats: Mapping[str, EnginePlacement] = field(default_factory=dict)
    planner: Planner | None = None
    fleet: Fleet | None = None
    site: SimulatedSite | None = None
    kinds: Sequence[EngineKind] = ()
    drain_s: float = 30.0
    rebalance: RebalanceSettings = field(default_factory=RebalanceSettings)
    reshard: ReshardSettings | None = None
    lending: LendingSettings | None = None
    colocation: bool = False
    concurrency: ConcurrencySettings | None = None
    experts: bool = False
    traced: float = 0.0
    hosts: ModelledHosts | None = None
    """Environment hosts; None: environments run in the controller."""
    borrow: Callable[[Sequence[EngineId]], None] | None = None
    clocks: dict[str, ResourceClock] = field(default_factory=dict)
    """Of `engines`, by name."""
    on_step: Callable[[StepDone], None] = lambda _: None
    trace: Callable[[TrajectoryState], AttemptTrace] = lambda _: UNTRACED
    tokenizer: Tokenizer = field(default_factory=WordTokenizer)
    published: list[int] = field(default_factory=list)
    shares: dict[str, EngineShares] = field(default_factory=dict)
    supervisor: EngineSupervisor | None = None

    async def run(self, recovered: Recovered | None = None) -> None:
        """Run all steps, from the start or from a journal's recovery."""
        loop = asyncio.get_running_loop()
        self.leases = Leases(self.recorder)
        version = recovered.version if recovered else 0
        clocks = []
        trainer_clock = ResourceClock(role="train", resource="trainer", recorder=self.recorder, clock=loop.time)
        clocks.append(trainer_clock)
        self.trainer_clock = trainer_clock
        self.control = ControlPlane(
            self.domains,
            tokenizer=self.tokenizer,
            rewarder=self.rewarder,
            trainer=self.trainer,
            journal=self.journal,
            weights=MemoryWeights(),
            recorder=self.recorder,
            leases=self.leases,
            trainer_clock=trainer_clock,
            version=version,
            settings=self.settings(),
            hooks=Hooks(
                self._recover,
                self._suspect,
                version=self.published.append,
                step=self.on_step,
                borrow=self.borrow,
                trace=self.trace,
            ),
            planner=self.planner,
        )
        if self.fleet is not None:
            self.control.move_by(self.fleet)
        parts: list[EnginePart] = []
        if self.site is not None:
            parts = await self._populate(self.site)
        for engine in () if self.site is not None else self.engines:
            clock = ResourceClock(role="engine", resource=engine.id, recorder=self.recorder, clock=loop.time)
            clocks.append(clock)
            self.clocks[engine.id] = clock
            self.shares[engine.id] = EngineShares(clock, clock=loop.time)
            self.control.gateway.join(engine, version=version, shares=self.shares[engine.id])
        try:
            running = self.control.run(
                step=recovered.step if recovered else 0,
                steps=self.steps,
                recovered=recovered,
                supervisor=self.supervisor,
                parts=parts,
            )
            await (running if self.hosts is None else self._on_hosts(self.hosts, running))
        finally:
            if self.site is not None:
                self.site.close()
            for clock in clocks:
                clock.close()

    async def _on_hosts(self, hosts: ModelledHosts, running: Coroutine[Any, Any, None]) -> None:
        async with asyncio.TaskGroup() as tasks:
            fleet = tasks.create_task(hosts.open(self.leases, self.recorder).run(), name="environment hosts")
            await running
            fleet.cancel()

    def settings(self) -> ControlSettings:
        schedule = SchedulerSettings(
            seed=0,
            steps=self.steps,
            rules=resolve(self.schedule, self.alpha),
            max_attempts=self.max_attempts,
            max_fault_rate=self.max_fault_rate,
        )
        return ControlSettings(
            schedule,
            token_budget=self.token_budget,
            samples=all_samples if self.cut_tokens is None else BatchTruncation(self.cut_tokens),
            due=self.due,
            columns=self.columns,
            overlap=self.overlap,
            pace_s=self.pace_s,
            updates=None if self.updates is None else partial(RollingUpdater, self.updates),
            waits=self.waits,
            evaluation=self.evaluation,
            stop_when=self.stop_when,
            gateway=self.limits,
            router=self.router,
            seats=self.seats,
            rebalance=self.rebalance,
            options=StrategySettings(
                redundancy=self.redundancy,
                tail=self.tail,
                filter=self.filter,
                fairness=self.fairness,
                prefetch=self.prefetch,
                lending=self.lending,
                reshard=self.reshard,
            ),
            colocation=self.colocation,
            concurrency=self.concurrency,
            experts=self.experts,
            traced=self.traced,
        )

    async def _populate(self, site: SimulatedSite) -> list[EnginePart]:
        """The first engines, supervised, and the fleet that changes them."""
        gateway = self.control.gateway
        self.supervisor = EngineSupervisor(
            gateway,
            self.leases,
            self.recorder,
            shares=site.shares,
            weights=lambda: WeightsRef(gateway.version, ""),
            start_s=site.start_s + 60.0,
            on_gone=self._gone,
        )
        self.fleet = EngineFleet(gateway, self.supervisor, site, self.recorder, drain_s=self.drain_s)
        self.control.move_by(self.fleet)
        self.control.reshard_by(self.fleet)
        parts: list[EnginePart] = []
        for kind in self.kinds:
            placed = await site.place(kind)
            await self.supervisor.bring_up(placed.part, placed.seat)
            parts.append(placed.part)
        return parts

    def _gone(self, engine_id: EngineId, cause: str) -> None:
        assert isinstance(self.fleet, EngineFleet)
        self.fleet.gone(engine_id)
        self.control.gone(engine_id, cause)

    async def _recover(self) -> None:
        await self.trainer.restore(WeightsRef(self.control.gateway.version, ""))

    def _suspect(self, engine_id: EngineId) -> None:
        if self.supervisor is not None:
            self.supervisor.suspect(engine_id)
            return
        loop = asyncio.get_running_loop()
        engine = next(e for e in self.engines if e.id == engine_id)

        def rejoin() -> None:
            engine.restart(self.control.gateway.version)
            self.control.gateway.join(engine, version=self.control.gateway.version, shares=self.shares[engine_id])

        loop.call_later(3.0, rejoin)


def make_simulated_run(
    *,
    quotas: Mapping[str, tuple[int, int]] = MappingProxyType({"a": (4, 2)}),
    alpha: int = 1,
    steps: int = 3,
    engines: int = 2,
    turns: int = 2,
    tokens: int = 2,
    seed: int = 0,
    engine_s: Callable[..., float] | None = None,
    load_s: Callable[..., float] | None = None,
    env_s: Callable[..., float] | None = None,
    reward_s: Callable[..., float] | None = None,
    train_s: Callable[..., float] | None = None,
    env_faults: float = 0.0,
    reward_faults: float = 0.0,
    reward_of: Callable[..., float] | None = None,
    fail_steps: frozenset[int] = frozenset(),
    journal: Journal | None = None,
    recorder: Recorder | None = None,
    version: int = 0,
    **more: object,
) -> SimulatedRun:
    """A run of `quotas` (domain -> samples per step, group size); durations are drawn by the given functions."""
    memory = MemoryRecorder()
    domains = [
        Domain(
            name=name,
            environment=lambda: SimulatedEnvironment(turns=turns, seed=seed, seconds=env_s, fault_rate=env_faults),
            quota=quota,
            group_size=size,
            max_turns=turns,
            max_tokens=tokens,
        )
        for name, (quota, size) in quotas.items()
    ]
    return SimulatedRun(
        domains,
        alpha,
        steps,
        [
            SimulatedEngine(f"e{i}", version=version, seed=seed, tokens=tokens, seconds=engine_s, load_s=load_s)
            for i in range(engines)
        ],
        SimulatedTrainer(seed, train_s, fail_steps),
        SimulatedRewarder(seed, reward_s, reward_faults, reward_of),
        journal or memory,
        recorder or memory,
        **more,  # type: ignore[arg-type]
    )
