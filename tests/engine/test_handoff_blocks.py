"""The wire format of a block, and the parameters with its location."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.engine.cache import KvBlock
from rollart.engine.handoff import DTYPES, KvSource, decode_block, encode_block, parse_kv_source
from rollart.errors import EngineError, HandoffFailed


def block(tokens: int = 5, start: int = 0, *, dtype: str = "float32", vocab: int = 7, seed: int = 0) -> KvBlock:
    g = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(2, 3, tokens - start, 4, generator=g).to(DTYPES[dtype]) for _ in range(2))
    return KvBlock(tuple(range(tokens)), 3, keys, values, start, torch.randn(vocab, generator=g) if vocab else None)


@settings(deadline=None)
@given(st.integers(0, 9), st.integers(0, 9), st.sampled_from(sorted(DTYPES)), st.sampled_from([0, 1, 7]))
def test_a_block_comes_back_as_it_was(a: int, b: int, dtype: str, vocab: int) -> None:
    sent = block(max(a, b), min(a, b), dtype=dtype, vocab=vocab)
    came = decode_block(b"".join(encode_block(sent, "t")), "t")
    assert (came.token_ids, came.start, came.version, came.size) == (sent.token_ids, sent.start, 3, sent.size)
    assert torch.equal(came.keys, sent.keys)
    assert torch.equal(came.values, sent.values)
    assert came.keys.dtype == sent.keys.dtype
    if sent.logits is None:
        assert came.logits is None
    else:
        assert came.logits is not None
        assert torch.equal(came.logits, sent.logits)


def test_a_part_of_a_tensor_is_sent_as_what_it_shows() -> None:
    whole = block(5)
    part = KvBlock(whole.token_ids, 3, whole.keys[:, :, 2:], whole.values[:, :, 2:], 2)
    assert torch.equal(decode_block(b"".join(encode_block(part))).keys, whole.keys[:, :, 2:])


@given(st.data())
def test_no_changed_or_shortened_block_is_read(data: st.DataObject) -> None:
    sent = b"".join(encode_block(block(), "t"))
    changed = bytearray(sent)
    if data.draw(st.booleans()):
        changed[data.draw(st.integers(0, len(sent) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del changed[data.draw(st.integers(0, len(sent) - 1)) :]
    with pytest.raises(HandoffFailed) as refused:
        decode_block(changed, "t")
    assert "\n" not in str(refused.value)


def test_a_block_for_somebody_else_is_refused() -> None:
    with pytest.raises(HandoffFailed, match="exported for another request"):
        decode_block(b"".join(encode_block(block(), "mine")), "yours")


SOURCE = KvSource("h", 5, "r", "t", 9, 2, 4, "boot", "a/b", 3.0)


def test_params_lead_back_to_their_source() -> None:
    assert parse_kv_source({**SOURCE.params(), "timeout_s": 3.0}, timeout_s=9.0) == SOURCE
    found = parse_kv_source(SOURCE.params(), timeout_s=9.0)
    assert found is not None
    assert found.timeout_s == 9.0
    assert SOURCE.url == "http://h:5/rollart/kv"
    assert KvSource("::1", *SOURCE_REST).url == "http://[::1]:5/rollart/kv"


SOURCE_REST: Any = (5, "r", "t", 9, 2, 4, "boot", "a/b", 3.0)


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_decode": True, "do_remote_prefill": False},
        {"do_remote_decode": True, "remote_engine_id": None, "remote_request_id": None, "remote_host": None},
        {"return_kv": True},
    ],
)
def test_a_first_turn_pulls_nothing(params: Any) -> None:
    assert parse_kv_source(params, timeout_s=1.0) is None


def test_what_came_back_is_pulled_whichever_flag_the_router_sets() -> None:
    """vLLM's own proxy clears `do_remote_prefill` when it sends a decode engine's value to a prefill engine."""
    params = {**SOURCE.params(), "do_remote_prefill": False, "do_remote_decode": True}
    found = parse_kv_source(params, timeout_s=1.0)
    assert found is not None
    assert found.request_id == "r"


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_port": "x"},
        {"remote_num_tokens": None},
        {"weight_version": "new"},
        {"timeout_s": -1},
        {"timeout_s": "nan"},
        {"timeout_s": "inf"},
    ],
)
def test_nonsense_is_the_callers_mistake(changes: dict[str, object]) -> None:
    with pytest.raises(EngineError) as refused:
        parse_kv_source({**SOURCE.params(), **changes}, timeout_s=1.0)
    assert not refused.value.retryable
