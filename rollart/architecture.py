"""Contents of a Hugging Face checkpoint directory: the architecture, and the files with the weights.

One decoder, described by `Architecture`, computes the families of `FAMILIES`. A model that the embedded engine cannot
compute exactly is refused by name here rather than approximated: by the engine when it starts, and by `rollart
validate` before. Errors: `UsageError`, one line.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rollart.errors import UsageError
from rollart.lora import base_directory

SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
"""Required keys of a configuration: transformers would default them to the sizes of a model of several billion
parameters."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files that engines look for beside the weights."""

MARKER = "COMPLETE"
"""File that the trainer writes last into a published directory: a directory without it is incomplete and is never read.
It is empty, or JSON with the `version` and hashes of the files."""

ATTENTION_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Linear modules that adapters take in a model with experts: peft adapts the experts of a layer as one module, whose
merged form is another."""

DELTA_LINEAR = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
"""Linear modules of a layer with linear attention."""

LINEAR = (
    *ATTENTION_LINEAR,
    "gate_proj",
    "up_proj",
    "down_proj",
    "qkv_proj",
    "gate_up_proj",
    *DELTA_LINEAR,
)
"""Linear modules of a supported decoder layer; `qkv_proj` and `gate_up_proj` are Phi-3's."""

ROTARY_PARAMETERS: Mapping[str, Sequence[str]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor"),
}
"""Supported scalings of rotary embeddings, with their parameters. Of `longrope` the factors for sequences of the
original length alone: a longer `context` is refused."""

OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
"""Parameters that a configuration may leave out."""

MAX_EXPERTS = 32_767
"""Bound of the experts of a layer, whose numbers travel in two bytes."""

