"""The scheduler: admits groups, runs their trajectories, hands complete groups to the buffer, and follows publishes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rollart.errors import SpecError
from rollart.model import AbortReason, Group, GroupId, Purpose, TrainSample, TrajectoryId
from rollart.policy.admission import AdmissionWindow, DomainQuota
from rollart.policy.release import SlotLedger
from rollart.policy.schedules import Admission, Schedule
from rollart.policy.schedules import Rewarding as RewardStage
from rollart.ports import Journal, Recorder, Recovered, RunEvent
from rollart.runtime.barrier import FreeRunning, TurnBarrier
from rollart.runtime.buffer import SampleBuffer
from rollart.runtime.domain import Domain, training_seed
from rollart.runtime.faults import FaultMeter
from rollart.runtime.groups import GroupRun, GroupTable, Rolling
from rollart.runtime.rewarding import Rewarding
from rollart.runtime.trajectory import Aborted, Live, TrajectoryRunner

__all__ = ["Scheduler", "SchedulerSettings"]


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """`rules` say how far rollout runs ahead and what becomes of what is too old; `steps` training steps in all;
    `max_attempts` per group before its prompt is given up; faults above `max_fault_rate` end the run once there are
    `min_faults`."""

    seed: int
    steps: int
    rules: Schedule
    max_attempts: int = 3
    max_fault_rate: float = 0.05
    min_faults: int = 20


@dataclass(slots=True)
class _Progress:
    """Counts per domain that survive a resume."""

    drawn: dict[str, int] = field(default_factory=dict)
    consumed: dict[str, int] = field(default_factory=dict)


class Scheduler:
    """Owns admission and the tasks of all training trajectories.

    `run` waits for slots, which are freed by `published` (consumed samples) and by drops; it is unblocked by either.
    `published` is called while every engine stands still, synchronously. Invariants: samples that wait or run never
    exceed (alpha + 1) x batch (I4); a group enters the buffer whole, once (I6); none older than alpha
    runs on (I2).
    """

    def __init__(
        self,
        domains: Sequence[Domain],
        runner: TrajectoryRunner,
        rewarding: Rewarding,
        buffer: SampleBuffer,
        journal: Journal,
        recorder: Recorder,
        *,
        settings: SchedulerSettings,
    ) -> None:
        self._domains = {d.name: d for d in domains}
        self._runner = runner
        self._rewarding = rewarding
        self._buffer = buffer
        self._journal = journal
        self._recorder = recorder
        self._settings = settings
        self._rules = settings.rules
        self._bound = settings.rules.bound
        quotas = tuple(DomainQuota(d.name, d.quota, d.group_size) for d in domains)
        self._window = AdmissionWindow(quotas, settings.rules.alpha if self._rules.windowed else 0)
        self._slots = SlotLedger()
        # Rewards as a stage of their own wait until every trajectory of the batch has ended.
        self._stage = TurnBarrier() if self._rules.rewarding is RewardStage.INLINE else FreeRunning()
        self._quiet = asyncio.Event()
        self._groups = GroupTable(
            bound=self._bound,
            max_attempts=settings.max_attempts,
            on_complete=buffer.add,
            on_drop=self._dropped,
        )
        self._progress = _Progress(dict.fromkeys(self._domains, 0), dict.fromkeys(self._domains, 0))
        self._freed = asyncio.Event()
        self._closed = False
        self._drops: list[tuple[GroupId, str]] = []
        self.rolling = Rolling()
        self.faults = FaultMeter(settings.max_fault_rate, settings.min_faults)

    async def run(self, version: Callable[[], int], recovered: Recovered | None = None) -> None:
        """Admit groups until `close`; then abort what still runs. The last step is given no more than its batch."""
        async with asyncio.TaskGroup() as tasks:
            if recovered is not None:
                await self._readmit(tasks, recovered, version())
            while not self._closed:
                await self._write_drops()
                fresh = self._reserve()
                if fresh:
                    # Together: one transaction of the journal, not one per group.
                    await asyncio.gather(*(self._journal.admit(g, d.name, seed) for g, d, seed in fresh))
                    for group_id, domain, seed in fresh:
                        self._start(tasks, self._groups.open(group_id, domain, seed), range(domain.group_size))
                elif not self._closed and not self._drops:
                    # Nothing is awaited since they were looked at: no close and no drop can fall between.
                    self._freed.clear()
                    await self._freed.wait()
            self._groups.cancel_all(AbortReason.SHUTDOWN)
        await self._write_drops()

    def close(self) -> None:
        """Training is over: nothing more is admitted."""
        self._closed = True
        self._freed.set()

    def published(self, version: int, consumed: Sequence[Group]) -> None:
        """A version is current: free the slots of what it consumed, abort what is now too old."""
        for group in consumed:
            self._progress.consumed[group.domain] += len(group.samples)
            self._slots.release(group.id)
        self._groups.published(version, self._rules.judged)
        self._evict(version)
        self._buffer.published()
        self._freed.set()

    def refused(self, groups: Sequence[Group], detail: str) -> None:
        """The trainer will not train these: give them up, free their slots."""
        for group in groups:
            self._drop_event(group.id, self._domains[group.domain], AbortReason.REFUSED, detail)

    def taken(self, groups: Sequence[Group]) -> None:
        """They are in training: under a schedule of whole batches the next one may start."""
        if self._rules.admission is Admission.NEXT_BATCH:
            for group in groups:
                self._slots.train(group.id)
            self._freed.set()

    async def drained(self) -> None:
        """Returns when weights may change: at once, or when no trajectory is under way (whole batches end under the
        weights that they began with)."""
        while not self._rules.may_publish(running=self._groups.live()):
            self._quiet.clear()
            await self._quiet.wait()

    def outstanding(self) -> Mapping[str, int]:
        """Samples per domain that hold a slot: running, waiting in the buffer, or in training."""
        return dict(self._slots.outstanding)

    def live(self) -> int:
        return self._groups.live()

    def _evict(self, version: int) -> None:
        if not self._rules.drops_stale:
            return
        for group in self._buffer.stale(version):
            self._buffer.discard(group.id)
            domain = self._domains[group.domain]
            self._drop_event(group.id, domain, AbortReason.STALE, f"waited in the buffer past v{version}")

    def _remaining(self) -> dict[str, int]:
        """Samples per domain that the run may still start: the last step needs no more than its batch."""
        return {
            d.name: self._settings.steps * d.quota
            - self._progress.consumed[d.name]
            - self._slots.outstanding.get(d.name, 0)
            for d in self._domains.values()
        }

    def _reserve(self) -> list[tuple[GroupId, Domain, int]]:
        """Take slots for every group that may start now: its id, domain and seed."""
        fresh = []
        while (name := self._window.next_domain(self._slots.ahead, self._remaining())) is not None:
            domain, index = self._domains[name], self._progress.drawn[name]
            self._progress.drawn[name] = index + 1
            group_id = GroupId(f"{name}-{index}")
            self._slots.admit(group_id, name, domain.group_size)
            fresh.append((group_id, domain, training_seed(self._settings.seed, name, index)))
        return fresh

    async def _readmit(self, tasks: asyncio.TaskGroup, recovered: Recovered, version: int) -> None:
        """Continue a crashed run: complete groups go to the buffer, incomplete ones run their missing members."""
        self._progress.drawn.update({k: v for k, v in recovered.seeds_drawn.items() if k in self._domains})
        for name, domain in self._domains.items():
            self._progress.consumed[name] = recovered.step * domain.quota
        by_group: dict[str, list[TrainSample]] = {}
        for sample in recovered.samples:
            by_group.setdefault(sample.group, []).append(sample)
        for group_id, name, seed in recovered.pending:
            if name not in self._domains:
                raise SpecError(
                    f"the run to resume has unfinished groups of domain '{name}', which the spec no longer has",
                    remedy="resume without renaming or removing domains",
                )
            domain = self._domains[name]
            self._slots.admit(group_id, name, domain.group_size)
            run = self._groups.open(GroupId(group_id), domain, seed)
            for sample in by_group.get(group_id, []):
                member = member_index(sample.id)
                if member not in run.samples and not self._bound.stale(sample.v0, version):
                    self._groups.finish(run, member, sample)
            self._start(tasks, run, [m for m in range(domain.group_size) if m not in run.samples])

    def _start(self, tasks: asyncio.TaskGroup, run: GroupRun, members: Sequence[int]) -> None:
        for member in members:
            name = f"{run.id}.{member}"
            run.tasks[member] = tasks.create_task(self._member(run, member), name=name)

    async def _member(self, run: GroupRun, member: int) -> None:
        try:
            await self._attempts(run, member)
        finally:
            self._groups.ended(run)

    async def _attempts(self, run: GroupRun, member: int) -> None:
        """Attempts of one member until it is scored or its group is gone."""
        attempt = 0
        while not self._closed:
            attempt += 1
            live = self._live(run, member, attempt)
            run.live[member] = live
            try:
                sample = await self._attempt(live)
                run.live.pop(member, None)
                await self._journal.finish(sample)
                self._settle(run, member, sample, live)
                return
            except Aborted as aborted:
                # An environment may turn our cancellation into an error of its own: it was ours all the same.
                reason, detail = (aborted.reason, aborted.detail) if live.abort is None else (live.abort, "")
            except asyncio.CancelledError:
                if live.abort is None:
                    raise
                reason, detail = live.abort, ""
            if live.abort is not None:
                _uncancel()
            run.live.pop(member, None)
            self._charge(live, str(reason), None)
            self.faults.ended(reason, detail)
            if reason is AbortReason.INFRA_FAULT:
                self._event("infra_fault", live.id, detail=detail, attempt=attempt)
                self.faults.check()
            if reason in (AbortReason.SHUTDOWN, AbortReason.GROUP_DROPPED) or self._closed:
                return
            if not self._groups.fail(run, member, reason, detail):
                return

    async def _attempt(self, live: Live) -> TrainSample:
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
            self._quiet.set()

    def _settle(self, run: GroupRun, member: int, sample: TrainSample, live: Live) -> None:
        """The sample is durable: it counts, unless its group was dropped or a publish made it stale meanwhile."""
        self.faults.ended(None)
        if not self._groups.holds(run):
            self._charge(live, str(AbortReason.GROUP_DROPPED), sample)
            return
        if self._runner.stale(sample.v0):
            raise Aborted(AbortReason.STALE, "scored after its bound")
        self._charge(live, "finished", sample)
        self._groups.finish(run, member, sample)
        self._freed.set()

    def _live(self, run: GroupRun, member: int, attempt: int) -> Live:
        suffix = "" if attempt == 1 else f"r{attempt}"
        return Live(
            id=TrajectoryId(f"{run.id}.{member}{suffix}"),
            group=run.id,
            domain=run.domain,
            seed=run.seed,
            purpose=Purpose.TRAIN,
            run_seed=self._settings.seed,
            started=asyncio.get_running_loop().time(),
        )

    def _dropped(self, run: GroupRun, reason: AbortReason, detail: str) -> None:
        self._drop_event(run.id, run.domain, reason, detail)

    def _drop_event(self, group_id: GroupId, domain: Domain, reason: AbortReason, detail: str) -> None:
        self._slots.release(group_id)
        self._drops.append((group_id, str(reason)))
        self._event("group_dropped", group_id, domain=domain.name, reason=str(reason), detail=detail)
        self._freed.set()

    async def _write_drops(self) -> None:
        drops, self._drops = self._drops, []
        await asyncio.gather(*(self._journal.drop(group_id, reason) for group_id, reason in drops))

    def _event(self, kind: str, subject: str, **fields: str | int | float | None) -> None:
        self._recorder.event(RunEvent(asyncio.get_running_loop().time(), kind, subject, fields))

    def _charge(self, live: Live, outcome: str, sample: TrainSample | None) -> None:
        if sample is None:
            charge(self._recorder, live, outcome, None, None)
        else:
            charge(self._recorder, live, outcome, sample.score, sample.success)


def _uncancel() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


def charge(recorder: Recorder, live: Live, outcome: str, score: float | None, success: bool | None) -> None:
    """One ledger row for a trajectory that ended, whatever became of it."""
    recorder.charge(
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
        first_tokens=len(live.segments[0].token_ids) if live.segments else 0,
        reset_s=live.reset_seconds,
        env_s=live.env_seconds,
    )


def member_index(sample: TrajectoryId) -> int:
    """The member of its group that a trajectory id names: 'lake-12.3r2' is member 3."""
    return int(sample.rpartition(".")[2].partition("r")[0])
