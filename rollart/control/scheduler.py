"""The scheduler: admits groups, runs their trajectories, hands complete groups to the buffer, and follows publishes.

`PromptAdmission` gives slots to prompts, `AttemptRunner` runs each group member until it is scored, and `FaultMeter`
stops a run that loses too many attempts to infrastructure instead of training on the remainder. Options of a run take
part as `RolloutStrategy`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

from rollart.control.admission import PromptAdmission, SchedulerSettings
from rollart.control.buffer import SampleBuffer
from rollart.control.domain import Domain
from rollart.control.groups import ActiveRollouts, GroupLaunch, GroupRun, GroupTable, PendingPrompt
from rollart.control.rewarding import TrajectoryScorer
from rollart.control.strategy import RolloutStrategy
from rollart.control.trajectory import FreeRunning, TrajectoryAborted, TrajectoryRunner, TrajectoryState, TurnBarrier
from rollart.errors import FaultRateExceeded, SpecError
from rollart.model import AbortReason, Group, GroupId, Purpose, TrainSample, TrajectoryId
from rollart.policy.incidents import IncidentWindow
from rollart.policy.schedules import Admission
from rollart.policy.schedules import RewardTiming as RewardStage
from rollart.ports import FINISHED, RELAUNCH_MARK, Charge, Journal, Recorder, Recovered, RunEvent

MIN_INCIDENTS = 3
"""Minimum number of incidents whose losses can stop a run: two at about the same time are ordinary machine failures."""

MAX_INCIDENT_SHARE = 0.5
"""Maximum share of attempts that may be lost to incidents, unless `max_rate` is higher."""

WINDOW = 1000
"""Minimum number of recent attempts over which losses to incidents are counted."""


@dataclass(slots=True)
class FaultMeter:
    """Counts attempts and infrastructure faults of the whole run. `max_rate` is a share of attempts. With fewer than
    `min_count` faults the rate is not checked, so that one early crash does not end a run.

    The end of an environment host aborts hundreds of episodes at once, in any state. All episodes of one incident count
    as one fault; the ends of several hosts of a node are one incident (`policy.incidents`). A run also stops when more
    than half of the last `window` ended attempts were lost to incidents (the first attempt of each incident not
    counted), if at least `MIN_INCIDENTS` incidents and `min_count` such attempts are in the window. Bound: among any
    `window` consecutive attempts, at most half plus the episodes of one incident are lost to incidents; a `max_rate`
    above one half replaces the half, and 1 disables the limit. Older attempts are forgotten: an outage on the first day
    does not stop a run on its second day."""

    max_rate: float
    min_count: int
    window: int = WINDOW
    attempts: int = 0
    faults: int = 0
    details: dict[str, int] = field(default_factory=dict)
    losses: IncidentWindow = field(init=False)

    def __post_init__(self) -> None:
        self.losses = IncidentWindow(self.window)

    def ended(self, reason: AbortReason | None, detail: str = "", *, incident: str = "") -> None:
        """An attempt ended: with a sample (None) or aborted. Only infrastructure faults count; all attempts of one
        `incident` count once."""
        if not self.losses.add(incident):
            return
        self.attempts += 1
        if reason is AbortReason.INFRA_FAULT:
            self.faults += 1
            self.details[detail] = self.details.get(detail, 0) + 1

    def check(self) -> None:
        """Raise `FaultRateExceeded` if a limit is exceeded; an exceeded fault rate names the most frequent fault."""
        if self.faults >= self.min_count and self.faults > self.max_rate * self.attempts:
            worst, count = max(self.details.items(), key=lambda kv: (kv[1], kv[0]))
            raise FaultRateExceeded(
                f"{self.faults} of {self.attempts} trajectories met an infrastructure fault "
                f"(limit {self.max_rate:.0%}); most often ({count}×): {worst}",
                remedy="mend the part it names, or raise faults.max_rate, then rollart launch --resume",
            )
        limit = max(MAX_INCIDENT_SHARE, self.max_rate)
        if self.losses.too_many(share=limit, incidents=MIN_INCIDENTS, least=self.min_count):
            raise FaultRateExceeded(
                f"{self.losses.shared_losses} of the last {len(self.losses.attempts)} trajectories were lost with "
                f"{self.losses.incidents} ends of environment hosts (limit {limit:.0%})",
                remedy="see rollart logs --role environment, then rollart launch --resume",
            )


@dataclass(eq=False)
class AttemptRunner:
    """Each member has its own task, which runs `member`. It waits for its trajectory, its reward and the journal; a
    cancellation, with the reason in its `TrajectoryState`, ends it. `quiet` is set whenever a trajectory ends.

    Invariant: the journal holds no more samples of a group than the group needs, each once.
    """

    groups: GroupTable
    runner: TrajectoryRunner
    rewarding: TrajectoryScorer
    journal: Journal
    recorder: Recorder
    _: KW_ONLY
    seed: int
    stage: FreeRunning
    faults: FaultMeter
    strategies: Sequence[RolloutStrategy] = ()

    def __post_init__(self) -> None:
        self.rolling = ActiveRollouts()
        self.quiet = asyncio.Event()
        self.closed = False

    async def member(self, run: GroupRun, member: int) -> None:
        """Run attempts of one group member until it is scored or its group has ended."""
        attempt = 0
        try:
            while not self.closed and self.groups.holds(run):
                attempt += 1
                state = self._live(run, member, attempt)
                run.running[member] = state
                try:
                    sample = await self._attempt(state)
                    run.running.pop(member, None)
                    await self._keep(run, member, sample, state)
                    return
                except TrajectoryAborted as aborted:
                    # An environment may convert the cancellation into its own error; the cancellation's reason counts.
                    ended = aborted if state.abort is None else TrajectoryAborted(state.abort)
                except asyncio.CancelledError:
                    if state.abort is None:
                        raise
                    ended = TrajectoryAborted(state.abort)
                if state.abort is not None:
                    run.tasks[member].uncancel()
                if run.running.pop(member, None) is not None:  # otherwise its charge was written with its sample
                    self.recorder.charge(self._charge(state, str(ended.reason), None))
                if not self._again(run, member, state, ended, attempt):
                    return
        finally:
            self.groups.ended(run)

    def _again(
        self, run: GroupRun, member: int, state: TrajectoryState, ended: TrajectoryAborted, attempt: int
    ) -> bool:
        """Handle an attempt that ended without a sample. True if the member starts another one."""
        reason, detail = ended.reason, ended.detail
        if reason in (AbortReason.REDUNDANT, AbortReason.DEFERRED):
            if reason is AbortReason.REDUNDANT:
                self._cancelled(run, state, None)
            return False
        self._ended(run.domain, reason)
        self.faults.ended(reason, detail, incident=ended.incident)
        if reason is AbortReason.INFRA_FAULT:
            named = {"host": ended.host} if ended.host else {}
            self._event("infra_fault", state.id, detail=detail, attempt=attempt, **named)
            self.faults.check()
        if reason in (AbortReason.SHUTDOWN, AbortReason.GROUP_DROPPED) or self.closed:
            return False
        return self.groups.fail(run, member, reason, detail, ended.incident)

    async def _attempt(self, state: TrajectoryState) -> TrainSample:
        self.stage.join()
        for strategy in self.strategies:
            strategy.began(state)
        self.rolling.begin(state)
        try:
            trajectory = await self.runner.run(state)
            await self.stage.turn()
            for strategy in self.strategies:
                strategy.rolled(state)
            now = asyncio.get_running_loop().time
            asked = now()
            self.rolling.ask(state, asked)
            sample = await self.rewarding.score(trajectory)
            state.reward_seconds = now() - asked
            return sample
        finally:
            for strategy in self.strategies:
                strategy.left(state)
            self.rolling.leave(state)
            self.stage.leave()
            self.quiet.set()

    async def _keep(self, run: GroupRun, member: int, sample: TrainSample, state: TrajectoryState) -> None:
        """Journal the sample, unless its group has enough samples."""
        self.faults.ended(None)
        self._ended(run.domain, None)
        if run.enough:
            self.recorder.charge(self._charge(state, str(AbortReason.REDUNDANT), sample))
            self._cancelled(run, state, sample)
            return
        outcome = FINISHED if self.groups.holds(run) else str(run.ended or AbortReason.GROUP_DROPPED)
        run.writing[member] = sample.v0
        try:
            await self.journal.finish(sample, self._charge(state, outcome, sample))
        finally:
            del run.writing[member]
        await self._settle(run, member, sample, state)

    async def _settle(self, run: GroupRun, member: int, sample: TrainSample, state: TrajectoryState) -> None:
        """Count a durable sample, unless its group was dropped or a publish made the sample stale meanwhile."""
        if not self.groups.holds(run):
            if run.ended is AbortReason.REDUNDANT:
                self._cancelled(run, state, sample)
            return
        if self.runner.stale(sample.v0):
            await self.journal.outdate(sample.id)
            raise TrajectoryAborted(AbortReason.STALE, "scored after its bound")
        for strategy in self.strategies:
            strategy.sampled(run, state, sample)
        self.groups.finish(run, member, sample)

    def _ended(self, domain: Domain, reason: AbortReason | None) -> None:
        for strategy in self.strategies:
            strategy.attempt_ended(domain, reason)

    def _cancelled(self, run: GroupRun, state: TrajectoryState, sample: TrainSample | None) -> None:
        for strategy in self.strategies:
            strategy.cancelled(run, state, sample)

    def _live(self, run: GroupRun, member: int, attempt: int) -> TrajectoryState:
        suffix = "" if attempt == 1 else f"r{attempt}"
        return TrajectoryState(
            id=TrajectoryId(f"{run.id}.{member}{suffix}"),
            group=run.id,
            domain=run.domain,
            seed=run.seed,
            purpose=Purpose.TRAIN,
            run_seed=self.seed,
            started=asyncio.get_running_loop().time(),
            slot_request=run.slot_request(member),
        )

    def _event(self, kind: str, subject: str, **fields: str | int | float | None) -> None:
        self.recorder.event(RunEvent(asyncio.get_running_loop().time(), kind, subject, fields))

    def _charge(self, state: TrajectoryState, outcome: str, sample: TrainSample | None) -> Charge:
        for strategy in self.strategies:
            strategy.charged(state)
        if sample is None:
            return trajectory_charge(state, outcome, None, None)
        return trajectory_charge(state, outcome, sample.score, sample.success)


def trajectory_charge(state: TrajectoryState, outcome: str, score: float | None, success: bool | None) -> Charge:
    """The ledger row of a trajectory that ends now."""
    return Charge(
        state.id,
        domain=state.domain.name,
        outcome=outcome,
        v0=-1 if state.begun is None else state.begun,
        engine_seconds=state.engine_seconds,
        turns=len(state.turns),
        prompt_tokens=state.prompt_tokens,
        action_tokens=state.action_tokens,
        success=success,
        score=score,
        purpose=str(state.purpose),
        t0=state.started,
        t1=asyncio.get_running_loop().time(),
        first_tokens=state.first_tokens,
        reset_s=state.reset_seconds,
        env_s=state.env_seconds,
        reward_s=state.reward_seconds,
    )


FAULT_WINDOW_BATCHES = 4
"""Size in batches of the window of attempts over which losses to incidents are counted, if larger than `WINDOW`."""


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
        strategies: Sequence[RolloutStrategy] = (),
        admission: type[PromptAdmission] | Callable[..., PromptAdmission] = PromptAdmission,
    ) -> None:
        self._strategies = strategies
        self._domains = {d.name: d for d in domains}
        self.buffer = buffer
        self._journal = journal
        self._recorder = recorder
        self._rules = settings.rules
        self._bound = settings.rules.bound
        self.admission = admission(domains, settings, recorder, strategies)
        self.admission.short = buffer.short
        self._slots = self.admission.slots
        # Rewards that are a separate stage wait until every trajectory of the batch has ended.
        stage = TurnBarrier() if self._rules.rewarding is RewardStage.INLINE else FreeRunning()
        self.groups = GroupTable(
            bound=self._bound,
            max_attempts=settings.max_attempts,
            on_complete=self._completed,
            on_drop=self._dropped,
            on_sample=lambda run, sample: buffer.offer(sample, run.domain.group_size),
            on_retry=buffer.changed,
        )
        if buffer.pace is not None:
            buffer.pace.unfinished = self.groups.unfinished
        self._freed = asyncio.Event()
        for strategy in strategies:
            strategy.wake = self._freed.set
        self._drops: list[tuple[GroupId, str]] = []
        self._again: list[tuple[GroupId, str, int]] = []
        """New groups of deferred prompts: they are journaled before the old groups are dropped."""
        window = max(WINDOW, FAULT_WINDOW_BATCHES * sum(d.quota for d in domains))
        self.faults = FaultMeter(settings.max_fault_rate, settings.min_faults, window)
        self._attempts = AttemptRunner(
            self.groups,
            runner,
            rewarding,
            journal,
            recorder,
            seed=settings.seed,
            stage=stage,
            faults=self.faults,
            strategies=strategies,
        )
        self.rolling = self._attempts.rolling

    async def run(self, version: Callable[[], int], recovered: Recovered | None = None) -> None:
        """Admit groups until `close`, then abort the running ones. The last step gets no more groups than its batch."""
        async with asyncio.TaskGroup() as tasks:
            if recovered is not None:
                await self._readmit(tasks, recovered, version())
            while not self._attempts.closed:
                await self._write_drops()
                fresh = self.admission.reserve()
                if fresh:
                    # Concurrently: one transaction of the journal, not one per group.
                    await asyncio.gather(
                        *(self._journal.admit(p.group, p.journal_domain, p.seed) for p in [f.prompt for f in fresh])
                    )
                    self._open(tasks, fresh, version())
                elif not self._attempts.closed and not self._drops:
                    # There is no await since the checks: neither a close nor a drop can come between.
                    for strategy in self._strategies:
                        strategy.look_ahead(tasks, self.admission.remaining({}), self.admission.next)
                    self._freed.clear()
                    await self._freed.wait()
            self._end_surplus()  # after a resume without a step left, `close` preceded its groups
            self.groups.cancel_all(AbortReason.SHUTDOWN)
            for strategy in self._strategies:
                strategy.close()
        for strategy in self._strategies:
            strategy.ended(version())
        await self._write_drops()

    def close(self) -> None:
        """Training is over: admit no more groups, and end surplus ones."""
        self._attempts.closed = True
        self._end_surplus()
        self._freed.set()

    def _end_surplus(self) -> None:
        for group_id, (domain, _) in list(self._slots.held.items()):
            self.buffer.discard(GroupId(group_id))
            self._surplus(GroupId(group_id), self._domains[domain])

    def published(self, version: int, consumed: Sequence[Group]) -> None:
        """A version was published: free the slots of the consumed groups, and abort stale trajectories."""
        for group in consumed:
            self.admission.consumed[group.domain] += len(group.samples)
            self._slots.release(group.id)
        self.groups.published(version, self._rules.judged)
        self._evict(version)
        self.buffer.changed()
        for strategy in self._strategies:
            strategy.published(version, consumed)
        self._freed.set()

    def refused(self, groups: Sequence[Group], detail: str) -> None:
        """The trainer refused these groups: drop them and free their slots."""
        self.buffer.refused(groups)
        for strategy in self._strategies:
            strategy.refused(groups)
        for group in groups:
            self._drop_event(group.id, self._domains[group.domain], AbortReason.REFUSED, detail)

    def taken(self, groups: Sequence[Group]) -> None:
        """The groups are in training: under a schedule of whole batches, the next batch may start."""
        for strategy in self._strategies:
            strategy.taken(groups)
        if self._rules.admission is Admission.NEXT_BATCH:
            for group in groups:
                self._slots.train(group.id)
            self._freed.set()

    async def drained(self) -> None:
        """Returns when weights may change: at once, or when no trajectory is live (whole batches end under their
        initial weights)."""
        while not self._rules.may_publish(running=self.groups.running()):
            self._attempts.quiet.clear()
            await self._attempts.quiet.wait()
        for strategy in self._strategies:
            strategy.before_publish()

    def _evict(self, version: int) -> None:
        if not self._rules.drops_stale:
            return
        for group in self.buffer.stale(version):
            self.buffer.discard(group.id)
            domain = self._domains[group.domain]
            self._drop_event(group.id, domain, AbortReason.STALE, f"waited in the buffer past v{version}")

    def _open(self, tasks: asyncio.TaskGroup, launches: Sequence[GroupLaunch], version: int) -> None:
        """Run the groups that still hold slots: a group may have lost them while it was journaled, or because samples
        of another group that survived a crash made it surplus."""
        opened = []
        for launch in launches:
            prompt = launch.prompt
            if prompt.group in self._slots.held:
                run = self.groups.open(prompt.group, prompt.domain, prompt.seed)
                run.opened = asyncio.get_running_loop().time()
                opened.append((launch, run))
        for launch, run in opened:
            for sample in launch.samples:
                member = member_index(sample.id)
                fits = member not in run.samples and not self._bound.stale(sample.v0, version)
                if fits and self.groups.holds(run):
                    self.groups.finish(run, member, sample)
        for launch, run in opened:
            if self.groups.holds(run):
                self._start(tasks, run, [m for m in range(launch.members) if m not in run.samples])

    async def _readmit(self, tasks: asyncio.TaskGroup, recovered: Recovered, version: int) -> None:
        """Continue a crashed run: complete groups go to the buffer, incomplete ones run their missing members."""
        self.admission.drawn.update({k: v for k, v in recovered.seeds_drawn.items() if k in self._domains})
        for strategy in self._strategies:
            strategy.resume(recovered)
        for name, domain in self._domains.items():
            self.admission.consumed[name] = recovered.step * domain.quota
        pending = []
        for group_id, counted, seed in recovered.pending:
            name = counted.removesuffix(RELAUNCH_MARK)
            if name not in self._domains:
                raise SpecError(
                    f"the run to resume has unfinished groups of domain '{name}', which the spec no longer has",
                    remedy="resume without renaming or removing domains",
                )
            pending.append(PendingPrompt.of(group_id, self._domains[name], seed))
        launches, replaced = self.admission.readmit(pending, recovered.samples)
        self._drops += [(g, str(AbortReason.DEFERRED)) for g in replaced]
        self._open(tasks, launches, version)

    def _start(self, tasks: asyncio.TaskGroup, run: GroupRun, members: Sequence[int]) -> None:
        run.trying.update(members)
        for member in members:
            name = f"{run.id}.{member}"
            run.tasks[member] = tasks.create_task(self._attempts.member(run, member), name=name)
        for strategy in self._strategies:
            strategy.started(run, members)

    def _completed(self, run: GroupRun) -> None:
        """Add a complete group to the buffer, unless a strategy refuses it. End groups that became surplus."""
        for strategy in self._strategies:
            strategy.completed(run)
        if not all(strategy.accepts(run) for strategy in self._strategies):
            self._release(run.id, AbortReason.FILTERED)
            self._defer(self.admission.dropped(run))
            self._attempts.quiet.set()
            return
        self.buffer.add(run.whole())
        self._slots.complete(run.id)
        for strategy in self._strategies:
            strategy.kept(run)
        self._defer(self.admission.completed(run))
        if full := self.admission.full(run.domain):
            for domain in full:
                for group_id in self._slots.incomplete(domain.name):
                    self._surplus(GroupId(group_id), domain)
            for group in self.buffer.beyond():
                self.buffer.discard(group.id)
                self._surplus(group.id, self._domains[group.domain])
        self._attempts.quiet.set()

    def _surplus(self, group_id: GroupId, domain: Domain) -> None:
        """End a group that the full batch does not need."""
        if (run := self.groups.runs.get(group_id)) is not None:
            self.groups.dismiss(run, AbortReason.REDUNDANT)
            for strategy in self._strategies:
                strategy.surplus(run)
        self._release(group_id, AbortReason.REDUNDANT)
        self._event("group_redundant", group_id, domain=domain.name)

    def _defer(self, prompts: Sequence[PendingPrompt]) -> None:
        """End the launch of these prompts. They wait for a later round, each as a new group."""
        for prompt in prompts:
            old = prompt.group
            if (run := self.groups.runs.get(old)) is not None:
                self.groups.dismiss(run, AbortReason.DEFERRED)
            if old not in self._slots.held:  # a replacement of a dropped prompt that has not begun
                self.admission.withdraw(prompt)
                self._again.append((old, prompt.journal_domain, prompt.seed))
                self._slots.admit(old, prompt.domain.name, prompt.domain.group_size)
            prompt.launch += 1
            self._again.append((prompt.group, prompt.journal_domain, prompt.seed))
            self._release(old, AbortReason.DEFERRED)
            self._event("group_deferred", old, domain=prompt.domain.name, next=prompt.group)

    def _dropped(self, run: GroupRun, reason: AbortReason, detail: str) -> None:
        self._drop_event(run.id, run.domain, reason, detail)
        self._defer(self.admission.dropped(run))

    def _drop_event(self, group_id: GroupId, domain: Domain, reason: AbortReason, detail: str) -> None:
        self._release(group_id, reason)
        self._event("group_dropped", group_id, domain=domain.name, reason=str(reason), detail=detail)

    def _release(self, group_id: GroupId, reason: AbortReason) -> None:
        for strategy in self._strategies:
            strategy.released(group_id)
        self.buffer.withdraw(group_id)
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
