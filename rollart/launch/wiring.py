"""Chooses the concrete part behind each port, and connects them.

Also the fields of the events that are shown during a run, and the billing clocks of plan parts without a supervisor:
the trainer, and reward devices without a host.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import functools
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from placement.types import ROLLOUT_ROLES
from rollart.adapters.rewards.keeping import KeepingRewarder
from rollart.adapters.rewards.offload import OffloadRewarder, RewardCalls
from rollart.adapters.rewards.order_check import LIMIT_S, OrderCheckedOffload
from rollart.adapters.text import HubTokenizer
from rollart.adapters.webhook import Webhook, webhook_url
from rollart.adapters.weights.directory import DirectoryWeightStore
from rollart.architecture import may_have_experts, stamp_of, vocab_of
from rollart.control.admission import SchedulerSettings
from rollart.control.buffer import BatchDeadline, SampleColumn
from rollart.control.control_plane import ControlPlane, ControlSettings, Hooks
from rollart.control.domain import Domain
from rollart.control.evaluation import EvaluationResult
from rollart.control.given import GivenBatches
from rollart.control.keeping import TrajectoryKeeper
from rollart.control.training import StepDone, all_samples
from rollart.control.trajectory import UNTRACED, AttemptTrace, TrajectoryState, WaitLimits
from rollart.controller_loop import ControllerLoop
from rollart.errors import StoppedEarly, StorageFailed
from rollart.fleet import EngineRole
from rollart.launch.broadcasts import weight_broadcaster
from rollart.launch.clusters import elastic_nodes, elastic_planner, open_cluster, record_cluster_events
from rollart.launch.engines import ClusterEngineSite, TrainerProgram
from rollart.launch.functions import (
    LedgerMeter,
    backend,
    function_secrets,
    function_settings,
    make_scaler,
    offload_events,
    one_worker,
    translated_errors,
)
from rollart.launch.hosts import (
    environment_fleet,
    environment_host_names,
    function_fleet,
    planned_function_hosts,
    provider_run_id,
    watch_memory,
)
from rollart.launch.layout import part_clock
from rollart.launch.plan import RunStart, engines_are_movable, rebalance_settings
from rollart.launch.prepare import given_samples, prepare_tokenizer, runtime_domains, trainer_config
from rollart.launch.rewards import RunRewards, reward_cases
from rollart.launch.routing import concurrency_settings, engine_placements, make_router
from rollart.launch.servers import open_harnesses
from rollart.launch.start_limits import engine_start_limits, trainer_start_s
from rollart.launch.strategies import (
    engine_wait_s,
    launch_reshard_settings,
    node_wait_s,
    stall_limit_s,
    strategy_settings,
    update_policy,
)
from rollart.launch.trainer import place_trainer
from rollart.launch.weight_store import SharedWeightStore, agreement_sample, weight_store
from rollart.leases import Leases
from rollart.ledger.events import (
    BUDGET_ALARM,
    EVALUATION_SAMPLED,
    FUNCTION_VERSION,
    NOTICE,
    STEP_FAILED,
    UTC_CLOCK,
)
from rollart.ledger.intervals import ResourceClock
from rollart.ledger.store import Ledger
from rollart.model import EngineId, Group, Outcome, TrainSample, Trajectory, WeightsRef
from rollart.money import dollars, dollars_between
from rollart.policy.budget import BudgetAlarm, BudgetAlarms, SpendForecast, SpendMeter
from rollart.policy.collapse import CollapseAlarm, StalenessAlarm
from rollart.policy.schedules import resolve as schedule
from rollart.ports import RunEvent, Runtime
from rollart.report.checkpoints import best_version
from rollart.serving.engine_registry import GatewayLimits
from rollart.settings.resolve import Resolved
from rollart.settings.run import BatchSpec
from rollart.strategies.rolling_update import RollingUpdater
from rollart.strategies.token_budget import BatchTruncation
from rollart.strategies.tp_change import ReshardSettings
from rollart.supervise.engines import EngineSupervisor, watch_progress
from rollart.supervise.environment_hosts import EnvironmentHostSupervisor
from rollart.supervise.fleet import EngineFleet
from rollart.supervise.function_hosts import FunctionHostSupervisor
from rollart.supervise.nodes import NodeTracker
from serverless.pipeline.offload import Offload
from serverless.scaling.decisions import StatisticsMeter
from serverless.workers.remote import WorkerHosts

EventFields = dict[str, str | int | float | bool | None]

SHOWN_METRICS = (
    "loss",
    "entropy",
    "clip_fraction",
    "approx_kl",
    "grad_norm",
    "value_loss",
    "explained_variance",
    "return_mean",
    "staleness_mean",
    "mismatch_gap",
    "stale_gap",
    "effective_share",
    "replayed_share",
)


SHOWN_EVENTS = frozenset(
    {
        "affinity_fallback",
        "affinity_restored",
        "engine_drained",
        "engine_given_up",
        "engine_lost",
        "engine_started",
        "no_engine_left",
        "order_not_checked",
        "engine_down",
        "engine_starting",
        "handoffs_pull_nothing",
        "prefill_unused",
        "filter_exhausted",
        "function_scaling_failed",
        "group_dropped",
        "host_draining",
        "host_given_up",
        "host_lost",
        "host_quarantined",
        "host_started",
        "infra_fault",
        "lease_expired",
        NOTICE,
        "prefill_barred",
        "rebalance_failed",
        "rebalance_measured",
        "rebalance_proposed",
        "rebalanced",
        "role_flipped",
        "stalled",
        STEP_FAILED,
        "trainer_restarted",
        "worker_left_processes",
        "wrong_answer",
    }
)
"""Part events that are shown at the terminal."""


NOTABLE_PAUSE_S = 5.0
"""Pauses of the controller's loop from which on they are shown, seconds."""


