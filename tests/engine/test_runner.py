"""The engine's guarantees, on tiny models in this process. Checked by greedy tokens, which wrong KV would change."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.engine.handoff import decode_block, encode_block
from rollart.engine.jobs import EngineJob, FinishedJob
from rollart.engine.runner import Runner
from rollart.engine.weights import read_tensors
from rollart.errors import EngineError
from rollart.model import FinishReason, GenerateRequest, Sampling
from tests.engine.models import finish, greedy, job, run_one, runner


def random_prompts(n: int, seed: int = 0, longest: int = 20) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(61) for _ in range(rng.randint(1, longest))] for _ in range(n)]


@pytest.mark.parametrize("family", ["qwen", "hybrid"])
def test_a_seeded_request_repeats_itself_in_any_company(family: str, request: pytest.FixtureRequest) -> None:
    """Alone, among requests that come and go, in chunks, and with more requests than slots."""
    directory: Path = request.getfixturevalue(family)
    prompts = random_prompts(10)

    def sampled(r: Runner, names: list[int]) -> dict[str, tuple[int, ...]]:
        for i in names:
            r.add(job(f"{i}", prompts[i], max_tokens=3 + i, temperature=0.9, top_p=0.8 if i % 3 else 1.0, seed=i))
        return {k: f.completion.token_ids for k, f in finish(r).items()}

    alone: dict[str, tuple[int, ...]] = {}
    for i in range(10):
        alone |= sampled(runner(directory), [i])
    assert sampled(runner(directory, slots=10), list(range(10))) == alone
    assert sampled(runner(directory, slots=3), list(range(9, -1, -1))) == alone
    assert sampled(runner(directory, slots=4, step_tokens=5), list(range(10))) == alone


def test_a_deterministic_engine_computes_the_same_bits_in_any_company(qwen: Path) -> None:
    """With sessions whose prefixes another engine would keep or evict."""

    def sampled(r: Runner, together: int) -> dict[str, tuple[float, ...]]:
        said: dict[str, tuple[float, ...]] = {}
        for turn in range(2):
            prompts = random_prompts(6, seed=turn)
            for first in range(0, 6, together):
                for i in range(first, first + together):
                    whole = [*prompts[i], *range(turn * 9)]
                    r.add(job(f"{turn}-{i}", whole, session=f"s{i % 4}", max_tokens=4, temperature=0.9, seed=i))
                said |= {name: f.completion.logprobs for name, f in finish(r).items()}
        return said

    alone = sampled(runner(qwen, step_tokens=16, deterministic=True), 1)
    for slots, together in ((6, 6), (2, 3)):
        assert sampled(runner(qwen, slots=slots, step_tokens=16, deterministic=True), together) == alone
    assert sampled(runner(qwen, slots=6), 6) != sampled(runner(qwen), 1), "else this test shows nothing"


def test_unseeded_requests_differ(qwen: Path) -> None:
    r = runner(qwen)
    for i in range(4):
        r.add(job(f"{i}", [1, 2, 3], max_tokens=20, temperature=2.0))
    assert len({f.completion.token_ids for f in finish(r).values()}) == 4


def test_the_next_turn_computes_only_what_is_new(qwen: Path) -> None:
    r = runner(qwen)
    first = run_one(r, job("0", range(10), session="s", max_tokens=5)).completion
    prompt = [*range(10), *first.token_ids, 7, 8, 9]
    second = run_one(r, job("1", prompt, session="s", max_tokens=5)).completion
    assert second.cached_tokens == 14, "the last sampled token was never fed, so its KV is not there"
    assert second.token_ids == greedy(qwen, prompt, 5)
    assert r.stats().cached_tokens == 14
    forked = [*range(5), 40, 41]
    third = run_one(r, job("2", forked, session="s", max_tokens=5)).completion
    assert third.cached_tokens == 5
    assert third.token_ids == greedy(qwen, forked, 5)
    r.release("s")
    assert run_one(r, job("3", prompt, session="s", max_tokens=5)).completion.cached_tokens == 0


def test_a_salt_parts_prefixes(qwen: Path) -> None:
    r = runner(qwen)
    run_one(r, job("0", range(10), session="s", salt="a"))
    assert run_one(r, job("1", range(12), session="s", salt="b")).completion.cached_tokens == 0
    assert run_one(r, job("2", range(14), session="s", salt="b")).completion.cached_tokens == 12


def test_idle_sessions_give_way_and_requests_wait(qwen: Path) -> None:
    r = runner(qwen, slots=2)
    for i in range(4):
        run_one(r, job(f"{i}", range(10), session=f"s{i}"))
    for i in range(5):
        r.add(job(f"w{i}", [i, i + 1], max_tokens=4))
    r.step()
    assert (r.stats().running, r.stats().waiting) == (2, 3)
    over = finish(r)
    assert all(over[f"w{i}"].completion.token_ids == greedy(qwen, [i, i + 1], 4) for i in range(5))


def test_stop_ids_length_and_context_end_a_request(qwen: Path) -> None:
    r = runner(qwen, context=16)
    want = greedy(qwen, [5, 6, 7], 8)
    at = next(i for i in range(8) if want[i] not in want[:i] and i >= 1)
    c = run_one(r, job("stop", [5, 6, 7], stop_token_ids=(want[at],))).completion
    assert (c.token_ids, c.finish) == (want[: at + 1], FinishReason.STOP)
    c = run_one(r, job("length", [5, 6, 7], max_tokens=3)).completion
    assert (c.token_ids, c.finish) == (want[:3], FinishReason.LENGTH)
    c = run_one(r, job("full", [5, 6, 7], max_tokens=100)).completion
    assert (len(c.token_ids), c.finish) == (13, FinishReason.LENGTH)


def test_only_legal_tokens_and_their_own_distribution(qwen: Path) -> None:
    r = runner(qwen)
    c = run_one(r, job("a", [1, 2], max_tokens=20, temperature=1.0, seed=0, allowed_token_ids=(9, 3))).completion
    assert set(c.token_ids) == {3, 9}
    c = run_one(r, job("b", [1, 2], max_tokens=5, temperature=1.0, allowed_token_ids=(4,))).completion
    assert c.token_ids == (4,) * 5
    assert c.logprobs == (0.0,) * 5


def test_abort_returns_what_is_there_and_keeps_the_prefix(qwen: Path) -> None:
    r = runner(qwen, slots=1)
    r.add(job("run", [1, 2, 3], session="s", max_tokens=50))
    r.add(job("wait", [1, 2, 3]))
    for _ in range(4):
        assert r.step() == []
    over = {f.job.request.request_id: f.completion for f in r.abort(["wait", "run", "unknown"])}
    assert over["wait"].token_ids == ()
    assert over["run"].token_ids == greedy(qwen, [1, 2, 3], 4)
    assert {c.finish for c in over.values()} == {FinishReason.ABORT}
    assert over["run"].spans[0].end == 4
    assert not r.busy
    assert run_one(r, job("again", [1, 2, 3, 4], session="s")).completion.cached_tokens == 3


def update(r: Runner, directory: Path, version: int) -> None:
    r.load(read_tensors(directory), version)


def test_an_update_in_flight_goes_on_as_a_fresh_prefill_would(qwen: Path, qwen_next: Path) -> None:
    r = runner(qwen, version=3)
    r.add(job("a", [1, 2, 3], max_tokens=9))
    r.add(job("b", range(20), max_tokens=12))
    for _ in range(5):
        r.step()
    update(r, qwen_next, 4)
    r.add(job("late", [9, 9], max_tokens=3))
    over = finish(r)
    for name, prompt, total in (("a", [1, 2, 3], 9), ("b", list(range(20)), 12)):
        c = over[name].completion
        old = c.token_ids[:5]
        assert old == greedy(qwen, prompt, 5)
        assert c.token_ids[5:] == greedy(qwen_next, [*prompt, *old], total - 5)
        assert [(s.version, s.start, s.end) for s in c.spans] == [(3, 0, 5), (4, 5, total)]
    assert over["late"].completion.token_ids == greedy(qwen_next, [9, 9], 3)
    assert [(s.version, s.end) for s in over["late"].completion.spans] == [(4, 3)]


def test_no_idle_prefix_outlives_its_weights(qwen: Path, qwen_next: Path) -> None:
    r = runner(qwen)
    run_one(r, job("0", range(10), session="s"))
    update(r, qwen_next, 1)
    c = run_one(r, job("1", range(12), session="s")).completion
    assert c.cached_tokens == 0
    assert c.token_ids == greedy(qwen_next, range(12), 8)


def test_an_abort_right_after_an_update_keeps_nothing(qwen: Path, qwen_next: Path) -> None:
    r = runner(qwen)
    r.add(job("0", range(10), session="s"))
    r.step()
    update(r, qwen_next, 1)
    r.abort(["0"])
    c = run_one(r, job("1", range(12), session="s")).completion
    assert c.cached_tokens == 0
    assert c.token_ids == greedy(qwen_next, range(12), 8)


def test_reset_prefix_cache(qwen: Path) -> None:
    r = runner(qwen)
    run_one(r, job("0", range(10), session="s"))
    assert r.reset_prefix_cache()
    assert run_one(r, job("1", range(10), session="s")).completion.cached_tokens == 0
    r.add(job("2", range(10), max_tokens=6))
    r.step()
    assert not r.reset_prefix_cache()
    assert r.reset_prefix_cache(running=True)
    assert finish(r)["2"].completion.token_ids == greedy(qwen, range(10), 6)


def exported(r: Runner, prompt: list[int]) -> FinishedJob:
    request = GenerateRequest("p", "", tuple(prompt), Sampling(max_tokens=1, temperature=0.0))
    over = run_one(r, EngineJob(request, export=True))
    assert over.kv is not None
    return over


@pytest.mark.parametrize("family", ["qwen", "llama", "hybrid"])
def test_prefill_here_and_decode_there_equals_both_in_one(family: str, request: pytest.FixtureRequest) -> None:
    directory: Path = request.getfixturevalue(family)
    prefill, decode = runner(directory), runner(directory)
    for n, prompt in enumerate(random_prompts(6, seed=3, longest=30)):
        block = exported(prefill, prompt).kv
        assert block is not None
        moved = decode_block(b"".join(encode_block(block)))
        for temperature in (0.0, 1.0):
            one = run_one(prefill, job(f"a{n}", prompt, temperature=temperature, seed=n)).completion
            split = job(f"d{n}", prompt, temperature=temperature, seed=n)
            split.imported = moved
            two = run_one(decode, split).completion
            assert two.token_ids == one.token_ids
            assert two.logprobs == one.logprobs, "the very bits"
            assert two.cached_tokens == len(prompt)
    assert decode.imported_tokens == decode.cached_tokens > 0


def test_kv_of_other_weights_prompts_and_shapes_is_refused(qwen: Path, qwen_next: Path, llama: Path) -> None:
    block = exported(runner(qwen, version=3), [1, 2, 3]).kv

    def imported(r: Runner, prompt: list[int]) -> None:
        j = job("d", prompt)
        j.imported = block
        r.add(j)

    with pytest.raises(EngineError, match="computed under weights 3, this engine has 4") as refused:
        imported(runner(qwen_next, version=4), [1, 2, 3])
    assert refused.value.retryable
    with pytest.raises(EngineError, match="another prompt"):
        imported(runner(qwen, version=3), [1, 2, 4])
    with pytest.raises(EngineError, match="is not this model's"):
        imported(runner(llama, version=3), [1, 2, 3])


def test_kv_that_waits_across_an_update_is_computed_anew(qwen: Path, qwen_next: Path) -> None:
    block = exported(runner(qwen), [1, 2, 3]).kv
    r = runner(qwen)
    j = job("d", [1, 2, 3])
    j.imported = block
    r.add(j)
    update(r, qwen_next, 1)
    assert finish(r)["d"].completion.token_ids == greedy(qwen_next, [1, 2, 3], 8)


@pytest.mark.parametrize(
    ("prompt", "changes", "words"),
    [
        ([], {}, "prompt is empty"),
        (range(64), {}, "64 tokens, the engine's context is 64"),
        ([1, 61], {}, "prompt holds token id 61, the vocabulary has 61"),
        ([-1], {}, "token id -1"),
        ([1], {"allowed_token_ids": (99,)}, "allowed_token_ids holds token id 99"),
        ([1], {"allowed_token_ids": ()}, "allowed_token_ids is empty"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"temperature": -1.0}, "temperature is -1"),
        ([1], {"top_p": 0.0}, "top_p is 0"),
    ],
)
def test_refusals_name_the_value(qwen: Path, prompt: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineError, match=words) as refused:
        runner(qwen).add(job("x", prompt, **changes))
    assert not refused.value.retryable


def test_an_id_in_use_is_refused(qwen: Path) -> None:
    r = runner(qwen)
    r.add(job("x", [1]))
    with pytest.raises(EngineError, match="'x' is in use"):
        r.add(job("x", [1]))
    finish(r)
    r.add(job("x", [1]))


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_any_schedule_gives_every_token_its_own_weights_and_prefix(
    qwen: Path, qwen_next: Path, data: st.DataObject
) -> None:
    check_schedule(qwen, qwen_next, data)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_many_more_schedules(qwen: Path, qwen_next: Path, data: st.DataObject) -> None:
    """Slow: the number of examples."""
    check_schedule(qwen, qwen_next, data)


def check_schedule(qwen: Path, qwen_next: Path, data: st.DataObject) -> None:
    """Requests, aborts, releases and updates in any order: each span is greedy under the version that it names,
    given all tokens before it. A stale or foreign KV entry would break it."""
    r = runner(qwen, slots=3, context=32, step_tokens=data.draw(st.sampled_from([4, 2048])))
    directories, over, version = [qwen, qwen_next], [], 0
    for i in range(data.draw(st.integers(3, 12))):
        action = data.draw(st.sampled_from(["add", "add", "step", "step", "step", "abort", "release", "update"]))
        session = f"s{data.draw(st.integers(0, 3))}"
        if action == "add":
            prompt = [int(session[1])] * 3 + list(range(data.draw(st.integers(0, 9))))
            r.add(job(f"{i}", prompt, session=session, max_tokens=data.draw(st.integers(1, 4))))
        elif action == "step":
            over += r.step()
        elif action == "abort":
            over += r.abort([f"{data.draw(st.integers(0, i))}"])
        elif action == "release":
            r.release(session)
        else:
            version += 1
            update(r, directories[version % 2], version)
    over += finish(r).values()
    for f in over:
        ids, c = [*f.job.request.token_ids], f.completion
        assert [s.start for s in c.spans] == [0, *(s.end for s in c.spans)][: len(c.spans)]
        assert (c.spans[-1].end if c.spans else 0) == len(c.token_ids)
        for s in c.spans:
            want = greedy(directories[s.version % 2], ids, s.end - s.start)
            assert c.token_ids[s.start : s.end] == want
            ids += want
    used = r.table
    assert not r.busy
    assert len(used.free) + used.idle_sessions() == 3
