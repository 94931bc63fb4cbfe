"""The roofline: figures computed by hand, its limits, and monotonicity."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.architecture import DecoderShape, shape_of
from placement.hardware import device
from placement.roofline import PRIORS, Calibration, Constants, Roofline, RooflinePerformance, prior, transfer_s
from placement.types import Device

LLAMA_8B = shape_of(
    {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    name="Llama-3.1-8B",
)
MOE = shape_of(
    {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    name="Qwen3-30B-A3B",
)
DEEPSEEK_V3 = shape_of(
    {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "vocab_size": 129280,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
    name="DeepSeek-R1",
    weight_bytes_per_parameter=1.0,
)
H100, H200, H20 = device("H100"), device("H200"), device("H20")
PLAIN = Constants(
    mfu=0.5, mfu_decode=0.4, mbu=0.8, step_s=1e-3, layer_s=50e-6, row_s=20e-6, alpha_s=5e-6, expert_passes=200
)


def test_prefill_on_one_h100_by_hand() -> None:
    """2,000 tokens of Llama-3.1-8B: 6.979e9 parameters of the layers × 2 × 2,000 = 2.7918e13 FLOPs; the output layer
    for one position 1.05e9; attention 4 × 32 layers × 4,096 × 2,000² / 2 = 1.0486e12. At 989e12 × 0.5: 58.6 ms;
    fixed 1 ms + 32 × 50 µs; one row 20 µs."""
    arithmetic = (2 * 6.979588096e9 * 2000 + 2 * 128256 * 4096 + 4 * 32 * 4096 * 2000**2 / 2) / (989e12 * 0.5)
    assert arithmetic == pytest.approx(0.0586, abs=1e-4)
    found = Roofline(LLAMA_8B, H100, 1, PLAIN).prefill_s(2000, 0)
    assert found == pytest.approx(arithmetic + 1e-3 + 1.6e-3 + 20e-6, rel=1e-3)


def test_a_prefill_takes_no_less_than_its_launches() -> None:
    """32 layers × 1 ms, where 100 tokens compute for 3 ms and 2,000 for 58.6; a step of decoding rows has a graph."""
    plain, launched = (Roofline(LLAMA_8B, H100, 1, replace(PLAIN, launch_s=s)) for s in (0.0, 1e-3))
    fixed = 1e-3 + 1.6e-3 + 20e-6
    assert launched.prefill_s(100, 0) == pytest.approx(32e-3 + fixed)
    assert launched.prefill_s(2000, 0) == plain.prefill_s(2000, 0)
    assert launched.mixed_step_s(16, 500, 100, 0) == pytest.approx(32e-3 + fixed + 16 * 20e-6)
    assert launched.mixed_step_s(16, 500, 0, 0) == plain.mixed_step_s(16, 500, 0, 0)
    assert launched.decode_step_s(16, 500) == plain.decode_step_s(16, 500)


def test_decode_on_one_h100_by_hand() -> None:
    """16 sequences of 1,000 tokens: weights without the input embedding (8.03e9 − 0.525e9) × 2 = 15.0 GB, KV
    16 × 1,000 × 131,072 B = 2.1 GB, at 3.35 × 0.8 TB/s: 6.4 ms. Arithmetic would take 0.65 ms: memory binds."""
    memory = ((8030261248 - 128256 * 4096) * 2 + 16 * 1000 * 131072) / (3.35e12 * 0.8)
    assert memory == pytest.approx(0.00638, abs=1e-5)
    found = Roofline(LLAMA_8B, H100, 1, PLAIN).decode_step_s(16, 1000)
    assert found == pytest.approx(memory + 1e-3 + 1.6e-3 + 16 * 20e-6, rel=1e-4)


def test_arithmetic_binds_a_large_batch_on_a_device_with_little_of_it() -> None:
    """H20's 148 TFLOP/s at 40 %: 512 rows × (15.0e9 FLOPs + attention over 100 tokens) take 131 ms, memory 7 ms."""
    per_row = 2 * (6979588096 + 128256 * 4096) + 4 * 32 * 4096 * 100
    found = Roofline(LLAMA_8B, H20, 1, PLAIN).decode_step_s(512, 100)
    assert found == pytest.approx(512 * per_row / (148e12 * 0.4) + 2.6e-3 + 512 * 20e-6, rel=1e-4)