@dataclass(slots=True)
class RunContext:
    """All parts of one run, created but not started. `begin` and then `open_functions` complete it."""

    resolved: Resolved  # the part of `wanted`, the run of the specs, that fits on the initial nodes
    wanted: Resolved
    roles: Mapping[str, EngineRole]
    directory: Path
    progress: Callable[[RunEvent], None]
    ledger: Ledger
    runtime: Runtime
    leases: Leases
    tokenizer: HubTokenizer
    domains: Sequence[Domain]
    trainer: TrainerProgram
    trainer_clock: ResourceClock
    site: ClusterEngineSite
    clocks: Sequence[ResourceClock]
    weights: DirectoryWeightStore
    devices_before: float
    environments: EnvironmentHostSupervisor | None
    functions: FunctionHostSupervisor | None
    workers: WorkerHosts | None
    current: WeightsRef | None = None
    emitted: int = 0
    collapse: CollapseAlarm = field(init=False)
    staleness: StalenessAlarm = field(default_factory=StalenessAlarm)
    control: ControlPlane = field(init=False)
    supervisor: EngineSupervisor = field(init=False)
    fleet: EngineFleet = field(init=False)
    nodes: NodeTracker | None = None
    rewarder: OffloadRewarder = field(init=False)
    spend: SpendMeter = field(init=False)
    forecast: SpendForecast | None = None
    alarms: BudgetAlarms | None = None
    webhook: Webhook | None = None

    def __post_init__(self) -> None:
        run = self.resolved.run
        self.spend = SpendMeter(run.steps)
        loss = run.training.loss
        penalised = bool(loss.kl) and loss.kl_in == "reward"
        self.collapse = CollapseAlarm(rewarded=loss.kind not in ("nll", "dpo") and not penalised)
        if run.budget.usd is not None:
            self.alarms = BudgetAlarms(run.budget.usd, run.budget.warn_at)
        if run.budget.notify is not None:
            self.webhook = Webhook(webhook_url(run.budget.notify), self.ledger)

    def emit(self, kind: str, subject: str, **fields: str | int | float | bool | None) -> None:
        """Record an event in the ledger and show it."""
        self.emitted += 1
        event = RunEvent(asyncio.get_running_loop().time(), kind, subject, fields)
        self.ledger.event(event)
        if kind not in SHOWN_EVENTS:  # the ledger itself shows those in the set
            self.progress(event)

    def on_loop_pause(self, seconds: float) -> None:
        """The controller's loop was paused for `seconds`: extend all leases, so that none expires because of it."""
        self.leases.moved(seconds)
        event = RunEvent(asyncio.get_running_loop().time(), "controller_paused", "run", {"seconds": round(seconds, 3)})
        self.ledger.event(event)
        if seconds >= NOTABLE_PAUSE_S:
            self.progress(event)

    def begin(self, weights: WeightsRef) -> None:
        """Create the control plane, with the version that engines start with."""
        self.current = weights
        settings = control_settings(
            self.resolved,
            self.roles,
            vocab_of(self.weights.path(weights.version)),
            experts=may_have_experts(self.weights.path(weights.version)),
            reshard=launch_reshard_settings(self.resolved),
        )
        if self.resolved.run.training.data is not None:
            run, samples = self.resolved.run, given_samples(self.resolved, self.tokenizer.directory)
            batches = GivenBatches(samples, run.batch.trajectories, run.seed)
            settings = replace(settings, samples=batches, rollout=False)
        if (metric := settings.checkpoints.best_by) is not None:
            settings = replace(settings, best=best_version(self.directory, metric, weights.version))
        self.control = ControlPlane(
            self.domains,
            tokenizer=self.tokenizer,
            rewarder=self,
            trainer=self.trainer,
            journal=self.ledger,
            weights=self.weights,
            recorder=self.ledger,
            leases=self.leases,
            trainer_clock=self.trainer_clock,
            version=weights.version,
            settings=settings,
            planner=elastic_planner(self.wanted, self.resolved),
            hooks=Hooks(
                recover_trainer=self.trainer.recover,
                suspect=lambda engine: self.supervisor.suspect(engine),
                versions_in_use=lambda: self.supervisor.versions_in_use(),
                version=self._on_published,
                step=self._on_step,
                evaluation=self._on_evaluated,
                trace=self._trace(),
            ),
        )
        self.supervisor = EngineSupervisor(
            self.control.gateway,
            self.leases,
            self.ledger,
            shares=self.site.shares,
            weights=lambda: self.current or weights,
            start_s=engine_start_limits(self.resolved).most_s,
            on_gone=self._on_engine_gone,
            patience_s=node_wait_s(self.resolved),
        )
        self.fleet = EngineFleet(
            self.control.gateway, self.supervisor, self.site, self.ledger, drain_s=self.resolved.run.leases.generate_s
        )
        if engines_are_movable(self.resolved):
            self.control.move_by(self.fleet)
        self.control.reshard_by(self.fleet)
        self.nodes = elastic_nodes(self.resolved, self.site.where)
        self.control.follow(self.nodes)

    @contextlib.asynccontextmanager
    async def open_functions(self, rewards: RunRewards) -> AsyncIterator[None]:
        """Deploy the reward functions while the body runs."""
        spec, root = self.resolved.cluster.functions, self.directory / "functions"
        meter = StatisticsMeter(LedgerMeter(self.ledger))
        for name, why in rewards.why.items():
            self.emit("reward_beside", name, why=why)
        for name, scorer in rewards.stateful.items():
            scorer.meter_tokens(name, meter)
        for package in rewards.packages:
            self.emit(FUNCTION_VERSION, package.spec.name, version=package.version, **self._drawn(package.spec.name))
        if (played := spec.local.rehearse) is not None and "local" in spec.chain:
            self.emit("rehearsal", "functions", provider=played, seed=spec.local.seed)
        with translated_errors("reward functions: "):
            async with contextlib.AsyncExitStack() as stack:
                chain, run = [], provider_run_id(self.directory)
                secrets = function_secrets(spec, Path(self.resolved.base))
                for name in spec.chain:
                    opened = backend(name, spec, meter=meter, root=root, hosts=self.workers, run=run, secrets=secrets)
                    chain.append(await stack.enter_async_context(opened))
                offload = Offload(
                    rewards.packages,
                    chain,
                    settings=function_settings("pipeline", spec),
                    cache=self.directory / "rewards.sqlite",
                    meter=meter,
                    seed=self.resolved.run.seed,
                    quota=spec.quota,
                )
                calls: RewardCalls = await stack.enter_async_context(offload)
                if spec.order_check:
                    checked = OrderCheckedOffload(
                        offload,
                        rewards.packages,
                        functools.partial(one_worker, chain, spec, meter, secrets),
                        note=self._note,
                        cases=reward_cases(self.resolved, rewards.packages),
                        limit_s=min(LIMIT_S, self.resolved.run.leases.reward_s / 4.0),
                    )
                    calls = await stack.enter_async_context(checked)
                self.rewarder = self._rewarder(calls, rewards)
                scheduler = self.control.scheduler
                scaling = make_scaler(
                    self.resolved,
                    offload,
                    chain,
                    seen=meter,
                    rolling=scheduler.rolling,
                    live=scheduler.groups.running,
                    events=self.ledger,
                    directory=self.directory,
                )
                await stack.enter_async_context(scaling)
                try:
                    yield
                finally:  # most useful for a run that fails on function faults
                    with contextlib.suppress(StorageFailed):
                        for event in offload_events(offload, asyncio.get_running_loop().time(), self.directory):
                            self.ledger.event(event)

    def _note(self, kind: str, function: str, fields: Mapping[str, Any]) -> None:
        """Record an event of a function's check."""
        self.ledger.event(RunEvent(asyncio.get_running_loop().time(), kind, function, fields))

    def _rewarder(self, calls: RewardCalls, rewards: RunRewards) -> OffloadRewarder:
        domains, keep = self.resolved.run.domains, self.resolved.run.keep
        if keep.items == "none":
            return OffloadRewarder(calls, domains, rewards.stateful)
        versions = {package.spec.name: package.version for package in rewards.packages}
        return KeepingRewarder(calls, domains, rewards.stateful, versions=versions, sink=self.ledger.scored)

    def _trace(self) -> Callable[[TrajectoryState], AttemptTrace]:
        keep = self.resolved.run.keep
        return (lambda _: UNTRACED) if keep.items == "none" else TrajectoryKeeper(keep, self.ledger.keep)

    def _drawn(self, function: str) -> dict[str, str]:
        """The fields of the event of a version that was drawn; none for a function with a source."""
        release = self.resolved.releases.get(function)
        if release is None:
            return {}
        fields = release.model_dump(include={"reference", "provider", "number"})
        return {**fields, "weights": json.dumps(release.weights)}

    def watchers(self) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
        """Tasks of the whole run, by name."""
        yield "ledger", self.ledger.watch()
        yield "watchdog", self.watchdog()
        if self.webhook is not None:
            yield "notices", self.webhook.run()
        if self.resolved.cluster.runtime.backend == "ray":
            yield "cluster", record_cluster_events(self.runtime, self.emit)
        if self.environments is None:
            yield "memory", watch_memory(self.resolved.cluster.environments, self.emit)

    async def watchdog(self) -> None:
        """Monitor the run, from the first part's start on."""
        await watch_progress(
            self.leases,
            self.ledger,
            progress=self._progress_count,
            stall_s=stall_limit_s(self.resolved),
            check=self._flush_clocks,
            budget=self.resolved.run.budget,
            seconds=lambda: self.ledger.seconds,
            spent_usd=self._spent_usd,
            spent=self._check_budget,
        )

    def _check_budget(self, spent: float) -> None:
        """Record and show the alarms that are due, and post them to the webhook."""
        run = self.resolved.run
        if self.alarms is None or run.budget.usd is None:
            return
        for alarm in self.alarms.due(spent, self.forecast):
            text = budget_text(alarm, spent, run.budget.usd, self.forecast, steps=run.steps)
            self.emit(BUDGET_ALARM, alarm, spent_usd=spent, budget_usd=run.budget.usd, text=text)
            if self.webhook is not None:
                self.webhook.post(alarm, f"rollart, run {self.directory.name}: {text}")

    def finish(self) -> None:
        """Record the end of the run. Raises `StoppedEarly` if a condition of `stop_when` ended it."""
        steps, version, why = self.resolved.run.steps, self.control.gateway.version, self.control.stopped
        if not why or version >= steps:
            self.emit("finished", "run", steps=steps, version=version)
            return
        per_step = self._spent_usd() / version  # a step publishes one version
        saved = per_step * (steps - version)
        self.emit("stopped_early", "run", step=version, steps=steps, why=why, saved_usd_estimate=saved)
        raise StoppedEarly(
            f"stopped after step {version} of {steps}: {why}; about {dollars(saved)} saved (estimate: "
            f"{dollars(per_step)} per step so far, {steps - version} steps)",
            remedy="--resume continues; without the condition, clear stop_when",
        )

    def _spent_usd(self) -> float:
        """Over all lives of the run: every device while a part holds it, busy or idle; all devices of pools that are
        not rented; and calls of functions whose provider sends a bill."""
        return self.devices_before + self.site.spent_usd() + self.ledger.functions_usd

    async def score(self, trajectory: Trajectory, deadline_s: float) -> Outcome:
        """`Rewarder`: the functions are opened after this object is created."""
        return await self.rewarder.score(trajectory, deadline_s)

    def _progress_count(self) -> int:
        """A counter that grows while work gets done: started parts, generated turns, published versions."""
        if self.current is None:
            return self.emitted
        gateway = self.control.gateway
        return self.emitted + gateway.turns.served + gateway.version + self.supervisor.waited

    def _on_engine_gone(self, engine: EngineId, cause: str) -> None:
        self.fleet.gone(engine)
        self.control.gone(engine, cause)

    def _on_published(self, version: int) -> None:
        path = self.weights.path(version)
        self.current = WeightsRef(version, path, stamp=stamp_of(path))

    def _on_step(self, done: StepDone) -> None:
        """One training step: progress, speed, and results by domain (`success.lake`, `score.lake`)."""
        if why := self.collapse.step(done.report.metrics):
            self.emit("learning_stopped", "training", step=done.step + 1, why=why)
        if (share := self.staleness.step(done.report.metrics)) is not None:
            advice = "a lower staleness learns more from as many samples"
            self.emit("samples_too_stale", "training", step=done.step + 1, effective_share=round(share, 2), why=advice)
        fields: EventFields = {
            "step": done.step + 1,
            "steps": self.resolved.run.steps,
            "version": done.version,
            "train_s": done.t1 - done.t0,
            "waited_s": done.waited_s,
            "trained_tokens": done.report.trained_tokens,
            "live": self.control.scheduler.groups.running(),
        }
        by_domain: dict[str, list[tuple[float, bool | None]]] = {}
        for group in done.groups:
            for sample in group.samples:
                by_domain.setdefault(sample.domain, []).append((sample.score, sample.success))
        for domain, results in sorted(by_domain.items()):
            judged = [s for _, s in results if s is not None]
            fields[f"success.{domain}"] = sum(judged) / len(judged) if judged else None
            fields[f"score.{domain}"] = sum(v for v, _ in results) / len(results)
        fields |= {name: done.report.metrics[name] for name in SHOWN_METRICS if name in done.report.metrics}
        if usd := self._spent_usd():
            self.forecast = self.spend.step(done.step + 1, usd)
            fields |= spend_fields(usd, self.forecast)
        self.emit("step", "training", **fields)

    def _on_evaluated(self, label: str, results: Mapping[str, EvaluationResult]) -> None:
        """Held-out success by domain."""
        fields: EventFields = {"version": self.control.gateway.version}
        for domain, result in sorted(results.items()):
            fields[f"success.{domain}"] = result.rate
            fields[f"episodes.{domain}"] = result.episodes
            fields[f"faults.{domain}"] = result.faults
        now, version = asyncio.get_running_loop().time(), self.control.gateway.version
        self.progress(RunEvent(now, "evaluated", label, fields))
        settings = self.resolved.run.evaluation
        for number, temperature in enumerate(settings.temperatures):
            fields = {"version": version, "temperature": temperature}
            for domain, result in sorted(results.items()):
                sampled = result.sampled[number]
                fields[f"{domain} avg@{settings.samples}"] = sampled.mean
                fields |= {f"{domain} pass@{k}": value for k, value in sampled.passes.items()}
            self.progress(RunEvent(now, EVALUATION_SAMPLED, label, fields))

    async def _flush_clocks(self) -> None:
        """Once a second: flush open intervals, so that reports of a live run are current."""
        hosts = [clock for fleet in (self.environments, self.functions) if fleet for clock in fleet.clocks]
        for clock in (*self.clocks, *self.site.clocks, *hosts):
            clock.flush()


