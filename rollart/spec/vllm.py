"""vLLM engines: their installation, and settings that do not follow from the plan."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollart.entry import SpecEntry

__all__ = ["Dtype", "VllmSpec"]

Dtype = Literal["auto", "bfloat16", "float16", "float32"]


class VllmSpec(SpecEntry):
    """vLLM servers. Tensor parallelism, context, concurrent requests and roles come from the plan and the run."""

    python: str | None = Field(
        default=None,
        min_length=1,
        description="Interpreter of the environment that vLLM and integrations/vllm are installed in; "
        "ROLLART_VLLM_PYTHON if not given.",
    )
    dtype: Dtype = Field(
        default="auto",
        description="Precision of weights and computation; `auto`: `engines.dtype`, and if that is `auto`, vLLM's "
        "choice.",
    )
    memory: float = Field(
        default=0.9, gt=0, le=1, description="Share of a GPU's memory that vLLM takes, weights and KV together."
    )
    kv_gb: float = Field(
        default=1.0, ge=0.001, le=1e6, description="KV memory of an engine on CPU cores, GB of 1e9 bytes."
    )
    block_size: int | None = Field(
        default=None, ge=1, le=4096, description="Tokens of a KV block, the unit of prefix caching; by default vLLM's."
    )
    probe: float | None = Field(
        default=None,
        ge=0,
        le=100,
        description="After each start and update: how far log-probabilities of a fixed prompt may be from the "
        "trainer's, on average (0.05 is usual in bfloat16, 0.0001 in float32). An engine that is further off is "
        "restarted. Default: 0.01 where engines and trainer compute in float32, else 0.2. 0, or a temperature other "
        "than 1: not checked.",
    )
    args: list[str] = Field(default_factory=list, description="More arguments of `vllm serve`; they win.")
    env: dict[str, str] = Field(default_factory=dict, description="More environment variables of it; they win.")
