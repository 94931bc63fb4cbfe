"""The resource needs of a model architecture (parameters, KV bytes, FLOPs), from a Hugging Face `config.json`.

`DecoderShape` computes in closed form, so that a planner can call it millions of times. Conventions: a FLOP count has 2
per multiply-add; the token at position p attends to p earlier ones (the integral p, not p + 1: at the lengths that
matter the difference is nothing, and sums over pieces of a sequence stay exact), or to `window` where a layer has one.

How parameters follow from a config differs by family (biases, norms, where experts are, windows). A family is listed
in `FAMILIES` when its parameter count has been compared with the model itself; any other family is refused instead of
guessed. Errors name the wrong field of the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from placement.types import finite_number, require_positive


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """A decoder's architecture at a serving precision. Made by `shape_of`.

    Counts are of numbers (parameters, cache elements); `*_bytes` at `weight_bytes_per_parameter` and
    `kv_bytes_per_element`. Methods take fractions: a mean over sequences is a fine argument.
    """

    name: str
    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int | None
    """Width of the dense feed-forward layers; None if every layer has experts."""
    parameters: int
    """All of them; of a multimodal model those of the text part."""
    expert_parameters: int
    """Of routed experts, all layers (shared experts are not among them)."""
    embedding_parameters: int
    """Of the input embedding, of which a token reads one row; and of the output layer, shared with it or not."""
    tied: bool
    """The output layer is the input embedding."""
    experts: int = 0
    """Routed experts of a layer that has them; 0 for a dense model."""
    experts_per_token: int = 0
    expert_layers: int = 0
    expert_intermediate: int | None = None
    window: int | None = None
    """Tokens that layers with a sliding window attend to."""
    window_layers: int = 0
    mla: Mla | None = None
    linear: LinearLayers | None = None
    """Layers with linear attention in place of attention over keys and values."""
    weight_bytes_per_parameter: float = 2.0
    kv_bytes_per_element: float = 2.0
    notes: tuple[str, ...] = ()
    """Parts that were left out or not taken from the config, as text."""

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: all but the routed experts that are not chosen. Embeddings count, as in model
        cards."""
        chosen = self.expert_parameters // self.experts * self.experts_per_token if self.experts else 0
        return self.parameters - self.expert_parameters + chosen

    @property
    def is_moe(self) -> bool:
        """True if some parameters are experts that a token may not use."""
        return self.active_parameters < self.parameters

    @property
    def body_parameters(self) -> int:
        """Parameters that one token is multiplied with before the output layer."""
        return self.active_parameters - self.embedding_parameters * (1 if self.tied else 2)

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.weight_bytes_per_parameter

    @property
    def kv_elements_per_layer(self) -> int:
        """Cached numbers per token and layer."""
        if self.mla is not None:
            return self.mla.kv_lora_rank + self.mla.rope
        return 2 * self.kv_heads * self.head_dim

    def kv_bytes(self, tokens: float) -> float:
        """Bytes of one copy of a sequence's KV cache (`kv_copies` is the number of copies per TP size); windows cap
        their layers, and linear attention has a state whatever the length."""
        state = self.linear.state_bytes if self.linear is not None and tokens > 0 else 0.0
        return state + self._reach(tokens) * self.kv_elements_per_layer * self.kv_bytes_per_element

    def kv_copies(self, tp: int) -> int:
        """How often a cache is held over `tp` devices: heads that cannot be divided further are replicated, and so is
        a latent cache, which has no heads."""
        return tp if self.mla is not None else max(1, tp // self.kv_heads)

    def flops(self, new: float, cached: float, logits: float | None = None) -> float:
        """Forward FLOPs of `new` tokens after `cached` ones of the same sequence.

        `logits`: at how many positions the output layer is computed (1 for a prefill); None: at every new token.
        """
        positions = new if logits is None else logits
        return (
            (2.0 * self.body_parameters + self._state_flops) * new
            + 2.0 * self.embedding_parameters * positions
            + self._pair_flops * self._pairs(cached, cached + new)
        )

    def decode_flops(self, context: float) -> float:
        """Forward FLOPs of one generated token at a context, output layer and all.

        Latent attention decodes in the space of the latent (weights absorbed), which costs more per pair than the
        expanded heads of a prefill do.
        """
        per_pair = self._pair_flops
        if self.mla is not None:
            per_pair = 2.0 * self.heads * (2 * self.mla.kv_lora_rank + self.mla.rope)
        every = 2.0 * (self.body_parameters + self.embedding_parameters) + self._state_flops
        return every + per_pair * self._reach(context)

    def train_flops(self, tokens: float, context: float) -> float:
        """Forward and backward (3 × forward) of `tokens` tokens that have `context` tokens before them on average, as
        in sequences of twice that length. Recomputed activations are not counted."""
        attention = self._pair_flops * self._pairs(0.0, 2.0 * context) / (2.0 * context) if context > 0 else 0.0
        every = 2.0 * (self.body_parameters + self.embedding_parameters) + self._state_flops
        return 3.0 * tokens * (every + attention)

    def activation_bytes(self, tokens: float, *, recompute: bool) -> float:
        """Activations that a training pass over `tokens` tokens keeps for its backward pass, in bf16, with attention
        kernels that keep no scores (FlashAttention). Per layer: the inputs of both norms and their results, queries,
        keys, values, the attention's result, and of the feed-forward part gate, up, activated gate and their product.
        Counted from the architecture, in the manner of Korthikanti et al. (arXiv 2205.05198, section 4.1)."""
        wide = self.heads * self.head_dim
        attention = 4 * self.hidden + 2 * wide + self.kv_elements_per_layer
        dense = 4 * (self.intermediate or 0)
        routed = self.experts_per_token * (4 * (self.expert_intermediate or 0) + 2 * self.hidden)
        kept = self.layers * attention + (self.layers - self.expert_layers) * dense + self.expert_layers * routed
        if recompute:
            kept = self.layers * self.hidden + attention + max(dense, routed)
        return 2.0 * tokens * kept

    def logit_bytes(self, tokens: float) -> float:
        """One copy of the logits of `tokens` tokens, in float32."""
        return 4.0 * tokens * self.vocab

    @property
    def linears(self) -> Mapping[str, tuple[int, int, int]]:
        """Inputs, outputs and number of the linear modules, by the name that Llama and Qwen give them. Routed experts
        and latent attention are left out: adapters of theirs are not counted."""
        wide, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        linear, attending = self.linear, self.layers - (0 if self.linear is None else self.linear.layers)
        found = {"o_proj": (wide, self.hidden, attending)}
        if self.mla is None:
            found |= {
                "q_proj": (self.hidden, wide * (1 if linear is None else 2), attending),
                "k_proj": (self.hidden, kv, attending),
                "v_proj": (self.hidden, kv, attending),
            }
        if linear is not None:
            found |= {
                "in_proj_qkv": (self.hidden, linear.channels, linear.layers),
                "in_proj_z": (self.hidden, linear.value_width, linear.layers),
                "out_proj": (linear.value_width, self.hidden, linear.layers),
            }
            found |= dict.fromkeys(("in_proj_a", "in_proj_b"), (self.hidden, linear.value_heads, linear.layers))
        dense = self.layers - self.expert_layers
        if self.intermediate is not None and dense:
            found |= dict.fromkeys(("gate_proj", "up_proj"), (self.hidden, self.intermediate, dense))
            found["down_proj"] = (self.intermediate, self.hidden, dense)
        return found

    def touched_weight_bytes(self, batch: float) -> float:
        """Weights that a step over `batch` tokens reads: all but the input embedding (unless tied) and the experts
        that no token chose, if each chooses `experts_per_token` of them evenly: E (1 - (1 - k/E)^batch) are read."""
        read = self.parameters - self.expert_parameters - (0 if self.tied else self.embedding_parameters)
        touched = float(read)
        if self.experts:
            share = 1.0 - (1.0 - self.experts_per_token / self.experts) ** batch
            touched += self.expert_parameters * share
        return touched * self.weight_bytes_per_parameter

    def allows_tp(self, tp: int) -> str | None:
        """None if engines can divide the model by `tp`; else why not. Vocabularies are padded, so any size will do."""
        if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
            return f"tp is {tp!r} (rule: a whole number, at least 1)"
        if self.heads % tp:
            return f"tp {tp} does not divide num_attention_heads, which is {self.heads}"
        if self.mla is None and self.kv_heads % tp and tp % self.kv_heads:
            return f"tp {tp} neither divides num_key_value_heads, which is {self.kv_heads}, nor is a multiple of it"
        for field, width in (("intermediate_size", self.intermediate), ("expert width", self.expert_intermediate)):
            if width is not None and width % tp:
                return f"tp {tp} does not divide {field}, which is {width}"
        return None

    @property
    def _pair_flops(self) -> float:
        """FLOPs of one query and one key in one layer: scores and weighted sum, all heads."""
        if self.mla is not None:
            return 2.0 * self.heads * (self.mla.nope + self.mla.rope + self.mla.value)
        return 4.0 * self.heads * self.head_dim

    @property
    def _state_flops(self) -> float:
        """FLOPs of one token in the states of all layers with linear attention: what it reads of the state, what it
        writes, and what the query reads."""
        return 0.0 if self.linear is None else 6.0 * self.linear.layers * self.linear.matrices

    @property
    def _full_layers(self) -> int:
        """Layers that attend to every earlier token."""
        return self.layers - self.window_layers - (0 if self.linear is None else self.linear.layers)

    def _reach(self, position: float) -> float:
        """Keys that the token at `position` attends to, summed over layers: also the tokens that a cache holds."""
        near = position if self.window is None else min(position, self.window)
        return self._full_layers * position + self.window_layers * near

    def _pairs(self, start: float, end: float) -> float:
        """Query-key pairs of the tokens from `start` to `end`, summed over layers: the integral of `_reach`."""
        full = self._full_layers * (end - start) * (start + end) / 2
        return full + self.window_layers * (self._near_pairs(end) - self._near_pairs(start))

    def _near_pairs(self, position: float) -> float:
        if self.window is None or position <= self.window:
            return position * position / 2
        return self.window * (position - self.window / 2)


def shape_of(
    config: Mapping[str, object],
    *,
    name: str = "",
    weight_bytes_per_parameter: float = 2.0,
    kv_bytes_per_element: float = 2.0,
) -> DecoderShape:
    """The shape of a model from its `config.json`. ValueError names the missing or invalid field.

    The precisions are those of serving, which a config does not state (2: bf16, 1: fp8).
    """
    widths = {"weight_bytes_per_parameter": weight_bytes_per_parameter, "kv_bytes_per_element": kv_bytes_per_element}
    for what, value in widths.items():
        require_positive(what, finite_number(what, value))
    fields, notes = _text_part(config)
    model_type = fields.text("model_type")
    model_type = _SAME_AS.get(model_type, model_type)
    known = f"one of {', '.join(FAMILIES)}, or one that is built as one of them"
    fields.check("model_type", model_type in FAMILIES, known)
    family = FAMILIES[model_type]
    absent = {k: v for k, v in (family.defaults or {}).items() if k not in fields.config}
    fields = ConfigFields({**absent, **fields.config}, fields.where)
    mla = _mla(fields)
    heads, kv_heads, head_dim = _heads(fields, mla)
    hidden, layers, vocab = (fields.whole(k) for k in ("hidden_size", "num_hidden_layers", "vocab_size"))
    experts = _experts(fields, family, layers)
    dense_layers = layers - experts.layers
    intermediate = fields.whole("intermediate_size") if dense_layers else None
    window, window_layers = _window(fields, family, layers)
    tied = fields.flag("tie_word_embeddings", family.tied)
    linear = _linear(fields, family, layers)
    attention = _attention(fields, family, hidden, (heads, kv_heads, head_dim), mla)
    expert = 3 * hidden * experts.width + (2 * experts.width + hidden) * family.expert_bias
    routed = experts.layers * experts.count * expert
    router = (hidden + family.expert_bias) * experts.count
    shared = _feed_forward(fields, hidden, experts.shared) if experts.shared else 0
    total = vocab * hidden * (1 if tied else 2) + hidden + layers * (attention + family.layer_norms * hidden) + routed
    if linear is not None:
        total += linear.layers * (linear.parameters(hidden) - attention)
    total += dense_layers * _feed_forward(fields, hidden, intermediate or 0)
    total += experts.layers * (router + shared + hidden * experts.shared_gate)
    if fields.has("quantization_config"):
        notes.append("the config is quantised: bytes follow weight_bytes_per_parameter, not quantization_config")
    further = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")
    extra = next((fields.whole(k, least=0) for k in further if fields.has(k)), 0)
    if extra:
        notes.append(f"{extra} layer(s) for predicting further tokens are left out")
    notes += [f"{k} is not in the config: {v}, as in the family's reference implementation" for k, v in absent.items()]
    return DecoderShape(
        name=name or model_type,
        layers=layers,
        hidden=hidden,
        vocab=vocab,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        parameters=total,
        expert_parameters=routed,
        embedding_parameters=vocab * hidden,
        tied=tied,
        experts=experts.count,
        experts_per_token=experts.per_token,
        expert_layers=experts.layers,
        expert_intermediate=experts.width or None,
        window=window,
        window_layers=window_layers,
        mla=mla,
        linear=linear,
        weight_bytes_per_parameter=weight_bytes_per_parameter,
        kv_bytes_per_element=kv_bytes_per_element,
        notes=tuple(notes),
    )


def _text_part(config: Mapping[str, object]) -> tuple[ConfigFields, list[str]]:
    """The language model's own fields: those of `text_config` where there is one."""
    if not isinstance(config, Mapping):
        raise ValueError(f"model config is {config!r} (rule: an object, as in config.json)")
    text = config.get("text_config")
    if text is None:
        seen = "vision_config" in config
        return ConfigFields(config), ["multimodal: only the text part is counted"] if seen else []
    if not isinstance(text, Mapping):
        raise ValueError(f"model config: text_config is {text!r} (rule: an object)")
    merged = dict(text)
    for key in ("tie_word_embeddings", "model_type"):  # older configs state these once, at the top
        if key not in merged and key in config:
            merged[key] = config[key]
    return ConfigFields(merged, "text_config."), ["multimodal: only the text part (text_config) is counted"]


def _heads(fields: ConfigFields, mla: Mla | None) -> tuple[int, int, int]:
    heads = fields.whole("num_attention_heads")
    kv_heads = fields.whole("num_key_value_heads", heads)
    fields.check("num_key_value_heads", heads % kv_heads == 0, f"a divisor of num_attention_heads, which is {heads}")
    if mla is not None:
        return heads, heads, mla.nope + mla.rope
    if not fields.has("head_dim"):
        hidden = fields.whole("hidden_size")
        fields.check("hidden_size", hidden % heads == 0, f"a multiple of num_attention_heads, which is {heads}")
        return heads, kv_heads, hidden // heads
    return heads, kv_heads, fields.whole("head_dim")


def _attention(
    fields: ConfigFields, family: Family, hidden: int, heads_kv_dim: tuple[int, int, int], mla: Mla | None
) -> int:
    """Parameters of one layer's attention, its own norms included."""
    heads, kv_heads, dim = heads_kv_dim
    biased = fields.flag("attention_bias", family.attention_bias)
    if mla is not None:
        queries = heads * dim
        total = hidden * queries
        if mla.q_lora_rank is not None:
            total = mla.q_lora_rank * (hidden + 1 + queries + biased)
        total += (hidden + biased) * (mla.kv_lora_rank + mla.rope) + mla.kv_lora_rank
        total += mla.kv_lora_rank * heads * (mla.nope + mla.value)
        return total + heads * mla.value * hidden + hidden * biased
    q, kv = heads * dim, kv_heads * dim
    total = hidden * (q + 2 * kv) + q * hidden
    total += hidden * q if family.gated else 0
    qkv_bias = biased if family.qkv_bias is None else fields.flag("qkv_bias", family.qkv_bias)
    total += (q + 2 * kv) * qkv_bias
    total += hidden * (biased if family.output_bias is None else family.output_bias)
    head_norms = fields.flag("use_qk_norm", False) if family.head_norms is None else family.head_norms
    return total + 2 * dim * head_norms + (q + kv) * family.wide_norms + heads * family.sinks


def _feed_forward(fields: ConfigFields, hidden: int, width: int) -> int:
    """Parameters of one dense layer: gate, up, down."""
    return 3 * hidden * width + (2 * width + hidden) * fields.flag("mlp_bias", False)


class LayerSelection(Enum):
    """The layers that have a component, and the config fields that determine them."""

    NEVER = auto()
    EVERY = auto()
    """Windows: every layer, if the field is set at all. Experts: every layer, as wide as `intermediate_size`."""
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
    expert_bias: bool = False
    """Biases of the experts and of the router."""
    sinks: bool = False
    """One learned attention sink per head."""
    gated: bool = False
    """A gate of the attention's result, as wide as the queries; and linear attention in some layers."""
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
    "mixtral": Family(qkv_bias=False, output_bias=False, window=LayerSelection.EVERY, experts=LayerSelection.EVERY),
    "qwen2": Family(qkv_bias=True, output_bias=False, window=LayerSelection.FLAG),
    "qwen2_moe": Family(qkv_bias=True, output_bias=False, window=LayerSelection.FLAG, experts=LayerSelection.STEP),
    "qwen3": Family(head_norms=True, window=LayerSelection.FLAG),
    "qwen3_moe": Family(head_norms=True, window=LayerSelection.FLAG, experts=LayerSelection.STEP),
    "qwen3_5_text": Family(head_norms=True, gated=True),
    "deepseek_v2": _MOE_AFTER,
    "deepseek_v3": _MOE_AFTER,
    "kimi_k2": _MOE_AFTER,
    "glm4": Family(output_bias=False, layer_norms=4),
    "glm4_moe": Family(output_bias=False, head_norms=None, experts=LayerSelection.AFTER),
    "gpt_oss": Family(
        attention_bias=True,
        window=LayerSelection.ALTERNATE,
        experts=LayerSelection.EVERY,
        expert_bias=True,
        sinks=True,
    ),
    "gemma": Family(tied=True),
    "gemma2": Family(layer_norms=4, window=LayerSelection.ALTERNATE, tied=True),
    "gemma3_text": Family(head_norms=True, layer_norms=4, window=LayerSelection.PATTERN, tied=True, defaults=_GEMMA3),
    "minimax_m2": Family(qkv_bias=False, output_bias=False, wide_norms=True, experts=LayerSelection.EVERY),
    "olmo2": Family(wide_norms=True),
    "olmoe": Family(wide_norms=True, experts=LayerSelection.EVERY),
    "phi3": Family(qkv_bias=False, output_bias=False, window=LayerSelection.EVERY),
    "smollm3": Family(tied=True),
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
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not least <= value <= _MAX_FIELD
            or value % 1
        ):
            raise self._error(name, repr(value), f"a whole number >= {least}")
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._error(name, repr(value), "true or false")
        return value

    def text(self, name: str) -> str:
        value = self.config.get(name)
        if not isinstance(value, str) or not value:
            raise self._error(name, repr(value) if name in self.config else "missing", "a word")
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


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention: the cache holds one latent and one rotary key per token, for all heads."""

    q_lora_rank: int | None
    kv_lora_rank: int
    rope: int
    nope: int
    value: int


def _mla(fields: ConfigFields) -> Mla | None:
    if not fields.has("kv_lora_rank"):
        return None
    return Mla(
        q_lora_rank=fields.whole("q_lora_rank") if fields.has("q_lora_rank") else None,
        kv_lora_rank=fields.whole("kv_lora_rank"),
        rope=fields.whole("qk_rope_head_dim"),
        nope=fields.whole("qk_nope_head_dim"),
        value=fields.whole("v_head_dim"),
    )


@dataclass(frozen=True, slots=True)
class LinearLayers:
    """Layers with linear attention by gated delta networks (arXiv:2412.06464), of queries, keys and values under a
    causal convolution of `kernel` tokens. A sequence has a state of one size in each."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Queries, keys and values of a token."""
        return 2 * self.key_heads * self.key_dim + self.value_width

    @property
    def matrices(self) -> int:
        """Elements of a state's matrices, one per value head."""
        return self.value_width * self.key_dim

    @property
    def state_bytes(self) -> float:
        """Of a sequence's states in all layers, in float32."""
        return 4.0 * self.layers * (self.matrices + self.channels * (self.kernel - 1))

    def parameters(self, hidden: int) -> int:
        """Of one layer: projections in (queries, keys, values; gate; two numbers per head) and out, convolution, norm,
        and two numbers per head."""
        projections = hidden * (self.channels + 2 * self.value_width + 2 * self.value_heads)
        return projections + self.channels * self.kernel + self.value_dim + 2 * self.value_heads


