"""`rollart simulate`: a resolved run on virtual time, with the plan's parts modelled.

What decides is the product: the same control plane, reward pipeline and ledger. What takes time is modelled: engines
by the roofline that the plan was made with, environments and answers by the domains' profiles, training by FLOPs,
weights and KV by links.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from placement.architecture import Shape as ModelShape
from placement.roofline import Roofline
from placement.types import Assignment, Role
from placement.workload import DomainProfile, Quantity
from rollart.adapters.rewards.offload import DomainRewards, OffloadRewarder, RewardTerm
from rollart.compose.routing import SERVING, PlannedTurns, seat
from rollart.compose.wiring import control_settings
from rollart.errors import SpecError
from rollart.model import WeightsRef
from rollart.policy.schedules import resolve as schedule_named
from rollart.ports import Rewarder
from rollart.runtime.control import ControlSettings
from rollart.runtime.domain import Domain
from rollart.runtime.session import EvaluationPlan
from rollart.sim import loop as virtual
from rollart.sim import scoring
from rollart.sim.disaggregated import HandoffEngine, KvFabric
from rollart.sim.draws import Constant, Distribution, LogNormal
from rollart.sim.engines import EngineLimits, ModelledEngine
from rollart.sim.environments import World
from rollart.sim.links import PUSH, RDMA, LinkProfile, SharedLink
from rollart.sim.mass import mass_of
from rollart.sim.modelled import Billed, ModelledRun, Place, StepSeen, Traced
from rollart.sim.steps import StepModel
from rollart.sim.trainers import ModelledTrainer, TrainerSpeed
from rollart.sim.weights import Moved, WeightTransfer
from rollart.sim.workload import PRESETS, Answers, Generated, Shape, Workload
from rollart.spec.resolve import Resolved
from serverless.backends.simulated import Profile, SimulatedBackend
from serverless.deploy.package import build
from serverless.pipeline import Offload
from serverless.spec import BatchSpec, FunctionSpec
from serverless.types import Invocation

__all__ = ["Simulated", "simulate"]

COLD_S = 0.5
"""Start of a function's worker: between the local pool's milliseconds and Modal's seconds, as Lambda's with Python."""

Z90 = 1.2816
"""Standard deviations from the median of a normal distribution to its 90th percentile."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """What one simulation did. `directory` has its ledger; `trace` is the same for the same spec, schedule and seed."""

    schedule: str
    seed: int
    seconds: float
    trace: str
    steps: tuple[StepSeen, ...]
    moved: tuple[Moved, ...]
    directory: Path


def simulate(
    resolved: Resolved,
    directory: Path,
    *,
    schedule: str | None = None,
    seed: int = 0,
    steps: int | None = None,
    fuzz: int | None = None,
    on_step: Callable[[StepSeen], None] = lambda _: None,
) -> Simulated:
    """Play the run; its ledger stays in `directory`. `fuzz` shuffles what happens at the same instant.

    SpecError for a run or a cluster that cannot be modelled, ValueError for a schedule that is none.
    """
    run = resolved.run
    name = schedule or run.schedule
    rules = schedule_named(name, run.staleness if name == run.schedule else None)
    if name != run.schedule and rules.windowed:
        rules = schedule_named(name, max(run.staleness, 1))
    settings = control_settings(resolved)
    settings = replace(
        settings,
        schedule=replace(settings.schedule, rules=rules, seed=seed, steps=run.steps if steps is None else steps),
        measure=mass_of,
        evaluation=EvaluationPlan(0),
    )
    return virtual.run(_main(resolved, directory, settings, name, seed, on_step), seed=fuzz)


async def _main(
    resolved: Resolved,
    directory: Path,
    settings: ControlSettings,
    name: str,
    seed: int,
    on_step: Callable[[StepSeen], None],
) -> Simulated:
    loop = asyncio.get_running_loop()
    world = _Cluster(resolved)
    with Traced(directory, clock=loop.time, config=resolved.to_dict()) as ledger:
        async with SimulatedFunctions(resolved, ledger, seed) as rewarder:
            run = ModelledRun(
                [_domain(resolved, n, seed) for n in range(len(resolved.run.domains))],
                world.places(),
                world.trainer(),
                world.trained_by(),
                rewarder,
                settings,
                ledger,
                unused=world.unused(),
                on_step=on_step,
            )
            await run.run()
        moved = tuple(world.transfer.moved.values())
        return Simulated(name, seed, run.ended, ledger.trace, tuple(run.seen), moved, directory)


class _Cluster:
    """The plan's parts, modelled."""

    def __init__(self, resolved: Resolved) -> None:
        if resolved.problem is None or resolved.plan.placement is None:
            raise SpecError(
                "nothing says how fast this cluster is (rule: GPUs of the catalogue, or a calibration)",
                remedy="rollart calibrate, and name its file in the cluster spec's `calibration`",
            )
        self._resolved = resolved
        self._performance = resolved.problem.performance
        self._devices = {pool.name: pool.device for pool in resolved.problem.pools}
        self._links = PlannedTurns.of(resolved.problem, resolved.plan.placement.deployments).links
        self._shared: dict[tuple[str, str], SharedLink] = {}
        self._models: dict[tuple[str, int], StepModel] = {}
        self._pool_of = {a.name: a.pool for a in resolved.plan.assignments}
        shape = self._performance.shape
        assert isinstance(shape, ModelShape)
        self._shape = shape
        self._train = resolved.plan.of(Role.TRAINER)[0]
        elsewhere = any(a.pool != self._train.pool for a in resolved.plan.assignments if a.role in SERVING)
        self._pulls: dict[str, SharedLink] = {}
        self.transfer = WeightTransfer(
            shape.weight_bytes / 1e9,
            push=SharedLink(PUSH if elsewhere else RDMA),
            pull=lambda engine: self._pulls.setdefault(engine, SharedLink(RDMA)),
        )

    def places(self) -> list[Place]:
        fabric = KvFabric(self._link)
        return [self._place(a, fabric) for role in SERVING for a in self._resolved.plan.of(role)]

    def trainer(self) -> ModelledTrainer:
        spec, device = self._resolved.run.placement.train, self._devices[self._train.pool]
        if spec.seconds_per_token is not None or device.tflops_bf16 is None:
            raise SpecError("training is modelled by FLOPs (rule: devices with tflops_bf16, no seconds_per_token)")
        speed = TrainerSpeed(
            self._shape,
            device,
            len(self._train.devices),
            mfu=spec.mfu,
            epochs=self._resolved.run.training.epochs,
            seconds_per_step=spec.seconds_per_step,
        )
        return ModelledTrainer(speed, transfer=self.transfer, streams=self._resolved.run.training.stream)

    def trained_by(self) -> Billed:
        return self._billed(self._train)

    def unused(self) -> list[Billed]:
        """Devices that are paid and that nothing runs on."""
        rented = {p.name for p in self._resolved.cluster.pools if p.rented}
        price = self._resolved.usd_per_device_hour
        return [
            Billed("unused", f"unused-{pool}", float(count), price[pool])
            for pool, count in self._resolved.plan.idle.items()
            if count and pool not in rented
        ]

    def _place(self, assignment: Assignment, fabric: KvFabric) -> Place:
        tp = len(assignment.devices)
        limits = EngineLimits(slots=self._resolved.cluster.engines.max_slots)
        name, steps = assignment.name, self._steps(assignment.pool, tp)

        async def load(weights: WeightsRef) -> None:
            await self.transfer.load(name, weights)

        engine: ModelledEngine
        if assignment.role is Role.ENGINE:
            engine = ModelledEngine(name, steps, limits=limits, load=load)
        else:
            engine = HandoffEngine(name, steps, fabric, limits=limits, load=load)
        self.transfer.subscribe(name)
        return Place(engine, seat(self._resolved, assignment), self._billed(assignment))

    def _steps(self, pool: str, tp: int) -> StepModel:
        if (pool, tp) not in self._models:
            found = self._performance.instance(self._devices[pool], tp)
            if not isinstance(found, Roofline):
                raise SpecError(f"pool '{pool}' cannot serve the model: {found}")
            self._models[pool, tp] = StepModel(found)
        return self._models[pool, tp]

    def _link(self, source: str, target: str) -> SharedLink:
        """Between the pools of two engines; all their hand-offs share it."""
        a, b = sorted((self._pool_of[source], self._pool_of[target]))
        if (a, b) not in self._shared:
            gb_per_s, latency_s = self._links.get((a, b), (math.inf, 0.0))
            given = gb_per_s < math.inf
            self._shared[a, b] = SharedLink(LinkProfile(gb_per_s, latency_s=latency_s) if given else RDMA)
        return self._shared[a, b]

    def _billed(self, assignment: Assignment) -> Billed:
        usd = self._resolved.usd_per_device_hour[assignment.pool]
        return Billed(str(assignment.role), assignment.name, float(len(assignment.devices)), usd)


