"""Sums behind a step's metrics, kept on the device and read once at the end."""

from __future__ import annotations

import torch
from torch import Tensor

from rollart.train.microbatch import MicroBatch
from rollart.train.ranks import Ranks


class TrainingMeter:
    """Sums over all trained tokens, with one transfer from the device at the end. Names with a leading `_` are
    intermediate values, not metrics."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.real = self.padded = self.updates = self.tokens = 0
        self.largest = 0
        """Padded tokens of the largest micro-batch of this rank."""

    def add(self, micro: MicroBatch, statistics: dict[str, Tensor], loss: Tensor | None = None) -> None:
        """Add per-token statistics [M] of a micro-batch, and its share of the loss if known."""
        self.real += micro.real_tokens
        self.padded += micro.padded_tokens
        self.largest = max(self.largest, micro.padded_tokens)
        self.tokens += len(micro.pick)
        for name, value in statistics.items():
            self._sum(name, value.sum())
        if loss is not None:
            self._sum("loss", loss)

    def update(self, norm: Tensor, loss: Tensor | None = None) -> None:
        self.updates += 1
        self._sum("grad_norm", norm)
        if loss is not None:
            self._sum("loss", loss)

    def merge(self, ranks: Ranks, device: torch.device) -> None:
        """Add the sums of the other ranks. `grad_norm` and the number of updates are equal on all ranks already."""
        if ranks.size == 1:
            return
        names = sorted(self.sums.keys() - {"grad_norm"})
        sums = [float(self.sums[name].item()) for name in names]
        real, padded, tokens, *sums = ranks.totals([self.real, self.padded, self.tokens, *sums], device)
        self.real, self.padded, self.tokens = int(real), int(padded), int(tokens)
        self.sums |= {name: torch.tensor(value, dtype=torch.float64) for name, value in zip(names, sums, strict=True)}

    def mean(self, name: str) -> float:
        """Mean per update for `loss` and `grad_norm`, per visited token for other names."""
        return float(self.sums[name].item()) / max(1, self.updates if name in ("loss", "grad_norm") else self.tokens)

    def metrics(self) -> dict[str, float]:
        means = {name: self.mean(name) for name in self.sums if not name.startswith("_")}
        return means | {"updates": float(self.updates), "padding_share": 1.0 - self.real / max(1, self.padded)}

    def _sum(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name] + value if name in self.sums else value
