"""The control plane of one run: makes every component and connects them over the given ports."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from rollart.control.admission import PromptAdmission, SchedulerSettings
from rollart.control.buffer import BatchDeadline, BatchShares, SampleBuffer, SampleColumn
from rollart.control.domain import Domain
from rollart.control.evaluation import Evaluation, EvaluationResult
from rollart.control.groups import GroupRun
from rollart.control.pacing import BatchPace, StartPace
from rollart.control.publish import CheckpointKeeper, Publisher
from rollart.control.rewarding import TrajectoryScorer
from rollart.control.scheduler import Scheduler
from rollart.control.strategy import RolloutStrategy
from rollart.control.tracing import TracedTrajectoryRunner
from rollart.control.training import ColumnFiller, StepDone, Training, all_samples
from rollart.control.trajectory import (
    UNTRACED,
    AttemptTrace,
    EnvironmentSource,
    FreeRunning,
    TrajectoryRunner,
    TrajectoryState,
    TurnBarrier,
    WaitLimits,
)
from rollart.fleet import EnginePlacement
from rollart.leases import Leases
from rollart.ledger.events import STEP_FAILED
from rollart.ledger.intervals import ResourceClock
from rollart.model import EngineId, Group, GroupId, PauseMode, TrainSample
from rollart.policy.checkpoints import CheckpointPolicy, references
from rollart.policy.early_stop import BatchStatistics, EarlyStopMonitor, StopCondition, mean_and_parts
from rollart.policy.routing import RoutingPolicy
from rollart.policy.schedules import InFlightHandling, TurnSynchrony
from rollart.policy.workload import WorkloadMeter
from rollart.ports import (
    Fleet,
    Journal,
    Planner,
    Recorder,
    Recovered,
    Rewarder,
    RunEvent,
    Tokenizer,
    Trainer,
    WeightStore,
)
from rollart.serving.engine_registry import GatewayLimits
from rollart.serving.gateway import Gateway
from rollart.serving.group_colocation import GroupColocation
from rollart.serving.kv_admission import ConcurrencySettings
from rollart.serving.weight_updates import AllAtOnceUpdates, UpdateContext, WeightUpdates
from rollart.settings.run import CheckpointsSpec, EvaluationSpec, StopSpec
from rollart.supervise.engines import EnginePart, EngineSupervisor
from rollart.supervise.nodes import NodeTracker
from rollart.supervise.rebalance import Rebalancer, RebalanceSettings

S = TypeVar("S", bound=RolloutStrategy)


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """The parts of a run that its options use."""

    domains: Sequence[Domain]
    schedule: SchedulerSettings
    waits: WaitLimits
    gateway: Gateway
    leases: Leases
    recorder: Recorder
    trainer: ResourceClock
    borrow: Callable[[Sequence[EngineId]], None] | None
    """Sets the engines whose devices the trainer borrows. None: it cannot borrow devices."""
    meter: Callable[[], WorkloadMeter]
    """The measured workload of training trajectories, which is collected if this is called."""
    round: Callable[[], str]
    """The kind of the current round of admission."""


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    """The options of one run; the defaults are those of a run without options."""

    strategies: Sequence[RolloutStrategy] = ()
    admission: Callable[..., PromptAdmission] = PromptAdmission
    shares: BatchShares | None = None
    """Shares of domains in place of quotas."""
    environments: EnvironmentSource | None = None
    """Environments that are reset before their trajectories start."""


class _Colocation(RolloutStrategy):
    """Reports groups and their members to the gateway's colocation."""

    def __init__(self, colocation: GroupColocation) -> None:
        self._colocation = colocation

    def started(self, run: GroupRun, members: Sequence[int]) -> None:
        if members:
            self._colocation.open(run.id, members)
        for member in members:  # the callback is also called for a member cancelled before it begins
            run.tasks[member].add_done_callback(partial(self._left, run.id, member))

    def _left(self, group: GroupId, member: int, _: asyncio.Task[None]) -> None:
        self._colocation.left(group, member)


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """The schedule of a run and its longest waits, in seconds. `token_budget` bounds the tokens of a batch."""

    schedule: SchedulerSettings
    token_budget: int | None = None
    samples: Callable[[Sequence[Group], int], list[TrainSample]] = all_samples
    """The trained samples of a batch, given its groups and its step."""
    rollout: bool = True
    """Roll out the domains' prompts. False: `samples` needs no groups, and domains are evaluated alone."""
    due: BatchDeadline | None = None
    columns: Sequence[SampleColumn] = ()
    """Columns that are filled once samples are complete, before training takes them."""
    reference: int | None = None
    """The latest version whose number is a multiple of it is kept, and the one before while a resume may go back to it,
    since the loss refers to it; 0: the first one."""
    waits: WaitLimits = field(default_factory=WaitLimits)
    gateway: GatewayLimits = field(default_factory=GatewayLimits)
    train_s: float = 600.0
    publish_s: float = 120.0
    pace_s: float = 1800.0
    """Longest wait of a batch for groups at their staleness bound, under a paced schedule, seconds."""
    overlap: bool = False
    """Publish a version during the next training step, if the schedule lets that step start before the version is
    current."""
    updates: Callable[[int, UpdateContext], WeightUpdates] | None = None
    """Weight updates that let the versions of engines differ by the given number, if the schedule does; None: all
    engines at once."""
    evaluation: EvaluationSpec = field(default_factory=EvaluationSpec)
    checkpoints: CheckpointsSpec = field(default_factory=CheckpointsSpec)
    stop_when: Sequence[StopSpec] = ()
    best: tuple[float, int] | None = None
    """Score and number of the best version of the run so far, if it is kept."""
    router: RoutingPolicy = field(default_factory=RoutingPolicy)
    seats: Mapping[str, EnginePlacement] = field(default_factory=dict)
    """Placement of engines by id; an engine that is not named has no particular placement and every role."""
    rebalance: RebalanceSettings = field(default_factory=RebalanceSettings)
    concurrency: ConcurrencySettings | None = None
    """Trajectories that an engine admits at a time. Ignored with lockstep turns: admitted trajectories would wait at
    the barrier for trajectories that wait for admission."""
    colocation: bool = False
    """A group's members stay on one engine, and are admitted and released as one."""
    options: Callable[[RolloutContext], RolloutOptions] = lambda _: RolloutOptions()
    """Makes the options of the run (`launch.strategies`)."""
    measure: Callable[[Sequence[int]], int] = len
    """Number of tokens that a sequence of ids stands for: its length, except in a simulated world."""
    experts: bool = False
    """Trajectories bring the experts that their engine chose."""
    traced: float = 0.0
    """Share of the prompts whose trajectories' turns are recorded."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """Callbacks of the control plane to its owner, called on the loop. Only `recover_trainer` may wait."""

    recover_trainer: Callable[[], Awaitable[None]]
    suspect: Callable[[EngineId], None]
    versions_in_use: Callable[[], Iterable[int]] = tuple
    borrow: Callable[[Sequence[EngineId]], None] | None = None
    """See `RolloutContext`."""
    version: Callable[[int], None] = lambda _: None
    step: Callable[[StepDone], None] = lambda _: None
    evaluation: Callable[[str, Mapping[str, EvaluationResult]], None] = lambda *_: None
    trace: Callable[[TrajectoryState], AttemptTrace] = lambda _: UNTRACED
    """Makes the trace of an attempt that begins."""


class ControlPlane:
    """Owns the gateway, the scheduler and the training loop. Engines join `gateway`; then `run` executes the run.

    Callers need not know the connections between the components: trajectories check their staleness against the
    gateway's version, and a publish frees slots and aborts stale trajectories before engines resume.
    """

    def __init__(
        self,
        domains: Sequence[Domain],
        *,
        tokenizer: Tokenizer,
        rewarder: Rewarder,
        trainer: Trainer,
        journal: Journal,
        weights: WeightStore,
        recorder: Recorder,
        leases: Leases,
        trainer_clock: ResourceClock,
        version: int,
        settings: ControlSettings,
        hooks: Hooks,
        planner: Planner | None = None,
    ) -> None:
        self._settings = settings
        self._hooks = hooks
        self._statistics = BatchStatistics()
        self._monitor = EarlyStopMonitor(
            [StopCondition(one.metric, one.above, one.below, one.for_steps) for one in settings.stop_when]
        )
        self._evaluated = -1
        self.stopped = ""
        """The condition that ended the run early; '' for none."""
        rules = settings.schedule.rules
        aborts, bound = rules.aborts_stale, rules.bound
        trained = domains if settings.rollout else ()
        colocation = GroupColocation() if settings.colocation else None
        self.gateway = _gateway(leases, recorder, version, settings, hooks, colocation)
        self._meter: WorkloadMeter | None = None
        options = settings.options(
            RolloutContext(
                trained,
                settings.schedule,
                settings.waits,
                self.gateway,
                leases,
                recorder,
                trainer_clock,
                hooks.borrow,
                meter=self._workload,
                round=lambda: self.scheduler.admission.round,
            )
        )
        self.strategies = [*options.strategies]
        if rules.paced:
            self.strategies.append(StartPace(rules.alpha, recorder))
        if colocation is not None:
            self.strategies.append(_Colocation(colocation))
        self.rebalancer = (
            None  # the routes do not change
            if planner is None
            else Rebalancer(self.gateway, planner, leases, recorder, self._workload(), settings=settings.rebalance)
        )
        runner: TrajectoryRunner = _runner_type(settings.traced, recorder)(
            self.gateway,
            tokenizer,
            leases,
            limits=settings.waits,
            stale=lambda v0: aborts and bound.stale(v0, self.gateway.version),  # at every turn (I2)
            barrier=TurnBarrier() if rules.turns is TurnSynchrony.LOCKSTEP else FreeRunning(),
            meter=self._meter,
            measure=settings.measure,
            prefetch=options.environments,
            experts=settings.experts,
            trace=hooks.trace,
        )
        buffer = _buffer(trained, leases, recorder, settings, options.shares)
        success_at = {domain.name: domain.success_at for domain in domains}
        scorer = TrajectoryScorer(rewarder, leases, reward_s=settings.waits.reward_s, success_at=success_at)
        self.scheduler = Scheduler(
            trained,
            runner,
            scorer,
            buffer,
            journal,
            recorder,
            settings=settings.schedule,
            strategies=self.strategies,
            admission=options.admission,
        )
        kept = settings.checkpoints
        self._checkpoints = CheckpointKeeper(
            weights,
            recorder,
            CheckpointPolicy(kept.keep, kept.every, settings.best),
            metric=kept.best_by,
            in_use=self._versions_in_use,
        )
        publisher = Publisher(
            trainer,
            self.gateway,
            journal,
            leases,
            publish_s=settings.publish_s,
            on_version=self._published,
            prune=self._checkpoints.published,
            drained=self.scheduler.drained,
        )
        self._training = Training(
            trainer,
            buffer,
            publisher,
            leases,
            clock=trainer_clock,
            train_s=settings.train_s,
            recover=hooks.recover_trainer,
            on_step=self._on_step if settings.stop_when else hooks.step,
            on_taken=self.scheduler.taken,
            on_refused=self.scheduler.refused,
            on_failed=functools.partial(_record_failed_step, recorder),
            samples=settings.samples,
            between=self._between if settings.evaluation.episodes and settings.evaluation.every else None,
            overlap=settings.overlap and not rules.training_blocks_rollout,
        )
        self._columns = ColumnFiller(
            settings.columns, trainer, buffer, leases, column_s=settings.train_s, training=self._training
        )
        faults = self.scheduler.faults
        self.evaluation = Evaluation(domains, runner, scorer, recorder, faults, seed=settings.schedule.seed)

    async def run(
        self,
        *,
        step: int,
        steps: int,
        recovered: Recovered | None = None,
        supervisor: EngineSupervisor | None = None,
        parts: Sequence[EnginePart] = (),
    ) -> None:
        """Run steps `step` .. `steps` - 1, starting from the gateway's version, once engines have joined the gateway.

        Scheduling and training run to their end, and the background tasks meanwhile. The first task that fails ends all
        of them, and its error propagates to the caller."""
        background: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {}
        if supervisor is not None:
            background["supervision"] = partial(supervisor.run, parts)
        background["updates"] = self.gateway.updates.run
        if self.rebalancer is not None:
            background["rebalance"] = self.rebalancer.run
        if self.gateway.admission is not None:
            background["concurrency"] = self.gateway.admission.run
        for strategy in self.strategies:
            background |= strategy.background()
        if self._settings.columns:
            background["columns"] = self._columns.run
        evaluations = self._settings.evaluation.at
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(), name=name) for name, run in background.items()]
            if "start" in evaluations and step == 0:
                await self._evaluate("start")
            async with asyncio.TaskGroup() as rollout:
                rollout.create_task(self._train(step, steps), name="training")
                rollout.create_task(self.scheduler.run(lambda: self.gateway.version, recovered), name="scheduler")
            if "end" in evaluations and not (self.stopped and self._evaluated == self.gateway.version):
                await self._evaluate("end")
            for task in running:
                task.cancel()

    async def _train(self, step: int, steps: int) -> None:
        await self._training.run(first_step=step, version=self.gateway.version, steps=steps)
        self.scheduler.close()

    def _on_step(self, done: StepDone) -> None:
        values: dict[str, float | None] = {**done.report.metrics, **self._statistics.of(done.groups)}
        self._hooks.step(done)
        self._stop_if(self._monitor.step(values))

    def _stop_if(self, why: str) -> None:
        if why and not self.stopped:
            self.stopped = why
            self._training.stop()

    async def _between(self, step: int, last: bool) -> None:
        """Evaluate after every n-th step; after the last one too, unless that is evaluated anyway."""
        settings = self._settings.evaluation
        if settings.every and step % settings.every == 0 and not (last and "end" in settings.at):
            results = await self._evaluate(f"step{step}")
            rates = {name: result.rate for name, result in results.items()}
            self._stop_if(self._monitor.step(mean_and_parts("held_out_success", rates)))

    async def _evaluate(self, label: str) -> Mapping[str, EvaluationResult]:
        settings = self._settings.evaluation
        results: Mapping[str, EvaluationResult] = {}
        if settings.episodes:
            await self.gateway.settle()
            results = await self.evaluation.run(label, self.gateway.version, settings)
            rates = {name: result.rate for name, result in results.items()}
            self._checkpoints.evaluated(self.gateway.version, rates)
            self._hooks.evaluation(label, results)
            self._evaluated = self.gateway.version
        return results

    def move_by(self, fleet: Fleet) -> None:
        """Set the fleet of the rebalancer, which starts and drains engines of this control plane's gateway."""
        if self.rebalancer is not None:
            self.rebalancer.fleet = fleet

    def follow(self, nodes: NodeTracker | None) -> None:
        """Let the rebalancer plan for the nodes that are present at the time. None: the nodes do not change."""
        if self.rebalancer is not None and nodes is not None:
            self.rebalancer.follow(nodes)

    def reshard_by(self, fleet: Fleet) -> None:
        """Set the fleet of the strategies. In a run, only one of rebalancer and strategies changes tensor
        parallelism."""
        for strategy in self.strategies:
            strategy.move_by(fleet)

    def gone(self, engine: EngineId, cause: str) -> None:
        """Callback of the supervisor: an engine will not return, and the run continues without it."""
        if self.rebalancer is not None:
            self.rebalancer.notify(f"{engine} is gone: {cause}")

    def strategy(self, kind: type[S]) -> S | None:
        """The run's strategy of this kind, if it is on."""
        return next((s for s in self.strategies if isinstance(s, kind)), None)

    def _workload(self) -> WorkloadMeter:
        if self._meter is None:
            self._meter = WorkloadMeter()
        return self._meter

    def _versions_in_use(self) -> Iterable[int]:
        reference, version = self._settings.reference, self.gateway.version
        kept = () if reference is None else references(version, reference)
        return [*self._hooks.versions_in_use(), *self.gateway.updates.loading(), *kept]

    def _published(self, version: int, consumed: Sequence[Group]) -> None:
        self.scheduler.published(version, consumed)
        self._hooks.version(version)


