"""Muon for the matrices of a policy's blocks, AdamW for everything else, as one optimizer.

Muon (Jordan et al. 2024) replaces the momentum of a matrix by its orthogonalization. Its step is scaled to the root
mean square of AdamW's (arXiv:2502.16982, §2.2), so that both take the same learning rate and weight decay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rollart.errors import UsageError


class MuonWithAdamW(torch.optim.Optimizer):
    """`matrices` [rows, columns] are updated by Muon; `others`, parameter groups, by AdamW. State and parameter groups
    are those of both. `UsageError` if torch has no Muon (from 2.9 on)."""

    def __init__(
        self,
        matrices: list[nn.Parameter],
        others: Iterable[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise UsageError(
                f"training.optimizer is muon, which torch {torch.__version__} does not have (rule: 2.9 or later)",
                remedy="pip install -U torch, or set training.optimizer to adamw",
            )
        parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        ]
        if groups := [group for group in others if group["params"]]:  # adapters are matrices alone
            parts.append(torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True))
        super().__init__([p for part in parts for group in part.param_groups for p in group["params"]], {"lr": lr})
        self.param_groups = [group for part in parts for group in part.param_groups]  # a new rate reaches its part
        for part in parts:
            part.state = self.state
        self._parts = parts

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the gradient is there"
        for part in self._parts:
            part.step()


def muon_matrices(model: Any, trained: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The trained matrices, adapters included, but for embeddings and the output head: their rows belong to tokens, and
    no product of them is a map between activations."""
    tables: set[Tensor] = {p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    head = model.get_output_embeddings()
    tables |= set() if head is None else set(head.parameters())
    return [p for p in trained if p.ndim == 2 and p not in tables]
