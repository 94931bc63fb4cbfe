"""Read the fields that `architecture` needs from a Hugging Face `config.json`, with errors that name the wrong field.

How parameters follow from a config differs by family (biases, norms, where experts are, windows). A family is listed
here when its parameter count has been compared with the model itself; any other family is refused instead of guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

__all__ = [
    "FAMILIES",
    "Experts",
    "Family",
    "ConfigFields",
    "Mla",
    "LayerSelection",
    "experts_of",
    "family_of",
    "mla_of",
    "window_of",
]


class LayerSelection(Enum):
    """The layers that have a component, and the config fields that determine them."""

    NEVER = auto()
    EVERY = auto()
    """Every layer, if the field is set at all."""
    FLAG = auto()
    """Windows: layers from `max_window_layers` on if `use_sliding_window`."""
    ALTERNATE = auto()
    """Windows: every other layer, the first among them."""
    PATTERN = auto()
    """Windows: all but every `sliding_window_pattern`-th layer."""
    STEP = auto()
    """Experts: every `decoder_sparse_step`-th layer but `mlp_only_layers`."""
    AFTER = auto()
    """Experts: from layer `first_k_dense_replace` on."""


@dataclass(frozen=True, slots=True)
class Family:
    """How a family's weights follow from its config."""

    qkv_bias: bool | None = None
    """Bias of q, k and v; None: given by `attention_bias`."""
    output_bias: bool | None = None
    """Bias of the output projection; None: given by `attention_bias`."""
    attention_bias: bool = False
    """The default of `attention_bias`."""
    head_norms: bool | None = False
    """Norms of q and k, per head; None: given by `use_qk_norm`."""
    wide_norms: bool = False
    """Norms of q and k over all heads together."""
    layer_norms: int = 2
    window: LayerSelection = LayerSelection.NEVER
    experts: LayerSelection = LayerSelection.NEVER
    expert_width: str = "moe_intermediate_size"
    expert_bias: bool = False
    """Biases of the experts and of the router."""
    sinks: bool = False
    """One learned attention sink per head."""
    tied: bool = False
    """The default of `tie_word_embeddings`."""
    defaults: Mapping[str, int] | None = None
    """Fields that published configs of the family leave out, with the values of its reference implementation."""


_MOE_AFTER = Family(experts=LayerSelection.AFTER)
_GEMMA3 = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "granite": Family(),
    "mistral": Family(qkv_bias=False, output_bias=False, window=LayerSelection.EVERY),
    "mixtral": Family(
        qkv_bias=False,
        output_bias=False,
        window=LayerSelection.EVERY,
        experts=LayerSelection.EVERY,
        expert_width="intermediate_size",
    ),
    "qwen2": Family(qkv_bias=True, output_bias=False, window=LayerSelection.FLAG),
    "qwen2_moe": Family(qkv_bias=True, output_bias=False, window=LayerSelection.FLAG, experts=LayerSelection.STEP),
    "qwen3": Family(head_norms=True, window=LayerSelection.FLAG),
    "qwen3_moe": Family(head_norms=True, window=LayerSelection.FLAG, experts=LayerSelection.STEP),
    "deepseek_v2": _MOE_AFTER,
    "deepseek_v3": _MOE_AFTER,
    "kimi_k2": _MOE_AFTER,
    "glm4": Family(output_bias=False, layer_norms=4),
    "glm4_moe": Family(output_bias=False, head_norms=None, experts=LayerSelection.AFTER),
    "gpt_oss": Family(
        attention_bias=True,
        window=LayerSelection.ALTERNATE,
        experts=LayerSelection.EVERY,
        expert_width="intermediate_size",
        expert_bias=True,
        sinks=True,
    ),
    "gemma": Family(tied=True),
    "gemma2": Family(layer_norms=4, window=LayerSelection.ALTERNATE, tied=True),
    "gemma3_text": Family(head_norms=True, layer_norms=4, window=LayerSelection.PATTERN, tied=True, defaults=_GEMMA3),
    "minimax_m2": Family(
        qkv_bias=False,
        output_bias=False,
        wide_norms=True,
        experts=LayerSelection.EVERY,
        expert_width="intermediate_size",
    ),
    "olmo2": Family(wide_norms=True),
    "olmoe": Family(wide_norms=True, experts=LayerSelection.EVERY, expert_width="intermediate_size"),
    "phi3": Family(qkv_bias=False, output_bias=False, window=LayerSelection.EVERY),
}

_SAME_AS = {
    "gemma3": "gemma3_text",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
}
"""Language parts of multimodal models that are built as another family."""

