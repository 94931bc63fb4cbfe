"""Several simulations of one run: schedules beside each other, seeds as processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from rollart.compose.simulate import Simulated, simulate
from rollart.errors import RollartError, RunFailed
from rollart.ledger.reader import Reader
from rollart.report.rows import collect
from rollart.report.simulation import Finding, StepTimes, finding
from rollart.spec.resolve import Resolved

__all__ = ["Task", "found_in", "simulate_all"]


@dataclass(frozen=True, slots=True)
class Task:
    """One simulation: its ledger stays in `keep`, or is removed if that is None."""

    resolved: Resolved
    schedule: str
    seed: int
    steps: int | None = None
    keep: Path | None = None
    fuzz: int | None = None


def simulate_all(
    tasks: Sequence[Task], *, workers: int | None = None, on_done: Callable[[Finding], None] = lambda _: None
) -> list[Finding]:
    """Findings in the order of the tasks; `workers` processes, as many as there are cores if None.

    The first error ends all of them, and is raised.
    """
    count = min(len(tasks), workers or os.cpu_count() or 1)
    if count <= 1:
        found = []
        for task in tasks:
            found.append(_one(task))
            on_done(found[-1])
        return found
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(_one, task): n for n, task in enumerate(tasks)}
        by_task: dict[int, Finding] = {}
        try:
            for future in as_completed(futures):
                by_task[futures[future]] = future.result()
                on_done(by_task[futures[future]])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [by_task[n] for n in range(len(tasks))]


def found_in(done: Simulated) -> Finding:
    """The figures of a simulation from its ledger."""
    with Reader(done.directory) as reader:
        rows = collect(reader, done.directory.name)
    steps = [
        StepTimes(s.ended, s.waited_s, s.train_s, s.ended - s.began - s.train_s, s.trajectories, s.tokens)
        for s in done.steps
    ]
    lags: Counter[int] = sum((s.lags for s in done.steps), Counter())
    return finding(rows, steps, lags, schedule=done.schedule, seed=done.seed, trace=done.trace)


def _one(task: Task) -> Finding:
    directory = Path(tempfile.mkdtemp(prefix="rollart-simulate-")) if task.keep is None else task.keep
    gc.freeze()
    gc.set_threshold(200_000, 50, 1000)  # a world of long-lived objects: full collections find nothing and cost a third
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if task.keep is not None:
            (directory / "resolved.yaml").write_text(task.resolved.to_yaml())  # what makes it a run for reports
        return found_in(
            simulate(task.resolved, directory, schedule=task.schedule, seed=task.seed, steps=task.steps, fuzz=task.fuzz)
        )
    except BaseExceptionGroup as group:
        raise _first(group) from None
    finally:
        if task.keep is None:
            shutil.rmtree(directory, ignore_errors=True)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of what ended a simulation, the product's own error; it crosses processes as itself."""
    ours = group.subgroup(RollartError)
    error: BaseException = group if ours is None else ours
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, RollartError) else RunFailed(f"the simulation failed: {error!r}")
