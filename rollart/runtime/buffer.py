"""The sample buffer: complete groups in any order in, whole batches out, each group exactly once (I3, I6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from rollart.model import Group, GroupId
from rollart.policy.batching import ReadyGroup, select_batch
from rollart.policy.staleness import StalenessBound

__all__ = ["SampleBuffer"]


class SampleBuffer:
    """Owns the complete groups that no batch has taken. Admission bounds it: it holds at most (alpha + 1) batches.

    `add` is called by the scheduler and never waits. `take` and `grow` are called by training alone; `take` waits for a
    whole batch, `grow` for any group of it, both unblocked by `add` or `published`. Invariant: a group enters once and
    leaves once, by `take`, `grow` or `discard`.
    """

    def __init__(
        self,
        quotas: Mapping[str, int],
        *,
        bound: StalenessBound,
        token_budget: int | None = None,
        measure: Callable[[Sequence[int]], int] = len,
    ) -> None:
        """`measure`: how many tokens ids stand for, which the budget is in."""
        self._measure = measure
        self._quotas = dict(quotas)
        self._bound = bound
        self._token_budget = token_budget
        self._groups: dict[str, Group] = {}
        self._ready: dict[str, ReadyGroup] = {}
        self._held = dict.fromkeys(self._quotas, 0)
        self._seen = 0
        self._changed = asyncio.Event()

    def add(self, group: Group) -> None:
        if group.id in self._groups:
            raise ValueError(f"group {group.id} is in the buffer already")
        self._seen += 1
        self._held[group.domain] += len(group.samples)
        tokens = sum(self._measure(s.token_ids) for s in group.samples)
        self._groups[group.id] = group
        self._ready[group.id] = ReadyGroup(group.id, group.domain, group.v0, len(group.samples), tokens, self._seen)
        self._changed.set()

    def discard(self, group_id: GroupId) -> bool:
        """Remove a dropped group; whether it was here."""
        if group_id not in self._ready:
            return False
        self._take_out(self._ready[group_id])
        return True

    def stale(self, version: int) -> list[Group]:
        """Groups that no batch may take any more."""
        return [self._groups[r.id] for r in self._ready.values() if self._bound.stale(r.v0, version)]

    def published(self) -> None:
        """The version advanced: what can be taken may have changed."""
        self._changed.set()

    async def take(self, version: int) -> tuple[Group, ...]:
        """The next batch for training from `version`."""
        while True:
            chosen = self._select(version) if self._may_suffice() else None
            if chosen is not None:
                return tuple(self._take_out(ready) for ready in chosen)
            self._changed.clear()
            await self._changed.wait()

    async def grow(self, version: int, taken: Sequence[Group]) -> tuple[Group, ...]:
        """Groups for the batch that `taken` began, for training from `version`: all that are there and fit, at least
        one; none once it is whole.

        A batch that grows takes what is finished first, where `take` takes what is oldest; within what is there it is
        the same order. Staleness is judged here, once: the version does not change before the batch is trained. With a
        token budget, which is a matter of the whole batch, it comes in one piece.
        """
        if self._token_budget is not None:
            return () if taken else await self.take(version)
        room = dict(self._quotas)
        for group in taken:
            room[group.domain] -= len(group.samples)
        while any(room.values()):
            chosen = self._fitting(version, room)
            if chosen:
                return tuple(self._take_out(ready) for ready in chosen)
            self._changed.clear()
            await self._changed.wait()
        return ()

    def _fitting(self, version: int, room: Mapping[str, int]) -> list[ReadyGroup]:
        left = dict(room)
        fresh = [r for r in self._ready.values() if left[r.domain] and not self._bound.stale(r.v0, version)]
        chosen = []
        for ready in sorted(fresh, key=lambda r: (r.v0, r.order)):
            if ready.samples <= left[ready.domain]:
                left[ready.domain] -= ready.samples
                chosen.append(ready)
        return chosen

    def _take_out(self, ready: ReadyGroup) -> Group:
        del self._ready[ready.id]
        self._held[ready.domain] -= ready.samples
        return self._groups.pop(ready.id)

    def _select(self, version: int) -> tuple[ReadyGroup, ...] | None:
        return select_batch(
            list(self._ready.values()),
            self._quotas,
            version=version,
            bound=self._bound,
            token_budget=self._token_budget,
        )

    def _may_suffice(self) -> bool:
        """Cheap and necessary: without a token budget every domain must hold its quota. Asked at each added group."""
        if self._token_budget is not None:
            return True
        return all(self._held[domain] >= quota for domain, quota in self._quotas.items())
