"""`rollart simulate`: a resolved run on virtual time, with simulated parts.

Decisions are made by the product itself: the same control plane, reward pipeline, fleet of environment hosts and
ledger. Durations are modelled: engines by the roofline behind the plan, environments and answers by the domains'
profiles, reward functions by simulated workers, training by FLOPs, weights and KV by links. In an elastic cluster the
hosts are on simulated machines.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from placement.architecture import DecoderShape as ModelShape
from placement.problem import DomainProfile, Quantity, RewardCost, log_normal
from placement.roofline import Roofline
from placement.training import mfu as training_mfu
from placement.types import ROLLOUT_ROLES, Assignment, Role
from rollart.adapters.rewards.offload import OffloadRewarder
from rollart.control.domain import Domain
from rollart.errors import SpecError, UsageError
from rollart.fleet import EngineKind, EnginePlacement
from rollart.launch.clusters import PLACEMENT_S, elastic_nodes, elastic_planner, fit_to_devices
from rollart.launch.hosts import HostAssignments, host_count, host_count_keepers
from rollart.launch.layout import cpu_pool
from rollart.launch.routing import engine_placement
from rollart.launch.start_limits import trainer_start_s
from rollart.launch.strategies import engines_are_elastic, reshard_settings
from rollart.launch.wiring import control_settings
from rollart.model import WeightsRef
from rollart.policy.schedules import resolve as schedule_named
from rollart.ports import Recorder, Rewarder, RunEvent
from rollart.report.simulation import ObservedFaults
from rollart.settings.faults import LINK, FaultPlanSpec, matching_names
from rollart.settings.planning import publishing_of
from rollart.settings.resolve import NO_PREDICTION, Resolved, refuse_given_data
from rollart.settings.run import EvaluationSpec, RewardUse
from rollart.settings.variants import adapt_to_schedule
from rollart.sim import loop as virtual
from rollart.sim import scoring
from rollart.sim.engine import DisaggregatedEngine, EngineLimits, KvFabric, ModelledEngine
from rollart.sim.environments import START_S, ModelledEnvironment, ModelledHosts, SimulatedDomain
from rollart.sim.links import RDMA, LinkProfile, SharedLink
from rollart.sim.run import ModelledRun, StepTrace, TracedLedger
from rollart.sim.site import BilledDevices, HostReservation, MachineInventory, ModelledSite, PlacedEngine
from rollart.sim.steps import StepModel
from rollart.sim.trainers import ModelledTrainer, TrainerSpeed
from rollart.sim.weights import VersionTransfer, WeightTransfer
from rollart.sim.workload import (
    PRESETS,
    AnswerLengths,
    Constant,
    Distribution,
    GeneratedWorkload,
    LogNormal,
    ReplayedWorkload,
    Workload,
    WorkloadShape,
    mass_of,
)
from rollart.supervise.nodes import NodeTracker
from rollart.supervise.supervisor import HostLimits
from rollart.tools.faults import SimulationFaults, function_provider, kv_pairs, machine_name, simulated_function_hosts
from rollart.tools.recording import SIMULATED_KEY, RecordedRun
from serverless.deploy.package import build
from serverless.pipeline.offload import Offload
from serverless.providers.simulated import Profile, SimulatedBackend, SimulatedMachines
from serverless.spec import FunctionBatchSpec, FunctionSpec
from serverless.types import FaultKind

_BILLED = {"gpu", "keep_alive_s", "memory_mb", "concurrency"}
"""Settings from which reports compute the bill of a GPU function. A simulation's ledger records its simulated values of
them."""

INSTANT_GB_PER_S = 1e9
"""Bandwidth of instantaneous transfers: a broadcast leaves nothing to pull."""


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Trajectories and functions of a recorded run in place of the domains' profiles, in recorded order or `resample`d.
    With a `pace`, the trainer and publishes have their recorded timings, and engines take `pace` times their
    roofline."""

    recording: RecordedRun
    resample: bool = False
    pace: float | None = None


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of one simulation. `directory` has its ledger; `trace` is equal for equal spec, schedule and seed."""

    schedule: str
    seed: int
    seconds: float
    trace: str
    steps: tuple[StepTrace, ...]
    moved: tuple[VersionTransfer, ...]
    directory: Path
    observed_faults: ObservedFaults | None = None
    """Losses from the fault plan."""


def simulate(
    resolved: Resolved,
    directory: Path,
    *,
    schedule: str | None = None,
    seed: int = 0,
    steps: int | None = None,
    fuzz: int | None = None,
    replay: ReplayPlan | None = None,
    faults: FaultPlanSpec | None = None,
    on_step: Callable[[StepTrace], None] = lambda _: None,
    on_time: Callable[[float], None] = lambda _: None,
) -> SimulationResult:
    """Simulate the run; its ledger remains in `directory`. `fuzz`: seed that shuffles events of the same instant;
    `replay`: a recorded run to repeat; `faults`: the fault plan.

    SpecError for a run or cluster that cannot be modelled, ValueError for an unknown schedule.
    """
    refuse_given_data(resolved.run, "simulate")
    name = schedule or resolved.run.schedule
    run, left = adapt_to_schedule(resolved.run, name)
    wanted = replace(resolved, run=run) if left else resolved
    rules = schedule_named(name, run.staleness if name == run.schedule else None)
    if name != run.schedule and rules.windowed:
        rules = schedule_named(name, max(run.staleness, 1))
    settings = control_settings(wanted, reshard=reshard_settings(wanted), measure=mass_of)
    settings = replace(
        settings,
        schedule=replace(settings.schedule, rules=rules, seed=seed, steps=run.steps if steps is None else steps),
        evaluation=EvaluationSpec(),
    )

    async def main() -> SimulationResult:
        loop = asyncio.get_running_loop()
        simulation_faults = SimulationFaults(faults or FaultPlanSpec(), wanted, seed)
        machines = simulation_faults.machines
        present = wanted if machines is None else fit_to_devices(wanted, machines.there())
        world = _ModelledCluster(present, replay)
        functions = function_behaviours(present, None if replay is None else replay.recording)
        functions = with_function_faults(functions, simulation_faults.plan)
        rewarded = {one.spec.name: one.domains for one in functions}
        config = {**present.to_dict(), SIMULATED_KEY: {"schedule": name, "seed": seed, "functions": rewarded}}
        on_gpus = [one.spec for one in functions if one.spec.gpu]
        if on_gpus:  # the price of a GPU is that of its type
            declared = config["functions"]
            simulated = {
                spec.name: {**declared.get(spec.name, {}), **spec.model_dump(mode="json", include=_BILLED)}
                for spec in on_gpus
            }
            config["functions"] = {**declared, **simulated}
        with TracedLedger(directory, clock=loop.time, config=config, on_time=on_time) as ledger:
            names = simulated_function_hosts(present)
            workers = SimulatedMachines(names) if names else None
            async with simulated_functions(functions, present, ledger, seed, workers) as rewarder:
                hosts = simulated_environment_hosts(present, simulation_faults, wanted)
                nodes = None if machines is None else simulated_nodes(wanted, machines, ledger)
                run = ModelledRun(
                    _domains(present, seed, replay, simulation_faults, hosts),
                    world.engines(),
                    world.trainer(),
                    world.billing(world.train),
                    rewarder,
                    settings,
                    ledger,
                    unused=() if engines_are_elastic(present) else world.idle_devices(),
                    site=world.site(ledger, machines) if engines_are_elastic(present) else None,
                    planner=None if machines is None else elastic_planner(wanted, present),
                    nodes=nodes,
                    on_step=on_step,
                    lent_speed=world.lent_speed,
                    hosts=hosts,
                    autoscalers=None
                    if nodes is None
                    else lambda fleet: host_count_keepers(wanted, nodes, fleet, None, ledger),
                    restart_s=trainer_start_s(present),
                )
                simulation_faults.begin(run, world.links(), workers)
                await run.run()
                await ledger.flush()
            moved = tuple(world.transfer.moved.values())
            return SimulationResult(
                name, seed, run.ended, ledger.trace, tuple(run.steps), moved, directory, simulation_faults.losses(run)
            )

    return virtual.run(main(), seed=fuzz)


def simulated_nodes(resolved: Resolved, machines: MachineInventory, recorder: Recorder) -> NodeTracker:
    """The node tracker over simulated machines, whose events are recorded too."""
    now = asyncio.get_running_loop().time
    machines.tell = lambda kind, name: recorder.event(RunEvent(now(), kind, name, {}))
    nodes = elastic_nodes(resolved, machines.where)
    assert nodes is not None, "machines are an elastic cluster's"
    machines.nodes = nodes
    nodes.found((name, {m.pool: m.devices}) for name, m in machines.machines.items() if m.up)
    return nodes


class _ModelledCluster:
    """The plan's parts as simulated parts."""

    def __init__(self, resolved: Resolved, replay: ReplayPlan | None) -> None:
        if resolved.problem is None:
            notes = [note.removeprefix(NO_PREDICTION) for note in resolved.notes if note.startswith(NO_PREDICTION)]
            why = notes[0].removeprefix("no plan: ") if notes else "the speed of its devices is unknown"
            raise SpecError(
                f"cluster '{resolved.cluster.name}' cannot be simulated: {why}",
                remedy="name another --cluster; or give the speed of its CPUs (devices: [{name: cpu, tflops_bf16: …, "
                "memory_tb_per_s: …, source: …}]); or launch the run there, then `rollart simulate` the recorded run",
            )
        self._resolved, self._problem = resolved, resolved.problem
        self._pace = None if replay is None else replay.pace
        self._recorded = None if replay is None or replay.pace is None else replay.recording.timings
        self._devices = {pool.name: pool.device for pool in self._problem.pools}
        self._kv_channels = self._problem.kv_channels()
        self._pool_of = {a.name: a.pool for a in resolved.plan.assignments}
        rented = {p.name for p in resolved.cluster.pools if p.rented}
        self._usd_unused = {pool: usd for pool, usd in resolved.usd_per_device_hour.items() if pool not in rented}
        """Dollars per device-hour of pools whose unused devices are paid."""
        shape = self._problem.performance.shape
        assert isinstance(shape, ModelShape)
        self._shape = shape
        self.train = resolved.plan.of(Role.TRAINER)[0]
        self._publishing = publishing_of(resolved.run, resolved.cluster, shape)
        slowest = self._publishing.slowest(
            self._problem.pools,
            self._problem.links,
            self.train.pool,
            {a.pool for a in resolved.plan.assignments if a.role in ROLLOUT_ROLES},
        )
        self._pull_link, self._pool_link = cache(self._make_pull_link), cache(self._make_pool_link)
        self._steps = cache(self._make_steps)
        self._fabric = KvFabric(lambda *engines: self._pool_link(*sorted(self._pool_of[e] for e in engines)))
        self._made = 0
        store = resolved.run.weights.store
        self.transfer = WeightTransfer(
            slowest.gb,
            push=SharedLink(LinkProfile(slowest.push.gb_per_s)),
            pull=self._pull_link,
            load_gb_per_s=slowest.load_gb_per_s * (slowest.gb / (slowest.load_gb or slowest.gb)),
            prefetch=slowest.overlaps,
            bucket_gb=slowest.bucket_gb,
            in_flight=1 if store is None else store.in_flight,
        )

    def links(self) -> dict[str, SharedLink]:
        """Links by their names in fault plans. Empty for recorded publishes, which use no links."""
        if self._recorded is not None:
            return {}
        found = {f"{LINK}weights": self.transfer.push_link}
        for a in self._resolved.plan.assignments:
            if a.role in ROLLOUT_ROLES:
                found[f"{LINK}weights-{a.name}"] = self._pull_link(a.name)
        for one, other in kv_pairs(self._resolved):
            found[f"{LINK}kv-{one}-{other}"] = self._pool_link(one, other)
        return found

    def _make_pull_link(self, engine: str) -> SharedLink:
        """The link over which an engine's host pulls weights."""
        problem = self._problem
        path = self._publishing.path(problem.pools, problem.links, self.train.pool, self._pool_of[engine])
        return SharedLink(LinkProfile(min(path.pull.gb_per_s, INSTANT_GB_PER_S)))

    def engines(self) -> list[PlacedEngine]:
        return [self._make_engine(a) for a in self._resolved.plan.of(*ROLLOUT_ROLES)]

    def site(self, ledger: TracedLedger, machines: MachineInventory | None) -> ModelledSite:
        """Devices of the plan's engines and idle devices, for a run with elastic engines."""
        resolved, devices = self._resolved, dict.fromkeys(self._devices, 0)
        for assignment in resolved.plan.assignments:
            if assignment.role in ROLLOUT_ROLES:
                devices[assignment.pool] += len(assignment.devices)
        for pool, count in resolved.plan.idle.items():
            devices[pool] += count
        return ModelledSite(
            devices,
            self._start_engine,
            ledger,
            start_s=resolved.run.placement.rebalance.restart_s,
            prices=self._usd_unused,
            gone=self.transfer.unsubscribe,
            machines=machines,
            others={p.name: p.count - devices[p.name] for p in resolved.cluster.pools},
        )

    def _start_engine(self, kind: EngineKind) -> PlacedEngine:
        number = 1 + max(a.replica for a in self._resolved.plan.assignments) + self._made
        self._made += 1
        assignment = Assignment(kind.role, number, kind.pool, tuple(range(kind.tp)))
        self._pool_of[assignment.name] = kind.pool
        return self._make_engine(assignment)

    def trainer(self) -> ModelledTrainer:
        training = self._resolved.run.training
        penalised = training.loss.kl > 0
        if (seen := self._recorded) is not None:
            return ModelledTrainer(seen.trainer, publish_s=seen.publish_s, streams=training.stream, penalised=penalised)
        spec, device = self._resolved.run.placement.train, self._devices[self.train.pool]
        if spec.seconds_per_token is not None or device.tflops_bf16 is None:
            raise SpecError("training is modelled by FLOPs (rule: devices with tflops_bf16, no seconds_per_token)")
        problem, devices = self._problem, len(self.train.devices)
        assert problem.train is not None, "planning_problem always states training"
        pool = next(p for p in problem.pools if p.name == self.train.pool)
        speed = TrainerSpeed(
            self._shape,
            device,
            devices,
            # As in the plan's trainer model: both have the same communication and recomputation.
            mfu=training_mfu(problem, pool, replace(problem.train, pool=pool.name, devices=devices)),
            epochs=training.passes,
            seconds_per_step=spec.seconds_per_step,
        )
        return ModelledTrainer(speed, transfer=self.transfer, streams=training.stream, penalised=penalised)

    def lent_speed(self, placement: EnginePlacement) -> float:
        """Training speed of an engine's devices relative to the trainer's."""
        own = (self._devices[self.train.pool].tflops_bf16 or 0.0) * len(self.train.devices)
        return (self._devices[placement.pool].tflops_bf16 or 0.0) * placement.tp / own if own else 0.0

    def idle_devices(self) -> list[BilledDevices]:
        """Idle devices that are paid."""
        return [
            BilledDevices("unused", f"unused-{pool}", float(count), self._usd_unused[pool])
            for pool, count in self._resolved.plan.idle.items()
            if count and pool in self._usd_unused
        ]

    def _make_engine(self, assignment: Assignment) -> PlacedEngine:
        tp = len(assignment.devices)
        limits = EngineLimits(slots=self._resolved.cluster.engines.max_slots)
        name, steps = assignment.name, self._steps(assignment.pool, tp)

        async def load(weights: WeightsRef) -> None:
            if self._recorded is not None:
                await asyncio.sleep(self._recorded.load_s)
            else:
                await self.transfer.load(name, weights)

        engine: ModelledEngine
        if assignment.role is Role.ENGINE:
            engine = ModelledEngine(name, steps, limits=limits, load=load)
        else:
            engine = DisaggregatedEngine(name, steps, self._fabric, limits=limits, load=load)
        self.transfer.subscribe(name)
        return PlacedEngine(engine, engine_placement(self._resolved, assignment), self.billing(assignment))

    def _make_steps(self, pool: str, tp: int) -> StepModel:
        found = self._problem.performance.instance(self._devices[pool], tp)
        if not isinstance(found, Roofline):
            raise SpecError(f"pool '{pool}' cannot serve the model: {found}")
        return StepModel(found, pace=1.0 if self._pace is None else self._pace)

    def _make_pool_link(self, a: str, b: str) -> SharedLink:
        """The link between two pools, shared by all hand-offs of their engines."""
        channel = self._kv_channels.get((a, b))
        if channel is None or channel.gb_per_s == math.inf:
            return SharedLink(RDMA)
        return SharedLink(LinkProfile(channel.gb_per_s, latency_s=channel.latency_s))

    def billing(self, assignment: Assignment) -> BilledDevices:
        usd = self._resolved.usd_per_device_hour[assignment.pool]
        return BilledDevices(str(assignment.role), assignment.name, float(len(assignment.devices)), usd)


