"""Replay of the experts that the engine chose (R3; Ma et al., "Stabilizing MoE Reinforcement Learning by Aligning
Training and Inference Routers", arXiv:2510.11370, section 4).

Where two experts have nearly the same probability, engine and trainer may choose different ones, by rounding or since
the trainer is some updates ahead, and log-probabilities jump. In a replay each token runs through the experts of its
rollout. Their weights are still the trainer's router's, which therefore has a gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollart.architecture import ExpertLayers


class RouterReplay:
    """Owns the `forward` of a model's routers. `chosen` is valid for the passes until it is set again: a backward pass
    with activation checkpointing computes the routers anew."""

    def __init__(self, routers: Iterable[nn.Module]) -> None:
        self.chosen: Tensor | None = None
        """Numbers of the experts `[tokens, layers, active]` of the next forward pass, -1 where the model is to choose;
        None: it chooses all."""
        for layer, router in enumerate(routers):
            original = router.forward
            router.forward = functools.partial(self._route, router, original, layer)

    def _route(self, router: Any, original: Any, layer: int, hidden: Tensor) -> Any:
        """Logits `[tokens, experts]`, and weights and numbers of the chosen experts `[tokens, active]`."""
        if self.chosen is None:
            return original(hidden)
        logits = F.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
        probabilities = logits.softmax(-1, dtype=torch.float32)
        given = self.chosen[:, layer]
        numbers = torch.where(given < 0, probabilities.detach().topk(router.top_k).indices, given)
        shares = probabilities.gather(1, numbers)
        if router.norm_topk_prob:
            shares = shares / shares.sum(-1, keepdim=True)
        return logits, shares.to(logits.dtype), numbers


def expert_layers(model: Any) -> tuple[ExpertLayers | None, list[nn.Module]]:
    """The layers with experts of a transformers model and their routers, in order. None and no routers for a model
    without, or with another kind of router, which chooses for itself."""
    found: dict[int, Any] = {}
    for number, layer in enumerate(getattr(model.base_model, "layers", ())):
        router = getattr(getattr(layer, "mlp", None), "gate", None)
        if type(router).__name__ == "Qwen3MoeTopKRouter":
            found[number] = router
    if not found:
        return None, []
    first = next(iter(found.values()))
    width = int(model.config.moe_intermediate_size)
    shape = ExpertLayers(first.num_experts, first.top_k, width, bool(first.norm_topk_prob), tuple(found))
    return shape, list(found.values())
