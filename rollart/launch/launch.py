"""`launch`: start the parts of a resolved run, run it, and stop every one of them again."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from rollart import __version__, controller_loop
from rollart.architecture import stamp_of
from rollart.controller_loop import ControllerLoop, LoopWatchdog
from rollart.errors import (
    Interrupted,
    RollartError,
    RunFailed,
    StorageFailed,
    VersionDamaged,
    leaf_errors,
)
from rollart.exports.process import exporting
from rollart.launch.clusters import follow_nodes
from rollart.launch.hosts import host_count_keepers
from rollart.launch.plan import RunStart, resolve_start, work_events
from rollart.launch.preflight import decide_workers, refuse_unlaunchable
from rollart.launch.prepare import fetch_model, produce_artefacts, warm_start_samples
from rollart.launch.resume import forked_version, refuse_changed
from rollart.launch.rewards import build_rewards, check_releases, draw_releases
from rollart.launch.weight_store import SharedWeightStore
from rollart.launch.wiring import RunContext, open_run
from rollart.leases import Expiry
from rollart.ledger.intervals import ResourceState
from rollart.model import AbortReason, WeightsRef
from rollart.orphans import kill_at_end
from rollart.ports import Recovered, RunEvent
from rollart.settings.planning import pinned
from rollart.settings.resolve import Resolved
from rollart.settings.run import ForkSpec
from rollart.supervise.engines import EngineMeter

ProgressCallback = Callable[[RunEvent], None]

ORPHANS_S = 3.0
"""Seconds in which parts can clean up and end by themselves after the controller has died."""


def launch(
    resolved: Resolved,
    *,
    run_dir: str | Path,
    resume: bool = False,
    on_progress: ProgressCallback | None = None,
    since_s: float = 0.0,
) -> None:
    """Run to the end, in this process. Blocks; `on_progress` is called on the loop for each event worth a line. The
    run's ledger begins `since_s` seconds ago, for example at the start of a process that exists for this run alone.

    Errors: `RollartError` with its exit code; SIGINT, SIGTERM and SIGHUP end as `Interrupted`. In every case all child
    processes are stopped before it returns, and finished work is in the run directory. A second signal ends this
    process and its children at once.
    """
    directory = Path(run_dir).resolve()
    try:
        controller_loop.run(_main(resolved, directory, resume, on_progress or (lambda _: None), since_s))
    except KeyboardInterrupt:
        raise _interrupted(directory) from None
    except BaseExceptionGroup as group:
        raise _user_error(group, directory) from None
    except OSError as error:
        raise StorageFailed(
            f"{error.strerror or error}: {error.filename or directory}", remedy="see rollart doctor"
        ) from None


async def _main(resolved: Resolved, directory: Path, resume: bool, progress: ProgressCallback, since_s: float) -> None:
    main, loop = asyncio.current_task(), asyncio.get_running_loop()
    began = loop.time() - since_s
    assert main is not None
    assert isinstance(loop, ControllerLoop)
    stopped = asyncio.Event()

    def stop() -> None:
        stopped.set()
        main.cancel()

    def end(why: str, interrupted: bool) -> NoReturn:
        error = _interrupted(directory) if interrupted else RunFailed(why, remedy="rollart launch --resume continues")
        late = f" ({why})" if interrupted and why else ""
        with contextlib.suppress(OSError):  # stderr may be closed
            os.write(2, f"rollart: {error.message}{late}\n  remedy: {error.remedy}\n".encode())
        os._exit(error.exit_code)

    def report_pause(holder: str, seconds: float) -> None:
        progress(RunEvent(loop.time(), "controller_held", "run", {"holder": holder, "seconds": seconds}))

    watch = LoopWatchdog(loop, stop=stop, say=report_pause, end=end, limit_s=resolved.run.leases.env_step_s)
    try:
        with watch.watching():
            await _run(resolved, directory, resume, progress, began)
    except BaseException:
        if stopped.is_set():  # an interrupt takes precedence over errors of the shutdown
            raise _interrupted(directory) from None
        raise


async def _run(resolved: Resolved, directory: Path, resume: bool, progress: ProgressCallback, began: float) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    kill_at_end(ORPHANS_S)
    if resolved.base not in sys.path:
        # Environments and functions that a spec names lie in its directory.
        sys.path.insert(0, resolved.base)
    resolved = await draw_releases(resolved, directory)
    check_releases(resolved, directory)
    start = await _checked_start(pinned(resolved), directory, resume, progress)
    resolved = start.resolved
    async with (
        exporting(resolved.run.telemetry, directory, progress),
        open_run(start, directory, progress, began=began) as context,
    ):
        recovered = await context.ledger.recover() if resume else None
        async with asyncio.TaskGroup() as background, contextlib.AsyncExitStack() as ending:
            ending.callback(context.ledger.stopping)
            watchers = list[asyncio.Task[None]]()

            def watch(work: Coroutine[Any, Any, None], name: str) -> None:
                watchers.append(background.create_task(work, name=name))

            for name, work in context.watchers():
                watch(work, name)
            _record_start(context, resolved, directory, resume)
            fleets = [fleet for fleet in (context.environments, context.functions) if fleet is not None]
            for fleet in fleets:
                watch(fleet.run(), "hosts")
            if start.moved or start.why_not:
                context.emit("plan_resumed" if start.moved else "plan_from_spec", "fleet", why=start.why_not or None)
            artefacts = background.create_task(_produce_artefacts(resolved, directory, context), name="artefacts")
            await context.trainer.start()
            context.trainer_clock.enter(ResourceState.IDLE)
            if recovered is None:
                _refuse_lost_ledger(directory, context)
                weights = await context.trainer.supervised(lambda: _first_version(resolved, context))
                step = 0
            else:
                weights, recovered = await _resume(resolved, directory, context, recovered)
                step = recovered.step
            context.begin(weights)
            if context.nodes is not None:
                watch(follow_nodes(context.runtime, resolved, context.nodes), "nodes")
            # Concurrently with the functions: wrong credentials then fail before engines have cost much.
            engines = background.create_task(context.supervisor.begin(context.site.parts), name="engines")
            async with context.open_functions(build_rewards(resolved, await artefacts, directory)):
                await engines
                for fleet in fleets:
                    await fleet.ready()
                for keeper in host_count_keepers(
                    context.wanted, context.nodes, context.environments, context.functions, context.ledger
                ):
                    watch(keeper.run(), "hosts' nodes")
                meter = EngineMeter(context.control.gateway.stats, context.ledger)
                watch(meter.run(), "engines' counters")
                await context.control.run(
                    step=step,
                    steps=resolved.run.steps,
                    recovered=recovered,
                    supervisor=context.supervisor,
                    parts=context.site.parts,
                )
                await meter.look()
            for watcher in watchers:
                watcher.cancel()
        context.finish()


def _record_start(context: RunContext, resolved: Resolved, directory: Path, resume: bool) -> None:
    context.emit("starting", "run", directory=str(directory), resume=resume, rollart=__version__)
    for event in work_events(resolved, asyncio.get_running_loop().time()):
        context.ledger.event(event)


async def _checked_start(resolved: Resolved, directory: Path, resume: bool, progress: ProgressCallback) -> RunStart:
    refuse_unlaunchable(resolved, begun=resume)
    await fetch_model(resolved, directory, progress)
    resolved = decide_workers(resolved)
    if not resume:
        return RunStart(resolved)
    refuse_changed(resolved, directory)
    return resolve_start(resolved, directory)


async def _resume(
    resolved: Resolved, directory: Path, context: RunContext, recovered: Recovered
) -> tuple[WeightsRef, Recovered]:
    """The version to continue from, restored by the trainer and available to engines, and the recovered state."""
    weights, damage = await _restore_newest(directory, context, recovered)
    if weights.version < recovered.version:
        newest, samples = recovered.version, await context.ledger.roll_back(weights.version)
        found = await context.ledger.recover()
        assert found is not None, "it was rolled back to a committed version"
        recovered = replace(found, damaged=recovered.damaged)
        context.emit("version_lost", f"v{newest}", version=weights.version, samples=samples, why=damage)
    if isinstance(context.weights, SharedWeightStore):  # its last push may be incomplete
        async with context.leases.hold("launch", "the store", resolved.run.leases.publish_s, Expiry.FAIL_RUN):
            await context.weights.push(weights)
    for group, why in recovered.damaged.items():
        context.emit("group_dropped", group, reason=str(AbortReason.INFRA_FAULT), detail=why)
    context.emit("resumed", "run", step=recovered.step, version=weights.version, samples=len(recovered.samples))
    return weights, recovered


async def _restore_newest(directory: Path, context: RunContext, recovered: Recovered) -> tuple[WeightsRef, str]:
    """The newest version that the trainer can restore, and the damage of the newest version if an older one is used.
    Errors leave the ledger unchanged."""
    damage = ""
    older = [version for version in context.weights.versions() if version < recovered.version]
    for version in (recovered.version, *reversed(older)):
        path = context.weights.path(version)
        weights = WeightsRef(version, path, stamp=stamp_of(path))
        if not context.weights.complete(version):
            damage = damage or f"{path} is not complete on disk"
            continue
        if recovered.stamps.get(version, weights.stamp) != weights.stamp:
            damage = damage or f"{path} holds other weights than were published as v{version}"
            continue
        try:
            await context.trainer.supervised(functools.partial(context.trainer.restore, weights))
        except VersionDamaged as error:
            damage = damage or error.message
        else:
            return weights, damage
    raise RunFailed(
        f"no version of {directory} can be restored: {damage}",
        remedy="restore the newest version's directory from a backup, or start a new run; its ledger and reports stay "
        "readable",
    )


def _refuse_lost_ledger(directory: Path, context: RunContext) -> None:
    """A run without a committed version has written version 0 at most: a later version proves that its ledger was
    lost."""
    newest = max(context.weights.versions(), default=0)
    if newest > 0:
        raise StorageFailed(
            f"the ledger of {directory} knows of no version, but v{newest} of its weights is there: the ledger, or its "
            "-wal file, was lost (rule: a run resumes from its ledger)",
            remedy="restore ledger.sqlite and ledger.sqlite-wal from a backup, or start a new run",
        )


async def _first_version(resolved: Resolved, context: RunContext) -> WeightsRef:
    """Version 0: another run's weights, or the initial ones, after the warm start if there is one."""
    limits, fork = resolved.run.leases, resolved.run.fork
    if fork is not None:
        await _load_fork(resolved, fork, context)
    else:
        await _warm_start(resolved, context)
    context.trainer_clock.enter(ResourceState.SYNC)
    async with context.leases.hold("launch", "the first version", limits.publish_s, Expiry.FAIL_RUN):
        weights = await context.trainer.publish(0)
        await context.ledger.commit(version=0, step=0, consumed=[], metrics={}, stamp=weights.stamp)
    context.trainer_clock.enter(ResourceState.IDLE)
    return weights