def _domains(
    resolved: Resolved, seed: int, replay: ReplayPlan | None, faults: SimulationFaults, hosts: ModelledHosts | None
) -> list[Domain]:
    found = []
    for spec in resolved.run.domains:
        world = SimulatedDomain(
            workload(resolved, spec.name, seed, replay),
            seed=seed,
            name=spec.name,
            solved=None if spec.profile is None else spec.profile.solved,
            hosts=faults.hosts,
            faults=faults.plan.resets,
        )
        if hosts is not None:
            hosts.make[spec.name] = partial(ModelledEnvironment, world)
        domain = Domain(
            name=spec.name,
            environment=world.make if hosts is None else hosts.environment(spec.name),
            quota=resolved.quotas[spec.name],
            group_size=spec.group_size,
            max_turns=spec.max_turns,
            max_tokens=spec.max_tokens,
        )
        found.append(domain)
    return found


def workload(resolved: Resolved, name: str, seed: int, replay: ReplayPlan | None) -> Workload:
    if replay is not None:
        return ReplayedWorkload(replay.recording.scripts[name], seed=seed, resample=replay.resample)
    assert resolved.problem is not None
    profile = next(d for d in resolved.problem.domains if d.name == name)
    spec = resolved.run.domain(name)
    shape = PRESETS[spec.shape] if spec.shape is not None else workload_shape(profile, resolved.run.model.context)
    return GeneratedWorkload(replace(shape, most_turns=min(shape.most_turns, spec.max_turns)), seed, name=name)