def _domain(resolved: Resolved, number: int, seed: int) -> Domain:
    spec = resolved.run.domains[number]
    solved = None if spec.profile is None else spec.profile.solved
    world = World(_workload(resolved, spec.name, seed), seed=seed, name=spec.name, solved=solved)
    return Domain(
        name=spec.name,
        environment=world.make,
        quota=resolved.quotas[spec.name],
        group_size=spec.group_size,
        max_turns=spec.max_turns,
        max_tokens=spec.max_tokens,
    )


def _workload(resolved: Resolved, name: str, seed: int) -> Workload:
    assert resolved.problem is not None
    profile = next(d for d in resolved.problem.domains if d.name == name)
    spec = resolved.run.domain(name)
    shape = PRESETS[spec.shape] if spec.shape is not None else shape_of(profile, resolved.run.model.context)
    return Generated(replace(shape, most_turns=min(shape.most_turns, spec.max_turns)), seed, name=name)


def shape_of(profile: DomainProfile, context: int) -> Shape:
    """A profile as distributions: log-normal through the median and 90th percentile where these are known, else the
    mean for all."""
    output = profile.output_tokens
    median, sigma = _log_normal(output)
    return Shape(
        turns=_distribution(profile.turns, low=1.0),
        first=_distribution(profile.prompt, low=1.0),
        observation=_distribution(profile.new_tokens, low=1.0),
        answers=Answers(median, sigma, cap=context),
        reset_s=Constant(profile.environment.reset_s),
        step_s=Constant(profile.environment.wait_s),
        context=context,
    )