async def _load_fork(resolved: Resolved, fork: ForkSpec, context: RunContext) -> None:
    weights = forked_version(resolved)
    assert weights is not None, "the run is a fork"
    await context.trainer.restore(weights, optimizer=fork.optimizer)
    context.emit("forked", fork.run, version=fork.version, optimizer=fork.optimizer, stamp=weights.stamp)


async def _warm_start(resolved: Resolved, context: RunContext) -> None:
    warm = resolved.run.warm_start
    if warm is not None and context.environments is not None:
        await context.environments.ready()
    chats = {domain.name: domain.chat for domain in context.domains}
    samples = await warm_start_samples(resolved, context.tokenizer, context.environments, context.leases, chats)
    if samples and warm is not None:
        context.trainer_clock.enter(ResourceState.BUSY, "warm_start")
        async with context.leases.hold("launch", "the warm start", resolved.run.leases.train_s, Expiry.FAIL_RUN):
            report = await context.trainer.imitate(samples, warm.batches)
        context.emit("warm_start", "training", seconds=report.seconds, tokens=report.trained_tokens, **report.metrics)


async def _produce_artefacts(resolved: Resolved, directory: Path, context: RunContext) -> dict[str, list[str]]:
    async with context.leases.hold(
        "launch", "artefacts of the functions", resolved.run.leases.train_s, Expiry.FAIL_RUN
    ):
        return await produce_artefacts(resolved, directory)


def _interrupted(directory: Path) -> Interrupted:
    return Interrupted(
        "interrupted; every finished trajectory is kept", remedy=f"rollart launch --resume {os.path.relpath(directory)}"
    )


def _user_error(group: BaseExceptionGroup[BaseException], directory: Path) -> BaseException:
    """The error to show: the first `RollartError`, else the first error that is not a cancellation."""
    leaves = list(leaf_errors(group))
    for error in leaves:
        if isinstance(error, RollartError):
            return error
    for error in leaves:
        if isinstance(error, KeyboardInterrupt):
            return _interrupted(directory)
        if isinstance(error, OSError):
            return StorageFailed(
                f"{error.strerror or error}: {error.filename or directory}",
                remedy="look at the disk and at the run's directory, then rollart launch --resume",
            )
    return leaves[0]