def test_tensor_parallel_divides_the_work_and_pays_for_communication() -> None:
    """Two all-reduces per layer; each moves 2 × 3/4 of 4,096 × 2 B per token at 0.7 × 450 GB/s, after 5 µs."""
    one, four = Roofline(LLAMA_8B, H100, 1, PLAIN), Roofline(LLAMA_8B, H100, 4, PLAIN)
    fixed = 2.6e-3 + 8 * 20e-6
    communication = 2 * 32 * (5e-6 + 8 * 4096 * 2 * 2 * 0.75 / (0.7 * 450e9))
    assert four.decode_step_s(8, 500) == pytest.approx((one.decode_step_s(8, 500) - fixed) / 4 + fixed + communication)


def test_tokens_go_to_their_experts_and_back() -> None:
    """1,000 tokens, 200 times through memory in 48 layers of 2,048 numbers of 2 B: 39.3 GB at 3.35 TB/s × 0.8. Only
    prefilled ones, and only where there are experts."""
    plain, travelling = (Roofline(MOE, H100, 1, replace(PLAIN, expert_passes=n)) for n in (0, 200))
    more = 1000 * 200 * 48 * 2048 * 2 / (3.35e12 * 0.8)
    assert more == pytest.approx(0.0147, abs=1e-4)
    assert travelling.prefill_s(1000, 500) - plain.prefill_s(1000, 500) == pytest.approx(more)
    assert travelling.turn_s(8, 1000, 500, 20) - plain.turn_s(8, 1000, 500, 20) == pytest.approx(more)
    beside = [r.mixed_step_s(8, 900, 1000, 500) for r in (plain, travelling)]
    assert beside[1] - beside[0] == pytest.approx(more)
    assert travelling.decode_step_s(8, 900) == plain.decode_step_s(8, 900)
    dense = [Roofline(LLAMA_8B, H100, 1, replace(PLAIN, expert_passes=n)).prefill_s(1000, 500) for n in (0, 200)]
    assert dense[0] == dense[1]


@pytest.mark.parametrize(("gpu", "published"), [(H100, 52.3e3), (H20, 16.5e3)])
def test_prefill_of_deepseek_r1_on_two_kinds_of_gpu(gpu: Device, published: float) -> None:
    """Tokens/s of a node of 8 (LMSYS on H100; Ant Group with SGLang on H20), prompts of 2,000 tokens in batches of
    16,000, experts spread over many nodes: so each device does its share, and its weights are read once a batch. 0.94
    and 0.90 of the published rates; without the experts' passes 2.2 and 1.05. That passes are counted in bytes was
    chosen by these two; how many there are was not."""
    constants = prior("hopper", moe=True)[0]
    ours = Roofline(DEEPSEEK_V3, gpu, 1, constants, precision="fp8", kv_capacity_bytes=1e9)
    assert 8 * 2000 / ours.turn_s(8, 2000, 0, 1) == pytest.approx(published, rel=0.15)


def test_kv_capacity() -> None:
    """0.9 × 80 GB − 16.06 GB of weights; an engine's configured memory replaces it."""
    assert Roofline(LLAMA_8B, H100, 1, PLAIN).kv_capacity_bytes == pytest.approx(72e9 - 2 * 8030261248)
    assert Roofline(LLAMA_8B, H100, 2, PLAIN).kv_capacity_bytes == pytest.approx(144e9 - 2 * 8030261248)
    assert Roofline(LLAMA_8B, H100, 1, PLAIN, kv_capacity_bytes=5e9).kv_capacity_bytes == 5e9
    assert Roofline(LLAMA_8B, replace(H100, memory_gb=12), 1, PLAIN).kv_capacity_bytes < 0


def test_replicated_kv_heads_take_their_memory_and_traffic() -> None:
    """Four KV heads on eight devices: each sequence's cache is held, and read, twice."""
    eight = Roofline(MOE, H100, 8, PLAIN)
    assert eight.kv_capacity_bytes == pytest.approx((8 * 72e9 - MOE.weight_bytes) / 2)
    more = eight.decode_step_s(1, 20_000) - eight.decode_step_s(1, 10_000)
    assert more == pytest.approx(2 * MOE.kv_bytes(10_000) / (8 * 3.35e12 * 0.8))


