"""Batches of samples that are given, not rolled out: supervised fine-tuning."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rollart.control.domain import derive_seed
from rollart.model import Group, TrainSample

GIVEN = "data"
"""Domain of the samples, in the trainer's terms."""


@dataclass(eq=False)
class GivenBatches:
    """The batch of each step, from the step's number alone: a resumed run continues with the right samples.

    Invariant: the steps of an epoch, ⌈samples / size⌉ of them, have every sample once, in an order of that epoch's own;
    the last step has what is left.
    """

    samples: Sequence[tuple[Sequence[int], bytes]]
    """Tokens of each sample, and a 1 for each with loss."""
    size: int
    seed: int
    _order: tuple[int, Sequence[int]] = (-1, ())
    """The last epoch used, and its order."""

    def __call__(self, groups: Sequence[Group], step: int) -> list[TrainSample]:
        """Implements `ControlSettings.samples`; there are no groups."""
        return [self._sample(index) for index in self.indices(step)]

    def indices(self, step: int) -> Sequence[int]:
        """Numbers of the samples of a step."""
        count = len(self.samples)
        epoch, batch = divmod(step, -(-count // self.size))
        if self._order[0] != epoch:
            order = random.Random(derive_seed(self.seed, "epoch", epoch)).sample(range(count), count)
            self._order = epoch, order
        return self._order[1][batch * self.size : (batch + 1) * self.size]

    def _sample(self, index: int) -> TrainSample:
        tokens, mask = self.samples[index]
        return TrainSample.given(
            f"{GIVEN}-{index + 1}", GIVEN, tuple(tokens), tuple(0 if loss else -1 for loss in mask)
        )
