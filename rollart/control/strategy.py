"""The port of rollout options: what an option may decide and observe while a run schedules trajectories.

Each option of `rollart.strategies` is a `RolloutStrategy`. The scheduler calls the hooks of all strategies of a run, in
order; it imports none, and a run without options has an empty list.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from rollart.control.domain import Domain
from rollart.control.groups import GroupRun, PendingPrompt
from rollart.control.trajectory import TrajectoryState
from rollart.model import AbortReason, Group, GroupId, TrainSample
from rollart.ports import Fleet, Recovered


class RolloutStrategy:
    """Hooks with neutral defaults. All are synchronous and must not wait; they run on the loop, between two awaits of
    the scheduler. An error that a hook raises ends the run."""

    wake: Callable[[], None] = staticmethod(lambda: None)
    """Makes admission look again for prompts to start; set by the scheduler."""

    # Decisions

    def extra_groups(self, domain: Domain) -> int:
        """Groups of the domain to run beyond a batch."""
        return 0

    def extra_members(self, domain: Domain) -> int:
        """Members to start beyond the group size."""
        return 0

    def defers(self, prompt: PendingPrompt, *, whole: bool) -> bool:
        """True if the prompt, which could start now, waits for the next publish. `whole`: every domain has a whole
        batch waiting or running."""
        return False

    @property
    def by_groups(self) -> bool:
        """True if a full batch may leave surplus groups, which are ended."""
        return False

    def accepts(self, run: GroupRun) -> bool:
        """False if the complete group is not trained. Called once per complete group."""
        return True

    # Groups

    def started(self, run: GroupRun, members: Sequence[int]) -> None:
        """Tasks of these members exist (`run.tasks`), and have not run yet."""

    def completed(self, run: GroupRun) -> None:
        """The group has all samples; `accepts` is asked next."""

    def kept(self, run: GroupRun) -> None:
        """The complete group entered the buffer."""

    def surplus(self, run: GroupRun) -> None:
        """The incomplete group was ended: the batch is full without it."""

    def released(self, group: GroupId) -> None:
        """The group gave up its slots untrained."""

    # Attempts of members

    def began(self, state: TrajectoryState) -> None:
        """An attempt begins."""

    def rolled(self, state: TrajectoryState) -> None:
        """The attempt ended its last turn, and requests its reward."""

    def left(self, state: TrajectoryState) -> None:
        """The attempt ended, with any outcome."""

    def attempt_ended(self, domain: Domain, reason: AbortReason | None) -> None:
        """An attempt ended with a sample (None), or for a reason other than its redundancy or deferral."""

    def charged(self, state: TrajectoryState) -> None:
        """The attempt's engine time is final."""

    def sampled(self, run: GroupRun, state: TrajectoryState, sample: TrainSample) -> None:
        """A durable sample counts for its group."""

    def cancelled(self, run: GroupRun, state: TrajectoryState, sample: TrainSample | None = None) -> None:
        """An attempt was cancelled as redundant while it ran, or its scored `sample` was not needed."""

    # Batches and publishes

    def taken(self, groups: Sequence[Group]) -> None:
        """The groups are in training."""

    def refused(self, groups: Sequence[Group]) -> None:
        """The trainer refused the groups."""

    def before_publish(self) -> None:
        """Weights are about to change."""

    def published(self, version: int, consumed: Sequence[Group]) -> None:
        """`version`, trained on `consumed`, is current, and their slots are free."""

    # The run

    def resume(self, recovered: Recovered) -> None:
        """The run continues one that crashed."""

    def look_ahead(
        self,
        tasks: asyncio.TaskGroup,
        left: Mapping[str, int],
        upcoming: Callable[[Domain, int], Sequence[PendingPrompt]],
    ) -> None:
        """No prompt can start now. `left`: samples per domain that the run will still start; `upcoming` gives a
        domain's next prompts, which are not drawn thereby."""

    def move_by(self, fleet: Fleet) -> None:
        """`fleet` can start and drain engines."""

    def background(self) -> Mapping[str, Callable[[], Coroutine[Any, Any, None]]]:
        """Tasks by name that run until the run ends."""
        return {}

    def close(self) -> None:
        """No trajectory starts any more; tasks given to `look_ahead` must end."""

    def ended(self, version: int) -> None:
        """All trajectories have ended."""