def spend_fields(usd: float, forecast: SpendForecast | None) -> EventFields:
    """The fields of a step's event about dollars: spent so far, and at the last step if that can be told yet."""
    fields: EventFields = {"usd": usd}
    return fields if forecast is None else {**fields, **forecast.fields}


def budget_text(alarm: BudgetAlarm, spent: float, budget: float, forecast: SpendForecast | None, *, steps: int) -> str:
    """An alarm as one line for people."""
    text = f"{dollars(spent)} of a budget of {dollars(budget)} spent ({spent / budget:.0%})"
    if forecast is not None and forecast.half:
        text += f"; {dollars_between(forecast.usd, forecast.half)} to step {steps}, as the latest steps cost"
    match alarm:
        case BudgetAlarm.FORECAST:
            return f"the budget will not last: {text}"
        case BudgetAlarm.WARN_AT:
            return text
        case BudgetAlarm.EXCEEDED:
            return f"the budget is spent, and the run stops: {text}"


def control_settings(
    resolved: Resolved,
    roles: Mapping[str, EngineRole] | None = None,
    vocab: int | None = None,
    *,
    experts: bool = False,
    reshard: ReshardSettings | None,
    measure: Callable[[Sequence[int]], int] = len,
) -> ControlSettings:
    """The run spec as control plane settings. `roles`: see `engine_placements`; `vocab`: see `GatewayLimits`;
    `experts`: the model may have some; `measure`: see `ControlSettings`."""
    run, leases, updates = resolved.run, resolved.run.leases, update_policy(resolved)
    batch, due, loss = run.batch, None, run.training.loss
    if batch.deadline_s is not None:
        due = BatchDeadline(batch.deadline_s, batch.least or 0.5, batch.age_decay or 1.0)
    return ControlSettings(
        SchedulerSettings(
            seed=run.seed,
            steps=run.steps,
            rules=schedule(run.schedule, run.staleness),
            max_attempts=run.faults.max_attempts_per_group,
            max_fault_rate=run.faults.max_rate,
            min_faults=run.faults.min_count,
        ),
        token_budget=run.batch.tokens if run.batch.sampler == "fifo" else None,
        samples=batch_samples(run.batch, measure),
        due=due,
        columns=[SampleColumn(name) for name in run.training.columns],
        reference=None if not loss.kl or loss.reference else loss.reference_reset or 0,
        waits=WaitLimits(
            env_reset_s=leases.env_step_s,
            env_step_s=leases.env_step_s,
            reward_s=leases.reward_s,
            context_tokens=run.model.context,
        ),
        gateway=GatewayLimits(
            generate_s=leases.generate_s,
            engine_s=engine_start_limits(resolved).most_s + leases.publish_s + engine_wait_s(resolved),
            sync_s=leases.publish_s,
            slots=resolved.cluster.engines.max_slots,
            handoff_s=leases.handoff_s,
            handoffs=None if run.rollout.handoffs == "auto" else run.rollout.handoffs,
            vocab=vocab,
        ),
        train_s=leases.train_s,
        pace_s=leases.pace_s,
        publish_s=leases.publish_s,
        overlap=run.weights.overlap,
        updates=None if updates is None else functools.partial(RollingUpdater, updates),
        evaluation=run.evaluation,
        checkpoints=run.checkpoints,
        stop_when=run.stop_when,
        router=make_router(resolved),
        seats=engine_placements(resolved, roles),
        rebalance=rebalance_settings(resolved),
        concurrency=concurrency_settings(resolved),
        options=strategy_settings(resolved, reshard),
        colocation=not run.rollout.replication,
        measure=measure,
        traced=run.telemetry.turns,
        experts=experts and run.training.routing_replay is not False and resolved.cluster.engines.kind != "vllm",
    )