def workload_shape(profile: DomainProfile, context: int) -> WorkloadShape:
    """A profile as distributions: log-normal with the known median and 90th percentile, else constant at the mean."""
    median, sigma = log_normal(profile.output_tokens)
    return WorkloadShape(
        turns=_distribution(profile.turns),
        first=_distribution(profile.prompt),
        observation=_distribution(profile.new_tokens),
        answers=AnswerLengths(median, sigma, cap=context),
        reset_s=Constant(profile.environment.reset_s),
        step_s=Constant(profile.environment.wait_s),
        context=context,
    )


def _distribution(quantity: Quantity) -> Distribution:
    """At least 1."""
    median, sigma = log_normal(quantity)
    return LogNormal(median, sigma, low=1.0) if sigma else Constant(max(1.0, median))


UNLIMITED_EPISODES = 1_000_000
"""Capacity of a host that exists only in a fault plan, in episodes: unlimited."""


def simulated_environment_hosts(resolved: Resolved, faults: SimulationFaults, wanted: Resolved) -> ModelledHosts | None:
    """None if environments live in the controller and faults cannot hit them. `wanted`: the run with its whole plan.
    Hosts that exist only in a fault plan are on no machine."""
    spec, count = resolved.cluster.environments, host_count(resolved)
    if not count and not faults.affects_hosts:
        return None
    limits = HostLimits(
        per_host=spec.per_worker if count else UNLIMITED_EPISODES,
        health_s=math.inf,
        start_s=START_S,
        call_s=resolved.run.leases.env_step_s,
        pull_s=spec.pull_s,
    )
    hosts, machines = ModelledHosts(faults.hosts, {}, limits), faults.machines
    if not count or machines is None:
        return hosts
    # As in a real run: on the cores of their assignment, or without any, beside other parts.
    assignments, limit = HostAssignments(resolved, wanted), resolved.cluster.runtime.wait_s + PLACEMENT_S
    pool = cpu_pool(resolved, spec.pool).name

    async def room(name: str) -> HostReservation:
        with assignments.assigned(name, hosts.fleet.where(), machines.there()) as given:
            if given is None:
                reservation = HostReservation(machines, pool, 0)
            else:
                first = machine_name(wanted, given.pool, given.devices[0])
                reservation = HostReservation(machines, given.pool, len(given.devices), first)
            try:
                async with asyncio.timeout(limit):
                    await reservation.found()
            except BaseException as error:
                reservation.leave()
                if not isinstance(error, TimeoutError):
                    raise
                raise UsageError(
                    f"no machine of pool '{reservation.pool}' had room for {name} within {limit:g} s"
                ) from None
        return reservation

    hosts.room, hosts.count, hosts.later = room, count, assignments.first_unplanned
    return hosts