def _linear(fields: ConfigFields, family: Family, layers: int) -> LinearLayers | None:
    """The layers of `layer_types`, or all but every `full_attention_interval`-th."""
    if not family.gated:
        return None
    types, every = fields.items("layer_types", str), fields.whole("full_attention_interval", 4)
    count = layers - layers // every if types is None else types.count("linear_attention")
    if not count:
        return None
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    return LinearLayers(count, *(fields.whole(f"linear_{name}") for name in names))


@dataclass(frozen=True, slots=True)
class Experts:
    """`count` experts of width `width` in each of `layers` layers, `per_token` of them used; `shared` width besides."""

    count: int = 0
    per_token: int = 0
    width: int = 0
    layers: int = 0
    shared: int = 0
    shared_gate: bool = False


def _experts(fields: ConfigFields, family: Family, layers: int) -> Experts:
    """Where the experts are: nowhere in a dense model (also one of a family that could have them)."""
    key = next((k for k in ("n_routed_experts", "num_local_experts", "num_experts") if fields.has(k)), None)
    if key is None or fields.whole(key, least=0) == 0:
        return Experts()
    fields.check(key, family.experts is not LayerSelection.NEVER, "left out: this model_type has no experts")
    count = fields.whole(key)
    chosen = "num_experts_per_tok"
    if not fields.has(chosen) and fields.has("experts_per_token"):
        chosen = "experts_per_token"
    per_token = fields.whole(chosen)
    fields.check(chosen, per_token <= count, f"at most {key}, which is {count}")
    if family.experts is LayerSelection.EVERY:
        return Experts(count, per_token, fields.whole("intermediate_size"), layers)
    width = fields.whole("moe_intermediate_size")
    if family.experts is LayerSelection.STEP:
        step = fields.whole("decoder_sparse_step", 1)
        excepted = set(fields.items("mlp_only_layers", int) or ())
        sparse = sum((i + 1) % step == 0 and i not in excepted for i in range(layers))
        shared = fields.whole("shared_expert_intermediate_size", 0, least=0)
        return Experts(count, per_token, width, sparse, shared, shared_gate=shared > 0)
    dense = fields.whole("first_k_dense_replace", 0, least=0)
    fields.check("first_k_dense_replace", dense <= layers, f"at most num_hidden_layers, which is {layers}")
    fields.check("moe_layer_freq", fields.whole("moe_layer_freq", 1) == 1, "1: other spacings are not known")
    shared = fields.whole("n_shared_experts", 0, least=0) * width
    return Experts(count, per_token, width, layers - dense, shared)


def _window(fields: ConfigFields, family: Family, layers: int) -> tuple[int | None, int]:
    """Size of the sliding window, tokens, and how many layers have it."""
    types, where, count = fields.items("layer_types", str), family.window, 0
    if types is not None:
        fields.check("layer_types", len(types) == layers, f"one per layer, of which there are {layers}")
        known = {"full_attention", "linear_attention" if family.gated else "sliding_attention"}
        fields.check("layer_types", set(types) <= known, f"each of {', '.join(sorted(known))}")
        count = types.count("sliding_attention")
    elif where is LayerSelection.FLAG:
        if fields.flag("use_sliding_window", False):
            count = max(0, layers - fields.whole("max_window_layers", least=0))
    elif where is not LayerSelection.NEVER and fields.has("sliding_window"):
        if where is LayerSelection.PATTERN:
            count = layers - layers // fields.whole("sliding_window_pattern", 6)
        else:
            count = layers if where is LayerSelection.EVERY else (layers + 1) // 2
    return (fields.whole("sliding_window"), count) if count else (None, 0)
