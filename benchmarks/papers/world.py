"""A paper's testbed on virtual time: modelled parts under the product's control plane.

Where the papers share GPUs between rollout and training, `train` names the same devices again; only schedules that do
one after the other may do that.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.papers.models import shape, steps
from benchmarks.papers.tuned import TRAIN_FIXED_S, TRAIN_MFU
from benchmarks.papers.workloads import PUSH
from placement.hardware import device
from rollart.control.admission import SchedulerSettings
from rollart.control.control_plane import ControlPlane, ControlSettings, Hooks
from rollart.control.domain import Domain
from rollart.control.training import StepDone
from rollart.control.trajectory import WaitLimits
from rollart.fleet import EnginePlacement, EngineRole
from rollart.launch.strategies import StrategySettings
from rollart.leases import Leases
from rollart.ledger.intervals import EngineShares, ResourceClock
from rollart.model import Outcome, Scored, Trajectory, WeightsRef
from rollart.policy.routing import PREFILL_RULES, RoutingPolicy
from rollart.policy.schedules import resolve
from rollart.ports import Charge, Rewarder
from rollart.serving.engine_registry import GatewayLimits
from rollart.settings.faults import ResetTroubleSpec
from rollart.settings.rollout import TailBatchingSpec
from rollart.sim import loop as virtual
from rollart.sim.engine import DisaggregatedEngine, EngineLimits, KvFabric, ModelledEngine, SimulatedJob
from rollart.sim.environments import SimulatedDomain, SimulatedHost
from rollart.sim.links import RDMA, LinkProfile, SharedLink
from rollart.sim.run import MemoryWeights
from rollart.sim.trainers import ModelledTrainer, TrainerSpeed
from rollart.sim.weights import WeightTransfer
from rollart.sim.workload import GeneratedWorkload, MassTokenizer, WorkloadShape, mass_of
from rollart.testing.ledger import MemoryRecorder

__all__ = ["Bed", "Played", "Serving", "Task", "mean", "play", "played"]

FOREVER_S = 1e6


@dataclass(frozen=True, slots=True)
class Task:
    """A domain: `quota` trajectories of every batch, in groups of `group`."""

    name: str
    shape: WorkloadShape
    quota: int
    group: int = 8


@dataclass(frozen=True, slots=True)
class Serving:
    """`count` engines of `tp` GPUs each. Where some only prefill, all turns are prefilled there."""

    kind: str
    count: int
    tp: int = 1
    slots: int = 256
    role: EngineRole = EngineRole.ENGINE


@dataclass(frozen=True, slots=True)
class Bed:
    """One job on one testbed. `apart`: weights cross the slow link between clusters; `overlap`: beside the next step.
    `reward`: seconds of one, computed as its trajectory ends, or `rewarder`: a real one; `stage_s`: of a reward stage
    between a rollout and its training. `tail`: eta of tail batching. `kv_gb_per_s`: of the link between prefill and
    decode engines."""

    model: str
    tasks: tuple[Task, ...]
    rollout: tuple[Serving, ...]
    train: tuple[str, int]
    schedule: str = "sync_plus"
    alpha: int | None = None
    steps: int = 2
    apart: bool = False
    overlap: bool = False
    kv_gb_per_s: float = 50.0
    reward: Callable[[Trajectory], float] | None = None
    rewarder: Rewarder | None = None
    stage_s: float = 0.0
    tail: float | None = None
    faults: ResetTroubleSpec | None = None
    hosts: int = 1
    token_budget: int | None = None
    prefix_cache: bool = True
    seed: int = 0

    def under(self, schedule: str, alpha: int | None = None) -> Bed:
        return replace(self, schedule=schedule, alpha=alpha)


@dataclass(frozen=True, slots=True)
class Passed:
    """A training step: when its batch was complete and its version served, the wait for the batch, the training."""

    began: float
    ended: float
    waited_s: float
    train_s: float
    tokens: int
    lags: Counter[int]


@dataclass
class Played:
    """The results of a run."""

    bed: Bed
    since: float = 0.0
    """When it began."""
    passed: list[Passed] = field(default_factory=list)
    seconds: float = 0.0
    engines: list[ModelledEngine] = field(default_factory=list)
    charges: list[Charge] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    """Of each round of tail batching: short or long."""

    def step_s(self, skip: int = 0) -> float:
        """Mean seconds of a step, from one version to the next, without the first `skip`."""
        start = self.passed[skip - 1].ended if skip else self.since
        return (self.passed[-1].ended - start) / (len(self.passed) - skip)

    def rollouts_s(self) -> list[float]:
        """Seconds until each batch is complete, where nothing else goes on meanwhile."""
        ends = [self.since, *(p.ended for p in self.passed)]
        return [p.began - at for p, at in zip(self.passed, ends, strict=False)]

    def rollout_s(self) -> float:
        return mean(self.rollouts_s())

    def steps_s(self) -> list[float]:
        """Seconds of each step, from one version to the next."""
        ends = [self.since, *(p.ended for p in self.passed)]
        return [b - a for a, b in itertools.pairwise(ends)]

    def waiting(self, skip: int = 0) -> float:
        """The trainer's share of time in which it waits for a batch."""
        start = self.passed[skip - 1].ended if skip else self.since
        return sum(p.waited_s for p in self.passed[skip:]) / (self.passed[-1].ended - start)

    def train_s(self) -> float:
        return statistics.fmean(p.train_s for p in self.passed)

    def last(self, step: int) -> Charge:
        """The trajectory that the step waited for, where steps do not overlap."""
        start = self.passed[step - 1].ended if step else self.since
        return max((c for c in self.charges if start <= c.t0 and c.t1 <= self.passed[step].began), key=lambda c: c.t1)

    def aborted(self) -> int:
        """Trajectories that were ended as too old."""
        return sum(c.outcome == "stale" for c in self.charges)


