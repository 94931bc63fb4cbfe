"""Several simulations of one run: schedules in comparison, seeds in parallel processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing.queues import Queue
from pathlib import Path

from rollart.errors import RollartError, RunFailed, leaf_errors
from rollart.ledger.reader import LedgerReader
from rollart.report.rows import collect
from rollart.report.simulation import INFRA_FAULT, SimulationFigures, StepTimes, fault_cost, simulation_figures
from rollart.report.timeline import timeline
from rollart.settings.faults import FaultPlanSpec
from rollart.settings.resolve import Resolved
from rollart.sim.run import StepTrace
from rollart.tools.simulate import ReplayPlan, SimulationResult, simulate


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """Progress of a simulation: number of its task, trained steps, and virtual seconds."""

    task: int
    steps: int
    seconds: float


ProgressWatcher = Callable[[TaskProgress], None]


@dataclass(frozen=True, slots=True)
class SimulationTask:
    """One simulation. Its ledger remains in `keep`, or is removed if that is None."""

    resolved: Resolved
    schedule: str
    seed: int
    steps: int | None = None
    keep: Path | None = None
    fuzz: int | None = None
    timeline: bool = False
    """Include a timeline in the finding."""
    replay: ReplayPlan | None = None
    faults: FaultPlanSpec | None = None


def simulate_all(
    tasks: Sequence[SimulationTask],
    *,
    workers: int | None = None,
    on_done: Callable[[SimulationFigures], None] = lambda _: None,
    on_progress: ProgressWatcher = lambda _: None,
) -> list[SimulationFigures]:
    """Findings in the order of the tasks, computed by `workers` processes (one per core if None). With several
    processes `on_progress` is called on another thread.

    The first error ends all simulations and is raised; so do an interrupt, and SIGTERM, which the command turns into
    SystemExit. No process is left running, and no file is left except kept ledgers.
    """
    count = min(len(tasks), workers or os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(prefix="rollart-simulate-", ignore_cleanup_errors=True) as scratch:
        placed = [(task, task.keep or Path(scratch) / str(n)) for n, task in enumerate(tasks)]
        if count > 1:
            return _run_in_processes(placed, count, on_done, on_progress)
        found = []
        for n, (task, directory) in enumerate(placed):
            found.append(_run_task(task, directory, n, on_progress))
            on_done(found[-1])
        return found


def _run_in_processes(
    placed: Sequence[tuple[SimulationTask, Path]],
    count: int,
    on_done: Callable[[SimulationFigures], None],
    on_progress: ProgressWatcher,
) -> list[SimulationFigures]:
    spawn = multiprocessing.get_context("spawn")
    queue: Queue[TaskProgress | None] = spawn.Queue()

    def forward() -> None:
        while (progress := queue.get()) is not None:
            on_progress(progress)

    watcher = threading.Thread(target=forward, name="progress", daemon=True)
    watcher.start()
    with ProcessPoolExecutor(count, spawn, initializer=_init_worker, initargs=(queue,)) as pool:
        try:
            futures = [pool.submit(_run_task, *one, n) for n, one in enumerate(placed)]
            for future in as_completed(futures):
                on_done(future.result())
        except BrokenProcessPool:
            raise RunFailed("a simulation's process was killed", remedy="use fewer --workers, or more memory") from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.kill()
            raise
        finally:
            queue.cancel_join_thread()
            queue.put(None)
            watcher.join(JOIN_S)  # a process killed during a write leaves the queue half read
    return [future.result() for future in futures]


JOIN_S = 1.0
"""Longest wait for final messages of processes that have ended."""

_queue_progress: ProgressWatcher
"""In a simulation's process: sends progress to the parent."""


def _init_worker(queue: Queue[TaskProgress | None]) -> None:
    global _queue_progress
    # An interrupt at the terminal reaches every process; only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    queue.cancel_join_thread()
    _queue_progress = queue.put


def simulation_finding(done: SimulationResult, *, with_timeline: bool = False) -> SimulationFigures:
    """A simulation's figures, from its ledger."""
    with LedgerReader(done.directory) as reader:
        rows = collect(reader, done.directory.name)
        faults = None
        if done.observed_faults is not None:
            faults = fault_cost(rows, reader.events(INFRA_FAULT), done.observed_faults)
        drawn = replace(timeline(reader), label=f"{done.schedule}, seed {done.seed}") if with_timeline else None
    steps = [
        StepTimes(s.ended, s.waited_s, s.trained - s.began, s.ended - s.trained, s.trajectories, s.tokens)
        for s in done.steps
    ]
    lags: Counter[int] = sum((s.lags for s in done.steps), Counter())
    found = simulation_figures(rows, steps, lags, schedule=done.schedule, seed=done.seed, trace=done.trace)
    return replace(found, timeline=drawn, faults=faults)


def _run_task(
    task: SimulationTask, directory: Path, number: int, on_progress: ProgressWatcher | None = None
) -> SimulationFigures:
    """`on_progress` is None in a process of its own."""
    report, steps = on_progress or _queue_progress, 0

    def stepped(seen: StepTrace) -> None:
        nonlocal steps
        steps += 1
        report(TaskProgress(number, steps, seen.ended))

    gc.freeze()
    gc.set_threshold(200_000, 50, 1000)  # objects are long-lived: full collections find nothing and cost a third
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if task.keep is not None:
            (directory / "resolved.yaml").write_text(task.resolved.to_yaml())  # reports require it in a run's directory
        return simulation_finding(
            simulate(
                task.resolved,
                directory,
                schedule=task.schedule,
                seed=task.seed,
                steps=task.steps,
                fuzz=task.fuzz,
                replay=task.replay,
                faults=task.faults,
                on_step=stepped,
                on_time=lambda now: report(TaskProgress(number, steps, now)),
            ),
            with_timeline=task.timeline,
        )
    except BaseExceptionGroup as group:
        errors = list(leaf_errors(group))
        error = next((error for error in errors if isinstance(error, RollartError)), None)
        if error is None:
            raise RunFailed(f"the simulation failed: {errors[0]!r}") from None
        # Only this error is raised: groups do not survive pickling between processes.
        error.remedy = error.remedy.replace("then rollart launch --resume", "then simulate again")
        raise error from None
