"""A rewarder that also stores scored items, for the run spec's `keep`."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from rollart.adapters.rewards.offload import OffloadRewarder, RewardCalls
from rollart.ledger.kept import KeptItem, KeptScore
from rollart.model import InfraFault, Item, ModelFault, Outcome, Purpose, Scored, Trajectory
from rollart.settings.run import DomainSpec, KeepSpec
from serverless.inline import InlineScorer


class KeepingRewarder(OffloadRewarder):
    """Passes scored items to `sink`. `versions`: the digests of the functions' packages."""

    def __init__(
        self,
        offload: RewardCalls,
        domains: Iterable[DomainSpec],
        local: Mapping[str, InlineScorer] | None = None,
        *,
        keep: KeepSpec,
        versions: Mapping[str, str],
        sink: Callable[[KeptItem], None],
    ) -> None:
        super().__init__(offload, domains, local)
        self._keep, self._versions, self._sink = keep, versions, sink

    def _combined(self, trajectory: Trajectory, domain: DomainSpec, item: Item, outcomes: Sequence[Outcome]) -> Outcome:
        combined = super()._combined(trajectory, domain, item, outcomes)
        if trajectory.purpose is Purpose.TRAIN and is_kept(self._keep, trajectory.group, outcomes):
            scores = [
                KeptScore(use.function, self._versions.get(use.function, ""), use.weight, outcome)
                for use, outcome in zip(domain.rewards, outcomes, strict=True)
            ]
            value = combined.value if isinstance(combined, Scored) else None
            value = combined.floor if isinstance(combined, ModelFault) else value
            now = asyncio.get_running_loop().time()
            kept = KeptItem(item, trajectory.group, trajectory.domain, trajectory.v0, value, tuple(scores), now)
            self._sink(kept)
        return combined


def is_kept(keep: KeepSpec, group: str, outcomes: Sequence[Outcome]) -> bool:
    """True if an item of the group with these outcomes is stored. A sample has whole groups, the same in every life of
    a run. Pure."""
    if keep.share < 1.0:
        drawn = hashlib.blake2b(group.encode(), digest_size=4).digest()
        return int.from_bytes(drawn, "big") < keep.share * 2**32
    return keep.items != "failed" or any(isinstance(outcome, InfraFault | ModelFault) for outcome in outcomes)