def test_a_turn_alone_is_its_prefill_and_its_steps() -> None:
    instance = Roofline(LLAMA_8B, H100, 1, replace(PLAIN, request_s=4e-3))
    turn = instance.turn_s(1, 700, 300, 101)
    assert turn == pytest.approx(instance.prefill_s(700, 300) + 100 * instance.decode_step_s(1, 1000 + 50.5))
    for output in (0, 1):  # the first token comes with the prefill
        assert instance.turn_s(1, 700, 300, output) == pytest.approx(instance.prefill_s(700, 300))


@pytest.mark.parametrize(("new", "output"), [(100, 200_000), (100_000, 1)])
def test_a_long_turn_costs_its_share_of_steps_and_its_prefill(new: float, output: float) -> None:
    """The usual formula output × step(b) / b + prefill, where fixed costs of the first step no longer show."""
    instance, batch = Roofline(LLAMA_8B, H100, 1, PLAIN), 32.0
    usual = output * instance.decode_step_s(batch, new + output / 2) / batch + instance.prefill_s(new, 0)
    assert instance.turn_s(batch, new, 0, output) == pytest.approx(usual, rel=1e-3)


def test_a_mixed_step_is_a_decode_step_when_nothing_is_prefilled() -> None:
    instance = Roofline(LLAMA_8B, H100, 1, PLAIN)
    assert instance.mixed_step_s(8, 900, 0, 0) == pytest.approx(instance.decode_step_s(8, 900))
    assert instance.mixed_step_s(8, 900, 512, 0) > instance.decode_step_s(8, 900)


def test_a_client_alone_waits_for_nobody() -> None:
    instance = Roofline(LLAMA_8B, H100, 1, PLAIN)
    assert instance.tpot_s(1, 500, 0, 100) == instance.decode_step_s(1, 550)
    assert instance.ttft_s(1, 500, 0, 100) == instance.prefill_s(500, 0) + instance.decode_step_s(1, 550)


def test_transfer() -> None:
    assert transfer_s(50e9, 25.0, 0.001) == pytest.approx(2.001)
    assert transfer_s(0, 25.0) == 0


BATCH = st.floats(1, 512)
TOKENS = st.floats(0, 40_000)
SHAPES = st.sampled_from([LLAMA_8B, MOE])
TPS = st.sampled_from([1, 2, 4, 8])
GPUS = st.sampled_from([H100, H200, H20, device("B200"), device("A100-80")])


@given(SHAPES, GPUS, TPS, BATCH, TOKENS, TOKENS, TOKENS)
def test_everything_is_finite_and_above_zero(
    shape: DecoderShape, gpu: Device, tp: int, batch: float, new: float, cached: float, output: float
) -> None:
    instance = RooflinePerformance(shape).instance(gpu, tp)
    assert not isinstance(instance, str)
    answers = (
        instance.prefill_s(new, cached),
        instance.decode_step_s(batch, cached),
        instance.band,
        instance.turn_s(batch, new, cached, output),
        instance.mixed_step_s(batch, cached, new, output),
        instance.tpot_s(batch, new, cached, output),
        instance.ttft_s(batch, new, cached, output),
    )
    assert all(math.isfinite(a) and a > 0 for a in answers)


@given(SHAPES, GPUS, TPS, BATCH, TOKENS, TOKENS, TOKENS, st.floats(0, 5000))
def test_more_work_takes_longer(
    shape: DecoderShape, gpu: Device, tp: int, batch: float, new: float, cached: float, output: float, more: float
) -> None:
    instance = Roofline(shape, gpu, tp, PLAIN)
    turn = instance.turn_s(batch, new, cached, output) * (1 - 1e-12)
    assert instance.turn_s(batch, new + more, cached, output) >= turn
    assert instance.turn_s(batch, new, cached + more, output) >= turn
    assert instance.turn_s(batch, new, cached, output + more) >= turn
    assert instance.prefill_s(new + more, cached) >= instance.prefill_s(new, cached) * (1 - 1e-12)
    assert instance.prefill_s(new, cached + more) >= instance.prefill_s(new, cached) * (1 - 1e-12)
    assert instance.decode_step_s(batch, cached + more) >= instance.decode_step_s(batch, cached) * (1 - 1e-12)