COLD_START_S = 0.5
"""Start time of a function worker: between the local pool's milliseconds and Modal's seconds, like Lambda with
Python."""


GPU_START_S, WEIGHTS_GB_PER_S = 10.0, 1.0
"""A container with a GPU starts in this time, and reads its weights at this speed. Guesses, for an image with torch of
3 GB and a network volume; `cold_start_s` of a profile replaces them."""


SCORE_SOURCE = "rollart.sim.scoring:score"


@dataclass(frozen=True, slots=True)
class FunctionBehaviour:
    """A function, its timing, and the domains that it scores."""

    spec: FunctionSpec
    profile: Profile
    domains: tuple[str, ...]


def function_behaviours(resolved: Resolved, recording: RecordedRun | None) -> list[FunctionBehaviour]:
    """The functions of a run: recorded ones with their recorded call times, else those of the domains' profiles. Cold
    starts on another provider than the recorded one take `COLD_START_S`."""
    if recording is None:
        return _profiled_functions(resolved)
    found: list[FunctionBehaviour] = []
    for name, spec in resolved.functions.items():
        seen = recording.functions.get(name)
        domains = tuple(d.name for d in resolved.run.domains if name in (r.function for r in d.rewards))
        if seen is None or not domains:
            continue
        if recording.provider not in resolved.cluster.functions.chain:
            seen = Profile(COLD_START_S, call_s=seen.call_s, item_s=seen.item_s)
        changed = {
            "source": SCORE_SOURCE,
            "handler": "",
            "takes": "samples",
            "deterministic": False,
            "artefacts": (),
            "requirements": (),
            "preload": (),
        }
        found.append(FunctionBehaviour(spec.model_copy(update=changed), seen, domains))
    return found


