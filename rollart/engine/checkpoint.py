"""What lies in a Hugging Face checkpoint directory: the architecture and the tensors.

Qwen3 and Llama families. Whatever the engine cannot compute exactly is refused here, by name, rather than
approximated. Errors: `UsageError`, one line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from rollart.errors import UsageError

__all__ = [
    "MARKER",
    "Architecture",
    "architecture_of",
    "published_version",
    "read_architecture",
    "read_tensors",
    "require_complete",
]

MARKER = "COMPLETE"
"""A published directory holds this file once it was written whole: it is the last thing the trainer writes. It may
be empty, or JSON with the `version`."""

FAMILIES = {"Qwen3ForCausalLM": True, "LlamaForCausalLM": False}
"""Supported architectures, and whether they normalise queries and keys per head."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The numbers that fix a decoder's computation. Sizes in elements; `rope` as in the checkpoint's config."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float
    tied: bool
    qk_norm: bool
    attention_bias: bool
    rope_theta: float
    rope_scaling: Mapping[str, float] | None
    """`llama3` scaling: factor, low_freq_factor, high_freq_factor, original_max_position_embeddings."""
    eos: tuple[int, ...] = field(compare=False)
    """End-of-sequence ids. Not compared: a trainer may publish weights without a generation config."""

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads


def read_architecture(directory: str | Path) -> Architecture:
    """Read `config.json` (and `generation_config.json` for the end-of-sequence ids)."""
    path = Path(directory)
    if not path.is_dir():
        raise UsageError(f"model directory {path} does not exist", remedy="pass --model DIR with a config.json")
    return architecture_of(_read_json(path / "config.json"), path)


def architecture_of(config: Mapping[str, Any], path: Path) -> Architecture:
    """Of a parsed `config.json`; `path` is where it is from."""
    family = (config.get("architectures") or [config.get("model_type", "?")])[0]
    if family not in FAMILIES:
        raise UsageError(f"{path}: architecture {family} is not supported", remedy=f"use one of {', '.join(FAMILIES)}")
    _refuse_unsupported(path, config)
    heads = int(config["num_attention_heads"])
    theta, scaling = _rope(path, config)
    return Architecture(
        family=family,
        layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        intermediate=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=FAMILIES[family],
        attention_bias=bool(config.get("attention_bias", False)),
        rope_theta=theta,
        rope_scaling=scaling,
        eos=_eos(path, config),
    )


def read_tensors(directory: str | Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name, on the CPU, memory-mapped. One file or a sharded index."""
    from safetensors.torch import load_file

    path = Path(directory)
    index = path / "model.safetensors.index.json"
    if index.exists():
        shards = sorted(set(_read_json(index)["weight_map"].values()))
    else:
        shards = ["model.safetensors"]
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        if not (path / shard).exists():
            raise UsageError(f"{path}: {shard} is missing", remedy="write the checkpoint as safetensors")
        try:
            tensors.update(load_file(path / shard))
        except Exception as error:  # the library raises its own types for truncated and foreign files
            raise UsageError(f"{path / shard}: not a readable safetensors file ({error})") from error
    return tensors


def require_complete(directory: str | Path) -> None:
    """Refuse a directory that its writer did not finish."""
    path = Path(directory)
    if not path.is_dir():
        raise UsageError(f"weights directory {path} does not exist")
    if not (path / MARKER).exists():
        raise UsageError(f"weights directory {path} has no {MARKER} marker", remedy="wait until it was published whole")


def published_version(directory: str | Path) -> int:
    """The version in a directory's marker; 0 for a checkpoint that was not published by a trainer."""
    try:
        return int(json.loads((Path(directory) / MARKER).read_text())["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist", remedy="pass a Hugging Face checkpoint directory") from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not a JSON object")
    return value


def _refuse_unsupported(path: Path, config: Mapping[str, Any]) -> None:
    """What would silently change the computation if it were ignored."""
    if config.get("mlp_bias"):
        raise UsageError(f"{path}: mlp_bias is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise UsageError(f"{path}: activation {config['hidden_act']} is not supported", remedy="use silu")
    layer_types = set(config.get("layer_types") or ["full_attention"])
    if config.get("use_sliding_window") or layer_types != {"full_attention"}:
        raise UsageError(f"{path}: sliding-window attention is not supported")
    if config.get("quantization_config"):
        raise UsageError(f"{path}: quantised checkpoints are not supported")


def _rope(path: Path, config: Mapping[str, Any]) -> tuple[float, Mapping[str, float] | None]:
    """Base and scaling, from transformers 5 (`rope_parameters`) or 4 (`rope_theta` and `rope_scaling`)."""
    parameters: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if float(parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) != 1.0:
        raise UsageError(f"{path}: partial rotary embeddings are not supported")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UsageError(f"{path}: rope scaling {kind} is not supported", remedy="use default or llama3")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return theta, {key: float(parameters[key]) for key in keys}


def _eos(path: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids, as vLLM takes them: generation_config.json first, then config.json."""
    generation = path / "generation_config.json"
    value = _read_json(generation).get("eos_token_id") if generation.exists() else None
    if value is None:
        value = config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)
