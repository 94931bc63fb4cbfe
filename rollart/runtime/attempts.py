"""Attempts of group members: run, score, journal, retry, and charge each attempt with its outcome."""

from __future__ import annotations

import asyncio

from rollart.model import AbortReason, Purpose, TrainSample, TrajectoryId
from rollart.ports import FINISHED, Charge, Journal, Recorder, RunEvent
from rollart.runtime.barrier import FreeRunning
from rollart.runtime.faults import FaultMeter
from rollart.runtime.groups import ActiveRollouts, GroupRun, GroupTable
from rollart.runtime.redundant import RedundancyController, SelectionBiasReport
from rollart.runtime.rewarding import TrajectoryScorer
from rollart.runtime.sharing import DomainShareTracker
from rollart.runtime.trajectory import TrajectoryAborted, TrajectoryRunner, TrajectoryState

__all__ = ["AttemptRunner", "trajectory_charge"]


class AttemptRunner:
    """Each member has its own task, which runs `member`. It waits for its trajectory, its reward and the journal; a
    cancellation, with the reason in its `TrajectoryState`, ends it. `quiet` is set whenever a trajectory ends.

    Invariant: the journal holds no more samples of a group than the group needs, each once.
    """

    def __init__(
        self,
        groups: GroupTable,
        runner: TrajectoryRunner,
        rewarding: TrajectoryScorer,
        journal: Journal,
        recorder: Recorder,
        *,
        seed: int,
        stage: FreeRunning,
        faults: FaultMeter,
        redundant: RedundancyController,
        cancellations: SelectionBiasReport,
        shares: DomainShareTracker | None = None,
    ) -> None:
        self._shares = shares
        self._groups = groups
        self._runner = runner
        self._rewarding = rewarding
        self._journal = journal
        self._recorder = recorder
        self._seed = seed
        self._stage = stage
        self._faults = faults
        self._redundant = redundant
        self._cancellations = cancellations
        self.rolling = ActiveRollouts()
        self.quiet = asyncio.Event()
        self.closed = False

    async def member(self, run: GroupRun, member: int) -> None:
        """Run attempts of one group member until it is scored or its group has ended."""
        attempt = 0
        try:
            while not self.closed and self._groups.holds(run):
                attempt += 1
                live = self._live(run, member, attempt)
                run.live[member] = live
                try:
                    sample = await self._attempt(live)
                    run.live.pop(member, None)
                    await self._keep(run, member, sample, live)
                    return
                except TrajectoryAborted as aborted:
                    # An environment may convert the cancellation into its own error; the cancellation's reason counts.
                    ended = aborted if live.abort is None else TrajectoryAborted(live.abort)
                except asyncio.CancelledError:
                    if live.abort is None:
                        raise
                    ended = TrajectoryAborted(live.abort)
                if live.abort is not None:
                    _uncancel()
                if run.live.pop(member, None) is not None:  # otherwise its charge was written with its sample
                    self._recorder.charge(self._charge(live, str(ended.reason), None))
                if not self._again(run, member, live, ended, attempt):
                    return
        finally:
            self._groups.ended(run)

    def _again(self, run: GroupRun, member: int, live: TrajectoryState, ended: TrajectoryAborted, attempt: int) -> bool:
        """Handle an attempt that ended without a sample. True if the member starts another one."""
        reason, detail = ended.reason, ended.detail
        if reason in (AbortReason.REDUNDANT, AbortReason.DEFERRED):
            if reason is AbortReason.REDUNDANT:
                self._cancellations.cancelled(run, live)
            return False
        self._redundant.ended(run.domain, reason)
        self._faults.ended(reason, detail, incident=ended.incident)
        if reason is AbortReason.INFRA_FAULT:
            named = {"host": ended.host} if ended.host else {}
            self._event("infra_fault", live.id, detail=detail, attempt=attempt, **named)
            self._faults.check()
        if reason in (AbortReason.SHUTDOWN, AbortReason.GROUP_DROPPED) or self.closed:
            return False
        return self._groups.fail(run, member, reason, detail, ended.incident)

    async def _attempt(self, live: TrajectoryState) -> TrainSample:
        self._stage.join()
        self.rolling.begin(live)
        try:
            trajectory = await self._runner.run(live)
            await self._stage.turn()
            self.rolling.ask(live, asyncio.get_running_loop().time())
            return await self._rewarding.score(trajectory)
        finally:
            self.rolling.leave(live)
            self._stage.leave()
            self.quiet.set()

    async def _keep(self, run: GroupRun, member: int, sample: TrainSample, live: TrajectoryState) -> None:
        """Journal the sample, unless its group has enough samples."""
        self._faults.ended(None)
        self._redundant.ended(run.domain, None)
        if run.enough:
            self._recorder.charge(self._charge(live, str(AbortReason.REDUNDANT), sample))
            self._cancellations.cancelled(run, live, sample)
            return
        outcome = FINISHED if self._groups.holds(run) else str(run.ended or AbortReason.GROUP_DROPPED)
        run.writing[member] = sample.v0
        try:
            await self._journal.finish(sample, self._charge(live, outcome, sample))
        finally:
            del run.writing[member]
        await self._settle(run, member, sample, live)

    async def _settle(self, run: GroupRun, member: int, sample: TrainSample, live: TrajectoryState) -> None:
        """Count a durable sample, unless its group was dropped or a publish made the sample stale meanwhile."""
        if not self._groups.holds(run):
            if run.ended is AbortReason.REDUNDANT:
                self._cancellations.cancelled(run, live, sample)
            return
        if self._runner.stale(sample.v0):
            await self._journal.outdate(sample.id)
            raise TrajectoryAborted(AbortReason.STALE, "scored after its bound")
        self._cancellations.ended(run, live, sample)
        self._groups.finish(run, member, sample)

    def _live(self, run: GroupRun, member: int, attempt: int) -> TrajectoryState:
        suffix = "" if attempt == 1 else f"r{attempt}"
        return TrajectoryState(
            id=TrajectoryId(f"{run.id}.{member}{suffix}"),
            group=run.id,
            domain=run.domain,
            seed=run.seed,
            purpose=Purpose.TRAIN,
            run_seed=self._seed,
            started=asyncio.get_running_loop().time(),
            wish=run.wish(member),
        )

    def _event(self, kind: str, subject: str, **fields: str | int | float | None) -> None:
        self._recorder.event(RunEvent(asyncio.get_running_loop().time(), kind, subject, fields))

    def _charge(self, live: TrajectoryState, outcome: str, sample: TrainSample | None) -> Charge:
        if self._shares is not None:
            self._shares.spent(live.domain, live.engine_seconds)
        if sample is None:
            return trajectory_charge(live, outcome, None, None)
        return trajectory_charge(live, outcome, sample.score, sample.success)


def _uncancel() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


def trajectory_charge(live: TrajectoryState, outcome: str, score: float | None, success: bool | None) -> Charge:
    """The ledger row of a trajectory that ends now."""
    return Charge(
        live.id,
        domain=live.domain.name,
        outcome=outcome,
        v0=-1 if live.begun is None else live.begun,
        engine_seconds=live.engine_seconds,
        turns=len(live.turns),
        prompt_tokens=live.prompt_tokens,
        action_tokens=live.action_tokens,
        success=success,
        score=score,
        purpose=str(live.purpose),
        t0=live.started,
        t1=asyncio.get_running_loop().time(),
        first_tokens=live.first_tokens,
        reset_s=live.reset_seconds,
        env_s=live.env_seconds,
    )
