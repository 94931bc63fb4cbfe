"""Engines that are vLLM's: where it is installed, and what the plan cannot know of it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollart.entry import SpecEntry

__all__ = ["Dtype", "VllmSpec"]

Dtype = Literal["auto", "bfloat16", "float16", "float32"]


class VllmSpec(SpecEntry):
    """vLLM servers. Tensor parallelism, context, requests at a time and roles are the plan's and the run's."""

    python: str | None = Field(
        default=None,
        min_length=1,
        description="Interpreter of the environment that vLLM and integrations/vllm are installed in; "
        "ROLLART_VLLM_PYTHON if not given.",
    )
    dtype: Dtype = Field(
        default="auto",
        description="Of weights and computation; `auto`: `engines.dtype`, and if that is `auto` what vLLM chooses.",
    )
    memory: float = Field(
        default=0.9, gt=0, le=1, description="Share of a GPU's memory that vLLM takes, weights and KV together."
    )
    kv_gb: float = Field(
        default=1.0, ge=0.001, le=1e6, description="KV memory of an engine on CPU cores, GB of 1e9 bytes."
    )
    block_size: int | None = Field(
        default=None, ge=1, le=4096, description="Tokens of a KV block: what prefixes are found again by. vLLM's own."
    )
    probe: float | None = Field(
        default=None,
        ge=0,
        le=100,
        description="After each start and update: how far log-probabilities of a fixed prompt may be from the "
        "trainer's, on average (0.05 is usual in bfloat16, 0.0001 in float32). An engine that is further off is "
        "restarted. If none is given, 0.01 where engines and trainer compute in float32, else 0.2. 0: not looked at; "
        "nor is it at a temperature other than 1.",
    )
    args: list[str] = Field(default_factory=list, description="More arguments of `vllm serve`; they win.")
    env: dict[str, str] = Field(default_factory=dict, description="More environment variables of it; they win.")
