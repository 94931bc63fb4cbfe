"""Linear attention: the gated delta rule, and the states of sessions, hand-offs and weight updates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollart.engine.delta import convolve, delta_chunks, delta_step
from rollart.engine.handoff import decode_block, encode_block
from rollart.engine.jobs import EngineJob, FinishedJob
from rollart.engine.runner import Runner
from rollart.engine.weights import read_tensors
from rollart.errors import HandoffFailed
from tests.engine.models import HYBRID, finish, job, publish, run_one, runner

ROWS, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 1, 2, 4, 3


def plain(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
    """The rule token by token, in double precision."""
    q, k, v, decay, strength = (part.double() for part in (q, k, v, decay, strength))
    out, memory = torch.zeros_like(v), torch.zeros(ROWS, HEADS, KEY_DIM, VALUE_DIM).double()
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    for t in range(v.shape[1]):
        query, key = q[:, t].expand(-1, HEADS, -1), k[:, t].expand(-1, HEADS, -1)  # one key head for all value heads
        memory = memory * decay[:, t, :, None, None].exp()
        missing = v[:, t] - (key[..., None] * memory).sum(2)
        memory = memory + key[..., None] * (strength[:, t, :, None] * missing)[:, :, None]
        out[:, t] = (query[..., None] * memory).sum(2) / KEY_DIM**0.5
    return out, memory


@settings(max_examples=4, deadline=None)
@given(st.data())
def test_any_division_of_a_sequence_computes_the_rule(data: st.DataObject) -> None:
    """Passes of one token, shorter and longer than a chunk; weak and strong decays."""
    widths = data.draw(st.lists(st.sampled_from([1, 2, 64, 70]), min_size=1, max_size=2))
    g, total = torch.Generator().manual_seed(data.draw(st.integers(0, 99))), sum(widths)
    q, k = (torch.randn(ROWS, total, KEY_HEADS, KEY_DIM, generator=g) for _ in range(2))
    v = torch.randn(ROWS, total, HEADS, VALUE_DIM, generator=g)
    decay = -torch.rand(ROWS, total, HEADS, generator=g) * data.draw(st.sampled_from([0.0, 0.1, 30.0]))
    strength = torch.rand(ROWS, total, HEADS, generator=g)
    outputs, memory = [], torch.zeros(ROWS, HEADS, KEY_DIM, VALUE_DIM)
    for parts in zip(*(torch.split(one, widths, 1) for one in (q, k, v, decay, strength)), strict=True):
        out, memory = (delta_step if parts[0].shape[1] == 1 else delta_chunks)(*parts, memory)
        outputs.append(out)
    expected, last = plain(q, k, v, decay, strength)
    torch.testing.assert_close(torch.cat(outputs, 1).double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(memory.double(), last, atol=1e-5, rtol=1e-5)


def test_a_convolution_goes_on_after_each_rows_own_tokens() -> None:
    """Rows of 3 and 1 tokens, then 2 each, against one convolution of each row."""
    taps, first, then = torch.randn(5, 1, 4), torch.randn(2, 3, 5), torch.randn(2, 2, 5)
    lengths = [3, 1]
    _, state = convolve(first, torch.zeros(2, 3, 5), taps, torch.tensor(lengths))
    out, _ = convolve(then, state, taps, None)
    for row, n in enumerate(lengths):
        whole = torch.cat((torch.zeros(3, 5), first[row, :n], then[row]))
        expected = torch.nn.functional.conv1d(whole.T[None], taps, groups=5)[0].T
        torch.testing.assert_close(out[row], expected[n:])


def fresh(directory: Path, prompt: list[int], tokens: int) -> tuple[int, ...]:
    """The greedy continuation of a runner that has seen nothing else."""
    return run_one(runner(directory), job("fresh", prompt, max_tokens=tokens)).completion.token_ids


def test_a_session_goes_on_after_all_of_its_tokens_alone(hybrid: Path) -> None:
    r = runner(hybrid)
    first = run_one(r, job("0", range(10), session="s", max_tokens=5)).completion
    prompt = [*range(10), *first.token_ids, 7, 8, 9]
    second = run_one(r, job("1", prompt, session="s", max_tokens=5)).completion
    assert second.cached_tokens == 14
    assert second.token_ids == fresh(hybrid, prompt, 5)
    forked = [*range(10), 40, 41]
    third = run_one(r, job("2", forked, session="s", max_tokens=5)).completion
    assert third.cached_tokens == 0, "the state is past token 10"
    assert third.token_ids == fresh(hybrid, forked, 5)


def test_an_aborted_request_leaves_states_that_can_be_continued(hybrid: Path) -> None:
    """Within its prompt and within its answer."""
    for steps in (2, 6):
        r = runner(hybrid, step_tokens=4)
        r.add(job("a", range(12), session="s", max_tokens=9))
        for _ in range(steps):
            r.step()
        answer = r.abort(["a"])[0].completion.token_ids
        prompt = [*range(12), *answer, 3, 4]
        again = run_one(r, job("b", prompt, session="s", max_tokens=5)).completion
        assert again.cached_tokens == (8 if steps == 2 else 11 + len(answer))
        assert again.token_ids == fresh(hybrid, prompt, 5)


def test_an_update_in_flight_computes_the_states_anew(hybrid: Path, tmp_path: Path) -> None:
    other = publish(tmp_path / "other", 9, HYBRID)
    r = runner(hybrid)
    r.add(job("a", [1, 2, 3], max_tokens=9))
    for _ in range(4):
        r.step()
    r.load(read_tensors(other), 1)
    ids = finish(r)["a"].completion.token_ids
    assert ids[:4] == fresh(hybrid, [1, 2, 3], 4)
    assert ids[4:] == fresh(other, [1, 2, 3, *ids[:4]], 5)


def handed_off(r: Runner, one: EngineJob) -> FinishedJob:
    """A request that leaves the KV of prompt and answer, as it travels."""
    one.returns = True
    over = run_one(r, one)
    assert over.kv is not None
    return over


def test_kv_that_returns_to_a_prefill_engine_brings_its_states(hybrid: Path) -> None:
    """It is of use where the next prompt goes on after all of it; otherwise the prompt is computed."""
    over = handed_off(runner(hybrid), job("a", range(8), session="s", max_tokens=6))
    assert over.kv is not None
    block = decode_block(b"".join(encode_block(over.kv)))
    went_on, left = [*range(8), *over.completion.token_ids, 5, 6], [*range(8), 50, 51]
    for prompt, cached in ((went_on, 13), (left, 0)):
        r, one = runner(hybrid), job("b", prompt, max_tokens=5)
        one.imported, one.export = block, True
        ended = run_one(r, one)
        assert ended.completion.cached_tokens == cached
        assert ended.completion.token_ids == fresh(hybrid, prompt, 5)
        assert r.dropped_imports == (cached == 0)
        assert ended.kv is None, "its states are past the prompt, whose KV was asked for"


def test_kv_without_states_is_refused(hybrid: Path) -> None:
    r = runner(hybrid)
    handed_off(r, job("a", range(8), session="s", max_tokens=6))
    block = r.session_kv("s", tuple(range(8)), 0, 0)
    assert block is not None
    assert block.states is None
    one = job("b", range(9))
    one.imported = block
    with pytest.raises(HandoffFailed, match="is not this model's"):
        runner(hybrid).add(one)
