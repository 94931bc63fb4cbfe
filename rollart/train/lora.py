"""Low-rank adapters through `peft` (extra `lora`): injected into the model, and merged into published versions.

Engines never see an adapter: a version's weights are W + (alpha / rank) B A, under the names of W.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rollart.errors import UsageError
from rollart.learning import LoraSpec

ADAPTER = "default"
"""The adapters' name in peft's parameter names."""


@dataclass(frozen=True, slots=True)
class AdaptedTensor:
    """A tensor of a version: `base`, plus `scale` × `b` @ `a` if it has an adapter. May be sharded by rows."""

    base: Tensor
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 0.0

    @property
    def parts(self) -> list[Tensor]:
        return [t for t in (self.base, self.a, self.b) if t is not None]

    @staticmethod
    def merge(parts: list[Tensor], scale: float) -> Tensor:
        """The merged tensor of whole parts, in the order of `parts`."""
        if len(parts) == 1:
            return parts[0]
        base, a, b = parts
        return base + scale * (b.to(base.dtype) @ a.to(base.dtype))


def inject_adapters(model: nn.Module, config: LoraSpec, seed: int) -> None:
    """Inject adapters into the model and freeze the rest. They start at zero, with no effect on the policy.
    `UsageError` if peft is missing or finds no such module."""
    try:
        import peft
    except ImportError as error:
        raise UsageError("training.lora needs peft", remedy="pip install 'rollart[lora]'") from error
    targets: Any = "all-linear" if config.targets == ["all-linear"] else config.targets
    setup = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets, lora_dropout=0.0)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            peft.inject_adapter_in_model(setup, model, adapter_name=ADAPTER)
    except ValueError as error:
        raise UsageError(f"training.lora.targets {config.targets}: {str(error).splitlines()[0]}") from error


def published_tensors(model: Any) -> dict[str, AdaptedTensor]:
    """Tensors of a version by Hugging Face name. A tied tensor appears once, under its first name, as in
    `save_pretrained`."""
    state: Mapping[str, Tensor] = model.state_dict(keep_vars=True)
    out: dict[str, AdaptedTensor] = {}
    visited: set[int] = set()
    for name, tensor in state.items():
        if ".lora_" in name or id(tensor) in visited:
            continue
        visited.add(id(tensor))
        holder, _, leaf = name.rpartition(".base_layer.")
        if not holder:
            out[name] = AdaptedTensor(tensor)
        elif leaf != "weight":
            out[f"{holder}.{leaf}"] = AdaptedTensor(tensor)
        else:
            a, b = (state[f"{holder}.{which}.{ADAPTER}.weight"] for which in ("lora_A", "lora_B"))
            out[f"{holder}.weight"] = AdaptedTensor(tensor, a, b, float(model.get_submodule(holder).scaling[ADAPTER]))
    return out


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The adapters' own parameters, by name."""
    return {name: p for name, p in model.named_parameters() if ".lora_" in name}
