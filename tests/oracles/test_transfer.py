"""KV transfers against a published table, typed in."""

from __future__ import annotations

import pytest

from placement.architecture import shape_of
from placement.roofline import transfer_s

GIB = 2**30
MOONCAKE = (
    (128, 20 / 1024, 0.54),
    (256, 38 / 1024, 0.61),
    (512, 74 / 1024, 0.92),
    (1024, 146 / 1024, 1.50),
    (2048, 290 / 1024, 2.51),
    (4096, 578 / 1024, 4.75),
    (8192, 1.13, 8.84),
    (16384, 2.25, 16.43),
    (32768, 4.50, 31.65),
)
"""Prompt tokens, GiB moved, milliseconds. Qwen3-8B between two nodes of 8 H800 over 8 × RoCE (vLLM 0.11, one request at
a time): Mooncake, docs/source/performance/vllm-v1-support-benchmark.md, 2025. The document writes GB; the cache of
32,768 tokens is 4.5 GiB."""


def test_one_latency_and_one_bandwidth_describe_the_table() -> None:
    # 0.39 ms and 137 GiB/s (147 GB/s in the units used here) were fitted to this table: the form is what is tested.
    wrong = [abs(transfer_s(size * GIB, 137 * GIB / 1e9, 0.39e-3) / (ms / 1000) - 1) for _, size, ms in MOONCAKE]
    assert sum(wrong) / len(wrong) <= 0.04
    without_latency = [abs(transfer_s(size * GIB, 137 * GIB / 1e9) / (ms / 1000) - 1) for _, size, ms in MOONCAKE]
    assert sum(without_latency) / len(without_latency) > 0.2


@pytest.mark.parametrize(("tokens", "size"), [(tokens, size) for tokens, size, _ in MOONCAKE if tokens >= 4096])
def test_the_cache_is_as_large_as_they_say(tokens: int, size: float) -> None:
    config: dict[str, object] = {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    }
    assert shape_of(config, name="Qwen3-8B").kv_bytes(tokens) == pytest.approx(size * GIB, rel=0.01)
