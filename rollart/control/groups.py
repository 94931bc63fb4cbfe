"""Live groups: running and finished members, and the effect of faults and publishes (invariants I2 and I6).

A group's members finish, are retried, or the whole group is dropped with a reason.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field

from rollart.control.domain import Domain
from rollart.control.trajectory import TrajectoryState
from rollart.model import AbortReason, Group, GroupId, TrainSample, TrajectoryId
from rollart.policy.host_slots import PlacementPriority, PlacementRequest
from rollart.policy.schedules import StalenessCheck
from rollart.policy.staleness import StalenessBound
from rollart.ports import RELAUNCH_MARK

STALE_RESTARTS = 4
"""Restarts for staleness, per member, before a group is given up."""


@dataclass(frozen=True, slots=True)
class TrajectorySnapshot:
    """A trajectory when it was kept or cancelled; for a cancelled one, tokens, age and turns are lower bounds.
    `difficulty` is the mean reward of its group so far, `reward` its own; None where unknown."""

    id: str
    tokens: int
    age_s: float
    turns: int
    difficulty: float | None = None
    reward: float | None = None


@dataclass(slots=True)
class PendingPrompt:
    """A prompt that is not trained yet. Its seed stays the same, however often it is launched."""

    name: str
    domain: Domain
    seed: int
    launch: int = 1

    @classmethod
    def of(cls, group: str, domain: Domain, seed: int) -> PendingPrompt:
        """The prompt of a group id."""
        name, _, launch = group.partition(RELAUNCH_MARK)
        return cls(name, domain, seed, int(launch or 1))

    @property
    def group(self) -> GroupId:
        return GroupId(self.name if self.launch == 1 else f"{self.name}{RELAUNCH_MARK}{self.launch}")

    @property
    def journal_domain(self) -> str:
        return self.domain.name if self.launch == 1 else f"{self.domain.name}{RELAUNCH_MARK}"


@dataclass(frozen=True, slots=True)
class GroupLaunch:
    """A group to start now, with its number of members. `samples`: its samples that survived a crash."""

    prompt: PendingPrompt
    members: int
    samples: tuple[TrainSample, ...] = ()


@dataclass(frozen=True, slots=True)
class PacedGroup:
    """A group of one domain that holds slots, complete or not. `v0` is that of its oldest sample."""

    id: str
    v0: int
    samples: int


@dataclass(frozen=True, slots=True)
class IncompleteGroup:
    """A group that holds slots and is not complete. `v0` is None while none of its members has sampled anything."""

    id: str
    v0: int | None
    samples: int
    domain: str

    def under(self, version: int) -> PacedGroup:
        """The group as a batch for `version` sees it: if it has not begun, it begins under that version at the
        earliest."""
        return PacedGroup(self.id, version if self.v0 is None else self.v0, self.samples)


@dataclass(slots=True)
class GroupState:
    """Counters of one group. `finished` maps a finished member to its v0; `attempts` counts failed attempts of the
    group, where all attempts that one incident (the end of a host) ended count once."""

    size: int
    max_attempts: int
    finished: dict[str, int] = field(default_factory=dict)
    attempts: int = 0
    stale: int = 0
    incidents: set[str] = field(default_factory=set)

    def finish(self, member: str, v0: int) -> bool:
        """A member is scored. True if the group is complete. Finishing one member twice is a bug of the caller."""
        assert member not in self.finished, f"{member} finished twice"
        self.finished[member] = v0
        return len(self.finished) == self.size

    def fail(self, reason: AbortReason, incident: str = "") -> bool:
        """A member's attempt failed. True: retry it in a fresh environment. False: give the group up.

        An incident that ended several members counts once: several losses give no more evidence about the prompt than
        one.

        Staleness is not a failure of the prompt, so it has a bound of its own: a prompt whose trajectories outlive
        `STALE_RESTARTS` versions' worth of attempts is slower than the run can wait for.
        """
        if reason is AbortReason.STALE:
            self.stale += 1
            return self.stale <= STALE_RESTARTS * self.size
        if incident in self.incidents:
            return True
        if incident:
            self.incidents.add(incident)
        self.attempts += 1
        return self.attempts < self.max_attempts


@dataclass(slots=True)
class GroupRun:
    """A group that holds slots and is not complete. `running` and `tasks` hold its running members, by member index.

    A group may run more members than it needs (`state.size`): the members that end first complete it. A sample counts
    from the start of its write, so that no more samples are written than the group needs.
    """

    id: GroupId
    domain: Domain
    seed: int
    state: GroupState
    samples: dict[int, TrainSample] = field(default_factory=dict)
    running: dict[int, TrajectoryState] = field(default_factory=dict)
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    trying: set[int] = field(default_factory=set)
    """Members that may still produce a sample."""
    writing: dict[int, int] = field(default_factory=dict)
    """v0 of the members whose samples are being written."""
    opened: float = 0.0
    """Loop time at which it got its slots, seconds."""
    seniority: int = 0
    """Order of opening: an older group has a lower number."""
    ended: AbortReason | None = None
    """Abort reason of members that end from now on, as the group no longer needs them; None while it does."""
    snapshots: list[TrajectorySnapshot] = field(default_factory=list)
    """Snapshots of its sampled trajectories, for the report on selection bias."""

    @property
    def enough(self) -> bool:
        """True if enough samples are written or being written."""
        return len(self.samples) + len(self.writing) >= self.state.size

    @property
    def v0(self) -> int | None:
        """The oldest policy version under which any member started; None as long as no token is sampled."""
        running = (member.begun for member in self.running.values())
        begun = [*self.state.finished.values(), *self.writing.values(), *(v0 for v0 in running if v0 is not None)]
        return min(begun, default=None)

    def slot_request(self, member: int) -> PlacementRequest:
        """The member's request for a slot on an environment host. It is a spare member's if the samples and the members
        before it suffice."""
        others = sum(other < member for other in self.trying) + len(self.samples)
        return PlacementRequest(
            PlacementPriority.TRAIN if others < self.state.size else PlacementPriority.SPARE, self.seniority
        )

    def whole(self) -> Group:
        return Group(self.id, self.domain.name, tuple(self.samples[m] for m in sorted(self.samples)))

    def cancel(self, members: Iterable[int], reason: AbortReason) -> None:
        """Cancel the tasks of running members. The reason of the cancellation is in the member's `TrajectoryState`."""
        for member in members:
            state = self.running.get(member)
            if state is not None and state.abort is None:
                state.abort = reason
                self.tasks[member].cancel()


