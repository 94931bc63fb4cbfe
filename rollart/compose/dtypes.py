"""The number format of each part where the specs leave it open: bfloat16 on GPUs, float32 on cores."""

from __future__ import annotations

from typing import Literal

from rollart.spec.resolve import Resolved

__all__ = ["engine_dtype", "probe_tolerance", "trainer_dtype", "vllm_dtype"]

FLOAT32_TOLERANCE = 0.01
"""Mean difference of log-probabilities from which two float32 sides are taken to have different weights: 0.0001 is
usual, and another summation order does not make it ten times that."""

HALF_TOLERANCE = 0.2
"""The same tolerance where one side computes in bfloat16 or float16: 0.05 is usual."""


def engine_dtype(resolved: Resolved, device: str) -> str:
    """The format of an embedded engine on `device` ("cpu", "cuda"). Half the bytes of float32 double a GPU's decoding
    speed, and its matrix units do not compute float32. Cores multiply bfloat16 more slowly, if at all."""
    dtype = resolved.cluster.engines.dtype
    if dtype != "auto":
        return dtype
    return "float32" if device == "cpu" else "bfloat16"


def vllm_dtype(resolved: Resolved) -> str:
    """The format that vLLM is started with; its own `auto` by default."""
    engines = resolved.cluster.engines
    return engines.dtype if engines.vllm.dtype == "auto" else engines.vllm.dtype


def trainer_dtype(resolved: Resolved, device: str) -> Literal["float32", "bfloat16"]:
    """The format of the trainer's forward and backward passes. A streamed step sums gradients exactly, in float32."""
    dtype = resolved.cluster.trainer.dtype
    if dtype != "auto":
        return dtype
    return "float32" if device == "cpu" or resolved.run.training.stream else "bfloat16"


def probe_tolerance(resolved: Resolved, trainer_device: str) -> float:
    """Largest accepted difference between vLLM engines and the trainer on a probe: the coarser format decides."""
    given = resolved.cluster.engines.vllm.probe
    if given is not None:
        return given
    both = {vllm_dtype(resolved), trainer_dtype(resolved, trainer_device)}
    return FLOAT32_TOLERANCE if both == {"float32"} else HALF_TOLERANCE
