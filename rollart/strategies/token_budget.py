"""The trained part of a batch: all of it, or a fixed number of tokens (Ring-lite's C3PO, arXiv:2506.14731)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from rollart.control.training import all_samples
from rollart.model import Group, TrainSample
from rollart.policy.sample_table import SampleRow, TokenBudget


@dataclasses.dataclass(frozen=True, slots=True)
class BatchTruncation:
    """At most `tokens` tokens of a batch, so that every step takes the same time. Samples are taken in an order drawn
    from step and id; the sample at the limit is cut there, and later samples are left out. A batch with fewer tokens
    stays whole.

    All samples, long or short, are equally likely to be left out. The rewards of a cut sample after the cut move to its
    last kept action token, so that its return does not change.
    """

    tokens: int
    measure: Callable[[Sequence[int]], int] = len

    def __call__(self, groups: Sequence[Group], step: int) -> list[TrainSample]:
        samples = all_samples(groups, step)
        rows: dict[str, SampleRow] = {
            s.id: SampleRow(s.id, g.id, len(g.samples), self.measure(s.token_ids), s.v0)
            for g in groups
            for s in g.samples
        }
        if sum(row.tokens for row in rows.values()) <= self.tokens:
            return samples
        chosen = TokenBudget(self.tokens, str(step))(rows)
        assert chosen is not None, "there are more tokens than the budget's"
        kept = {p.row.id: p.tokens for p in chosen.batches[0]}
        cut = [self._cut(s, kept[s.id], rows[s.id].tokens) for s in samples if s.id in kept]
        return [s for s in cut if any(s.loss_mask)]

    def _cut(self, sample: TrainSample, tokens: int, of: int) -> TrainSample:
        if tokens == of:
            return sample
        end, used = 0, 0
        for token in sample.token_ids:
            used += self.measure((token,))
            if used > tokens:
                break
            end += 1
        last = max((i for i in range(end) if sample.loss_mask[i]), default=None)
        rewards = list(sample.rewards[:end])
        if last is not None:
            rewards[last] += sum(sample.rewards[end:])
        return dataclasses.replace(
            sample,
            token_ids=sample.token_ids[:end],
            loss_mask=sample.loss_mask[:end],
            logprobs=sample.logprobs[:end],
            versions=sample.versions[:end],
            turn=sample.turn[:end],
            rewards=tuple(rewards),
            allowed=sample.allowed[:end],
            reference=sample.reference[:end],
            advantage=sample.advantage[:end],
            experts=sample.experts[:end],
        )
