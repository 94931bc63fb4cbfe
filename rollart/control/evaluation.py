"""Evaluation: held-out episodes with greedy sampling, on the engines of the training run, while no training runs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass

from rollart.control.domain import Domain
from rollart.control.scheduler import FaultMeter, trajectory_charge
from rollart.control.trajectory import TrajectoryAborted, TrajectoryRunner, TrajectoryState
from rollart.model import GroupId, Purpose, Trajectory, TrajectoryId
from rollart.policy.host_slots import PlacementPriority, PlacementRequest
from rollart.ports import EVAL_SEEDS_FROM, FINISHED, Recorder, RunEvent


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Success in one domain: of `episodes` that ended with a verdict, `successes` succeeded. `unknown` episodes ended
    without a verdict (their environment gives none); `faults` episodes ended in infrastructure faults."""

    episodes: int
    successes: int
    unknown: int
    faults: int

    @property
    def rate(self) -> float | None:
        """Share of successes among the episodes with a verdict; None if there are none: unknown is not zero."""
        return self.successes / self.episodes if self.episodes else None


@dataclass(eq=False)
class Evaluation:
    """Runs `episodes` episodes of each domain, at most `concurrency` at a time. An episode that ends in a fault is
    retried once, then excluded from the success rate; its faults count towards the run's fault rate, as in training."""

    domains: Sequence[Domain]
    runner: TrajectoryRunner
    recorder: Recorder
    faults: FaultMeter
    _: KW_ONLY
    seed: int

    async def run(
        self, label: str, version: int, episodes: int, concurrency: int = 128
    ) -> Mapping[str, EvaluationResult]:
        slots = asyncio.Semaphore(concurrency)
        outcomes: dict[str, list[Trajectory | None]] = {d.name: [] for d in self.domains}

        async def one(domain: Domain, seed: int) -> None:
            async with slots:
                outcomes[domain.name].append(await self._episode(label, domain, seed))

        async with asyncio.TaskGroup() as tasks:
            for domain in self.domains:
                for seed in range(EVAL_SEEDS_FROM, EVAL_SEEDS_FROM + episodes):
                    tasks.create_task(one(domain, seed), name=f"eval {domain.name} {seed}")
        results = {}
        for name, ended in outcomes.items():
            whole = [t for t in ended if t is not None]
            known = [t.success for t in whole if t.success is not None]
            results[name] = EvaluationResult(len(known), sum(known), len(whole) - len(known), len(ended) - len(whole))
            fields = {"label": label, "version": version, **asdict(results[name]), "success": results[name].rate}
            self.recorder.event(RunEvent(asyncio.get_running_loop().time(), "evaluation", name, fields))
        return results

    async def _episode(self, label: str, domain: Domain, seed: int) -> Trajectory | None:
        for attempt in (1, 2):
            state = TrajectoryState(
                id=TrajectoryId(f"eval-{label}-{domain.name}-{seed}.{attempt}"),
                group=GroupId(f"eval-{label}-{domain.name}-{seed}"),
                domain=domain,
                seed=seed,
                purpose=Purpose.EVAL,
                run_seed=self.seed,
                started=asyncio.get_running_loop().time(),
                slot_request=PlacementRequest(PlacementPriority.EVALUATE),
            )
            try:
                trajectory = await self.runner.run(state)
            except TrajectoryAborted as aborted:
                self.recorder.charge(trajectory_charge(state, str(aborted.reason), None, None))
                self.faults.ended(aborted.reason, aborted.detail, incident=aborted.incident)
                self.faults.check()
                continue
            self.recorder.charge(trajectory_charge(state, FINISHED, None, trajectory.success))
            self.faults.ended(None)
            return trajectory
        return None