def play(bed: Bed) -> Played:
    return virtual.run(played(bed))


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


async def played(bed: Bed) -> Played:
    """Several jobs may run on one loop."""
    loop, recorder = asyncio.get_running_loop(), MemoryRecorder()
    out = Played(bed, since=loop.time())
    gb = shape(bed.model).weight_bytes / 1e9
    pulls: dict[str, SharedLink] = {}
    transfer = WeightTransfer(
        gb, push=SharedLink(PUSH if bed.apart else RDMA), pull=lambda e: pulls.setdefault(e, SharedLink(RDMA))
    )
    kind, count = bed.train
    trainer = ModelledTrainer(
        TrainerSpeed(
            shape(bed.model), device(kind), count, mfu=TRAIN_MFU, seconds_per_step=TRAIN_FIXED_S + bed.stage_s
        ),
        transfer=transfer,
    )
    clocks = [ResourceClock(role="train", resource="trainer", recorder=recorder, clock=loop.time)]

    def stepped(done: StepDone) -> None:
        samples = [s for g in done.groups for s in g.samples]
        tokens = sum(mass_of(s.token_ids) for s in samples)
        lags = Counter(done.version - 1 - s.v0 for s in samples)
        out.passed.append(Passed(done.t0, done.t1, done.waited_s, done.report.seconds, tokens, lags))

    async def recover() -> None:
        return None

    control = ControlPlane(
        [_domain(bed, task) for task in bed.tasks],
        tokenizer=MassTokenizer(),
        rewarder=bed.rewarder or _Rewarder(bed.reward),
        trainer=trainer,
        journal=recorder,
        weights=MemoryWeights(),
        recorder=recorder,
        leases=Leases(recorder),
        trainer_clock=clocks[0],
        version=0,
        settings=_settings(bed),
        hooks=Hooks(recover, lambda _: None, step=stepped),
    )
    cross = SharedLink(LinkProfile(bed.kv_gb_per_s))
    fabric = KvFabric(lambda _from, _to: cross)
    for number, serving in enumerate(bed.rollout):
        for n in range(serving.count):
            name = f"{serving.kind}-{number}-{n}"
            clocks.append(ResourceClock(role="rollout", resource=name, recorder=recorder, clock=loop.time))
            out.engines.append(_join(control, transfer, fabric, bed, serving, clocks[-1]))
    await control.run(step=0, steps=bed.steps)
    for clock in clocks:
        clock.close()
    out.seconds = loop.time() - out.since
    out.charges = recorder.charges
    out.kinds = [e.subject for e in recorder.events if e.kind == "tail_round"]
    return out


