"""Token mass: in the simulated world a token id is the number of real tokens that it stands for.

The memory and time per turn of a simulated trajectory are then independent of its token counts: an observation of 512
tokens is the text "512" and one id, an answer of 8,000 tokens is one id too. The context of a request is the sum of its
ids. Counts that engines report (prompt and cached tokens) are real tokens; counts that the product makes itself
(`len(token_ids)`) are pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollart.model import SegmentKind, TrainSample, Trajectory

__all__ = ["MassTokenizer", "action_mass", "mass_of", "sampled_mass", "text_of"]


class MassTokenizer:
    """Implements `ports.Tokenizer`: decimal numbers separated by spaces are masses. ValueError for any other text, and
    for a mass below 1: a piece without tokens is invalid."""

    def encode(self, text: str) -> tuple[int, ...]:
        masses = tuple(map(int, text.split()))
        if masses and min(masses) < 1:
            raise ValueError(f"mass {min(masses)} in {text!r} (rule: at least 1 token)")
        return masses

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def token(self, token_id: int) -> str:
        return str(token_id)

    def token_id(self, text: str) -> int:
        masses = self.encode(text)
        if len(masses) != 1:
            raise ValueError(f"{text!r} is {len(masses)} pieces (rule: exactly one)")
        return masses[0]


def text_of(*masses: int) -> str:
    """The text that `MassTokenizer` encodes to these masses."""
    return " ".join(map(str, masses))


def mass_of(token_ids: Iterable[int]) -> int:
    """Real tokens that the ids stand for."""
    return sum(token_ids)


def sampled_mass(sample: TrainSample) -> int:
    """Real tokens with loss in a sample."""
    return sum(m for m, trained in zip(sample.token_ids, sample.loss_mask, strict=True) if trained)


def action_mass(trajectory: Trajectory) -> int:
    """Real tokens that were sampled in a trajectory."""
    return sum(sum(s.token_ids) for s in trajectory.segments if s.kind is SegmentKind.ACTION)