class ActiveRollouts:
    """Trajectories in rollout that have not requested their reward yet: they are the next calls of functions.

    Synchronous, and cheap with 20,000 trajectories: one dict per domain, the earliest first. Durations of finished
    rollouts are kept until `ended` takes them, the last few thousand at most.
    """

    def __init__(self) -> None:
        self._began: dict[str, dict[TrajectoryId, float]] = {}
        self._ended: deque[tuple[str, float]] = deque(maxlen=4096)

    def begin(self, state: TrajectoryState) -> None:
        self._began.setdefault(state.domain.name, {})[state.id] = state.started

    def ask(self, state: TrajectoryState, now: float) -> None:
        """The trajectory requests its reward now."""
        self._ended.append((state.domain.name, now - state.started))
        self.leave(state)

    def leave(self, state: TrajectoryState) -> None:
        """The trajectory has ended its rollout, with any outcome. Idempotent."""
        self._began[state.domain.name].pop(state.id, None)

    def began(self) -> dict[str, list[float]]:
        """Start times of the rollouts by domain, earliest first: loop seconds."""
        return {domain: list(began.values()) for domain, began in self._began.items()}

    def ended(self) -> list[tuple[str, float]]:
        """Domain and duration in seconds of the rollouts that requested a reward since the last call."""
        ended = list(self._ended)
        self._ended.clear()
        return ended