def _distribution(quantity: Quantity, *, low: float) -> Distribution:
    median, sigma = _log_normal(quantity)
    return LogNormal(median, sigma, low=low) if sigma else Constant(max(low, median))


def _log_normal(quantity: Quantity) -> tuple[float, float]:
    """Median and sigma. Of mean and 90th percentile alone: the smaller sigma that has both; none if there is none."""
    mean, p50, p90 = quantity.mean, quantity.p50, quantity.p90
    if p50 is not None and p50 > 0:
        if p90 is not None and p90 > p50:
            return p50, math.log(p90 / p50) / Z90
        return p50, math.sqrt(max(0.0, 2.0 * math.log(mean / p50))) if mean > 0 else 0.0
    if p90 is not None and p90 > mean > 0:
        spread = Z90**2 - 2.0 * math.log(p90 / mean)
        sigma = Z90 - math.sqrt(spread) if spread > 0 else Z90
        return mean * math.exp(-(sigma**2) / 2.0), sigma
    return mean, 0.0


class SimulatedFunctions:
    """Rewards of the profiles through the product's pipeline, on modelled workers. A domain without a reward's profile
    is paid by its environment."""

    def __init__(self, resolved: Resolved, ledger: Traced, seed: int) -> None:
        assert resolved.problem is not None
        costs = {d.name: d.reward for d in resolved.problem.domains if d.reward is not None and not d.reward.on_gpu}
        packages = [build(_function(name, memory_gb=cost.memory_gb)) for name, cost in costs.items()]
        functions = resolved.cluster.functions
        kind = type("Provider", (SimulatedBackend,), {"provider": functions.price or functions.chain[0]})
        meter = _Calls(ledger)
        self._backend: SimulatedBackend = kind(
            {_named(name): scoring.score for name in costs},
            meter=meter,
            profiles={_named(name): Profile(COLD_S, call_s=c.seconds, item_s=0.0) for name, c in costs.items()},
            seed=seed,
        )
        self._offload = Offload(packages, self._backend, meter=meter, seed=seed)
        self._plan: Mapping[str, DomainRewards] = {
            d.name: DomainRewards((RewardTerm(_named(d.name)),)) if d.name in costs else DomainRewards((), 1.0)
            for d in resolved.run.domains
        }

    async def __aenter__(self) -> Rewarder:
        await self._backend.__aenter__()
        await self._offload.__aenter__()
        return OffloadRewarder(self._offload, self._plan)

    async def __aexit__(self, *exc: object) -> None:
        await self._offload.__aexit__(*exc)
        await self._backend.__aexit__(*exc)


def _named(domain: str) -> str:
    return f"reward-{domain}"[:64]


def _function(domain: str, *, memory_gb: float) -> FunctionSpec:
    return FunctionSpec(
        name=_named(domain),
        source="rollart.sim.scoring:score",
        takes="samples",
        memory_mb=min(32_768, max(128, round(memory_gb * 1024))),
        concurrency=10_000,
        queue=1_000_000,
        timeout_s=900.0,
        deterministic=False,
        batch=BatchSpec(max_items=1),
    )


@dataclass(frozen=True, slots=True)
class _Calls:
    """`MeterSink`."""

    ledger: Traced

    def invocation(self, invocation: Invocation) -> None:
        self.ledger.invocation(invocation)

    def worker(self, span: object) -> None:
        return None

    def saving(self, saving: object) -> None:
        return None
