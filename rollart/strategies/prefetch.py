"""Environments that are reset before their trajectories are admitted, while others generate.

The number to reset ahead follows the look-ahead rule of `policy.pipeline`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from rollart.control.domain import Domain
from rollart.control.groups import GroupRun, PendingPrompt
from rollart.control.strategy import RolloutStrategy
from rollart.control.trajectory import PrefetchedEnvironment
from rollart.leases import Expiry, Leases
from rollart.model import Group, GroupId, TrajectoryId
from rollart.policy.host_slots import PlacementPriority, PlacementRequest
from rollart.policy.pipeline import in_flight, mean_and_jitter
from rollart.ports import Environment, Recorder, RunEvent
from rollart.supervise.environment_hosts import has_host_slot, mark_in_use, prepare_environment
from rollart.user_code import UserCodeGuard, checked_observation, require_awaitable

MOST_AHEAD = 4
"""Most batches of environments that the rule keeps ahead: each holds memory on some host all the time."""

SEEN = 64
"""Window of the rule, in resets per domain: enough for a 90th percentile, few enough to follow a change."""


@dataclass(slots=True)
class PrefetchDepth:
    """The prefetch depth of one domain: a number of environments, or computed from measurements (auto)."""

    fixed: int | Literal["auto"]
    quota: int
    resets_s: deque[float] = field(default_factory=lambda: deque(maxlen=SEEN))
    period_s: float | None = None
    """Seconds from one admission of a batch to the next: the mean of the last period and the previous value."""
    admitted_at: float | None = None

    def published(self, now: float) -> None:
        """The slots of a batch are free."""
        if self.admitted_at is not None:
            seen = now - self.admitted_at
            self.period_s = seen if self.period_s is None else (self.period_s + seen) / 2
        self.admitted_at = now

    def wanted(self) -> int:
        """Environments to keep reset, or in reset, for prompts that are not admitted yet."""
        if self.fixed != "auto":
            return self.fixed
        return environments_to_prefetch(self.quota, self.period_s, self.resets_s)


def environments_to_prefetch(quota: int, period_s: float | None, resets_s: Sequence[float]) -> int:
    """Whole batches of environments: slots are freed a batch at a time, one batch every `period_s`, and the resets of a
    batch should have ended by then. The number of batches is that of the look-ahead rule for the mean reset, with its
    90th percentile as jitter, at most `MOST_AHEAD`; one while no period is known; none before the first measured
    reset."""
    if not resets_s or max(resets_s) <= 0:
        return 0
    if period_s is None or period_s <= 0:
        return quota
    mean, jitter = mean_and_jitter(resets_s)
    # Beside the environment in use; the reset is the whole round trip of the rule.
    return quota * (in_flight(period_s, mean / 2, jitter_s=jitter / 2, most=MOST_AHEAD + 1) - 1)


@dataclass(eq=False)
class Prefetcher(RolloutStrategy):
    """Owns environments from the start of their reset until a trajectory takes them (`take`, `reset`).

    Each reset is a task of the scheduler under a lease in the name of its trajectory. A failed reset counts as a fault
    of the trajectory that takes it, as if that trajectory had made the call. Invariant: at most `PrefetchDepth.wanted`
    environments are held per domain. Unused environments are closed, the newest first if a running trajectory waits for
    a slot on a host. The seeds are the prompts' seeds, and members of a prompt are reset in order, so the observations
    of an episode do not depend on prefetching.
    """

    domains: Sequence[Domain]
    leases: Leases
    recorder: Recorder
    _: KW_ONLY
    depth: int | Literal["auto"]
    reset_s: float
    close_s: float

    def __post_init__(self) -> None:
        self.rules = {d.name: PrefetchDepth(self.depth, d.quota) for d in self.domains}
        self.held: dict[str, dict[TrajectoryId, PrefetchedEnvironment]] = {d.name: {} for d in self.domains}
        self.begun = self.used = self.unused = 0

    def look_ahead(
        self,
        tasks: asyncio.TaskGroup,
        left: Mapping[str, int],
        upcoming: Callable[[Domain, int], Sequence[PendingPrompt]],
    ) -> None:
        for domain in self.domains:
            self._fill(tasks, domain, max(min(left[domain.name], self.rules[domain.name].wanted()), 0), upcoming)

    def _fill(
        self,
        tasks: asyncio.TaskGroup,
        domain: Domain,
        room: int,
        upcoming: Callable[[Domain, int], Sequence[PendingPrompt]],
    ) -> None:
        """Begin resets for the members of the domain's next prompts, in order, until `room` are held for them."""
        held = self.held[domain.name]
        for prompt in upcoming(domain, math.ceil(room / domain.group_size)):
            for member in range(domain.group_size):
                name = TrajectoryId(f"{prompt.group}.{member}")
                if name in held:
                    continue
                if len(held) >= room:
                    return
                ahead = held[name] = PrefetchedEnvironment(asyncio.get_running_loop().create_future())
                ahead.task = tasks.create_task(self._hold(domain, name, prompt.seed, ahead), name=f"reset for {name}")

    def take(self, domain: str, trajectory: TrajectoryId) -> PrefetchedEnvironment | None:
        """The trajectory's prefetched environment, which the caller now owns and closes; None if there is none."""
        ahead = self.held[domain].pop(trajectory, None)
        if ahead is None:
            return None
        if ahead.environment is None or not has_host_slot(ahead.environment):
            self._give_up(ahead)  # not begun: a reset by the trajectory takes no longer, and has priority for a slot
            return None
        mark_in_use(ahead.environment)
        ahead.taken.set()
        self.used += 1
        return ahead

    def reset(self, domain: str, seconds: float) -> None:
        """Record the duration of a reset, prefetched or not."""
        rule = self.rules[domain]
        first = not rule.resets_s
        rule.resets_s.append(seconds)
        if first:  # prefetching becomes possible
            self.wake()

    def kept(self, run: GroupRun) -> None:
        self.released(run.id)

    def released(self, group: GroupId) -> None:
        """Close the unused environments of the group."""
        for held in self.held.values():
            for name in [n for n in held if n.rpartition(".")[0] == group]:
                self._give_up(held.pop(name))

    def published(self, version: int, consumed: Sequence[Group]) -> None:
        now = asyncio.get_running_loop().time()
        for rule in self.rules.values():
            rule.published(now)
        fields = {"begun": self.begun, "used": self.used, "unused": self.unused}
        held = sum(map(len, self.held.values()))
        self.recorder.event(RunEvent(now, "environments_prefetched", f"v{version}", {**fields, "held": held}))

    def close(self) -> None:
        """Cancel the tasks, which close the unused environments."""
        for held in self.held.values():
            for ahead in held.values():
                self._give_up(ahead)
            held.clear()

    def _give_up(self, ahead: PrefetchedEnvironment) -> None:
        assert ahead.task is not None
        ahead.task.cancel()

    def _yield(self, domain: str, trajectory: TrajectoryId, ahead: PrefetchedEnvironment) -> None:
        """Free its slot on the host for another episode."""
        self._drop(domain, trajectory, ahead)
        self._give_up(ahead)

    def _drop(self, domain: str, trajectory: TrajectoryId, ahead: PrefetchedEnvironment) -> None:
        """Stop holding it; another one may be held for the same trajectory."""
        if self.held[domain].get(trajectory) is ahead:
            del self.held[domain][trajectory]

    async def _hold(self, domain: Domain, trajectory: TrajectoryId, seed: int, ahead: PrefetchedEnvironment) -> None:
        try:
            with UserCodeGuard():
                environment = ahead.environment = domain.environment()
        except Exception:
            self._drop(domain.name, trajectory, ahead)  # the trajectory's own attempt reports the error
            return
        self.begun += 1
        try:
            await self._begin(domain.name, trajectory, seed, ahead, environment)
            await ahead.taken.wait()
        finally:
            if not ahead.taken.is_set():
                self._drop(domain.name, trajectory, ahead)
                self.unused += 1
                with (
                    contextlib.suppress(Exception),
                    self.leases.hold(trajectory, "the close of its environment", self.close_s, Expiry.GAP_FILL),
                    UserCodeGuard(),
                ):
                    await environment.close()

    async def _begin(
        self, domain: str, trajectory: TrajectoryId, seed: int, ahead: PrefetchedEnvironment, environment: Environment
    ) -> None:
        try:
            await prepare_environment(
                environment,
                seed,
                trajectory,
                PlacementRequest(PlacementPriority.AHEAD),
                lambda: self._yield(domain, trajectory, ahead),
            )
            ahead.ready.set()
            began = asyncio.get_running_loop().time()
            with (
                self.leases.hold(trajectory, "the reset of its environment", self.reset_s, Expiry.GAP_FILL),
                UserCodeGuard(),
            ):
                observation = checked_observation(await require_awaitable(environment.reset(seed), "reset"))
        except Exception as error:
            ahead.over.set_exception(error)
            ahead.ready.set()
            ahead.over.exception()  # marks it as retrieved: an unused failure is not logged
            return
        except asyncio.CancelledError:
            ahead.over.cancel()
            ahead.ready.set()
            raise
        ahead.seconds = asyncio.get_running_loop().time() - began
        self.reset(domain, ahead.seconds)
        ahead.over.set_result(observation)
