"""Prefill on one engine, decode on another, over real sockets and shared memory, in this process.

Tokens and log-probabilities are exactly equal if a single engine multiplies the same rows at the same time, that is,
with one request at a time. With concurrent requests the products have other numbers of rows, which changes the last
bits on a single engine as well; the tokens stay equal.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from rollart.engine.cache import KvCache
from rollart.errors import HandoffFailed
from tests.engine.models import greedy
from tests.engine.pd import (
    LOGITS_BYTES,
    TOKEN_BYTES,
    Params,
    Side,
    ask,
    conversation,
    prefilled,
    same,
    split,
    with_engines,
)

LENGTHS = [1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 34, 47, 48, 63, 64, 65, 95, 96, 97, 127, 128, 129, 150, 179]
"""Prompts from one token to near the context of 192, at the edges of the 32-token steps and around them."""


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("part", range(6))
def test_one_turn_equals_an_engine_alone_bit_by_bit(qwen: Path, shm: str, part: int, temperature: float) -> None:
    async def scenario(p: Side, d: Side, whole: Side) -> None:
        moved = 0
        for n in LENGTHS[part::6]:
            prompt = [(7 * i + n) % 61 for i in range(n)]
            request = ask(f"{n}", prompt, temperature=temperature)
            two = await split(p.client, d.client, request)
            same(two, await whole.client.generate(request))
            assert two.cached_tokens == n
            assert d.counters["computed"] == 0, "nothing of the prompt was computed again"
            moved += n * TOKEN_BYTES + LOGITS_BYTES
            assert d.counters["shm" if shm else "socket"] == moved

    with_engines(qwen, scenario, shm=shm, context=192, step_tokens=32)


def test_a_deterministic_engine_ends_a_step_in_which_imported_prompts_alone_were_answered(qwen: Path) -> None:
    async def scenario(p: Side, d: Side, whole: Side) -> None:
        for tokens in (1, 3):
            request = ask(f"{tokens}", range(40), tokens=tokens, temperature=1.0)
            same(await split(p.client, d.client, request), await whole.client.generate(request))

    with_engines(qwen, scenario, context=64, step_tokens=32, deterministic=True)


def test_deterministic_engines_compute_each_turn_alike_whatever_came_back(qwen: Path) -> None:
    async def scenario(p: Side, d: Side, whole: Side) -> None:
        first = await split(p.client, d.client, ask("0", range(20), session="s", tokens=12, temperature=1.0))
        prompt = [*range(20), *first.token_ids, 7, 8, 9]
        request = ask("1", prompt, session="s", temperature=1.0)
        same(await split(p.client, d.client, request, first.kv_transfer), await whole.client.generate(request))

    with_engines(qwen, scenario, context=64, step_tokens=32, deterministic=True)


@pytest.mark.parametrize(
    ("family", "per_token", "states"),
    [("qwen", TOKEN_BYTES, 0), ("llama", 2 * 2 * 8 * 4, 0), ("hybrid", 2 * 2 * 16 * 4, 2 * (3 * 80 + 4 * 8 * 12) * 4)],
)
def test_turns_move_and_compute_only_what_is_new(
    family: str, per_token: int, states: int, shm: str, request: pytest.FixtureRequest
) -> None:
    """Five turns with observations of several lengths: each side fetches exactly the tokens that it lacks, with the
    states of linear attention, and the result is bit for bit that of a single engine which keeps the session."""
    directory: Path = request.getfixturevalue(family)
    way = "shm" if shm else "socket"

    async def scenario(p: Side, d: Side, whole: Side) -> None:
        prompt: list[int] = []
        returned: Params = None
        held_p = held_d = 0
        for turn, said in enumerate(conversation(5, seed=11, longest=40)):
            prompt += said
            before_p, before_d = p.counters, d.counters
            turn_request = ask(f"t{turn}", prompt, session="s", tokens=5 + turn)
            two = await split(p.client, d.client, turn_request, returned)
            same(two, await whole.client.generate(turn_request))
            n = len(prompt)
            assert p.counters["imported"] - before_p["imported"] == held_d - held_p
            assert p.counters[way] - before_p[way] == (held_d - held_p) * per_token + (states if turn else 0)
            assert p.counters["computed"] - before_p["computed"] == n - held_d
            assert d.counters["imported"] - before_d["imported"] == n - held_d
            assert d.counters[way] - before_d[way] == (n - held_d) * per_token + states + LOGITS_BYTES
            assert d.counters["computed"] == 0
            returned = two.kv_transfer
            assert returned
            prompt += two.token_ids
            held_p, held_d = n, len(prompt) - 1  # the last sampled token was never fed
        assert held_d > 100

    with_engines(directory, scenario, shm=shm, context=256, step_tokens=32)


@pytest.mark.parametrize("asks", [True, False])
def test_remote_and_local_turns_may_alternate(qwen: Path, shm: str, asks: bool) -> None:
    """A local turn that returns its KV keeps the next remote turn exact. Without the KV, the prefill engine recomputes
    the local turn's answer in one pass with the observation, which rounds differently."""

    async def scenario(p: Side, d: Side, whole: Side) -> None:
        prompt: list[int] = []
        returned: Params = None
        at_p = at_d = lacking = 0
        for turn, said in enumerate(conversation(6, seed=3)):
            prompt += said
            request = ask(f"t{turn}", prompt, session="s")
            if turn % 2:
                kv = {"return_kv": True, "remote_num_tokens": at_p} if asks else None
                answer = await d.client.generate(dataclasses.replace(request, kv_transfer=kv))
                assert (answer.kv_transfer is not None) == asks
                returned = answer.kv_transfer or returned
            else:
                answer = await split(p.client, d.client, request, returned)
                returned, at_p = answer.kv_transfer, len(prompt)
                lacking += len(prompt) - at_d
            want = await whole.client.generate(request)
            assert answer.token_ids == want.token_ids
            assert answer.logprobs == (want.logprobs if asks else pytest.approx(want.logprobs, abs=1e-5))
            prompt += answer.token_ids
            at_d = len(prompt) - 1
        assert (p.counters["computed"] == lacking) == asks

    with_engines(qwen, scenario, shm=shm, context=256)