@dataclass(eq=False)
class GroupTable:
    """Owns the incomplete groups. Every method is synchronous: decisions take effect between two awaits.

    `on_sample` is called with each sample, `on_complete` then with each complete group, `on_drop` with each dropped
    group, and `on_retry` for each attempt that is repeated.
    """

    _: KW_ONLY
    bound: StalenessBound
    max_attempts: int
    on_complete: Callable[[GroupRun], None]
    on_drop: Callable[[GroupRun, AbortReason, str], None]
    on_sample: Callable[[GroupRun, TrainSample], None] = lambda *_: None
    on_retry: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._opened = 0
        self.runs: dict[str, GroupRun] = {}
        self._leftover: dict[str, GroupRun] = {}
        """Complete or dropped groups with members that still run."""

    def open(self, group_id: GroupId, domain: Domain, seed: int) -> GroupRun:
        self._opened += 1
        state = GroupState(domain.group_size, self.max_attempts)
        run = GroupRun(group_id, domain, seed, state, seniority=self._opened)
        self.runs[group_id] = run
        return run

    def finish(self, run: GroupRun, member: int, sample: TrainSample) -> None:
        """Add the sample of a member, which is scored and durable."""
        run.samples[member] = sample
        run.trying.discard(member)
        self.on_sample(run, sample)
        if run.state.finish(sample.id, sample.v0):
            self._leave(run, AbortReason.REDUNDANT)
            run.cancel(list(run.running), AbortReason.REDUNDANT)
            self.on_complete(run)

    def fail(self, run: GroupRun, member: int, reason: AbortReason, detail: str, incident: str = "") -> bool:
        """Handle a failed attempt of a member. True: retry it. False: the group is dropped (or was before), or its
        other members suffice: a redundant member that failed is not worth another attempt."""
        if run.id not in self.runs:
            return False
        others = run.trying - {member}
        if len(others) + len(run.samples) >= run.state.size:
            run.trying = others
            return False
        if run.state.fail(reason, incident):
            self.on_retry()
            return True
        self.drop(run, reason, detail, besides=member)
        return False

    def drop(self, run: GroupRun, reason: AbortReason, detail: str, *, besides: int | None = None) -> None:
        self._give_up(run, reason, detail)
        run.cancel([m for m in run.running if m != besides], AbortReason.GROUP_DROPPED)

    def dismiss(self, run: GroupRun, reason: AbortReason) -> None:
        """Cancel a group that is no longer needed: its members end at once with `reason`. The caller frees slots."""
        self._leave(run, reason)
        run.cancel(list(run.running), reason)

    def unfinished(self) -> list[IncompleteGroup]:
        """The incomplete groups."""
        return [IncompleteGroup(r.id, r.v0, r.domain.group_size, r.domain.name) for r in self.runs.values()]

    def published(self, version: int, judged: StalenessCheck = StalenessCheck.EVERY_TURN) -> None:
        """Apply a new current version. With the staleness check at every turn: drop groups that can never be consumed
        whole, and restart stale members of the others. With the check at the batch: drop stale groups, and let their
        members run on."""
        if judged is StalenessCheck.AT_BATCH:
            for run in list(self.runs.values()):
                begun = [*run.state.finished.values(), *(state.begun for state in run.running.values())]
                if any(self.bound.stale(v0, version) for v0 in begun):
                    self._give_up(run, AbortReason.STALE, f"begun too long before v{version}")
        if judged is not StalenessCheck.EVERY_TURN:
            return
        for run in list(self.runs.values()):
            if any(self.bound.stale(v0, version) for v0 in run.state.finished.values()):
                self.drop(run, AbortReason.STALE, f"a finished member is stale at v{version}")
            else:
                stale = [m for m, state in run.running.items() if self.bound.stale(state.begun, version)]
                run.cancel(stale, AbortReason.STALE)

    def cancel_all(self, reason: AbortReason) -> None:
        for run in [*self.runs.values(), *self._leftover.values()]:
            run.cancel(list(run.running), reason)

    def ended(self, run: GroupRun) -> None:
        """Forget a complete or dropped group whose last member's task has ended."""
        if run.id in self._leftover and not run.running:
            del self._leftover[run.id]

    def _give_up(self, run: GroupRun, reason: AbortReason, detail: str) -> None:
        self._leave(run, AbortReason.GROUP_DROPPED)
        self.on_drop(run, reason, detail)

    def _leave(self, run: GroupRun, reason: AbortReason) -> None:
        del self.runs[run.id]
        run.ended = reason
        if run.running:
            self._leftover[run.id] = run

    def holds(self, run: GroupRun) -> bool:
        """True if the group is still incomplete and not dropped."""
        return self.runs.get(run.id) is run

    def running(self) -> int:
        """Number of running trajectories of incomplete groups."""
        return sum(len(run.running) for run in self.runs.values())
