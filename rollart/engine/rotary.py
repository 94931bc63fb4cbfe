"""Rotary position embeddings: their frequencies, the tables of cosine and sine, and the rotation.

The frequencies are those of transformers' `modeling_rope_utils` (5.23), computed in fp32 as there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rollart.architecture import Rotary

Tables = tuple[Tensor, Tensor]
"""Cosine and signed sine `[context, 1, rotated elements]`."""


def rotary_tables(rotary: Rotary, context: int, device: torch.device, dtype: torch.dtype) -> Tables:
    """The tables for positions below `context`: rotating is x * cos + roll(x, dim / 2) * sin."""
    frequency, factor = _frequencies(rotary)
    angle = torch.arange(context, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos() * factor, angle.sin() * factor
    return (
        torch.cat((cos, cos), -1)[:, None].to(device, dtype),
        torch.cat((-sin, sin), -1)[:, None].to(device, dtype),
    )


def rotate(x: Tensor, tables: Tables) -> Tensor:
    """Rotate the leading elements of `x` `[n, heads, head_dim]` by tables of the n positions `[n, 1, dim]`."""
    cos, sin = tables
    dim = cos.shape[-1]
    if dim == x.shape[-1]:
        return torch.addcmul(x * cos, x.roll(dim // 2, -1), sin)
    rotated = x[..., :dim]
    rotated = torch.addcmul(rotated * cos, rotated.roll(dim // 2, -1), sin)
    return torch.cat((rotated, x[..., dim:]), -1)


def _frequencies(rotary: Rotary) -> tuple[Tensor, float]:
    """Frequencies `[dim / 2]`, and the factor of the tables."""
    s, exponent = rotary.scaling, torch.arange(rotary.dim // 2, dtype=torch.float32) * 2 / rotary.dim
    frequency = 1.0 / rotary.theta**exponent
    match rotary.kind:
        case "linear":
            return frequency / s["factor"], 1.0
        case "llama3":
            return _llama3(rotary, frequency), 1.0
        case "yarn":
            return _yarn(rotary, frequency)
        case "longrope":
            factor = s["factor"]
            default = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(_original(rotary)))
            return 1.0 / (torch.tensor(s["short_factor"]) * rotary.theta**exponent), s.get("attention_factor", default)
    return frequency, 1.0


def _original(rotary: Rotary) -> float:
    return float(rotary.scaling["original_max_position_embeddings"])


def _llama3(rotary: Rotary, frequency: Tensor) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, the middle blended (Llama 3.1)."""
    s, original = rotary.scaling, _original(rotary)
    low, high = s["low_freq_factor"], s["high_freq_factor"]
    wavelength = 2 * math.pi / frequency
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) / s["factor"] * frequency + smooth * frequency
    scaled = torch.where(wavelength > original / low, frequency / s["factor"], frequency)
    return torch.where((wavelength <= original / low) & (wavelength >= original / high), blended, scaled)


def _yarn(rotary: Rotary, frequency: Tensor) -> tuple[Tensor, float]:
    """Long wavelengths are stretched, short ones kept, between two dimensions a ramp (YaRN, arXiv:2309.00071)."""
    s, dim = rotary.scaling, rotary.dim
    factor, mscale, over_all = s["factor"], s.get("mscale"), s.get("mscale_all_dim")

    def boundary(rotations: float) -> float:
        """The dimension that turns so many times within the original length."""
        return (dim * math.log(_original(rotary) / (rotations * 2 * math.pi))) / (2 * math.log(rotary.theta))

    def magnitude(scale: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    first, last = boundary(s.get("beta_fast") or 32), boundary(s.get("beta_slow") or 1)
    if s.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    default = magnitude(mscale) / magnitude(over_all) if mscale and over_all else magnitude()
    return frequency / factor * (1 - kept) + frequency * kept, s.get("attention_factor", default)
