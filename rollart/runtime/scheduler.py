"""The scheduler: admits groups, runs their trajectories, hands complete groups to the buffer, and follows publishes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from rollart.errors import SpecError
from rollart.model import AbortReason, Group, GroupId, TrainSample, TrajectoryId
from rollart.policy.redundancy import Redundancy
from rollart.policy.replication import FilterSettings
from rollart.policy.schedules import Admission, Schedule
from rollart.policy.schedules import RewardTiming as RewardStage
from rollart.policy.tailbatch import TailSettings
from rollart.ports import Journal, Recorder, Recovered, RunEvent
from rollart.runtime.admitting import PromptAdmission
from rollart.runtime.attempts import AttemptRunner
from rollart.runtime.barrier import FreeRunning, TurnBarrier
from rollart.runtime.buffer import SampleBuffer
from rollart.runtime.domain import Domain
from rollart.runtime.faults import WINDOW, FaultMeter
from rollart.runtime.filtering import GroupFilter, additional_prompts
from rollart.runtime.groups import GroupRun, GroupTable
from rollart.runtime.pacing import StartPace
from rollart.runtime.prefetch import Prefetcher, PrefetchSettings
from rollart.runtime.redundant import SelectionBiasReport
from rollart.runtime.rewarding import TrajectoryScorer
from rollart.runtime.rounds import RELAUNCH_MARK, GroupLaunch, PendingPrompt, TailBatchRounds
from rollart.runtime.sharing import DomainShareTracker, FairnessSettings
from rollart.runtime.together import GroupColocation
from rollart.runtime.trajectory import TrajectoryRunner

__all__ = ["Scheduler", "SchedulerSettings"]

FAULT_WINDOW_BATCHES = 4
"""Size in batches of the window of attempts over which losses to incidents are counted, if larger than `WINDOW`."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """`rules` bound the lead of rollout and define the treatment of stale groups; `steps`: the total number of training
    steps; `max_attempts` per group before its prompt is given up; a fault rate above `max_fault_rate` ends the run once
    there are `min_faults` faults."""

    seed: int
    steps: int
    rules: Schedule
    max_attempts: int = 3
    max_fault_rate: float = 0.05
    min_faults: int = 20
    redundancy: Redundancy = field(default_factory=Redundancy)
    tail: TailSettings | None = None
    """Tail batching, under a schedule of one batch at a time."""
    filter: FilterSettings = field(default_factory=FilterSettings)
    fairness: FairnessSettings | None = None
    """Shares of domains instead of quotas."""
    prefetch: PrefetchSettings | None = None
    """Prefetch: environments are reset before their trajectories are admitted."""


class Scheduler:
    """Owns admission and the tasks of all training trajectories.

    `run` waits for slots; it is unblocked by `published` (consumed samples) and by dropped groups, which free them.
    `published` is synchronous, and is called while every engine stands still. Invariants: waiting and running samples
    never exceed (alpha + 1) x batch, plus the samples of redundant groups if these are requested (I4); a group enters
    the buffer whole, once (I6); no trajectory older than alpha versions continues (I2).
    """

    def __init__(
        self,
        domains: Sequence[Domain],
        runner: TrajectoryRunner,
        rewarding: TrajectoryScorer,
        buffer: SampleBuffer,
        journal: Journal,
        recorder: Recorder,
        *,
        settings: SchedulerSettings,
        prefetch: Prefetcher | None = None,
        shares: DomainShareTracker | None = None,
        together: GroupColocation | None = None,
    ) -> None:
        self._shares = shares
        self._together = together
        self._domains = {d.name: d for d in domains}
        self._buffer = buffer
        self._journal = journal
        self._recorder = recorder
        self._settings = settings
        self._rules = settings.rules
        self._bound = settings.rules.bound
        self._pace = StartPace(settings.rules.alpha, recorder) if settings.rules.paced else None
        self._admitting = PromptAdmission(
            domains,
            settings.rules,
            recorder,
            seed=settings.seed,
            steps=settings.steps,
            redundancy=settings.redundancy,
            additional=additional_prompts(domains, settings.filter.additional),
            tail=settings.tail,
            shares=shares,
            pace=self._pace,
        )
        self._admitting.short = buffer.short
        self._slots, self._rounds = self._admitting.slots, self._admitting.rounds
        # Rewards that are a separate stage wait until every trajectory of the batch has ended.
        stage = TurnBarrier() if self._rules.rewarding is RewardStage.INLINE else FreeRunning()
        self._groups = GroupTable(
            bound=self._bound,
            max_attempts=settings.max_attempts,
            on_complete=self._completed,
            on_drop=self._dropped,
            on_sample=lambda run, sample: buffer.offer(sample, run.domain.group_size),
            on_retry=buffer.changed,
        )
        if buffer.pace is not None:
            buffer.pace.unfinished = self._groups.unfinished
        self._freed = asyncio.Event()
        self._prefetch = prefetch
        if prefetch is not None:
            prefetch.on_known = self._freed.set
        self._drops: list[tuple[GroupId, str]] = []
        self._again: list[tuple[GroupId, str, int]] = []
        """New groups of deferred prompts: they are journaled before the old groups are dropped."""
        self._redundant = self._admitting.redundant
        speculates = settings.redundancy.any or settings.tail is not None or settings.filter.zero_variance
        self._cancellations = SelectionBiasReport(recorder, on=speculates)
        self._filter = GroupFilter(domains, settings.filter, recorder)
        window = max(WINDOW, FAULT_WINDOW_BATCHES * sum(d.quota for d in domains))
        self.faults = FaultMeter(settings.max_fault_rate, settings.min_faults, window)
        self._attempts = AttemptRunner(
            self._groups,
            runner,
            rewarding,
            journal,
            recorder,
            seed=settings.seed,
            stage=stage,
            faults=self.faults,
            redundant=self._redundant,
            cancellations=self._cancellations,
            shares=shares,
        )
        self.rolling = self._attempts.rolling

    async def run(self, version: Callable[[], int], recovered: Recovered | None = None) -> None:
        """Admit groups until `close`, then abort the running ones. The last step gets no more groups than its batch."""
        async with asyncio.TaskGroup() as tasks:
            if recovered is not None:
                await self._readmit(tasks, recovered, version())
            while not self._attempts.closed:
                await self._write_drops()
                fresh = self._admitting.reserve()
                if fresh:
                    # Concurrently: one transaction of the journal, not one per group.
                    await asyncio.gather(
                        *(self._journal.admit(p.group, p.journal_domain, p.seed) for p in [f.prompt for f in fresh])
                    )
                    self._open(tasks, fresh, version())
                elif not self._attempts.closed and not self._drops:
                    # There is no await since the checks: neither a close nor a drop can come between.
                    self._look_ahead(tasks)
                    self._freed.clear()
                    await self._freed.wait()
            self._end_surplus()  # after a resume without a step left, `close` preceded its groups
            self._groups.cancel_all(AbortReason.SHUTDOWN)
            if self._prefetch is not None:
                self._prefetch.close()
        self._cancellations.report(version())
        await self._write_drops()

    def close(self) -> None:
        """Training is over: admit no more groups, and end surplus ones."""
        self._attempts.closed = True
        self._end_surplus()
        self._freed.set()

    def _end_surplus(self) -> None:
        for group_id, (domain, _) in list(self._slots.held.items()):
            self._buffer.discard(GroupId(group_id))
            self._surplus(GroupId(group_id), self._domains[domain])

    def published(self, version: int, consumed: Sequence[Group]) -> None:
        """A version was published: free the slots of the consumed groups, and abort stale trajectories."""
        for group in consumed:
            self._admitting.consumed[group.domain] += len(group.samples)
            self._slots.release(group.id)
        if self._shares is not None:
            self._shares.published(version, consumed)
        if self._pace is not None:
            self._pace.ended(g.id for g in consumed)
            self._pace.published(asyncio.get_running_loop().time())
        self._groups.published(version, self._rules.judged)
        self._evict(version)
        self._buffer.changed()
        if self._prefetch is not None:
            self._prefetch.published(version)
        self._cancellations.report(version)
        self._filter.trained(consumed, version)
        self._freed.set()

    def refused(self, groups: Sequence[Group], detail: str) -> None:
        """The trainer refused these groups: drop them and free their slots."""
        self._buffer.refused(groups)
        if self._shares is not None:
            self._shares.refused(groups)
        if self._pace is not None:
            self._pace.ended(g.id for g in groups)
        for group in groups:
            self._drop_event(group.id, self._domains[group.domain], AbortReason.REFUSED, detail)

    def taken(self, groups: Sequence[Group]) -> None:
        """The groups are in training: under a schedule of whole batches, the next batch may start."""
        if self._shares is not None:
            self._shares.told()
        if self._pace is not None:
            self._pace.taken((g.id for g in groups), asyncio.get_running_loop().time())
        if self._rules.admission is Admission.NEXT_BATCH:
            for group in groups:
                self._slots.train(group.id)
            self._freed.set()

    async def drained(self) -> None:
        """Returns when weights may change: at once, or when no trajectory is live (whole batches end under their
        initial weights)."""
        while not self._rules.may_publish(running=self._groups.live()):
            self._attempts.quiet.clear()
            await self._attempts.quiet.wait()

    def outstanding(self) -> Mapping[str, int]:
        """Samples per domain that hold a slot: running, waiting in the buffer, or in training."""
        return dict(self._slots.outstanding)

    def live(self) -> int:
        return self._groups.live()

    @property
    def round(self) -> str:
        """The kind of the current round of tail batching; '' without tail batching."""
        return "" if self._rounds is None else self._rounds.kind

    def _evict(self, version: int) -> None:
        if not self._rules.drops_stale:
            return
        for group in self._buffer.stale(version):
            self._buffer.discard(group.id)
            domain = self._domains[group.domain]
            self._drop_event(group.id, domain, AbortReason.STALE, f"waited in the buffer past v{version}")

    def _look_ahead(self, tasks: asyncio.TaskGroup) -> None:
        """Prefetch environments for the prompts that are drawn next, at most as many as the run will still start."""
        if self._prefetch is None:
            return
        left = self._admitting.remaining({})
        for name, domain in self._domains.items():
            most = min(left[name], self._prefetch.wanted(name))
            prompts = self._admitting.next(domain, -(-max(most, 0) // domain.group_size))
            self._prefetch.fill(tasks, domain, [(p.group, p.seed) for p in prompts], most)

    def _open(self, tasks: asyncio.TaskGroup, launches: Sequence[GroupLaunch], version: int) -> None:
        """Run the groups that still hold slots: a group may have lost them while it was journaled, or because samples
        of another group that survived a crash made it surplus."""
        opened = []
        for launch in launches:
            prompt = launch.prompt
            if prompt.group in self._slots.held:
                run = self._groups.open(prompt.group, prompt.domain, prompt.seed)
                run.opened = asyncio.get_running_loop().time()
                opened.append((launch, run))
        for launch, run in opened:
            for sample in launch.samples:
                member = member_index(sample.id)
                fits = member not in run.samples and not self._bound.stale(sample.v0, version)
                if fits and self._groups.holds(run):
                    self._groups.finish(run, member, sample)
        for launch, run in opened:
            if self._groups.holds(run):
                self._start(tasks, run, [m for m in range(launch.members) if m not in run.samples])

    async def _readmit(self, tasks: asyncio.TaskGroup, recovered: Recovered, version: int) -> None:
        """Continue a crashed run: complete groups go to the buffer, incomplete ones run their missing members."""
        self._admitting.drawn.update({k: v for k, v in recovered.seeds_drawn.items() if k in self._domains})
        if self._shares is not None:
            self._shares.resume(recovered.step, recovered.consumed)
        for name, domain in self._domains.items():
            self._admitting.consumed[name] = recovered.step * domain.quota
        by_group: dict[str, list[TrainSample]] = {}
        for sample in recovered.samples:
            by_group.setdefault(sample.group, []).append(sample)
        pending = []
        for group_id, counted, seed in recovered.pending:
            name = counted.removesuffix(RELAUNCH_MARK)
            if name not in self._domains:
                raise SpecError(
                    f"the run to resume has unfinished groups of domain '{name}', which the spec no longer has",
                    remedy="resume without renaming or removing domains",
                )
            pending.append((group_id, self._domains[name], seed))
        if self._rounds is not None:
            self._drops += [(g, str(AbortReason.DEFERRED)) for g in self._rounds.resume(pending, recovered.samples)]
            return
        launches = []
        for group_id, domain, seed in pending:
            self._slots.admit(group_id, domain.name, domain.group_size)
            members = self._admitting.members(domain)
            launches.append(
                GroupLaunch(PendingPrompt(group_id, domain, seed), members, tuple(by_group.get(group_id, ())))
            )
        self._open(tasks, launches, version)

    def _start(self, tasks: asyncio.TaskGroup, run: GroupRun, members: Sequence[int]) -> None:
        run.trying.update(members)
        if self._together is not None and members:
            self._together.open(run.id, members)
        for member in members:
            name = f"{run.id}.{member}"
            task = run.tasks[member] = tasks.create_task(self._attempts.member(run, member), name=name)
            if self._together is not None:  # also called for a member cancelled before it begins
                task.add_done_callback(partial(self._member_left, self._together, run.id, member))

    @staticmethod
    def _member_left(together: GroupColocation, group: GroupId, member: int, _: asyncio.Task[None]) -> None:
        together.left(group, member)

    def _completed(self, run: GroupRun) -> None:
        """Filter a complete group or add it to the buffer. In a schedule of whole batches, end groups that became
        surplus."""
        if self._pace is not None:
            seconds = asyncio.get_running_loop().time() - run.opened
            self._pace.completed(str(run.seed), run.domain.name, seconds)
        if self._filter.leaves_out(run):
            self._release(run.id, AbortReason.FILTERED)
            self._replace(run)
            self._attempts.quiet.set()
            return
        self._buffer.add(run.whole())
        self._slots.complete(run.id)
        self._cancellations.kept(run)
        if self._prefetch is not None:
            self._prefetch.forget(run.id)
        if self._rounds is not None:
            self._defer(self._rounds, self._rounds.completed(self._rounds.prompt(run.id)))
        elif (self._redundant.by_groups or self._shares is not None) and (full := self._admitting.full(run.domain)):
            for domain in full:
                for group_id in self._slots.incomplete(domain.name):
                    self._surplus(GroupId(group_id), domain)
            for group in self._buffer.beyond():
                self._buffer.discard(group.id)
                self._surplus(group.id, self._domains[group.domain])
        self._attempts.quiet.set()

    def _surplus(self, group_id: GroupId, domain: Domain) -> None:
        """End a group that the full batch does not need."""
        if (run := self._groups.get(group_id)) is not None:
            self._groups.dismiss(run, AbortReason.REDUNDANT)
            self._cancellations.dropped(run)
        self._release(group_id, AbortReason.REDUNDANT)
        self._event("group_redundant", group_id, domain=domain.name)

    def _defer(self, rounds: TailBatchRounds, prompts: Sequence[PendingPrompt]) -> None:
        """End the launch of these prompts. They wait for a later round, each as a new group."""
        for prompt in prompts:
            old = prompt.group
            if (run := self._groups.get(old)) is not None:
                self._groups.dismiss(run, AbortReason.DEFERRED)
            if old not in self._slots.held:  # a replacement of a dropped prompt that has not begun
                rounds.replacements = [r for r in rounds.replacements if r.prompt is not prompt]
                self._again.append((old, prompt.journal_domain, prompt.seed))
                self._slots.admit(old, prompt.domain.name, prompt.domain.group_size)
            prompt.launch += 1
            self._again.append((prompt.group, prompt.journal_domain, prompt.seed))
            self._release(old, AbortReason.DEFERRED)
            self._event("group_deferred", old, domain=prompt.domain.name, next=prompt.group)

    def _dropped(self, run: GroupRun, reason: AbortReason, detail: str) -> None:
        self._drop_event(run.id, run.domain, reason, detail)
        self._replace(run)

    def _replace(self, run: GroupRun) -> None:
        """Replace the prompt of a group that released its slots; admission does so if there is no tail batching."""
        if self._rounds is not None:
            self._defer(self._rounds, self._rounds.dropped(self._rounds.prompt(run.id)))

    def _drop_event(self, group_id: GroupId, domain: Domain, reason: AbortReason, detail: str) -> None:
        self._release(group_id, reason)
        self._event("group_dropped", group_id, domain=domain.name, reason=str(reason), detail=detail)

    def _release(self, group_id: GroupId, reason: AbortReason) -> None:
        if self._prefetch is not None:
            self._prefetch.forget(group_id)
        self._buffer.withdraw(group_id)
        self._slots.release(group_id)
        self._drops.append((group_id, str(reason)))
        self._freed.set()

    async def _write_drops(self) -> None:
        """Admit deferred groups again before their old launches are dropped: a crash in between loses nothing."""
        drops, self._drops = self._drops, []
        again, self._again = self._again, []
        await asyncio.gather(*(self._journal.admit(*group) for group in again))
        await asyncio.gather(*(self._journal.drop(group_id, reason) for group_id, reason in drops))

    def _event(self, kind: str, subject: str, **fields: str | int | float | None) -> None:
        self._recorder.event(RunEvent(asyncio.get_running_loop().time(), kind, subject, fields))


def member_index(sample: TrajectoryId) -> int:
    """The member of its group that a trajectory id names: 'lake-12.3r2' is member 3."""
    return int(sample.rpartition(".")[2].partition("r")[0])
