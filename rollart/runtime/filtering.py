"""Dynamic filtering of complete groups, and statistics of the filtered groups against the kept ones."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence

from rollart.errors import RunFailed
from rollart.model import Group
from rollart.policy.fairness import Apportionment, DomainShare
from rollart.policy.replication import (
    FILTERED_AGAINST_KEPT,
    FilterSettings,
    GroupVerdict,
    RefillBudget,
    classify_rewards,
)
from rollart.ports import Recorder, RunEvent
from rollart.runtime.domain import Domain
from rollart.runtime.groups import GroupRun
from rollart.runtime.redundant import SelectionBiasReport

__all__ = ["GroupFilter", "additional_prompts"]


class GroupFilter:
    """Classifies every group once, when it is complete. Synchronous; called only by the scheduler.

    A group that was complete at a crash is classified again on resume, with the same verdict, because the verdict
    depends on the rewards alone.
    """

    def __init__(self, domains: Sequence[Domain], settings: FilterSettings, recorder: Recorder) -> None:
        self._settings = settings
        self._recorder = recorder
        self._refills = {
            d.name: RefillBudget(math.floor(settings.most * d.quota / d.group_size + 1e-9)) for d in domains
        }
        self._against = SelectionBiasReport(recorder, FILTERED_AGAINST_KEPT, on=settings.zero_variance)
        self._said: set[str] = set()

    def leaves_out(self, run: GroupRun) -> bool:
        """True if the group is excluded from training. `RunFailed` if the refill budget of its domain is exhausted,
        unless the settings `keep` further groups."""
        if not self._settings.zero_variance:
            return False
        refills = self._refills[run.domain.name]
        rewards = [sample.score for sample in run.samples.values()]
        verdict = classify_rewards(rewards)
        if refills.judged(verdict):
            self._against.dropped(run)
            self._event("group_filtered", run.id, domain=run.domain.name, reward=math.fsum(rewards) / len(rewards))
            return True
        if verdict is GroupVerdict.ALIKE:
            self._exhausted(run.domain.name, refills)
        self._against.kept(run)
        return False

    def trained(self, consumed: Iterable[Group], version: int) -> None:
        """These groups were trained: reset the refill budgets of their domains."""
        for domain in {group.domain for group in consumed}:
            self._refills[domain].trained()
            self._said.discard(domain)
        self._against.report(version)

    def _exhausted(self, domain: str, refills: RefillBudget) -> None:
        seen = refills.filtered + refills.qualified
        share = f"all {seen}" if not refills.qualified else f"{refills.filtered} of {seen}"
        said = f"{share} groups of domain {domain} since its last step had members of the same reward"
        if not self._settings.keep:
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