IMAGE_START_S, LONGEST_START_S = 60.0, 600.0
"""Seconds that Modal's containers are given beyond a function's `init_timeout_s` to load their image, as
`serverless.deploy.modal_app` does, and the limit of both."""


def _profiled_functions(resolved: Resolved) -> list[FunctionBehaviour]:
    """The functions behind the rewards of the domains' profiles: one for each function with a GPU, whichever domains it
    scores, and `reward-DOMAIN` for a domain's functions on cores."""
    assert resolved.problem is not None
    scored: dict[str, list[tuple[DomainProfile, RewardCost]]] = {}
    for domain in resolved.problem.domains:
        if domain.reward is None or (domain.reward.on_gpu and not _on_functions(resolved, domain.name)):
            continue
        for cost in domain.reward.parts:
            shared = cost.on_gpu and len(cost.functions) == 1
            name = cost.functions[0] if shared else f"reward-{domain.name}"[:64]
            scored.setdefault(name, []).append((domain, cost))
    return [_profiled_function(name, domains, resolved.functions.get(name)) for name, domains in scored.items()]


def _profiled_function(
    name: str, scored: Sequence[tuple[DomainProfile, RewardCost]], declared: FunctionSpec | None
) -> FunctionBehaviour:
    """A function with the settings `declared` for it and the costs of the domains that it scores. Its times are their
    mean, weighted by the domains' trajectories."""
    costs = [cost for _, cost in scored]
    spec = FunctionSpec(
        name=name,
        source=SCORE_SOURCE,
        takes="samples",
        memory_mb=min(32_768, max(128, round(max(cost.memory_gb for cost in costs) * 1024))),
        concurrency=10_000,
        queue=1_000_000,
        timeout_s=900.0,
        deterministic=False,
        batch=FunctionBatchSpec(max_items=max(cost.batch for cost in costs)),
    )
    if costs[0].on_gpu:
        spec = _scaled_as_declared(spec, costs[0], declared)
    profiles, weight = [_profile(cost) for cost in costs], math.fsum(domain.weight for domain, _ in scored)
    profile = Profile(
        max(one.cold_start_s for one in profiles),
        call_s=math.fsum(d.weight * one.call_s for (d, _), one in zip(scored, profiles, strict=True)) / weight,
        item_s=math.fsum(d.weight * one.item_s for (d, _), one in zip(scored, profiles, strict=True)) / weight,
    )
    return FunctionBehaviour(spec, profile, tuple(domain.name for domain, _ in scored))


