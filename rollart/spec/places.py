"""The number of concurrent episodes of a run, compared with the slots of its environment hosts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollart.spec.cluster import ClusterSpec
from rollart.spec.rules import quotas
from rollart.spec.run import RunSpec

__all__ = ["ConcurrentEpisodes", "concurrent_episodes", "episode_slot_notes"]

MAX_CONCURRENT_EVALUATIONS = 128
"""Largest number of concurrent held-out episodes (`runtime.evaluation`)."""

ROUNDING_TOLERANCE = 1e-9
"""A product this close below a whole number counts as that number."""


@dataclass(frozen=True, slots=True)
class ConcurrentEpisodes:
    """Upper bounds: running trajectories (redundant ones too), prefetched environments beside them, and held-out
    episodes, which run while nothing trains. `prefetch: auto` counts as one batch: its initial value, which it gives up
    where other episodes wait."""

    running: int
    ahead: int
    held_out: int

    @property
    def most(self) -> int:
        return max(self.running + self.ahead, self.held_out)


def concurrent_episodes(run: RunSpec) -> ConcurrentEpisodes:
    """The largest numbers of concurrent episodes. SpecError where domains cannot fill the batch."""
    rollout, running = run.rollout, 0
    more, members, extra = rollout.redundancy.groups, rollout.redundancy.size, 0
    if rollout.tail_batching is not None:
        more, members = rollout.tail_batching.eta_prompts, rollout.tail_batching.eta_responses
    for name, quota in quotas(run).items():
        size = run.domain(name).group_size
        groups = quota // size
        started = groups * run.staleness + math.floor(groups * more + ROUNDING_TOLERANCE)
        running += started * math.floor(size * members + ROUNDING_TOLERANCE)
        extra = max(extra, math.floor(size * members + ROUNDING_TOLERANCE))
    running += rollout.filter.max_additional_running_prompts * extra
    ahead = run.batch.trajectories if rollout.prefetch == "auto" else rollout.prefetch * len(run.domains)
    return ConcurrentEpisodes(
        running, ahead, min(MAX_CONCURRENT_EVALUATIONS, run.evaluation.episodes * len(run.domains))
    )


def episode_slot_notes(run: RunSpec, cluster: ClusterSpec) -> tuple[str, ...]:
    """A note if some episodes will wait for slots of others."""
    spec, most = cluster.environments, concurrent_episodes(run)
    if not isinstance(spec.workers, int) or not spec.workers or spec.workers * spec.per_worker >= most.most:
        return ()
    ahead = f", {most.ahead} ahead of need" if most.ahead else ""
    return (
        f"environments: {spec.workers} x {spec.per_worker} places (workers x per_worker) for up to {most.most} "
        f"episodes at a time ({most.running} trajectories{ahead}): the others wait for a place",
    )
