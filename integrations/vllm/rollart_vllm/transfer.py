"""vLLM's weight transfer: from published directories and from a trainer's broadcasts.

`update_weights` stages a version and `finish_weight_update` loads it: an invalid version is refused while the engine
still serves the previous weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rollart_vllm.collective import BroadcastOrder, ReceivedWeights, WeightReceiver
from rollart_vllm.directory import Version, another_model, open_version
from rollart_vllm.lora import ADAPTER_KEY, Adapter


@dataclass
class DirectoryInit(WeightTransferInitInfo):
    """Empty for directories; otherwise an order to take part in one broadcast (the fields of `BroadcastOrder`)."""

    address: str = ""
    group: str = ""
    backend: str = "gloo"
    size: int = 0
    lanes: int = 0
    stamp: str = ""
    version: int = 0
    limit_s: float = 0.0
    first: int = 1


@dataclass
class DirectoryUpdate(WeightTransferUpdateInfo):
    """A published directory that every worker of the engine can read."""

    path: str
    verify: bool = True
    """Compare every bucket with its published sha256 before the model changes."""

    stamp: str = ""
    """The broadcast of the version; the directory is read if the broadcast is incomplete here."""


class _Broadcast:
    """A version in memory, with the interface of `directory.Version`."""

    def __init__(self, received: ReceivedWeights) -> None:
        self._received = received

    def tensors(self, where: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._received.tensors.items()

    def close(self) -> None:
        pass


class DirectoryTransfer(WeightTransferEngine[DirectoryInit, DirectoryUpdate]):
    """One per worker. vLLM calls `start_weight_update`, `update_weights` and `finish_weight_update` in this order,
    while the scheduler is paused; staging again replaces the staged version."""

    init_info_cls = DirectoryInit
    update_info_cls = DirectoryUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._staged: Version | _Broadcast | None = None
        self._below: tuple[str, list[Any]] | None = None
        """Revision and buckets of the weights below the last adapter that was read from files."""
        self._receiver = WeightReceiver(self.device, check=self._loadable)

    def init_transfer_engine(self, init_info: DirectoryInit) -> None:
        """Returns at once: threads receive the broadcast while this worker generates."""
        if init_info.address:
            parallel = self.parallel_config
            worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
            self._receiver.take_part(BroadcastOrder(**asdict(init_info)), worker=worker)

    def start_weight_update(self) -> None:
        self._staged = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stage a version. (vLLM's own method also synchronizes an accelerator, which a CPU lacks.)"""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: DirectoryUpdate) -> None:
        received = self._receiver.take(update_info.stamp) if update_info.stamp else None
        if received is not None:
            adapter = _adapter_of(received)
            self._staged = _Broadcast(received) if adapter is None else Version(self._buckets_below(adapter), adapter)
            return
        config = self.model_config.hf_config.to_dict()
        self._staged = staged = open_version(update_info.path, config, verify=update_info.verify)
        self._below = None if staged.adapter is None else (staged.adapter.revision, staged.buckets)

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        """Load the staged version as vLLM loads a checkpoint: fused, sharded and packed anew, layer by layer."""
        staged, self._staged = self._staged, None
        if staged is None:
            raise ValueError("no version is staged: update_weights comes first")
        tied = _tied(self.model)
        with torch.device(self.device):
            initialize_layerwise_reload(self.model)
            self.model.load_weights(staged.tensors(self.device))
            finalize_layerwise_reload(self.model, self.model_config)
            for head in tied:
                # No checkpoint holds it, so it was not loaded. On a CPU it has a packed copy of the embedding that it
                # shares, which would stay stale: wrong answers without an error.
                head.quant_method.process_weights_after_loading(head)
        staged.close()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def shutdown(self) -> None:
        self._staged = None
        self._receiver.close()

    def _loadable(self, received: ReceivedWeights) -> None:
        found = json.loads(received.config)
        if problem := another_model(found, self.model_config.hf_config.to_dict()):
            raise ValueError(f"the broadcast is of {problem}")
        if (adapter := _adapter_of(received)) is not None:
            Version(self._buckets_below(adapter), adapter)

    def _buckets_below(self, adapter: Adapter) -> list[Any]:
        if self._below is None or self._below[0] != adapter.revision:
            raise ValueError("the engine lacks the weights below the adapter")
        return self._below[1]


def _adapter_of(received: ReceivedWeights) -> Adapter | None:
    """The adapter, if the broadcast has nothing else."""
    config = json.loads(received.config).get(ADAPTER_KEY)
    return None if config is None else Adapter.parse(config, received.tensors)


def _tied(model: torch.nn.Module) -> list[Any]:
    """Layers that share another layer's weight and process it after loading."""
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
