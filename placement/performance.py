"""The protocols of performance models and model shapes that the solver uses. `roofline` and `architecture` implement
them."""

from __future__ import annotations

from typing import Protocol

from placement.types import Device

__all__ = ["InstanceModel", "Performance", "ShapeModel"]


class ShapeModel(Protocol):
    """The properties of a model's architecture for serving and training. Byte figures are at the serving precision."""

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
        """Bytes that a training pass over `tokens` tokens keeps for its backward pass, on one device: every activation,
        or (`recompute`) the inputs of the layers and one layer's activations."""

    def logit_bytes(self, tokens: float) -> float:
        """One copy of the logits of `tokens` tokens, in float32."""

    @property
    def activation_width(self) -> float:
        """Width of the hidden state over all layers. Devices that share a sequence exchange as many elements per
        token."""

    def allows_tp(self, tp: int) -> str | None:
        """None if the model can be divided by `tp`; else the reason, naming the field."""


class InstanceModel(Protocol):
    """One engine instance: seconds per phase. All results are finite and above 0."""

    @property
    def kv_capacity_bytes(self) -> float:
        """Memory left for KV after the weights and a reserve, all devices of the instance; <= 0 if it does not fit."""

    @property
    def band(self) -> float:
        """Relative error of the predictions: 0.1 means ±10 %."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Extrapolations and assumed figures, as text."""

    def prefill_s(self, new: float, cached: float) -> float:
        """Compute `new` tokens after `cached` ones, alone; the first output token comes with it."""

    def turn_s(self, batch: float, new: float, cached: float, output: float) -> float:
        """Instance-seconds that one turn takes of an aggregated instance serving `batch` turns at a time: `new` tokens
        prefilled after `cached` ones and `output` generated, the fixed cost of a step shared by those in it."""

    def decode_step_s(self, batch: float, context: float) -> float:
        """One step that yields one token for each of `batch` sequences of mean context `context`."""


class Performance(Protocol):
    """Factory of instance models."""

    @property
    def shape(self) -> ShapeModel: ...

    def instance(self, device: Device, tp: int) -> InstanceModel | str:
        """The model of an instance, or the reason that this type or TP size cannot serve the model."""