def _on_functions(resolved: Resolved, domain: str) -> bool:
    """True if the plan scores a domain in functions. A reward model on GPUs of a pool is not run by rollart."""
    plan = resolved.plan.placement
    return plan is not None and any(choice.domain == domain and choice.where == "functions" for choice in plan.rewards)


def _scaled_as_declared(spec: FunctionSpec, cost: RewardCost, declared: FunctionSpec | None) -> FunctionSpec:
    """The simulated function with the declared settings that decide what its containers cost: their memory, their
    number, their idle time, and how long an item waits for a batch. Of a function without a declared GPU these are
    unknown, or those of cores."""
    spec = spec.model_copy(update={"gpu": f"{cost.gpu}:{cost.gpus}"})
    if declared is None or not declared.gpu:
        scaled = {"keep_alive_s": cost.keep_alive_s, "warm": cost.warm, "init_timeout_s": LONGEST_START_S}
        return spec.model_copy(update=scaled)
    batch = declared.batch.model_copy(update={"max_items": min(declared.batch.max_items, spec.batch.max_items)})
    kept = {key: getattr(declared, key) for key in ("memory_mb", "concurrency", "keep_alive_s", "warm")}
    start_s = min(LONGEST_START_S, declared.init_timeout_s + IMAGE_START_S)
    return spec.model_copy(update={"batch": batch, "init_timeout_s": start_s, **kept})