_MISSING = object()
_MAX_FIELD = 10**12
"""An upper limit of model dimensions, which keeps counts within the range of a float."""


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """Typed access to a config. ValueError names the field, its value and the rule."""

    config: Mapping[str, object]
    where: str = ""
    """Prefix of the names in messages: `text_config.`"""

    def has(self, name: str) -> bool:
        return self.config.get(name) is not None

    def whole(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number, at least `least`. Without `default` the field must be there."""
        value = self.config.get(name)
        if value is None:
            if default is None:
                raise self._error(name, "missing" if name not in self.config else "null", f"a whole number >= {least}")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= _MAX_FIELD:
            raise self._error(name, repr(value), f"a whole number >= {least}")
        if value != int(value):
            raise self._error(name, repr(value), f"a whole number >= {least}")
        return int(value)

    def optional(self, name: str) -> int | None:
        return self.whole(name) if self.has(name) else None

    def flag(self, name: str, default: bool) -> bool:
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._error(name, repr(value), "true or false")
        return value

    def text(self, name: str) -> str:
        value = self.config.get(name, _MISSING)
        if not isinstance(value, str) or not value:
            raise self._error(name, "missing" if value is _MISSING else repr(value), "a word")
        return value

    def items(self, name: str, of: type[str] | type[int]) -> list[object] | None:
        value = self.config.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(v, of) for v in value):
            raise self._error(name, repr(value), f"a list of {of.__name__}")
        return list(value)

    def check(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise self._error(name, repr(self.config.get(name)), rule)

    def _error(self, name: str, value: str, rule: str) -> ValueError:
        return ValueError(f"model config: {self.where}{name} is {value} (rule: {rule})")


def family_of(fields: ConfigFields) -> tuple[str, Family]:
    """The family by `model_type`. ValueError for a family whose weights cannot be counted."""
    model_type = fields.text("model_type")
    name = _SAME_AS.get(model_type, model_type)
    fields.check("model_type", name in FAMILIES, f"one of {', '.join(FAMILIES)}, or one that is built as one of them")
    return name, FAMILIES[name]


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention: the cache holds one latent and one rotary key per token, for all heads."""

    q_lora_rank: int | None
    kv_lora_rank: int
    rope: int
    nope: int
    value: int


def mla_of(fields: ConfigFields) -> Mla | None:
    if not fields.has("kv_lora_rank"):
        return None
    return Mla(
        q_lora_rank=fields.optional("q_lora_rank"),
        kv_lora_rank=fields.whole("kv_lora_rank"),
        rope=fields.whole("qk_rope_head_dim"),
        nope=fields.whole("qk_nope_head_dim"),
        value=fields.whole("v_head_dim"),
    )


@dataclass(frozen=True, slots=True)
class Experts:
    """`count` experts of width `width` in each of `layers` layers, `per_token` of them used; `shared` width besides."""

    count: int
    per_token: int
    width: int
    layers: int
    shared: int = 0
    shared_gate: bool = False


def experts_of(fields: ConfigFields, family: Family, layers: int) -> Experts | None:
    """Where the experts are. None for a dense model (also one of a family that could have them)."""
    key = next((k for k in ("n_routed_experts", "num_local_experts", "num_experts") if fields.has(k)), None)
    if key is None or fields.whole(key, least=0) == 0:
        return None
    fields.check(key, family.experts is not LayerSelection.NEVER, "left out: this model_type has no experts")
    count = fields.whole(key)
    chosen = "experts_per_token" if not fields.has("num_experts_per_tok") and fields.has("experts_per_token") else None
    per_token = fields.whole(chosen or "num_experts_per_tok")
    fields.check(chosen or "num_experts_per_tok", per_token <= count, f"at most {key}, which is {count}")
    width = fields.whole(family.expert_width)
    if family.experts is LayerSelection.EVERY:
        return Experts(count, per_token, width, layers)
    if family.experts is LayerSelection.STEP:
        return _stepped(fields, Experts(count, per_token, width, layers), layers)
    dense = fields.whole("first_k_dense_replace", 0, least=0)
    fields.check("first_k_dense_replace", dense <= layers, f"at most num_hidden_layers, which is {layers}")
    fields.check("moe_layer_freq", fields.whole("moe_layer_freq", 1) == 1, "1: other spacings are not known")
    shared = fields.whole("n_shared_experts", 0, least=0) * width
    return Experts(count, per_token, width, layers - dense, shared)


def _stepped(fields: ConfigFields, experts: Experts, layers: int) -> Experts:
    step = fields.whole("decoder_sparse_step", 1)
    dense = set(fields.items("mlp_only_layers", int) or ())
    sparse = sum((i + 1) % step == 0 and i not in dense for i in range(layers))
    shared = fields.whole("shared_expert_intermediate_size", 0, least=0)
    return Experts(experts.count, experts.per_token, experts.width, sparse, shared, shared_gate=shared > 0)


def window_of(fields: ConfigFields, family: Family, layers: int) -> tuple[int | None, int]:
    """Size of the sliding window, tokens, and how many layers have it."""
    types = fields.items("layer_types", str)
    if types is not None:
        fields.check("layer_types", len(types) == layers, f"one per layer, of which there are {layers}")
        known = {"full_attention", "sliding_attention"}
        fields.check("layer_types", set(types) <= known, f"each of {', '.join(sorted(known))}")
        count = types.count("sliding_attention")
    else:
        count = _windowed(fields, family.window, layers)
    return (fields.whole("sliding_window"), count) if count else (None, 0)


def _windowed(fields: ConfigFields, where: LayerSelection, layers: int) -> int:
    if where is LayerSelection.FLAG:
        if not fields.flag("use_sliding_window", False):
            return 0
        return max(0, layers - fields.whole("max_window_layers", least=0))
    if where is LayerSelection.NEVER or not fields.has("sliding_window"):
        return 0
    if where is LayerSelection.PATTERN:
        return layers - layers // fields.whole("sliding_window_pattern", 6)
    return layers if where is LayerSelection.EVERY else (layers + 1) // 2
