"""What each part computes with, where the specs leave it open: bfloat16 on GPUs, float32 on cores."""

from __future__ import annotations

from typing import Literal

from rollart.spec.resolve import Resolved

__all__ = ["engine_dtype", "probe_tolerance", "trainer_dtype", "vllm_dtype"]

FLOAT32_TOLERANCE = 0.01
"""Mean difference of log-probabilities at which two sides that compute in float32 do not have the same weights: 0.0001
is usual, and a sum of other order gives no tenfold of it."""

HALF_TOLERANCE = 0.2
"""The same where one of them computes in bfloat16 or float16: 0.05 is usual."""


def engine_dtype(resolved: Resolved, device: str) -> str:
    """Of an embedded engine on `device` ("cpu", "cuda"): half the bytes of float32 are twice the decoding speed of a
    GPU, whose matrix units do no float32. Cores multiply bfloat16 more slowly, if at all."""
    dtype = resolved.cluster.engines.dtype
    if dtype != "auto":
        return dtype
    return "float32" if device == "cpu" else "bfloat16"


def vllm_dtype(resolved: Resolved) -> str:
    """What vLLM is started with; its own `auto` if the spec says nothing."""
    engines = resolved.cluster.engines
    return engines.dtype if engines.vllm.dtype == "auto" else engines.vllm.dtype


def trainer_dtype(resolved: Resolved, device: str) -> Literal["float32", "bfloat16"]:
    """Of the trainer's passes through the model. A streamed step sums gradients exactly, in float32."""
    dtype = resolved.cluster.trainer.dtype
    if dtype != "auto":
        return dtype
    return "float32" if device == "cpu" or resolved.run.training.stream else "bfloat16"


def probe_tolerance(resolved: Resolved, trainer_device: str) -> float:
    """How far vLLM engines may be from the trainer on a probe: the coarser of both sides decides."""
    given = resolved.cluster.engines.vllm.probe
    if given is not None:
        return given
    both = {vllm_dtype(resolved), trainer_dtype(resolved, trainer_device)}
    return FLOAT32_TOLERANCE if both == {"float32"} else HALF_TOLERANCE
