"""Shapes against published parameter counts, against the models themselves, and against the laws they must obey."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.architecture import FAMILIES, DecoderShape, shape_of
from rollart.architecture import architecture_of
from rollart.quickstart.policy_config import policy_config

Config = dict[str, Any]


def config(
    model_type: str, vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, width: int | None, **rest: Any
) -> Config:
    made: Config = {
        "model_type": model_type,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **rest,
    }
    return made if width is None else {**made, "intermediate_size": width}


LLAMA_8B = config("llama", 128256, 4096, 32, 32, 8, 14336)
LLAMA_70B = config("llama", 128256, 8192, 80, 64, 8, 28672)
QWEN3_8B = config("qwen3", 151936, 4096, 36, 32, 8, 12288, head_dim=128)
QWEN3_30B = config(
    "qwen3_moe",
    151936,
    2048,
    48,
    32,
    4,
    6144,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    tie_word_embeddings=False,
)
MIXTRAL = config(
    "mixtral", 32000, 4096, 32, 32, 8, 14336, num_local_experts=8, num_experts_per_tok=2, sliding_window=None
)
DEEPSEEK_V3 = config(
    "deepseek_v3",
    129280,
    7168,
    61,
    128,
    128,
    18432,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    first_k_dense_replace=3,
    moe_layer_freq=1,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
    num_nextn_predict_layers=1,
)
GPT_OSS_120B = config(
    "gpt_oss",
    201088,
    2880,
    36,
    64,
    8,
    2880,
    head_dim=64,
    num_local_experts=128,
    num_experts_per_tok=4,
    attention_bias=True,
    sliding_window=128,
    tie_word_embeddings=False,
    layer_types=["sliding_attention", "full_attention"] * 18,
    quantization_config={"quant_method": "mxfp4"},
)
GEMMA3_27B = {  # as published: fields missing in the text part have the defaults of its reference implementation
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "intermediate_size": 21504,
        "sliding_window": 1024,
    },
    "vision_config": {},
}
MISTRAL = config("mistral", 32000, 4096, 32, 32, 8, 14336, sliding_window=4096)

# Safetensors metadata of the model's page on the Hugging Face hub, which counts every stored number.
EXACT = [
    ("Llama-3.1-8B", LLAMA_8B, 8_030_261_248),
    ("Llama-3.1-70B", LLAMA_70B, 70_553_706_496),
    ("Qwen3-8B", QWEN3_8B, 8_190_735_360),
    ("Qwen3-32B", config("qwen3", 151936, 5120, 64, 64, 8, 25600, head_dim=128), 32_762_123_264),
    ("Qwen3-30B-A3B", QWEN3_30B, 30_532_122_624),
    ("Qwen2.5-7B", config("qwen2", 152064, 3584, 28, 28, 4, 18944, use_sliding_window=False), 7_615_616_512),
    (
        "Qwen2.5-0.5B",
        config("qwen2", 151936, 896, 24, 14, 2, 4864, tie_word_embeddings=True, use_sliding_window=False),
        494_032_768,
    ),
    ("Mixtral-8x7B", MIXTRAL, 46_702_792_704),
    ("Mistral-7B-v0.1", MISTRAL, 7_241_732_096),
]
# Rounded figures: total and active billions, and where they are published.
ROUNDED = [
    ("DeepSeek-V3 report (arXiv 2412.19437): 671B, 37B active", DEEPSEEK_V3, 671.0, 37.0, 0.02),
    ("gpt-oss model card (arXiv 2508.10925) Table 1: 116.83B, 5.13B active", GPT_OSS_120B, 116.83, 5.13, 0.002),
    ("Mixtral of Experts (arXiv 2401.04088): 47B, 13B active", MIXTRAL, 47.0, 13.0, 0.01),
    ("Qwen3 report (arXiv 2505.09388): 30.5B, 3.3B active", QWEN3_30B, 30.5, 3.3, 0.02),
]


@pytest.mark.parametrize(("name", "published", "parameters"), EXACT, ids=[e[0] for e in EXACT])
def test_published_counts_are_met_exactly(name: str, published: Config, parameters: int) -> None:
    assert shape_of(published, name=name).parameters == parameters


@pytest.mark.parametrize(("source", "published", "total", "active", "tolerance"), ROUNDED, ids=[r[0] for r in ROUNDED])
def test_published_active_counts(source: str, published: Config, total: float, active: float, tolerance: float) -> None:
    shape = shape_of(published)
    assert shape.parameters / 1e9 == pytest.approx(total, rel=0.01)
    counted = shape.active_parameters
    if shape.name == "gpt_oss":  # its card counts the output layer, but not the input embedding
        counted -= shape.embedding_parameters
    assert counted / 1e9 == pytest.approx(active, rel=tolerance)


def test_gemma_3_27b_and_its_notes() -> None:
    """Gemma 3 report (arXiv 2503.19786) Table 1: 25,600M without and 1,416M of embeddings."""
    shape = shape_of(GEMMA3_27B)
    assert (shape.parameters - shape.embedding_parameters) / 1e6 == pytest.approx(25_600, rel=1e-3)
    assert shape.embedding_parameters / 1e6 == pytest.approx(1_416, rel=5e-3)
    assert (shape.window, shape.window_layers, shape.tied) == (1024, 52, True)  # 5 local layers to 1 global one
    assert shape.notes[0] == "multimodal: only the text part (text_config) is counted"
    assert shape.notes[1].startswith("vocab_size is not in the config: 262208")


def test_dense_models_use_all_of_their_parameters() -> None:
    shape = shape_of(LLAMA_8B)
    assert shape.active_parameters == shape.parameters == shape.body_parameters + 2 * shape.embedding_parameters
    assert shape.weight_bytes == 2 * 8_030_261_248
    assert shape_of(LLAMA_8B, weight_bytes_per_parameter=1).weight_bytes == 8_030_261_248


def test_kv_bytes_of_published_models() -> None:
    assert shape_of(LLAMA_8B).kv_bytes(1) == 2 * 2 * 32 * 8 * 128
    assert shape_of(LLAMA_70B, kv_bytes_per_element=1).kv_bytes(10) == 10 * 2 * 80 * 8 * 128
    # "Insights into DeepSeek-V3" (arXiv 2505.09343) Table 1: 70.272 KB per token, 327.680 KB for Qwen-2.5 72B.
    assert shape_of(DEEPSEEK_V3).kv_bytes(1) == 70_272
    assert shape_of(config("qwen2", 152064, 8192, 80, 64, 8, 29568)).kv_bytes(1) == 327_680


def test_windows_cap_their_layers_only() -> None:
    shape = shape_of(GPT_OSS_120B)
    per_layer = 2 * 2 * 8 * 64
    assert shape.kv_bytes(100) == 36 * 100 * per_layer
    assert shape.kv_bytes(1000) == 18 * (1000 + 128) * per_layer
    assert shape.decode_flops(1000) - shape.decode_flops(0) == 4 * 64 * 64 * 18 * (1000 + 128)
    mistral = shape_of(MISTRAL)
    assert mistral.kv_bytes(10**6) == mistral.kv_bytes(4096)
    assert mistral.flops(1, 10**6) - mistral.flops(1, 10**5) == 0


def test_flops_by_hand() -> None:
    shape = shape_of(LLAMA_8B)
    matmul = 8_030_261_248 - 128256 * 4096
    assert shape.flops(1000, 500) == 2 * matmul * 1000 + 4 * 32 * 32 * 128 * 1000 * (500 + 1000 / 2)
    assert shape.flops(1000, 500, logits=1) == shape.flops(1000, 500) - 999 * 2 * 128256 * 4096
    assert shape.decode_flops(700) == 2 * matmul + 4 * 32 * 32 * 128 * 700
    assert shape.train_flops(8, 500) == pytest.approx(3 * 8 * (2 * matmul + 4 * 32 * 32 * 128 * 500))
    assert shape.train_flops(8, 0) == 3 * 8 * 2 * matmul


def test_latent_attention_decodes_at_more_flops_than_it_prefills() -> None:
    shape = shape_of(DEEPSEEK_V3)
    assert shape.flops(2, 0, 0) - 2 * 2 * shape.body_parameters == 61 * 2 * 128 * (192 + 128) * 2
    assert shape.decode_flops(1) - shape.decode_flops(0) == 61 * 2 * 128 * (576 + 512)


def test_a_decode_step_touches_more_experts_with_more_tokens() -> None:
    shape = shape_of(QWEN3_30B)
    dense = (shape.parameters - shape.expert_parameters - shape.embedding_parameters) * 2
    assert shape.touched_weight_bytes(0) == dense
    assert shape.touched_weight_bytes(1) == pytest.approx((shape.body_parameters + shape.embedding_parameters) * 2)
    assert shape.touched_weight_bytes(1e4) == pytest.approx(dense + 2 * shape.expert_parameters)
    llama = shape_of(LLAMA_8B)
    assert llama.touched_weight_bytes(1) == llama.touched_weight_bytes(64) == 2 * (llama.parameters - 128256 * 4096)


@pytest.mark.parametrize(
    ("published", "tp", "why"),
    [
        (LLAMA_8B, 8, None),
        (LLAMA_8B, 16, None),  # two copies of each of the 8 kv heads
        (LLAMA_8B, 3, "does not divide num_attention_heads, which is 32"),
        (DEEPSEEK_V3, 128, None),
        (config("llama", 1000, 768, 2, 12, 4, 3072), 6, "neither divides num_key_value_heads, which is 4"),
        (config("llama", 1000, 768, 2, 12, 4, 3074), 4, "does not divide intermediate_size, which is 3074"),
        (QWEN3_30B, 32, None),
        ({**QWEN3_30B, "moe_intermediate_size": 100}, 8, "does not divide expert width, which is 100"),
        (LLAMA_8B, 0, "rule: a whole number, at least 1"),
        (LLAMA_8B, True, "rule: a whole number, at least 1"),
    ],
)
def test_tensor_parallel_sizes(published: Config, tp: int, why: str | None) -> None:
    answer = shape_of(published).allows_tp(tp)
    assert answer is None if why is None else why in str(answer)


def test_copies_of_the_cache() -> None:
    assert [shape_of(LLAMA_8B).kv_copies(tp) for tp in (1, 8, 16)] == [1, 1, 2]
    assert [shape_of(DEEPSEEK_V3).kv_copies(tp) for tp in (1, 8)] == [1, 8]


def test_notes_say_what_is_left_out() -> None:
    assert shape_of(LLAMA_8B).notes == ()
    assert "1 layer(s) for predicting further tokens are left out" in shape_of(DEEPSEEK_V3).notes
    assert any("quantised" in note for note in shape_of(GPT_OSS_120B).notes)
    old = config("qwen2_5_vl", 151936, 2048, 36, 16, 2, 11008, vision_config={}, tie_word_embeddings=True)
    assert shape_of(old).notes == ("multimodal: only the text part is counted",)


def test_windows_by_family() -> None:
    def windows(**changes: Any) -> tuple[int | None, int]:
        shape = shape_of({**QWEN3_8B, "sliding_window": 4096, **changes})
        return shape.window, shape.window_layers

    assert windows() == (None, 0)
    assert windows(use_sliding_window=True, max_window_layers=28) == (4096, 8)
    assert windows(layer_types=["sliding_attention"] * 6 + ["full_attention"] * 30) == (4096, 6)
    assert windows(model_type="gemma2") == (4096, 18)
    assert windows(model_type="gemma3_text", sliding_window_pattern=6) == (4096, 30)
    assert windows(model_type="mistral", sliding_window=None) == (None, 0)


SIZES = [k for k in (*LLAMA_8B, "head_dim") if k != "model_type"]
NO_SIZES = (0, -1, math.nan, math.inf, 1.5, "8", True, [], 10**400)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, value) for field in SIZES for value in NO_SIZES),
        ("num_key_value_heads", 5),
        ("model_type", "bert"),
        ("model_type", None),
        ("model_type", 3),
        ("tie_word_embeddings", "yes"),
        ("layer_types", ["full_attention"]),
        ("layer_types", "all"),
        ("layer_types", ["linear_attention"] * 32),
        ("num_experts", 8),
        ("attention_bias", 1),
        ("text_config", 7),
        ("sliding_window", -4),
    ],
)
def test_nonsense_names_the_field(field: str, value: object) -> None:
    base = {**LLAMA_8B, "model_type": "mistral"} if field == "sliding_window" else LLAMA_8B
    with pytest.raises(ValueError, match=rf"model config: {field} is .*rule"):
        shape_of({**base, field: value})


@pytest.mark.parametrize("field", [k for k in LLAMA_8B if k != "num_key_value_heads"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=f"model config: {field} is missing"):
        shape_of({k: v for k, v in LLAMA_8B.items() if k != field})


def test_a_missing_field_of_a_text_part_is_named_with_its_path() -> None:
    with pytest.raises(ValueError, match=r"model config: text_config\.hidden_size is missing"):
        shape_of({"text_config": {"model_type": "llama", "num_attention_heads": 4, "head_dim": 8}})


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [
        (QWEN3_30B, "num_experts_per_tok", 129),
        (QWEN3_30B, "moe_intermediate_size", None),
        (QWEN3_30B, "decoder_sparse_step", 0),
        (QWEN3_30B, "mlp_only_layers", 3),
        (QWEN3_30B, "num_experts", -1),
        (DEEPSEEK_V3, "first_k_dense_replace", 62),
        (DEEPSEEK_V3, "moe_layer_freq", 2),
        (DEEPSEEK_V3, "qk_rope_head_dim", None),
        (DEEPSEEK_V3, "v_head_dim", 0),
        (DEEPSEEK_V3, "kv_lora_rank", -1),
        (GPT_OSS_120B, "sliding_window", None),
        (GPT_OSS_120B, "num_experts_per_tok", None),
    ],
)
def test_nonsense_about_experts_and_latents(base: Config, field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"model config: {field} is .*rule"):
        shape_of({**base, field: value})


def test_hidden_size_must_divide_where_head_dim_is_derived() -> None:
    with pytest.raises(ValueError, match=r"hidden_size is 100 .*a multiple of num_attention_heads"):
        shape_of(config("llama", 10, 100, 1, 3, 3, 8))


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "2", True])
@pytest.mark.parametrize("name", ["weight_bytes_per_parameter", "kv_bytes_per_element"])
def test_nonsense_precisions(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is "):
        shape_of(LLAMA_8B, **{name: value})


def test_no_config_at_all() -> None:
    with pytest.raises(ValueError, match="model config is None"):
        shape_of(None)  # type: ignore[arg-type]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
EVERY_FIELD = sorted({*LLAMA_8B, *QWEN3_30B, *DEEPSEEK_V3, *GPT_OSS_120B, "text_config", "attention_bias", "mlp_bias"})


@given(
    st.sampled_from([LLAMA_8B, QWEN3_30B, DEEPSEEK_V3, GPT_OSS_120B, MISTRAL]),
    st.dictionaries(st.sampled_from(EVERY_FIELD), JSON, min_size=1, max_size=3),
)
def test_whatever_a_config_says_it_is_a_shape_or_a_clear_error(base: Config, changes: Config) -> None:
    try:
        shape = shape_of({**base, **changes})
    except ValueError as error:
        if not str(error).startswith("model config: "):
            raise
        return
    assert 0 < shape.active_parameters <= shape.parameters
    assert 0 < shape.touched_weight_bytes(3) <= shape.weight_bytes < math.inf
    assert 0 < shape.flops(7, 9) < math.inf


SHAPES = st.sampled_from([shape_of(c) for c in (LLAMA_8B, QWEN3_30B, DEEPSEEK_V3, GPT_OSS_120B, GEMMA3_27B, MISTRAL)])
TOKENS = st.integers(0, 1 << 17)


@given(SHAPES, TOKENS, TOKENS)
def test_kv_grows_with_tokens_and_linearly_without_windows(shape: DecoderShape, a: int, b: int) -> None:
    assert 0 <= shape.kv_bytes(a) <= shape.kv_bytes(a + b) <= shape.kv_bytes(a) + shape.kv_bytes(b)
    if shape.window is None:
        assert shape.kv_bytes(a + b) == shape.kv_bytes(a) + shape.kv_bytes(b)


@given(SHAPES, TOKENS, TOKENS, TOKENS)
def test_flops_of_the_pieces_add_up(shape: DecoderShape, a: int, b: int, cached: int) -> None:
    whole = shape.flops(a + b, cached)
    assert whole == pytest.approx(shape.flops(a, cached) + shape.flops(b, cached + a), rel=1e-12)


@given(SHAPES, st.floats(1, 1e5), st.floats(0, 1e5), st.floats(0, 1e5))
def test_more_context_never_costs_less(shape: DecoderShape, new: float, cached: float, more: float) -> None:
    assert shape.flops(new, cached) <= shape.flops(new, cached + more) * (1 + 1e-12)
    assert shape.decode_flops(cached) <= shape.decode_flops(cached + more)
    assert shape.train_flops(new, cached) <= shape.train_flops(new, cached + more) * (1 + 1e-12)
    assert shape.touched_weight_bytes(new) <= shape.touched_weight_bytes(new + more) <= shape.weight_bytes


@given(SHAPES, st.floats(1, 1e5), st.floats(1, 1e5))
def test_a_window_never_costs_more(shape: DecoderShape, new: float, cached: float) -> None:
    full = dataclasses.replace(shape, window=None, window_layers=0)
    assert shape.flops(new, cached) <= full.flops(new, cached) * (1 + 1e-9)
    assert shape.kv_bytes(cached) <= full.kv_bytes(cached) * (1 + 1e-9)


@given(SHAPES, st.integers(1, 1 << 16))
def test_training_costs_three_forwards_of_whole_sequences(shape: DecoderShape, length: int) -> None:
    assert shape.train_flops(length, length / 2) == pytest.approx(3 * shape.flops(length, 0), rel=1e-9)


def test_the_quickstart_has_a_shape() -> None:
    model = shape_of(policy_config(), name="quickstart", weight_bytes_per_parameter=4)
    assert (model.name, model.allows_tp(1), model.weight_bytes) == ("quickstart", None, 4 * model.parameters)


_TINY: Config = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_STEP = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
_AFTER = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 2,
    "n_group": 2,
    "topk_group": 1,
}
_LATENT = {
    **_AFTER,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
_LINEAR = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
_LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
MODELS: list[tuple[str, Config]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    ("llama", {"tie_word_embeddings": True}),
    ("granite", {}),
    ("mistral", {"head_dim": 16, "sliding_window": 8}),
    ("mixtral", _LOCAL),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen2_moe", _STEP),
    ("qwen2_moe", {**_STEP, "decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    ("qwen3", {"head_dim": 16}),
    ("qwen3", {"head_dim": 16, "attention_bias": True}),
    ("qwen3_moe", {**{k: v for k, v in _STEP.items() if "shared" not in k}, "head_dim": 16, "mlp_only_layers": [0]}),
    ("qwen3_5_text", _LINEAR),
    ("qwen3_5_text", {**_LINEAR, "layer_types": ["full_attention", "linear_attention"] * 2}),
    ("deepseek_v2", _LATENT),
    ("deepseek_v2", {**_LATENT, "q_lora_rank": None, "attention_bias": True}),
    ("deepseek_v3", _LATENT),
    ("deepseek_v3", {**_LATENT, "q_lora_rank": None}),
    ("deepseek_v3", {**_LATENT, "attention_bias": True}),
    ("glm4", {"head_dim": 16, "attention_bias": True}),
    ("glm4_moe", {**_AFTER, "head_dim": 16}),
    ("glm4_moe", {**_AFTER, "head_dim": 16, "attention_bias": True, "use_qk_norm": True}),
    ("gpt_oss", {**_LOCAL, "head_dim": 16, "sliding_window": 8}),
    ("gemma", {"head_dim": 16}),
    ("gemma2", {"head_dim": 16, "sliding_window": 8}),
    ("gemma3_text", {"head_dim": 16, "sliding_window": 8}),
    ("minimax_m2", {**_LOCAL, "head_dim": 16}),
    ("olmo2", {}),
    ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    ("phi3", {"sliding_window": 8}),
    ("smollm3", {}),
]


# Imports torch and transformers, and builds a model: seconds.
@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "changes"), MODELS, ids=[f"{m}-{i}" for i, (m, _) in enumerate(MODELS)])
def test_parameters_equal_those_of_the_model(model_type: str, changes: Config) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    stated = {**_TINY, **changes}
    saved = transformers.AutoConfig.for_model(model_type, **stated)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(saved)
    real = sum(p.numel() for p in model.parameters())
    typed = shape_of({"model_type": model_type, **stated})
    written = shape_of(saved.to_dict())
    assert typed.parameters == written.parameters == real
    types = getattr(saved, "layer_types", None) or []
    assert (typed.window, typed.window_layers) == (written.window, written.window_layers)
    if types:
        assert typed.window_layers == types.count("sliding_attention")
    routed = sum(p.numel() for n, p in model.named_parameters() if ".mlp.experts." in n)
    assert typed.expert_parameters == routed


def test_layers_with_linear_attention_have_a_state_of_one_size() -> None:
    """As the engine allocates it; keys and values are of the other layers alone."""
    config = {"model_type": "qwen3_5_text", **_TINY, **_LINEAR, "architectures": ["Qwen3_5ForCausalLM"]}
    shape = shape_of(config, kv_bytes_per_element=4.0)
    linear = architecture_of({**config, "tie_word_embeddings": False}, "config.json").linear
    assert linear is not None
    state = 3 * 4.0 * linear.state_size
    assert shape.kv_bytes(0) == 0.0
    assert [shape.kv_bytes(n) - state for n in (1, 100)] == [4.0 * 2 * 2 * 16, 100 * 4.0 * 2 * 2 * 16]
    assert shape.flops(2, 0, 0) - 2 * 2 * shape.body_parameters == 2 * 3 * 6 * 4 * 8 * 12 + 2 * 4 * 4 * 16


def test_every_family_is_compared_with_its_model() -> None:
    assert set(FAMILIES) - {m for m, _ in MODELS} == {"kimi_k2"}  # built by the code of deepseek_v3
