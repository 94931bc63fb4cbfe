"""What the solver asks of a performance model, and of a model's shape. `roofline` and `architecture` implement them."""

from __future__ import annotations

from typing import Protocol

from placement.types import Device

__all__ = ["InstanceModel", "Performance", "ShapeModel"]


class ShapeModel(Protocol):
    """What serving and training need to know of a model's architecture. Byte figures at the serving precision."""

    @property
    def name(self) -> str: ...

    @property
    def parameters(self) -> float: ...

    @property
    def active_parameters(self) -> float: ...

    @property
    def weight_bytes(self) -> float:
        """All weights, at the serving precision."""

    def kv_bytes(self, tokens: float) -> float:
        """KV cache of one sequence of `tokens` tokens, over all devices; sliding windows cap their layers."""

    def train_flops(self, tokens: float, context: float) -> float:
        """Forward and backward of `tokens` tokens in sequences of mean context `context`."""

    def activation_bytes(self, tokens: float, *, recompute: bool) -> float:
        """What a training pass over `tokens` tokens keeps for its backward pass, on one device: every activation, or
        (`recompute`) the inputs of the layers and one layer's activations."""

    def logit_bytes(self, tokens: float) -> float:
        """One copy of the logits of `tokens` tokens, in float32."""

    @property
    def activation_width(self) -> float:
        """Width of the hidden state over all layers: what devices that share a sequence exchange per token."""

    def allows_tp(self, tp: int) -> str | None:
        """None if `tp` divides what must be divided; else why not, in words naming the field."""


class InstanceModel(Protocol):
    """One engine instance: seconds per phase. All of its answers are finite and above 0."""

    @property
    def kv_capacity_bytes(self) -> float:
        """Memory left for KV after the weights and a reserve, all devices of the instance; <= 0 if it does not fit."""

    @property
    def band(self) -> float:
        """Relative error of the predictions: 0.1 means ±10 %."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Extrapolations and assumed figures, in words."""

    def prefill_s(self, new: float, cached: float) -> float:
        """Compute `new` tokens after `cached` ones, alone; the first output token comes with it."""

    def turn_s(self, batch: float, new: float, cached: float, output: float) -> float:
        """Instance-seconds that one turn takes of an aggregated instance serving `batch` turns at a time: `new` tokens
        prefilled after `cached` ones and `output` generated, the fixed cost of a step shared by those in it."""

    def decode_step_s(self, batch: float, context: float) -> float:
        """One step that yields one token for each of `batch` sequences of mean context `context`."""


class Performance(Protocol):
    """Makes instance models. `instance` answers None, or why not in words, where the model cannot run there."""

    @property
    def shape(self) -> ShapeModel: ...

    def instance(self, device: Device, tp: int) -> InstanceModel | str:
        """A string says why this type or tp cannot serve the model."""
