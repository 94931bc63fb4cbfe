"""A rewarder that also reports the functions' outcomes, for the run spec's `keep`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from rollart.adapters.rewards.offload import OffloadRewarder, RewardCalls
from rollart.ledger.kept import KeptScore
from rollart.model import Item, ModelFault, Outcome, Scored, Trajectory
from rollart.settings.run import DomainSpec
from serverless.inline import InlineScorer


class KeepingRewarder(OffloadRewarder):
    """Passes each trajectory's id, its reward (None without one) and the outcomes of its functions to `sink`.
    `versions`: the digests of the functions' packages."""

    def __init__(
        self,
        offload: RewardCalls,
        domains: Iterable[DomainSpec],
        local: Mapping[str, InlineScorer] | None = None,
        *,
        versions: Mapping[str, str],
        sink: Callable[[str, float | None, tuple[KeptScore, ...]], None],
    ) -> None:
        super().__init__(offload, domains, local)
        self._versions, self._sink = versions, sink

    def _combined(self, trajectory: Trajectory, domain: DomainSpec, item: Item, outcomes: Sequence[Outcome]) -> Outcome:
        combined = super()._combined(trajectory, domain, item, outcomes)
        value = combined.value if isinstance(combined, Scored) else None
        value = combined.floor if isinstance(combined, ModelFault) else value
        scores = [
            KeptScore(use.function, self._versions.get(use.function, ""), use.weight, outcome)
            for use, outcome in zip(domain.rewards, outcomes, strict=True)
        ]
        self._sink(trajectory.id, value, tuple(scores))
        return combined
