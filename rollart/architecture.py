"""Contents of a Hugging Face checkpoint directory: the architecture, and the files with the weights.

Qwen3 and Llama families. A model that the embedded engine cannot compute exactly is refused by name here rather than
approximated: by the engine when it starts, and by `rollart validate` before. Errors: `UsageError`, one line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollart.errors import UsageError

FAMILIES = {"Qwen3ForCausalLM": True, "LlamaForCausalLM": False}
"""Supported architectures, and whether they normalise queries and keys per head."""

TYPES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
"""Architecture by `model_type`, for a configuration without `architectures`."""

SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
"""Required keys of a configuration: transformers would default them to the sizes of a model of several billion
parameters."""

MARKER = "COMPLETE"
"""File that the trainer writes last into a published directory: a directory without it is incomplete and is never read.
It is empty, or JSON with the `version` and hashes of the files."""

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear modules of a supported decoder layer."""

AGAIN = "download or copy it again"

HEADER_BYTES = 100_000_000
"""Longest header that the safetensors format allows."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The numbers that determine a decoder's computation. Sizes in elements; `rope` as in the checkpoint's config."""

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
    """The architecture of a parsed `config.json`; `path` is its origin."""
    family = refuse_unsupported(config, path)
    heads = int(config["num_attention_heads"])
    theta, scaling = _rope(path, config)
    # With vLLM's precedence: generation_config.json first, then config.json.
    generation = path / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.exists() else None
    if eos is None:
        eos = config.get("eos_token_id", [])
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
        eos=tuple(int(token) for token in (eos if isinstance(eos, list) else [eos]) if token is not None),
    )


def weight_files(directory: str | Path) -> list[Path]:
    """The safetensors files of a checkpoint: one, or those of its index. `UsageError` for a missing file."""
    path = Path(directory)
    index = path / "model.safetensors.index.json"
    names = sorted(set(_read_json(index)["weight_map"].values())) if index.exists() else ["model.safetensors"]
    for name in names:
        if not (path / name).exists():
            raise UsageError(f"{path}: {name} is missing", remedy="write the checkpoint as safetensors")
    return [path / name for name in names]


def refuse_truncated(file: Path) -> None:
    """`UsageError` for a safetensors file without a header, or with tensors past its end: an interrupted download.
    Reads the header alone."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = dict(json.loads(stream.read(min(length, HEADER_BYTES))))
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        size, wanted = file.stat().st_size, 8 + length + max(ends, default=0)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UsageError(f"{file} is no safetensors file: its header cannot be read", remedy=AGAIN) from None
    if size < wanted:
        raise UsageError(f"{file} ends after {size} of {wanted} bytes", remedy=AGAIN)


def version_path(root: str | Path, version: int) -> Path:
    """The directory of a published version below the root of a run's versions."""
    return Path(root) / f"v{version:06d}"


def vocab_of(directory: str | Path) -> int | None:
    """Vocabulary size of the model in a directory, from its config.json; None if it has none."""
    try:
        config = json.loads((Path(directory) / "config.json").read_text())
        size = config.get("text_config", config)["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return size if isinstance(size, int) else None


def stamp_of(directory: str | Path) -> str:
    """The content stamp of a published version: a hash over the file hashes in its marker, or the `stamp` in the marker
    of a copy. '' for a marker with neither, or none. Reads the marker alone, not the weights."""
    try:
        marker = json.loads((Path(directory) / MARKER).read_text())
        if marker.get("stamp") or not marker.get("files"):
            return str(marker.get("stamp") or "")
        return hashlib.sha256(json.dumps(sorted(marker["files"].items())).encode()).hexdigest()
    except (OSError, ValueError, AttributeError, TypeError):
        return ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist", remedy="pass a Hugging Face checkpoint directory") from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not a JSON object")
    return value


def refuse_unsupported(config: Mapping[str, Any], path: str | Path) -> str:
    """The architecture of a configuration. `UsageError` for settings that the embedded engine does not support, or
    would compute wrongly if it ignored them; `path` is the configuration's origin."""
    named = config.get("architectures") or [TYPES.get(str(config.get("model_type")), config.get("model_type", "?"))]
    family = str(named[0])
    if family not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise UsageError(f"{path}: architecture {family} is not supported", remedy=f"use one of {supported}")
    if config.get("mlp_bias"):
        raise UsageError(f"{path}: mlp_bias is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise UsageError(f"{path}: activation {config['hidden_act']} is not supported", remedy="use silu")
    layer_types = set(config.get("layer_types") or ["full_attention"])
    if config.get("use_sliding_window") or layer_types != {"full_attention"}:
        raise UsageError(f"{path}: sliding-window attention is not supported")
    if config.get("quantization_config"):
        raise UsageError(f"{path}: quantised checkpoints are not supported")
    for key in SIZES:
        if not isinstance(config.get(key), int) or config[key] < 1:
            raise UsageError(f"{path}: {key} is {config.get(key)!r} (rule: a size, 1 or more)")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if heads % (config.get("num_key_value_heads") or heads):
        raise UsageError(
            f"{path}: num_attention_heads is {heads} and num_key_value_heads {config['num_key_value_heads']} (rule: "
            "every key-value head serves as many query heads)"
        )
    if not config.get("head_dim") and hidden % heads:
        raise UsageError(f"{path}: hidden_size is {hidden} and num_attention_heads {heads} (rule: a multiple)")
    _rope(path, config)
    return family


def _rope(path: str | Path, config: Mapping[str, Any]) -> tuple[float, Mapping[str, float] | None]:
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
