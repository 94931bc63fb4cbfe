"""The models and prices of the papers: what matters of each `config.json`."""

from __future__ import annotations

from functools import cache

from placement.architecture import DecoderShape, shape_of
from placement.hardware import device
from placement.roofline import Roofline, RooflinePerformance
from rollart.sim.steps import StepModel

__all__ = ["CONFIGS", "USD", "shape", "steps"]

USD = {"H800": 5.28, "H20": 1.85}
"""Dollars per GPU-hour (RollMux, Table 1)."""

_QWEN3 = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False}
_QWEN25 = {"model_type": "qwen2", "vocab_size": 152064, "tie_word_embeddings": False}

CONFIGS: dict[str, dict[str, object]] = {
    "Qwen3-8B": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Qwen3-14B": _QWEN3
    | {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "Qwen3-32B": _QWEN3
    | {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "Qwen3-30B-A3B": _QWEN3
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "Qwen3-235B-A22B": _QWEN3
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "Qwen2.5-7B": _QWEN25
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "Qwen2.5-14B": _QWEN25
    | {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "Qwen2.5-32B": _QWEN25
    | {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
}


@cache
def shape(model: str) -> DecoderShape:
    return shape_of(CONFIGS[model], name=model)


@cache
def steps(kind: str, tp: int, model: str) -> StepModel:
    found = RooflinePerformance(shape(model)).instance(device(kind), tp)
    if not isinstance(found, Roofline):
        raise ValueError(f"{model} on {tp} {kind}: {found}")
    return StepModel(found)