@given(SHAPES, GPUS, TPS, BATCH, TOKENS, TOKENS, TOKENS, st.floats(1, 16))
def test_a_larger_batch_is_never_less_efficient(
    shape: DecoderShape, gpu: Device, tp: int, batch: float, new: float, cached: float, output: float, factor: float
) -> None:
    instance, larger = Roofline(shape, gpu, tp, PLAIN), batch * factor
    assert instance.turn_s(larger, new, cached, output) <= instance.turn_s(batch, new, cached, output) * (1 + 1e-12)
    per_row = instance.decode_step_s(batch, cached) / batch
    assert instance.decode_step_s(larger, cached) / larger <= per_row * (1 + 1e-12)
    assert instance.decode_step_s(larger, cached) >= instance.decode_step_s(batch, cached) * (1 - 1e-12)


@given(
    SHAPES,
    GPUS,
    TPS,
    BATCH,
    TOKENS,
    TOKENS,
    TOKENS,
    st.sampled_from(["tflops_bf16", "memory_tb_per_s", "nvlink_gb_per_s"]),
    st.floats(1, 20),
)
def test_faster_hardware_is_never_slower(
    shape: DecoderShape,
    gpu: Device,
    tp: int,
    batch: float,
    new: float,
    cached: float,
    output: float,
    figure: str,
    by: float,
) -> None:
    faster = Roofline(shape, replace(gpu, **{figure: getattr(gpu, figure) * by}), tp, PLAIN)
    slower = Roofline(shape, gpu, tp, PLAIN)
    assert faster.prefill_s(new, cached) <= slower.prefill_s(new, cached)
    assert faster.decode_step_s(batch, cached) <= slower.decode_step_s(batch, cached)
    assert faster.turn_s(batch, new, cached, output) <= slower.turn_s(batch, new, cached, output)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: Constants(mfu=0), "mfu is 0"),
        (lambda r: Constants(mbu=math.nan), "mbu is nan"),
        (lambda r: Constants(mfu_decode=1.2), "mfu_decode is 1.2"),
        (lambda r: Constants(row_s=-1e-6), "row_s is -1e-06"),
        (lambda r: Constants(expert_passes=-1), "expert_passes is -1"),
        (lambda r: Constants(effective_tflops=0), "effective_tflops is 0"),
        (lambda r: Roofline(LLAMA_8B, H100, 3, PLAIN), "tp 3 does not divide"),
        (lambda r: Roofline(LLAMA_8B, H100, 1, PLAIN, kv_capacity_bytes=0), "kv_capacity_bytes is 0"),
        (lambda r: RooflinePerformance(LLAMA_8B, precision="int4"), "precision is 'int4'"),  # type: ignore[arg-type]
    ],
)
def test_nonsense_is_refused(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call(Roofline(LLAMA_8B, H100, 1, PLAIN))


@pytest.mark.parametrize(
    ("gpu", "tp", "precision", "why"),
    [
        (device("L40S"), 2, "bf16", "no NVLink figure for L40S: give nvlink_gb_per_s"),
        (device("A100-80"), 1, "fp8", "no fp8 figure for A100-80: give tflops_fp8"),
        (Device("x", tflops_bf16=1.0, memory_gb=1.0), 1, "bf16", "no memory bandwidth for x: give memory_tb_per_s"),
        (Device("x", tflops_bf16=1.0, memory_tb_per_s=1.0), 1, "bf16", "no memory size for x: give memory_gb"),
        (device("cpu"), 1, "bf16", "no bf16 figure for cpu: give tflops_bf16, or calibrate"),
        (H100, 16, "bf16", "tp 16 exceeds the 8 devices of one host of H100"),
        (H100, 0, "bf16", "tp is 0"),
        (H100, 3, "bf16", "tp 3 does not divide"),
    ],
)
def test_what_cannot_run_says_why(gpu: Device, tp: int, precision: str, why: str) -> None:
    answer = RooflinePerformance(LLAMA_8B, precision=precision).instance(gpu, tp)  # type: ignore[arg-type]
    assert isinstance(answer, str)
    assert why in answer


def calibration(**changes: object) -> Calibration:
    base = Calibration(PLAIN, "H200", "hopper", "bf16", "Llama-3.1-8B", error=0.04)
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "gpu", "band", "words"),
    [
        (calibration(), H200, 0.04, ()),
        (
            calibration(),
            H20,
            0.10,
            ("H20: constants calibrated on H200 (hopper), another device of the same generation: ±10%",),
        ),
        (
            calibration(error=0.15),
            H20,
            0.15,
            ("H20: constants calibrated on H200 (hopper), another device of the same generation: ±15%",),
        ),
        (
            calibration(),
            device("B200"),
            0.25,
            ("B200: constants calibrated on H200 (hopper), generation 'blackwell' is another: ±25%",),
        ),
        (
            calibration(precision="fp8"),
            H200,
            0.25,
            ("H200: constants calibrated on H200 (hopper), calibrated in fp8, asked in bf16: ±25%",),
        ),
        (
            calibration(model="Other"),
            H200,
            0.15,
            ("H200: constants calibrated on H200 (hopper), calibrated with Other, asked for Llama-3.1-8B: ±15%",),
        ),
    ],
)
def test_a_calibration_says_when_it_extrapolates(
    found: Calibration, gpu: Device, band: float, words: tuple[str, ...]
) -> None:
    instance = RooflinePerformance(LLAMA_8B, {"H200": found}).instance(gpu, 1)
    assert isinstance(instance, Roofline)
    assert (instance.band, instance.notes, instance.constants) == (band, words, PLAIN)