def _settings(bed: Bed) -> ControlSettings:
    return ControlSettings(
        SchedulerSettings(
            seed=bed.seed,
            steps=bed.steps,
            rules=resolve(bed.schedule, bed.alpha),
            max_fault_rate=1.0,
        ),
        options=StrategySettings(
            tail=None if bed.tail is None else TailBatchingSpec(eta_prompts=bed.tail, eta_responses=bed.tail)
        ),
        token_budget=bed.token_budget,
        overlap=bed.overlap,
        router=RoutingPolicy(
            rule=PREFILL_RULES["remote" if any(s.role is EngineRole.PREFILL for s in bed.rollout) else "local"]
        ),
        waits=WaitLimits(FOREVER_S, FOREVER_S, FOREVER_S, FOREVER_S, 1 << 40),
        gateway=GatewayLimits(generate_s=FOREVER_S, engine_s=FOREVER_S, sync_s=FOREVER_S),
        train_s=FOREVER_S,
        publish_s=FOREVER_S,
        measure=mass_of,
    )


def _join(
    control: ControlPlane, transfer: WeightTransfer, fabric: KvFabric, bed: Bed, serving: Serving, clock: ResourceClock
) -> ModelledEngine:
    """Hand-offs are one-directional, as in vLLM 0.8 (producer, consumer): generated tokens are prefilled again."""
    name = clock.resource

    async def load(weights: WeightsRef) -> None:
        await transfer.load(name, weights)

    transfer.subscribe(name)
    model = steps(serving.kind, serving.tp, bed.model)
    limits = EngineLimits(slots=serving.slots)
    engine: ModelledEngine
    if serving.role is not EngineRole.ENGINE:
        engine = DisaggregatedEngine(name, model, fabric, limits=limits, load=load, returns=False)
    else:
        engine = (ModelledEngine if bed.prefix_cache else _Uncached)(name, model, limits=limits, load=load)
    shares = EngineShares(clock, clock=asyncio.get_running_loop().time)
    seat = EnginePlacement(serving.kind, serving.kind, serving.role, serving.tp)
    control.gateway.join(engine, version=0, shares=shares, seat=seat)
    return engine


def _domain(bed: Bed, task: Task) -> Domain:
    hosts = tuple(SimulatedHost(f"host-{n}") for n in range(bed.hosts))
    world = SimulatedDomain(
        GeneratedWorkload(task.shape, bed.seed, name=task.name),
        seed=bed.seed,
        name=task.name,
        faults=bed.faults,
        hosts=hosts,
    )
    return Domain(
        name=task.name,
        environment=world.make,
        quota=task.quota,
        group_size=task.group,
        max_turns=task.shape.most_turns,
        max_tokens=1 << 30,
    )


@dataclass(frozen=True, slots=True)
class _Rewarder:
    """Scores 1.0 after `seconds` of the trajectory."""

    seconds: Callable[[Trajectory], float] | None

    async def score(self, trajectory: Trajectory, deadline_s: float) -> Outcome:
        took = 0.0 if self.seconds is None else self.seconds(trajectory)
        if took:
            await asyncio.sleep(took)
        return Scored(1.0)


class _Uncached(ModelledEngine):
    """Keeps no KV between turns."""

    def _retain(self, job: SimulatedJob, tokens: int) -> None:
        return None