STACKED_EXPERTS: Mapping[str, Sequence[str]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
"""Matrices of all experts in one tensor, with the matrices of each expert that they hold one below the other."""

AGAIN = "download or copy it again"

HEADER_BYTES = 100_000_000
"""Longest header that the safetensors format allows."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embedding of a layer. The leading `dim` elements of each head are rotated."""

    theta: float
    dim: int
    kind: Literal["default", "linear", "llama3", "yarn", "longrope"] = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The parameters of `kind`, by the names of Hugging Face's configuration; `attention_factor` multiplies both
    tables."""


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of one layer: `window` keys, the query's own included (None: all), and positions (None: none)."""

    window: int | None
    rotary: Rotary | None


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Attention by a gated delta network (Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule",
    arXiv:2412.06464), the same in each layer that has it. A sequence has no keys and values there, but a state whose
    size does not depend on its length: a matrix per value head, and the last inputs of a causal convolution over the
    tokens. The state is that of all tokens so far, and of no shorter prefix."""

    key_heads: int
    value_heads: int
    """A multiple of `key_heads`: as many consecutive ones share a query and a key."""
    key_dim: int
    value_dim: int
    kernel: int
    """Tokens under the convolution, the current one included."""

    @property
    def channels(self) -> int:
        """Queries, keys and values of a token, which pass through the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_width

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def convolved(self) -> int:
        """Elements of the convolution's part of a state."""
        return self.channels * (self.kernel - 1)

    @property
    def state_size(self) -> int:
        """Elements of a sequence's state in one layer."""
        return self.convolved + self.value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """The layers whose MLP is a mixture of experts: each token runs through the `active` experts that the layer's
    router gives the largest probabilities."""

    experts: int
    active: int
    width: int
    """Intermediate size of an expert."""
    normalized: bool
    """True if the weights of a token's experts sum to 1; otherwise they are the router's probabilities."""
    layers: tuple[int, ...]
    """Ascending."""

    @property
    def id_bytes(self) -> int:
        """Bytes of an expert's number. All bits set stand for an unknown choice, which no expert has as its number."""
        return 1 if self.experts < 256 else 2

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's choices, `[layers, active]` little-endian numbers."""
        return len(self.layers) * self.active * self.id_bytes


@dataclass(frozen=True, slots=True)
class Architecture:
    """The numbers that determine a decoder's computation. Sizes in elements."""

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
    attention: tuple[Attention | None, ...]
    """By layer; None: linear attention."""
    attention_scale: float
    """Factor of the products of queries and keys."""
    qk_norm: Literal["none", "head", "projection"]
    """Norm of queries and keys: of each head, or of the whole projection."""
    norms: Literal["before", "after", "around"]
    """Norms of attention and MLP: of their inputs, of their outputs before the addition, or of both."""
    norm_offset: float
    """Added to the norms' weights."""
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    activation: Literal["silu", "gelu_tanh"]
    embedding_scale: float
    attention_cap: float | None
    """Soft cap c of attention scores: c tanh(score / c)."""
    logit_cap: float | None
    """Soft cap of the logits."""
    fused: bool
    """True if the checkpoint has one matrix for queries, keys and values, and one for gate and up."""
    experts: ExpertLayers | None
    """None: every layer has a dense MLP."""
    gated: bool
    """True if the query projection has a gate beside each head's query; its sigmoid scales the head's result."""
    linear: LinearAttention | None
    """None: no layer has linear attention."""
    eos: tuple[int, ...] = field(compare=False)
    """End-of-sequence ids. Not compared: a trainer may publish weights without a generation config."""

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads

    @property
    def uniform(self) -> bool:
        """True for a decoder like Llama's and Qwen's: all that the fused kernels compute."""
        first = self.attention[0]
        return (
            first is not None
            and all(one == first for one in self.attention)
            and first.window is None
            and first.rotary is not None
            and first.rotary.dim == self.head_dim
            and self.attention_scale == self.head_dim**-0.5
            and self.attention_cap is None
            and not self.gated
            and self.qk_norm != "projection"
            and self.norms == "before"
            and not self.norm_offset
            and self.activation == "silu"
        )


def _no_windows(config: Mapping[str, Any]) -> list[bool]:
    return [False] * int(config["num_hidden_layers"])


def _all_windows(config: Mapping[str, Any]) -> list[bool]:
    return [bool(config.get("sliding_window"))] * int(config["num_hidden_layers"])


def _all_where_asked(config: Mapping[str, Any]) -> list[bool]:
    return _all_windows(config) if config.get("use_sliding_window") else _no_windows(config)


def _where_asked(config: Mapping[str, Any]) -> list[bool]:
    """By `layer_types`, if `use_sliding_window` is set."""
    kinds = config.get("layer_types")
    if not kinds or not config.get("use_sliding_window"):
        return _no_windows(config)
    return [kind == "sliding_attention" for kind in kinds]


def _last_layers(config: Mapping[str, Any]) -> list[bool]:
    """By `layer_types`, else those from `max_window_layers` on, if `use_sliding_window` is set."""
    if config.get("use_sliding_window") and not config.get("layer_types"):
        first = int(config.get("max_window_layers", 28))
        return [layer >= first for layer in range(int(config["num_hidden_layers"]))]
    return _where_asked(config)


def _alternating(period: int, config: Mapping[str, Any]) -> list[bool]:
    """By `layer_types`, else all but every `period`-th layer."""
    kinds = config.get("layer_types")
    if kinds:
        return [kind == "sliding_attention" for kind in kinds]
    period = int(config.get("sliding_window_pattern", period))
    return [(layer + 1) % period != 0 for layer in range(int(config["num_hidden_layers"]))]


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    """How the decoders of an architecture differ from Llama's, and the defaults of keys that configurations leave out
    (transformers 5.23)."""

    model_type: str
    qk_norm: Literal["none", "head", "projection"] = "none"
    norms: Literal["before", "after", "around"] = "before"
    qkv_bias: bool | None = None
    """None: `attention_bias` decides about all four projections."""
    mlp_bias: bool = False
    """True if the key `mlp_bias` has an effect."""
    windows: Callable[[Mapping[str, Any]], list[bool]] = _no_windows
    """Layers with a sliding window."""
    window: int | None = None
    no_rotary: int = 0
    """Every so many layers one has no positions; 0: none. The key `no_rope_layers` overrides it."""
    theta: float = 10_000.0
    window_theta: float | None = None
    """Base of layers with a window; None: that of the others."""
    head_dim: int | None = None
    norm_eps: float = 1e-6
    tied: bool = False
    attention_cap: float | None = None
    """Soft cap of scores that `attn_logit_softcapping` overrides; None: the family has none."""
    logit_cap: float | None = None
    """Soft cap of the logits that `final_logit_softcapping` overrides."""
    gemma: bool = False
    """Weights of norms are offsets from 1, embeddings are scaled by the root of their size, and scores by
    `query_pre_attn_scalar` to the power of -1/2."""
    fused: bool = False
    experts: bool = False
    """True if layers are mixtures of experts, but for those of `mlp_only_layers` and `decoder_sparse_step`."""
    hybrid: bool = False
    """Linear attention by `layer_types`, else in all but every `full_attention_interval`-th layer; gated attention in
    the others. Weights of norms are offsets from 1."""
    rotated: float = 1.0
    """Share of a head's elements that are rotated, where `partial_rotary_factor` is left out."""


FAMILIES: Mapping[str, DecoderFamily] = {
    "Gemma2ForCausalLM": DecoderFamily(
        "gemma2",
        norms="around",
        windows=functools.partial(_alternating, 2),
        window=4096,
        head_dim=256,
        tied=True,
        attention_cap=50.0,
        logit_cap=30.0,
        gemma=True,
    ),
    "Gemma3ForCausalLM": DecoderFamily(
        "gemma3_text",
        qk_norm="head",
        norms="around",
        windows=functools.partial(_alternating, 6),
        window=4096,
        theta=1_000_000.0,
        window_theta=10_000.0,
        head_dim=256,
        tied=True,
        gemma=True,
    ),
    "LlamaForCausalLM": DecoderFamily("llama", mlp_bias=True),
    "MistralForCausalLM": DecoderFamily("mistral", qkv_bias=False, windows=_all_windows, window=4096),
    "Olmo2ForCausalLM": DecoderFamily("olmo2", qk_norm="projection", norms="after", norm_eps=1e-5),
    "Phi3ForCausalLM": DecoderFamily("phi3", qkv_bias=False, windows=_all_windows, norm_eps=1e-5, fused=True),
    "Qwen2ForCausalLM": DecoderFamily("qwen2", qkv_bias=True, windows=_last_layers, window=4096),
    "Qwen3ForCausalLM": DecoderFamily("qwen3", qk_norm="head", windows=_last_layers, window=4096),
    "Qwen3MoeForCausalLM": DecoderFamily(
        "qwen3_moe", qk_norm="head", windows=_all_where_asked, window=4096, experts=True
    ),
    "Qwen3_5ForCausalLM": DecoderFamily("qwen3_5_text", qk_norm="head", head_dim=256, hybrid=True, rotated=0.25),
    "SmolLM3ForCausalLM": DecoderFamily(
        "smollm3", mlp_bias=True, windows=_where_asked, no_rotary=4, theta=2_000_000.0, tied=True
    ),
}
"""The decoders that the embedded engine computes, by the name of their architecture."""

TEXT_PARTS: Mapping[str, str] = {"Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM"}
"""By the architecture of a multimodal checkpoint, that of its text part, which alone is computed."""

TEXT_PREFIX = "model.language_model."
"""Prefix of the tensors of a multimodal checkpoint's text part, which has `model.` in a checkpoint of its own."""


def read_architecture(directory: str | Path) -> Architecture:
    """Read `config.json` (and `generation_config.json` for the end-of-sequence ids)."""
    path = Path(directory)
    if not path.is_dir():
        raise UsageError(f"model directory {path} does not exist", remedy="pass --model DIR with a config.json")
    config = _read_json(path / "config.json")
    # With vLLM's precedence: generation_config.json first, then config.json.
    generation = path / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.exists() else None
    return architecture_of(config if eos is None else {**config, "eos_token_id": eos}, path)


def architecture_of(config: Mapping[str, Any], path: str | Path) -> Architecture:
    """The architecture of a parsed `config.json`; `path` is its origin. `UsageError` for settings that the embedded
    engine does not support, or would compute wrongly if it ignored them."""
    config = _text_part(config)
    name, family = _family(config, path)
    _check_sizes(config, path)
    if config.get("quantization_config"):
        raise UsageError(f"{path}: quantised checkpoints are not supported")
    if config.get("use_bidirectional_attention"):
        raise UsageError(f"{path}: bidirectional attention is not supported")
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or family.head_dim or hidden // heads)
    bias = bool(config.get("attention_bias")) if family.qkv_bias is None else False
    eos = config.get("eos_token_id")
    scalar = float(config.get("query_pre_attn_scalar", 256)) if family.gemma else float(head_dim)
    attention = _attention(config, path, family, head_dim)
    return Architecture(
        family=name,
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        intermediate=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        norm_eps=float(config.get("rms_norm_eps", family.norm_eps)),
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        attention=attention,
        attention_scale=scalar**-0.5,
        qk_norm=family.qk_norm,
        norms=family.norms,
        norm_offset=1.0 if family.gemma or family.hybrid else 0.0,
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=bias,
        mlp_bias=family.mlp_bias and bool(config.get("mlp_bias")),
        activation=_activation(config, path),
        embedding_scale=hidden**0.5 if family.gemma else 1.0,
        attention_cap=config.get("attn_logit_softcapping", family.attention_cap) if family.attention_cap else None,
        logit_cap=config.get("final_logit_softcapping", family.logit_cap) if family.gemma else None,
        fused=family.fused,
        experts=_experts(config, path) if family.experts else None,
        gated=family.hybrid,
        linear=_linear(config, path) if None in attention else None,
        eos=tuple(int(token) for token in (eos if isinstance(eos, list) else [eos]) if token is not None),
    )


def refuse_longer_context(architecture: Architecture, context: int) -> None:
    """`UsageError` for a context that the rotary embeddings do not cover here. Beyond the original length, `longrope`
    has other frequencies, for all tokens of a sequence that becomes so long."""
    for one in architecture.attention:
        if one is not None and one.rotary is not None and one.rotary.kind == "longrope":
            most = int(one.rotary.scaling["original_max_position_embeddings"])
            if context > most:
                raise UsageError(
                    f"a context of {context} is not supported by the embedded engine for a model with longrope (rule: "
                    f"at most its original {most} positions)",
                    remedy=f"model.context {most}",
                )


def weight_names(directory: str | Path) -> list[str]:
    """Names of a checkpoint's safetensors files: one, or those of its index."""
    index = Path(directory) / "model.safetensors.index.json"
    return sorted(set(_read_json(index)["weight_map"].values())) if index.exists() else ["model.safetensors"]


def expert_parts(name: str, tensor: Any, first: int = 0) -> Iterator[tuple[str, Any]]:
    """The tensors of each expert, by the names of Hub checkpoints, of the experts of a layer in one tensor, as
    transformers 5 has them in memory: `mlp.experts.gate_up_proj` `[experts, 2 * width, hidden]` and `down_proj`
    `[experts, hidden, width]`. They share its memory. `first` is the number of the tensor's first expert. Any other
    tensor is returned as it is."""
    stem, _, kind = name.rpartition(".experts.")
    if kind not in STACKED_EXPERTS:
        yield name, tensor
        return
    parts = STACKED_EXPERTS[kind]
    rows = tensor.shape[1] // len(parts)
    for number, expert in enumerate(tensor, first):
        for at, part in enumerate(parts):
            yield f"{stem}.experts.{number}.{part}.weight", expert[at * rows : (at + 1) * rows]


def weight_files(directory: str | Path) -> list[Path]:
    """The safetensors files of a checkpoint, or of the one below a version's adapter. `UsageError` for a missing
    file."""
    path = base_directory(directory)
    names = weight_names(path)
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


def may_have_experts(directory: str | Path) -> bool:
    """False if a directory describes a model that the embedded engine computes, without experts."""
    try:
        return read_architecture(directory).experts is not None
    except UsageError:
        return True


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


def _family(config: Mapping[str, Any], path: str | Path) -> tuple[str, DecoderFamily]:
    types = {family.model_type: name for name, family in FAMILIES.items()}
    known = str(config.get("model_type", "?"))
    name = str((config.get("architectures") or [types.get(known, known)])[0])
    if name not in FAMILIES:
        supported = ", ".join(one.removesuffix("ForCausalLM") for one in FAMILIES)
        shared = config.get("shared_expert_intermediate_size") or config.get("n_shared_experts")
        what = f"architecture {name}{', which has shared experts,' if shared else ''}"
        raise UsageError(f"{path}: {what} is not supported by the embedded engine", remedy=f"use one of {supported}")
    return name, FAMILIES[name]


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of a multimodal checkpoint's text part; any other is returned as it is."""
    name, text = TEXT_PARTS.get(str((config.get("architectures") or [""])[0])), config.get("text_config")
    if name is None or not isinstance(text, Mapping):
        return config
    shared = {key: config[key] for key in ("tie_word_embeddings", "eos_token_id") if config.get(key) is not None}
    return {**shared, **text, "architectures": [name]}


def _check_sizes(config: Mapping[str, Any], path: str | Path) -> None:
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


def _experts(config: Mapping[str, Any], path: str | Path) -> ExpertLayers | None:
    """The layers with experts; None if there are none. transformers 5 writes `num_local_experts`."""
    found = {
        "num_experts": config.get("num_experts", config.get("num_local_experts")),
        "num_experts_per_tok": config.get("num_experts_per_tok"),
        "moe_intermediate_size": config.get("moe_intermediate_size"),
    }
    for key, value in found.items():
        if not isinstance(value, int) or value < 1:
            raise UsageError(f"{path}: {key} is {value!r} (rule: a size, 1 or more)")
    experts, active, width = found.values()
    if not active <= experts < MAX_EXPERTS:
        raise UsageError(
            f"{path}: num_experts is {experts} and num_experts_per_tok {active} (rule: experts per token ≤ experts < "
            f"{MAX_EXPERTS})"
        )
    step, dense = int(config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers") or ()
    if step < 1:
        raise UsageError(f"{path}: decoder_sparse_step is {step} (rule: 1 or more)")
    layers = (n for n in range(int(config["num_hidden_layers"])) if n not in dense and (n + 1) % step == 0)
    sparse = ExpertLayers(experts, active, width, bool(config.get("norm_topk_prob", False)), tuple(layers))
    return sparse if sparse.layers else None


def _linear(config: Mapping[str, Any], path: str | Path) -> LinearAttention:
    sizes = {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    found = {key: config.get(key, default) for key, default in sizes.items()}
    for key, value in found.items():
        if not isinstance(value, int) or value < 1:
            raise UsageError(f"{path}: {key} is {value!r} (rule: a size, 1 or more)")
    linear = LinearAttention(*found.values())
    if linear.value_heads % linear.key_heads:
        raise UsageError(
            f"{path}: linear_num_value_heads is {linear.value_heads} and linear_num_key_heads {linear.key_heads} "
            "(rule: a multiple)"
        )
    if _activation(config, path) != "silu":
        raise UsageError(f"{path}: activation {config['hidden_act']} is not supported in linear attention")
    return linear


def _activation(config: Mapping[str, Any], path: str | Path) -> Literal["silu", "gelu_tanh"]:
    name = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    match name:
        case "silu" | "swish":
            return "silu"
        case "gelu_pytorch_tanh":
            return "gelu_tanh"
    raise UsageError(f"{path}: activation {name} is not supported", remedy="use silu or gelu_pytorch_tanh")


def _attention(
    config: Mapping[str, Any], path: str | Path, family: DecoderFamily, head_dim: int
) -> tuple[Attention | None, ...]:
    window = config.get("sliding_window", family.window)
    layers = int(config["num_hidden_layers"])
    windows = family.windows({**config, "sliding_window": window})
    linear = _linear_layers(config, path) if family.hybrid else [False] * layers
    if family.windows is _no_windows and set(config.get("layer_types") or ()) - {"full_attention"} and not any(linear):
        raise UsageError(f"{path}: layer_types is {config['layer_types']}, which {family.model_type} does not have")
    if len(windows) != layers or (any(windows) and not (isinstance(window, int) and window > 0)):
        raise UsageError(
            f"{path}: layer_types and sliding_window do not describe the attention of {layers} layers (rule: "
            "full_attention or sliding_attention for each, and a window for the latter)"
        )
    rotary = {sliding: _rotary(config, path, family, head_dim, sliding=sliding) for sliding in set(windows)}
    used = config.get("no_rope_layers") if family.no_rotary else None
    if used is None:
        interval = int(config.get("no_rope_layer_interval", family.no_rotary)) if family.no_rotary else layers + 1
        used = [(layer + 1) % interval != 0 for layer in range(layers)]
    return tuple(
        None if linear[layer] else Attention(int(window) if sliding else None, rotary[sliding] if used[layer] else None)
        for layer, sliding in enumerate(windows)
    )


def _linear_layers(config: Mapping[str, Any], path: str | Path) -> list[bool]:
    """By `layer_types`, else all but every `full_attention_interval`-th layer."""
    layers, kinds = int(config["num_hidden_layers"]), config.get("layer_types")
    if not kinds:
        interval = int(config.get("full_attention_interval", 4))
        kinds = ["linear_attention" if (n + 1) % max(interval, 1) else "full_attention" for n in range(layers)]
    if len(kinds) != layers or set(kinds) - {"linear_attention", "full_attention"}:
        raise UsageError(
            f"{path}: layer_types is {kinds} (rule: linear_attention or full_attention for each of {layers} layers)"
        )
    return [kind == "linear_attention" for kind in kinds]


def _rotary(
    config: Mapping[str, Any], path: str | Path, family: DecoderFamily, head_dim: int, *, sliding: bool
) -> Rotary:
    """From transformers 5 (`rope_parameters`, for some families by layer type) or 4 (`rope_theta`, `rope_scaling`)."""
    given: Mapping[str, Any] = config.get("rope_parameters") or {}
    theta = config.get("rope_theta") or family.theta
    parameters = given.get("sliding_attention" if sliding else "full_attention", given)
    if not parameters and not (sliding and family.window_theta):
        parameters = config.get("rope_scaling") or {}
    if sliding and family.window_theta is not None:
        theta = config.get("rope_local_base_freq") or family.window_theta
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    share = float(parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", family.rotated)))
    dim = int(head_dim * share)
    if not 0 < dim <= head_dim or dim % 2:
        raise UsageError(
            f"{path}: partial_rotary_factor is {share:g}, and a head has {head_dim} elements (rule: an "
            "even number of them is rotated)"
        )
    keys = ROTARY_PARAMETERS.get(kind)
    if keys is None:
        raise UsageError(
            f"{path}: rope scaling {kind} is not supported", remedy="use one of " + ", ".join(ROTARY_PARAMETERS)
        )
    longest = config.get("max_position_embeddings")
    original = config.get(
        "original_max_position_embeddings", parameters.get("original_max_position_embeddings", longest)
    )
    scaling = {key: parameters[key] for key in keys if parameters.get(key) is not None}
    if "original_max_position_embeddings" in keys:
        scaling["original_max_position_embeddings"] = original
    if "factor" in keys and "factor" not in scaling and original and longest:
        scaling["factor"] = longest / original
    missing = [key for key in keys if key not in scaling and key not in OPTIONAL]
    if missing:
        raise UsageError(f"{path}: rope scaling {kind} has no {missing[0]}")
    return Rotary(float(parameters.get("rope_theta") or theta), dim, kind, scaling)
