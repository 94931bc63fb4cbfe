"""A performance model with plain coefficients, for tests of code that uses `placement.types`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from placement.types import Device

__all__ = ["FakeInstance", "FakePerformance", "FakeShape"]


@dataclass(frozen=True, slots=True)
class FakeShape:
    """`kv` bytes per token; `heads` must be divisible by TP."""

    name: str = "fake"
    parameters: float = 8e9
    active_parameters: float = 8e9
    weight_bytes: float = 16e9
    kv: float = 1e5
    heads: int = 8
    layers: int = 0
    hidden: int = 0

    def kv_bytes(self, tokens: float) -> float:
        return self.kv * tokens

    def train_flops(self, tokens: float, context: float) -> float:
        return 6 * self.active_parameters * tokens

    def activation_bytes(self, tokens: float, *, recompute: bool) -> float:
        return tokens * (1e3 if recompute else 1e4)

    def logit_bytes(self, tokens: float) -> float:
        return tokens * 4e3

    def allows_tp(self, tp: int) -> str | None:
        return None if self.heads % tp == 0 else f"heads is {self.heads}, which {tp} does not divide"


@dataclass(frozen=True, slots=True)
class FakeInstance:
    """Seconds: `prefill` per new token, `attention` per new and cached token; a decode step takes `step`, plus `each`
    per sequence, plus `read` per token of context in the batch."""

    kv_capacity_bytes: float
    prefill: float
    attention: float
    step: float
    each: float
    read: float
    band: float = 0.1
    notes: tuple[str, ...] = ()

    def prefill_s(self, new: float, cached: float) -> float:
        return new * (self.prefill + self.attention * (cached + new / 2))

    def turn_s(self, batch: float, new: float, cached: float, output: float) -> float:
        context = cached + new + output / 2
        return self.prefill_s(new, cached) + output * self.decode_step_s(batch, context) / batch

    def decode_step_s(self, batch: float, context: float) -> float:
        return self.step + batch * (self.each + self.read * context)


@dataclass(frozen=True, slots=True)
class FakePerformance:
    """Coefficients from a device's figures, so that more of anything is never slower; `refuse` by device name."""

    shape: FakeShape = field(default_factory=FakeShape)
    refuse: Mapping[str, str] = field(default_factory=dict)
    overhead_s: float = 2e-3
    efficiency: float = 0.9
    """Of a doubled TP: two devices are 1.8 times as fast as one."""

    def instance(self, device: Device, tp: int) -> FakeInstance | str:
        if device.name in self.refuse:
            return self.refuse[device.name]
        if device.tflops_bf16 is None or device.memory_gb is None or device.memory_tb_per_s is None:
            return f"{device.name} states no tflops_bf16, memory_gb or memory_tb_per_s"
        speed = tp * self.efficiency ** (tp.bit_length() - 1)
        flops, bandwidth = speed * device.tflops_bf16 * 0.5e12, speed * device.memory_tb_per_s * 0.8e12
        return FakeInstance(
            kv_capacity_bytes=0.9 * tp * device.memory_gb * 1e9 - self.shape.weight_bytes,
            prefill=2 * self.shape.active_parameters / flops,
            attention=self.shape.kv / flops,
            step=self.overhead_s + self.shape.weight_bytes / bandwidth,
            each=2 * self.shape.active_parameters / flops,
            read=self.shape.kv / bandwidth,
        )
