"""Several low-rank adapters over one model: every row of a step is computed with its own request's adapter, unmerged.

A linear layer holds the factors of all adapters stacked, A `[columns, in]` and B `[out, columns]`, and adds to W x

    ((x Aᵀ) ∘ s) Bᵀ,    s `[rows, columns]`: alpha / rank in the columns of the row's adapter, 0 in all others

The columns are by adapter, then by the projections that the layer fuses, whose rows of B are zero elsewhere. All shapes
are fixed, so that a decode step can be captured as a graph (as in Punica, arXiv:2310.18547, without its kernels).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollart.errors import UsageError
from rollart.lora import Adapter

RowScales = Mapping[int, Tensor]
"""The factors s of a pass, by the number of a layer's columns."""


@dataclass(frozen=True, slots=True)
class StackedFactors:
    """The factors of one linear layer. `b` may be rows of a larger layer's."""

    a: Tensor
    b: Tensor

    def rows(self, start: int, stop: int) -> StackedFactors:
        """The factors of the outputs [start, stop)."""
        return StackedFactors(self.a, self.b[start:stop])

    def add(self, product: Tensor, x: Tensor, scales: RowScales) -> Tensor:
        """`product` `[rows, out]` plus the adapters' of `x` `[rows, in]`."""
        return torch.addmm(product, torch.mm(x, self.a.t()) * scales[self.a.shape[0]], self.b.t())


@dataclass(frozen=True, slots=True)
class AdaptedPart:
    """A projection with adapters: `rows` of its layer's outputs from `start` on, its number there, and that of all such
    projections of the layer."""

    factors: StackedFactors
    start: int
    rows: int
    number: int
    parts: int


class AdapterStack:
    """The adapters of a network, fixed in number, rank and modules. `load` replaces the factors in place."""

    def __init__(
        self,
        names: Sequence[str],
        rank: int,
        parts: Mapping[str, AdaptedPart],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`parts`: by the name of the weight."""
        self.names, self._rank, self._parts = tuple(names), rank, dict(parts)
        widths = {part.factors.a.shape[0] for part in self._parts.values()}
        self._scales = {width: torch.zeros(len(names), width, device=device, dtype=dtype) for width in widths}
        """The factors s by adapter."""
        self._shapes = {name: (part.rows, part.factors.a.shape[1]) for name, part in self._parts.items()}
        self._revision = ""
        """Of the checkpoint that the network holds."""

    def holds_base(self, adapters: Mapping[str, Adapter]) -> bool:
        """True if the network holds the checkpoint below these adapters."""
        return all(adapter.revision == self._revision for adapter in adapters.values())

    def check(self, adapters: Mapping[str, Adapter]) -> None:
        """UsageError unless these are adapters of the same names, modules and shapes."""
        if tuple(sorted(adapters)) != self.names:
            found = ", ".join(sorted(adapters)) or "none"
            raise UsageError(f"the version has the adapters {found}, the engine {', '.join(self.names)}")
        for name, adapter in adapters.items():
            if adapter.factors.keys() != self._parts.keys():
                other = min(adapter.factors.keys() ^ self._parts.keys())
                raise UsageError(f"adapter '{name}' changes other weights than the engine's adapters: {other}")
            for weight, (a, _) in adapter.factors.items():
                if a.shape[0] != self._rank:
                    raise UsageError(f"adapter '{name}' of {weight} has rank {a.shape[0]}, the engine's {self._rank}")
            try:
                adapter.check(self._shapes)
            except ValueError as error:
                raise UsageError(f"adapter '{name}': {error}") from None

    def load(self, adapters: Mapping[str, Adapter]) -> None:
        """Copy the factors of adapters that `check` has passed, with the checkpoint below them loaded."""
        for index, name in enumerate(self.names):
            adapter = adapters[name]
            for weight, (a, b) in adapter.factors.items():
                part = self._parts[weight]
                first = (index * part.parts + part.number) * self._rank
                part.factors.a[first : first + self._rank].copy_(a)
                part.factors.b[part.start : part.start + b.shape[0], first : first + self._rank].copy_(b)
            for width, scales in self._scales.items():
                own = width // len(self.names)
                scales[index, index * own : (index + 1) * own] = adapter.scale
            self._revision = adapter.revision

    def scales(self, numbers: Tensor) -> RowScales:
        """The factors s of rows with the adapters of these numbers `[rows]` (indices into `names`)."""
        return {width: scales.index_select(0, numbers) for width, scales in self._scales.items()}


def select_scales(scales: RowScales | None, at: Tensor) -> RowScales | None:
    """The factors of the rows `at` alone."""
    return None if scales is None else {width: one.index_select(0, at) for width, one in scales.items()}