def test_a_local_turn_returns_kv_when_asked(qwen: Path, shm: str) -> None:
    async def scenario(p: Side, d: Side, whole: Side) -> None:
        first = await d.client.generate(ask("0", range(10), {"return_kv": True}, session="s"))
        await whole.client.generate(ask("0", range(10), session="s"))
        assert first.kv_transfer
        request = ask("1", [*range(10), *first.token_ids, 5, 6], session="s")
        same(await split(p.client, d.client, request, first.kv_transfer), await whole.client.generate(request))
        assert p.counters["imported"] == 15
        assert p.counters["computed"] == 3

    with_engines(qwen, scenario, shm=shm)


@pytest.mark.parametrize("family", ["qwen", "hybrid"])
def test_an_evicted_session_is_pulled_whole(family: str, shm: str, request: pytest.FixtureRequest) -> None:
    """Either side may lose the session between turns: it then requests more than was copied, and gets it from the other
    side's session."""

    async def scenario(p: Side, d: Side, whole: Side) -> None:
        prompt = list(range(1, 21))
        first = await split(p.client, d.client, ask("0", prompt, session="s"))
        await whole.client.generate(ask("0", prompt, session="s"))
        p.server.handoffs.runner.release("s")
        prompt += [*first.token_ids, 4, 5]
        second = ask("1", prompt, session="s")
        params = await prefilled(p.client, second, first.kv_transfer)
        assert p.counters["imported"] == 25, "D's whole sequence, though it had copied only the answer's"
        d.server.handoffs.runner.release("s")
        answer = await d.client.generate(dataclasses.replace(second, kv_transfer=params))
        assert d.counters["imported"] == 20 + 28
        same(answer, await whole.client.generate(second))

    with_engines(request.getfixturevalue(family), scenario, shm=shm)


def test_what_neither_copied_nor_held_is_refused_and_the_turn_succeeds_at_home(qwen: Path, shm: str) -> None:
    async def scenario(p: Side, d: Side, whole: Side) -> None:
        prompt = list(range(1, 21))
        first = await split(p.client, d.client, ask("0", prompt, session="s"))
        second = ask("1", [*prompt, *first.token_ids, 4, 5], session="s")
        params = await prefilled(p.client, second, first.kv_transfer)
        p.server.handoffs.runner.release("s")
        d.server.handoffs.runner.release("s")
        with pytest.raises(HandoffFailed, match="the session holds the rest no more"):
            await d.client.generate(dataclasses.replace(second, kv_transfer=params))
        same(await d.client.generate(second), await whole.client.generate(second))

    with_engines(qwen, scenario, shm=shm)