def batch_samples(
    batch: BatchSpec, measure: Callable[[Sequence[int]], int] = len
) -> Callable[[Sequence[Group], int], list[TrainSample]]:
    """The samples that a step, counted from 0, trains of its groups."""
    if batch.tokens is None or batch.sampler != "token_budget":
        return all_samples
    return BatchTruncation(batch.tokens, measure)


def _utc_clock(began: float) -> RunEvent:
    """The UTC time of the loop's second `began`, for exports with dates. No decision depends on it."""
    now = dt.datetime.now(dt.UTC).timestamp()
    return RunEvent(began, UTC_CLOCK, "run", {"unix_s": now - (asyncio.get_running_loop().time() - began)})


def _stop_recording_pauses() -> None:
    """The ledger's last write may itself hold the loop."""
    if isinstance(loop := asyncio.get_running_loop(), ControllerLoop):
        loop.on_pause = lambda seconds: None


@contextlib.asynccontextmanager
async def open_run(
    start: RunStart, directory: Path, progress: Callable[[RunEvent], None], *, began: float
) -> AsyncIterator[RunContext]:
    """Create every part of the run; stop all started parts at exit, in reverse order. `began`: the loop time at which
    the run's process began."""
    resolved = start.resolved
    tokenizer_dir = prepare_tokenizer(resolved, directory)
    tokenizer = HubTokenizer(tokenizer_dir)
    config = trainer_config(resolved, directory, tokenizer_dir)
    # The resources of pools that are not rented: their cost accrues whether the run uses them or not.
    owned = {pool.name for pool in resolved.cluster.pools if not pool.rented}
    held = {a.name for a in resolved.plan.assignments if a.pool in owned}
    held |= {f"unused-{pool}" for pool in owned if resolved.plan.idle.get(pool)}
    async with contextlib.AsyncExitStack() as stack:
        ledger = stack.enter_context(
            Ledger(
                directory,
                clock=asyncio.get_running_loop().time,
                config=resolved.to_dict(),
                prices=resolved.prices,
                began=began,
                held=held,
                on_event=lambda event: progress(event) if event.kind in SHOWN_EVENTS else None,
                kept_mb=0 if (keep := resolved.run.keep).items == "none" else keep.max_mb,
                only_failed=keep.items == "failed",
            )
        )
        ledger.event(_utc_clock(began))
        stack.callback(_stop_recording_pauses)
        devices_before = ledger.spent_usd - ledger.functions_usd
        leases = Leases(ledger)
        weights = weight_store(resolved, directory, leases, ledger)
        if (stored := weights if isinstance(weights, SharedWeightStore) else None) is not None:
            stack.push_async_callback(stored.aclose)
        runtime, resolved = await stack.enter_async_context(open_cluster(resolved, directory, progress))
        hosts = environment_host_names(resolved) | planned_function_hosts(resolved)
        others = [a for a in resolved.plan.assignments if a.role not in ROLLOUT_ROLES and a.name not in hosts]
        by_part = {a.name: part_clock(resolved, ledger, a) for a in others}  # the others have a part with a clock
        for clock in by_part.values():
            stack.callback(clock.close)
        broadcaster = weight_broadcaster(resolved, leases, ledger)
        site = ClusterEngineSite(
            resolved,
            directory,
            ledger,
            runtime,
            names=start.names,
            stored=stored,
            broadcasts=broadcaster,
            began=began,
        )
        stack.push_async_callback(site.close)
        created: list[RunContext] = []
        trainer = TrainerProgram(
            await place_trainer(stack, resolved, runtime, directory, config),
            leases,
            ledger,
            by_part["trainer-0"],
            current=lambda: created[0].current,
            start_s=trainer_start_s(resolved),
            agreement=agreement_sample(resolved),
            share=None if stored is None else stored.push,
            broadcasts=broadcaster,
        )
        stack.push_async_callback(trainer.close)
        await site.open()
        common = resolved, directory, runtime, leases, ledger
        fleet = environment_fleet(*common, used=start.names, wanted=start.resolved)
        context = RunContext(
            resolved,
            start.resolved,
            start.roles,
            directory,
            progress,
            ledger,
            runtime,
            leases,
            tokenizer,
            runtime_domains(
                resolved,
                tokenizer,
                await open_harnesses(stack, resolved, tokenizer_dir),
                fleet,
            ),
            trainer,
            by_part["trainer-0"],
            site,
            tuple(by_part.values()),
            weights,
            devices_before,
            fleet,
            *function_fleet(*common, used=start.names),
        )
        created.append(context)
        if isinstance(loop := asyncio.get_running_loop(), ControllerLoop):
            loop.on_pause = context.on_loop_pause
        yield context