def _runner_type(traced: float, recorder: Recorder) -> Callable[..., TrajectoryRunner]:
    return functools.partial(TracedTrajectoryRunner, recorder=recorder, share=traced) if traced else TrajectoryRunner


def _record_failed_step(recorder: Recorder, step: int, version: int, batch: Sequence[Group], why: str) -> None:
    ids = " ".join(sample.id for group in batch for sample in group.samples)
    failed = {"step": step + 1, "version": version}
    event = RunEvent(asyncio.get_running_loop().time(), STEP_FAILED, "training", {**failed, "why": why, "samples": ids})
    recorder.event(event)


def _buffer(
    domains: Sequence[Domain],
    leases: Leases,
    recorder: Recorder,
    settings: ControlSettings,
    shares: BatchShares | None,
) -> SampleBuffer:
    rules = settings.schedule.rules
    quotas = {d.name: d.quota for d in domains}

    def excess(version: int, groups: Sequence[Group]) -> None:
        samples = sum(rules.bound.stale(s.v0, version) for g in groups for s in g.samples)
        oldest = max(version - g.v0 for g in groups)
        fields = {"samples": samples, "oldest": oldest, "staleness": rules.alpha}
        recorder.event(RunEvent(asyncio.get_running_loop().time(), "batch_over_staleness", f"v{version}", fields))

    return SampleBuffer(
        quotas,
        bound=rules.bound,
        enforced=rules.drops_stale,
        pace=BatchPace(leases, recorder, rules.alpha, settings.pace_s) if rules.paced else None,
        on_excess=excess,
        token_budget=settings.token_budget,
        due=settings.due,
        measure=settings.measure,
        shares=shares,
        columns=settings.columns,
    )


def _gateway(
    leases: Leases,
    recorder: Recorder,
    version: int,
    settings: ControlSettings,
    hooks: Hooks,
    colocation: GroupColocation | None,
) -> Gateway:
    rules, updates = settings.schedule.rules, settings.updates
    differ = rules.windowed and rules.alpha > 0  # whole batches have one lag, and start with one version
    return Gateway(
        leases,
        limits=settings.gateway,
        version=version,
        on_suspect=hooks.suspect,
        recorder=recorder,
        router=settings.router,
        seats=settings.seats,
        concurrency=None if settings.schedule.rules.turns is TurnSynchrony.LOCKSTEP else settings.concurrency,
        updates=partial(updates, rules.alpha) if updates and differ else AllAtOnceUpdates,
        pause=PauseMode.ABORT if settings.schedule.rules.in_flight is InFlightHandling.TURN_REDONE else PauseMode.KEEP,
        colocation=colocation,
    )
