"""Evaluation: held-out episodes on the engines of the training run, while no training runs: greedy, and with several
samples per prompt at given temperatures."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

from rollart.control.domain import Domain
from rollart.control.rewarding import TrajectoryScorer
from rollart.control.scheduler import FaultMeter, trajectory_charge
from rollart.control.trajectory import TrajectoryAborted, TrajectoryRunner, TrajectoryState
from rollart.ledger.events import EVALUATION_SAMPLED
from rollart.model import GroupId, Purpose, Trajectory, TrajectoryId
from rollart.policy.host_slots import PlacementPriority, PlacementRequest
from rollart.ports import EVAL_SEEDS_FROM, FINISHED, Recorder, RunEvent
from rollart.settings.run import EvaluationSpec


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of `k` samples succeeds, from `n` ≥ k samples of which `c` succeeded: 1 − C(n − c,
    k) / C(n, k), unbiased (arXiv:2107.03374, eq. 1)."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


@dataclass(frozen=True, slots=True)
class SampledSuccess:
    """Success of several samples per prompt at a temperature: `mean` over the prompts of the share of successes, and
    the mean of pass@k by k over the prompts with at least k verdicts. None without a prompt."""

    temperature: float
    prompts: int
    mean: float | None
    passes: Mapping[int, float | None]

    @classmethod
    def of(cls, temperature: float, verdicts: Sequence[Sequence[bool]], passes: Sequence[int]) -> SampledSuccess:
        """`verdicts`: of each prompt, the known successes of its samples."""
        known = [(len(of), sum(of)) for of in verdicts if of]
        by_k = {k: [pass_at_k(n, c, k) for n, c in known if n >= k] for k in passes}
        return cls(temperature, len(known), _mean([c / n for n, c in known]), {k: _mean(v) for k, v in by_k.items()})


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Greedy success in one domain: of `episodes` that ended with a verdict, `successes` succeeded. `unknown` episodes
    ended without a verdict (their environment gives none); `faults` episodes ended in infrastructure faults."""

    episodes: int
    successes: int
    unknown: int
    faults: int
    sampled: tuple[SampledSuccess, ...] = ()

    @property
    def rate(self) -> float | None:
        """Share of successes among the episodes with a verdict; None if there are none: unknown is not zero."""
        return self.successes / self.episodes if self.episodes else None


@dataclass(eq=False)
class Evaluation:
    """Plays the held-out episodes of each domain, at most `concurrency` at a time. An episode that ends in a fault is
    retried once, then excluded from the success rate; its faults count towards the run's fault rate, as in training.
    Episodes of a domain with `success_at` are scored."""

    domains: Sequence[Domain]
    runner: TrajectoryRunner
    scorer: TrajectoryScorer
    recorder: Recorder
    faults: FaultMeter
    _: KW_ONLY
    seed: int

    async def run(
        self, label: str, version: int, settings: EvaluationSpec, concurrency: int = 128
    ) -> Mapping[str, EvaluationResult]:
        slots = asyncio.Semaphore(concurrency)
        plays = [
            _Play(domain, seed, temperature, number)
            for domain in self.domains
            for temperature in (None, *settings.temperatures)
            for seed in range(EVAL_SEEDS_FROM, EVAL_SEEDS_FROM + settings.episodes)
            for number in range(1 if temperature is None else settings.samples)
        ]

        async def one(play: _Play) -> None:
            async with slots:
                play.ended = await self._episode(label, play)

        async with asyncio.TaskGroup() as tasks:
            for play in plays:
                tasks.create_task(one(play), name=f"eval {play.name}")
        results = {}
        for domain in self.domains:
            mine = [play for play in plays if play.domain is domain]
            result = results[domain.name] = _result(mine, settings)
            fields: dict[str, str | int | float | None] = {"label": label, "version": version}
            fields |= {name: getattr(result, name) for name in ("episodes", "successes", "unknown", "faults")}
            self._record("evaluation", domain.name, fields | {"success": result.rate})
            for sampled in result.sampled:
                fields = {"label": label, "version": version, "temperature": sampled.temperature}
                fields |= {"prompts": sampled.prompts, f"avg@{settings.samples}": sampled.mean}
                fields |= {f"pass@{k}": value for k, value in sampled.passes.items()}
                self._record(EVALUATION_SAMPLED, domain.name, fields)
        return results

    def _record(self, kind: str, domain: str, fields: Mapping[str, str | int | float | None]) -> None:
        self.recorder.event(RunEvent(asyncio.get_running_loop().time(), kind, domain, fields))

    async def _episode(self, label: str, play: _Play) -> Trajectory | None:
        domain, name = play.domain, f"eval-{label}-{play.name}"
        if play.temperature is not None:
            domain = replace(domain, temperature=play.temperature)
        for attempt in (1, 2):
            state = TrajectoryState(
                id=TrajectoryId(f"{name}.{attempt}"),
                group=GroupId(name),
                domain=domain,
                seed=play.seed,
                purpose=Purpose.EVAL,
                run_seed=self.seed,
                started=asyncio.get_running_loop().time(),
                slot_request=PlacementRequest(PlacementPriority.EVALUATE),
                sampled=play.temperature is not None,
            )
            try:
                trajectory = await self.runner.run(state)
                if trajectory.success is None and domain.success_at is not None:
                    trajectory = replace(trajectory, success=(await self.scorer.score(trajectory)).success)
            except TrajectoryAborted as aborted:
                self.recorder.charge(trajectory_charge(state, str(aborted.reason), None, None))
                self.faults.ended(aborted.reason, aborted.detail, incident=aborted.incident)
                self.faults.check()
                continue
            self.recorder.charge(trajectory_charge(state, FINISHED, None, trajectory.success))
            self.faults.ended(None)
            return trajectory
        return None


@dataclass(eq=False, slots=True)
class _Play:
    """An episode: its prompt is that of `seed`. `temperature` None is greedy."""

    domain: Domain
    seed: int
    temperature: float | None
    number: int
    ended: Trajectory | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        sample = "" if self.temperature is None else f"-t{self.temperature:g}-{self.number}"
        return f"{self.domain.name}-{self.seed}{sample}"


def _result(plays: Sequence[_Play], settings: EvaluationSpec) -> EvaluationResult:
    """Of one domain."""
    ended = [play.ended for play in plays if play.temperature is None]
    whole = [t for t in ended if t is not None]
    known = [t.success for t in whole if t.success is not None]
    sampled = []
    for temperature in settings.temperatures:
        verdicts: dict[int, list[bool]] = {}
        for play in plays:
            if play.temperature == temperature and play.ended is not None and play.ended.success is not None:
                verdicts.setdefault(play.seed, []).append(play.ended.success)
        sampled.append(SampledSuccess.of(temperature, [*verdicts.values()], settings.passes))
    return EvaluationResult(
        len(known), sum(known), len(whole) - len(known), len(ended) - len(whole), sampled=tuple(sampled)
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