def _profile(cost: RewardCost) -> Profile:
    """The times of a reward's calls: between one item and a full batch they grow evenly."""
    single_s = cost.seconds if cost.single_s is None else cost.single_s
    item_s = (cost.call_s - single_s) / (cost.batch - 1) if cost.batch > 1 else 0.0
    cold_s = cost.cold_start_s
    if cold_s is None:
        cold_s = GPU_START_S + cost.memory_gb / WEIGHTS_GB_PER_S if cost.on_gpu else COLD_START_S
    return Profile(cold_s, call_s=single_s - item_s, item_s=item_s)


def with_function_faults(known: list[FunctionBehaviour], plan: FaultPlanSpec) -> list[FunctionBehaviour]:
    """The functions with the faults of a plan; the first of several entries for a function counts."""
    found = []
    for one in known:
        spec, profile = one.spec, one.profile
        entry = next((e for e in plan.functions if any(matching_names(p, [spec.name]) for p in e.functions)), None)
        if entry is not None:
            # The fields of an entry that are named like kinds of faults are their probabilities.
            faults = {FaultKind(field): share for field, share in entry if field in set(FaultKind) and share}
            cold_s = profile.cold_start_s if entry.cold_start_s is None else entry.cold_start_s
            profile = replace(
                profile, cold_start_s=cold_s, sigma=entry.spread, faults=faults or None, failed_start=entry.failed_start
            )
            if entry.concurrency is not None:
                changed = {"concurrency": entry.concurrency, "warm": min(spec.warm, entry.concurrency)}
                spec = spec.model_copy(update=changed)
        found.append(FunctionBehaviour(spec, profile, one.domains))
    return found


@asynccontextmanager
async def simulated_functions(
    known: list[FunctionBehaviour],
    resolved: Resolved,
    ledger: TracedLedger,
    seed: int,
    workers: SimulatedMachines | None,
) -> AsyncIterator[Rewarder]:
    """The run's rewarder. A domain without a function takes its environment's reward. `workers`: the hosts of function
    workers, None if faults cannot hit them."""
    backend = SimulatedBackend(
        {b.spec.name: scoring.score for b in known},
        meter=ledger,
        profiles={b.spec.name: b.profile for b in known},
        seed=seed,
        machines=workers,
        provider=function_provider(resolved),
    )
    domains = []
    for domain in resolved.run.domains:
        names = [b.spec.name for b in known if domain.name in b.domains]
        uses = [RewardUse(function=name, weight=1.0 / len(names)) for name in names]  # each scores the whole trajectory
        domains.append(domain.model_copy(update={"rewards": uses, "env_reward_weight": 0.0 if uses else 1.0}))
    packages, quota = [build(b.spec) for b in known], resolved.cluster.functions.quota
    async with backend, Offload(packages, backend, meter=ledger, seed=seed, quota=quota) as offload:
        yield OffloadRewarder(offload, domains)