def test_a_prompt_that_drops_part_of_the_answer_uses_what_it_shares(qwen: Path, shm: str) -> None:
    """An agent that strips its reasoning: the returned KV belongs to another continuation after a point."""

    async def scenario(p: Side, d: Side, _: Side) -> None:
        prompt = list(range(1, 21))
        first = await split(p.client, d.client, ask("0", prompt, session="s"))
        second = [*prompt, *first.token_ids[:2], 60, 60, 4, 5, 6, 7, 8, 9]
        assert first.token_ids[2] != 60
        answer = await split(p.client, d.client, ask("1", second, session="s"), first.kv_transfer)
        assert answer.token_ids == greedy(qwen, second, 6)
        assert p.counters["imported"] == 2

    with_engines(qwen, scenario, shm=shm)


def test_in_company_tokens_are_those_of_an_engine_alone(qwen: Path, shm: str) -> None:
    async def scenario(p: Side, d: Side, _: Side) -> None:
        prompts = conversation(16, seed=5, longest=40)
        answers = await asyncio.gather(
            *(split(p.client, d.client, ask(f"{i}", prompt, session=f"{i}")) for i, prompt in enumerate(prompts))
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == greedy(qwen, prompt, 6)

    with_engines(qwen, scenario, shm=shm)


def test_the_metrics_prove_it(qwen: Path, shm: str) -> None:
    async def scenario(p: Side, d: Side, _: Side) -> None:
        await split(p.client, d.client, ask("0", range(20), session="s"))

        async def lines(s: Side) -> set[str]:
            return set((await s.client.request("GET", "/metrics")).decode().splitlines())

        at_d, at_p = await lines(d), await lines(p)
        way = "shm" if shm else "socket"
        moved = 20 * TOKEN_BYTES + LOGITS_BYTES
        assert 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"} 20' in at_d
        assert 'vllm:prompt_tokens_by_source_total{source="local_compute"} 0' in at_d
        assert f'rollart:kv_pulled_bytes_total{{transport="{way}"}} {moved}' in at_d
        assert f'rollart:kv_pulls_total{{transport="{way}"}} 1' in at_d
        assert "rollart:pending_kv_exports 1" in at_d, "the answer's, for the next turn"
        assert f"rollart:pending_kv_export_bytes {5 * TOKEN_BYTES}" in at_d
        assert "rollart:pending_kv_exports 0" in at_p
        assert "rollart:kv_exports_taken_total 1" in at_p
        assert f"rollart:kv_exported_bytes_total {moved}" in at_p
        assert 'vllm:prompt_tokens_by_source_total{source="local_compute"} 20' in at_p

    with_engines(qwen, scenario, shm=shm)


def test_large_copies_leave_the_loop_and_come_to_the_same(
    qwen: Path, shm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollart.engine.handoff.OFFLOAD_BYTES", 0)

    async def scenario(p: Side, d: Side, whole: Side) -> None:
        prompt = list(range(1, 21))
        first = await split(p.client, d.client, ask("0", prompt, session="s"))
        await whole.client.generate(ask("0", prompt, session="s"))
        second = ask("1", [*prompt, *first.token_ids, 4, 5], session="s")
        d.server.handoffs.runner.release("s")  # and a block that is cut to another start
        same(await split(p.client, d.client, second, first.kv_transfer), await whole.client.generate(second))

    with_engines(qwen, scenario, shm=shm)


def test_an_export_copies_only_what_the_peer_lacks(qwen: Path, shm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[tuple[int, int]] = []
    export = KvCache.export

    def counted(self: KvCache, slot: int, token_ids: tuple[int, ...], version: int, *, start: int = 0) -> Any:
        copied.append((start, len(token_ids)))
        return export(self, slot, token_ids, version, start=start)

    monkeypatch.setattr(KvCache, "export", counted)

    async def scenario(p: Side, d: Side, _: Side) -> None:
        prompt = list(range(1, 21))
        first = await split(p.client, d.client, ask("0", prompt, session="s"))
        await split(p.client, d.client, ask("1", [*prompt, *first.token_ids, 4, 5], session="s"), first.kv_transfer)
        assert copied == [(0, 20), (20, 25), (25, 28), (28, 33)]

    with_engines(qwen, scenario, shm=shm)
