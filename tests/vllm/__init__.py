"""Tests against real vLLM: `make vllm-test`."""