def test_experts_extrapolate_worse() -> None:
    found = calibration(model="Qwen3-30B-A3B")
    moved = RooflinePerformance(MOE, {"H200": found}).instance(H100, 1)
    assert not isinstance(moved, str)
    assert moved.band == 0.18


def test_the_nearest_calibration_is_borrowed() -> None:
    """Generation first, then precision, then model; the order of the mapping plays no part."""
    near = calibration(device="H100", model="Other", constants=replace(PLAIN, mfu=0.3))
    far = calibration(device="B200", generation="blackwell")
    for constants in ({"a": near, "b": far}, {"b": far, "a": near}):
        instance = RooflinePerformance(LLAMA_8B, constants).instance(H20, 1)
        assert not isinstance(instance, str)
        assert instance.constants.mfu == 0.3


def test_effective_rates_stay_with_their_device() -> None:
    """A calibration that replaced datasheet figures does not apply to another device, nor a CPU's calibration to a
    GPU."""
    own = calibration(constants=replace(PLAIN, effective_tflops=100.0))
    cpu = calibration(device="cpu", generation="cpu", constants=replace(PLAIN, mfu=0.9))
    instance = RooflinePerformance(LLAMA_8B, {"H200": own, "cpu": cpu}).instance(H20, 1)
    assert not isinstance(instance, str)
    assert instance.constants == PRIORS["hopper"]
    assert instance.notes == ("H20: constants are priors of generation 'hopper', not calibrated: ±25%",)


def test_a_calibrated_cpu_needs_no_datasheet() -> None:
    rates = Constants(effective_tflops=0.05, effective_tb_per_s=0.02, step_s=2e-3, layer_s=0.0)
    found = calibration(device="cpu", generation="cpu", constants=rates)
    core = RooflinePerformance(LLAMA_8B, {"cpu": found}, kv_capacity_bytes={"cpu": 2e9}).instance(device("cpu"), 1)
    assert isinstance(core, Roofline)
    assert core.kv_capacity_bytes == 2e9
    assert core.decode_step_s(1, 0) == pytest.approx(2e-3 + 30e-6 + (8030261248 - 128256 * 4096) * 2 / 20e9)


def test_stated_constants_and_generation_keys() -> None:
    stated = replace(PLAIN, mfu=0.33)
    instance = RooflinePerformance(LLAMA_8B, {"hopper": stated}).instance(H20, 1)
    assert not isinstance(instance, str)
    assert instance.constants is stated
    assert instance.notes == ("H20: constants as stated, not measured: ±25%",)


@pytest.mark.parametrize(
    ("generation", "moe", "band", "note"),
    [
        ("hopper", False, 0.25, None),
        ("hopper", True, 0.35, None),
        ("cdna3", False, 0.40, "no measured rows for generation 'cdna3'"),
        ("volta", False, 0.40, "no measured rows for generation 'volta'"),
        ("", False, 0.40, "the generation is not stated"),
        ("cpu", False, 0.75, "constants are an order of magnitude for a CPU"),
    ],
)
def test_priors_say_how_little_they_know(generation: str, moe: bool, band: float, note: str | None) -> None:
    constants, found, why = prior(generation, moe=moe)
    assert (found, why) == (band, note)
    assert constants.layer_s == (105e-6 if moe else PRIORS.get(generation, PRIORS["hopper"]).layer_s)
    assert constants.expert_passes == (330 if moe else 0)
