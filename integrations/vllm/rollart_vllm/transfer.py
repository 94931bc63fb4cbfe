"""vLLM's weight transfer, from directories that a trainer published.

A version is staged by `update_weights` and put in by `finish_weight_update`: whatever is wrong with it is said while
the engine still serves the weights before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rollart_vllm.directory import Version, open_version

__all__ = ["DirectoryInit", "DirectoryTransfer", "DirectoryUpdate"]


@dataclass
class DirectoryInit(WeightTransferInitInfo):
    """Directories need no meeting of trainer and engine."""


@dataclass
class DirectoryUpdate(WeightTransferUpdateInfo):
    """A published directory that every worker of the engine can read."""

    path: str
    verify: bool = True
    """Compare every bucket with its published sha256 before anything changes."""


class DirectoryTransfer(WeightTransferEngine[DirectoryInit, DirectoryUpdate]):
    """One per worker. vLLM calls `start_weight_update`, `update_weights` and `finish_weight_update` in this order,
    while the scheduler is paused; a version that is staged again replaces the one before."""

    init_info_cls = DirectoryInit
    update_info_cls = DirectoryUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._staged: Version | None = None

    def init_transfer_engine(self, init_info: DirectoryInit) -> None:
        pass

    def start_weight_update(self) -> None:
        self._staged = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stage a version. (vLLM's own also synchronizes an accelerator, which a CPU has not.)"""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: DirectoryUpdate) -> None:
        config = self.model_config.hf_config.to_dict()
        self._staged = open_version(update_info.path, config, verify=update_info.verify)

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        """Load what is staged, as vLLM loads a checkpoint: fused, sharded and packed anew, layer by layer."""
        staged, self._staged = self._staged, None
        if staged is None:
            raise ValueError("no version is staged: update_weights comes first")
        tied = _tied(self.model)
        with torch.device(self.device):
            initialize_layerwise_reload(self.model)
            self.model.load_weights(staged.tensors())
            finalize_layerwise_reload(self.model, self.model_config)
            for head in tied:
                # It is in no checkpoint, so nothing of it was loaded; on a CPU it has a packed copy of the embedding
                # that it shares, which would stay as it was: wrong answers, and no error.
                head.quant_method.process_weights_after_loading(head)
        staged.close()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def shutdown(self) -> None:
        self._staged = None


def _tied(model: torch.nn.Module) -> list[Any]:
    """Layers that have their weight from another one, and do something with it after loading."""
    seen: set[int] = set()
    found: list[Any] = []
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, torch.nn.Parameter) or weight.numel() == 0:
            continue
        if id(weight) in seen and hasattr(getattr(layer, "quant_method", None), "process_weights_after_loading"):
            found.append(layer)
        seen.add(id(weight))
    return found
