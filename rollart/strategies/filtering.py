"""Dynamic filtering: which groups carry a training signal, and when enough of them do (ROLL Flash §2.1).

A group of equal rewards has no advantage and hence no gradient. Extra prompts run, and generation stops as soon as
enough groups qualify; the filtered groups are reported against the kept ones. Prompt replication itself is
`rollout.replication` (`serving.group_colocation` serves runs without it).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollart.control.domain import Domain
from rollart.control.groups import GroupRun
from rollart.control.strategy import RolloutStrategy
from rollart.errors import RunFailed
from rollart.ledger.events import FILTERED_AGAINST_KEPT
from rollart.model import Group
from rollart.ports import Recorder, RunEvent
from rollart.settings.rollout import FilterSpec
from rollart.shares import DomainShare
from rollart.strategies.fairness import Apportionment
from rollart.strategies.redundancy import SelectionBiasReport

TOLERANCE = 1e-8
"""Rewards that differ by less are equal: rounding of sums of floats, far below any meaningful difference."""


def rewards_alike(rewards: Sequence[float]) -> bool:
    """True if the rewards do not distinguish the members of a group: no advantage."""
    return max(rewards) - min(rewards) <= TOLERANCE


@dataclass(slots=True)
class RefillBudget:
    """Counts the groups of one domain that were filtered since its last step. Each is replaced by a fresh prompt, so
    the budget bounds how long a step can continue in vain. Bound: `filtered` never exceeds `limit`."""

    limit: int
    filtered: int = 0
    qualified: int = 0

    def takes(self, *, alike: bool) -> bool:
        """A group ended. True: filter it. False: it is kept, since its rewards differ or the bound is reached."""
        if not alike:
            self.qualified += 1
            return False
        if self.filtered >= self.limit:
            return False
        self.filtered += 1
        return True

    def trained(self) -> None:
        """Groups of the domain went into a step: the budget is reset."""
        self.filtered = self.qualified = 0


class GroupFilter(RolloutStrategy):
    """Classifies every group once, when it is complete. Its report needs the snapshots of `SelectionBiasReport`.

    A group that was complete at a crash is classified again on resume, with the same verdict, because the verdict
    depends on the rewards alone.
    """

    def __init__(self, domains: Sequence[Domain], settings: FilterSpec, recorder: Recorder) -> None:
        self._settings = settings
        self._recorder = recorder
        self._refills = {
            d.name: RefillBudget(math.floor(settings.max_refills * d.quota / d.group_size + 1e-9)) for d in domains
        }
        self._against = SelectionBiasReport(recorder, FILTERED_AGAINST_KEPT)
        self._said: set[str] = set()

    def accepts(self, run: GroupRun) -> bool:
        """False if the group is excluded from training. `RunFailed` if the refill budget of its domain is exhausted,
        unless further groups are kept."""
        refills = self._refills[run.domain.name]
        rewards = [sample.score for sample in run.samples.values()]
        alike = rewards_alike(rewards)
        if refills.takes(alike=alike):
            self._against.surplus(run)
            self._event("group_filtered", run.id, domain=run.domain.name, reward=math.fsum(rewards) / len(rewards))
            return False
        if alike:
            self._exhausted(run.domain.name, refills)
        self._against.kept(run)
        return True

    def published(self, version: int, consumed: Sequence[Group]) -> None:
        """Reset the refill budgets of the trained domains."""
        for domain in {group.domain for group in consumed}:
            self._refills[domain].trained()
            self._said.discard(domain)
        self._against.published(version, consumed)

    def _exhausted(self, domain: str, refills: RefillBudget) -> None:
        seen = refills.filtered + refills.qualified
        share = f"all {seen}" if not refills.qualified else f"{refills.filtered} of {seen}"
        said = f"{share} groups of domain {domain} since its last step had members of the same reward"
        if self._settings.exhausted == "fail":
            raise RunFailed(
                f"{said}, and were filtered (limit {refills.limit})",
                remedy="use prompts that the policy solves now and then, a larger group_size or "
                "rollout.filter.exhausted=keep, then rollart launch --resume",
            )
        if domain not in self._said:
            self._said.add(domain)
            self._event("filter_exhausted", domain, detail=f"{said}: further ones are trained as they are")

    def _event(self, kind: str, subject: str, **fields: str | float) -> None:
        self._recorder.event(RunEvent(asyncio.get_running_loop().time(), kind, subject, fields))


def additional_prompts(domains: Sequence[Domain], count: int) -> dict[str, int]:
    """`count` prompts beyond those of a step, apportioned to domains like the step's groups."""
    return Apportionment(tuple(DomainShare(d.name, d.quota / d.group_size) for d in domains)).step(count)
