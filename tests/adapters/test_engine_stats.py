"""What an engine's metrics say of its KV memory, in vLLM's words."""

from __future__ import annotations

import pytest

from rollart.adapters.engines.http import kv_capacity_tokens, parse_metrics

VLLM = """# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="%s",sliding_window="None"} 1.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
"""


@pytest.mark.parametrize(("blocks", "tokens"), [("2048", 32_768), ("None", None)])
def test_capacity_is_read_from_labels(blocks: str, tokens: int | None) -> None:
    assert kv_capacity_tokens(VLLM % blocks) == tokens


def test_a_server_that_says_nothing_has_no_capacity() -> None:
    assert kv_capacity_tokens("vllm:num_requests_running 0\n") is None


def test_use_and_preemptions() -> None:
    values = parse_metrics(VLLM % "1")
    assert values["vllm:kv_cache_usage_perc"] == 0.25
    assert values["vllm:num_preemptions_total"] == 3.0
