"""The contract of every `Engine`. Fakes, the simulated engine and `HttpEngine` pass the same suite.

Subclass `EngineContract` in a test module and implement `run`; engines that hand KV over pass `PdContract` as well.
Nothing here waits on real time: a scenario stops the engine with `pause` where it needs it to hold still. Counters are
compared with their earlier values: a subject may have served other scenarios.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from rollart.errors import EngineError, HandoffFailed
from rollart.model import (
    Completion,
    CompletionChunk,
    EngineStats,
    FinishReason,
    GenerateRequest,
    PauseMode,
    Sampling,
    VersionSpan,
    WeightsRef,
)
from rollart.ports import Engine

__all__ = ["EngineContract", "PdContract", "PdSubject", "Subject"]

TICKS = 20_000
"""Iterations of the loop that a scenario waits for a condition before it fails."""


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine that just started at version 0, or has it loaded again. `publish` makes a version that it can load.

    It has at least 8 slots, a context of at least 64 tokens, a vocabulary of at least 64 ids, and no
    end-of-sequence id among the first 61.
    """

    engine: Engine
    publish: Callable[[int], WeightsRef]


Scenario = Callable[[Subject], Awaitable[None]]


def request(
    name: str,
    prompt: Sequence[int] = (1, 2, 3),
    *,
    session: str = "",
    max_tokens: int = 5,
    seed: int | None = 0,
    temperature: float = 1.0,
    allowed: tuple[int, ...] | None = None,
    salt: str | None = None,
) -> GenerateRequest:
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed, allowed_token_ids=allowed)
    return GenerateRequest(name, session or name, tuple(prompt), sampling, cache_salt=salt)


def check(c: Completion, versions: Sequence[int]) -> None:
    """The invariants of every completion."""
    assert len(c.logprobs) == len(c.token_ids)
    assert all(p <= 1e-6 for p in c.logprobs)
    assert [s.version for s in c.spans] == list(versions)
    edges = [0, *(s.end for s in c.spans)]
    assert [s.start for s in c.spans] == edges[:-1]
    assert edges[-1] == len(c.token_ids)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(TICKS):
        if await condition():
            return
        await asyncio.sleep(0)
    pytest.fail("what the scenario waits for never happened")


class EngineContract:
    """The suite. `run` gives a scenario a fresh subject, on whatever loop the engine needs."""

    PREFIX = tuple(range(1, 13))
    """A prompt long enough for a KV hit: engines cache whole blocks of tokens."""

    RELEASES = True
    """`release` frees a session's KV at once; vLLM has no such call, and evicts the least recently used KV."""

    GAUGES = True
    """What is running, and the KV that it holds, is known while the engine is paused; vLLM's gauges are of its last
    step."""

    TELLS = True
    """Tokens are reported as they are sampled; a modelled engine reports none."""

    LONG = 50
    """Enough tokens that a scenario can usually interrupt their generation."""

    def run(self, scenario: Scenario) -> None:
        raise NotImplementedError

    def test_a_completion_accounts_for_every_token(self) -> None:
        async def scenario(s: Subject) -> None:
            old = await s.engine.stats()
            c = await s.engine.generate(request("a", max_tokens=7))
            check(c, [0])
            assert len(c.token_ids) == 7
            assert c.finish is FinishReason.LENGTH
            assert c.prompt_tokens == 3
            await until(lambda: _generated(s.engine, old, 7))
            stats = await s.engine.stats()
            assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0.0)
            assert stats.preemptions == old.preemptions
            assert stats.kv_tokens is not None
            assert stats.kv_tokens >= 10
            assert stats.prompt_tokens - old.prompt_tokens == 3
            assert stats.generated_tokens - old.generated_tokens == 7
            assert stats.cached_tokens == old.cached_tokens
            assert await s.engine.healthy()

        self.run(scenario)

    def test_streamed_tokens_are_a_prefix_of_the_answer(self) -> None:
        async def scenario(s: Subject) -> None:
            chunks: list[CompletionChunk] = []
            plain = await s.engine.generate(request("a", max_tokens=20))
            asked = dataclasses.replace(request("b", max_tokens=20), on_chunk=chunks.append)
            c = await s.engine.generate(asked)
            check(c, [0])
            assert (c.token_ids, c.finish) == (plain.token_ids, plain.finish)
            assert c.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
            ids = tuple(t for piece in chunks for t in piece.token_ids)
            assert ids == c.token_ids[: len(ids)]
            assert tuple(p for piece in chunks for p in piece.logprobs) == c.logprobs[: len(ids)]
            if self.TELLS:
                assert len(chunks) > 1, "they come one after the other"
                assert {piece.version for piece in chunks} == {0}

        self.run(scenario)

    def test_only_legal_tokens(self) -> None:
        async def scenario(s: Subject) -> None:
            c = await s.engine.generate(request("a", max_tokens=12, allowed=(4, 9)))
            assert set(c.token_ids) <= {4, 9}
            assert (await s.engine.generate(request("b", allowed=(6,)))).token_ids == (6,) * 5

        self.run(scenario)

    def test_a_seed_repeats_itself_in_company(self) -> None:
        async def scenario(s: Subject) -> None:
            alone = await s.engine.generate(request("a", max_tokens=10, seed=5))
            crowd = await asyncio.gather(
                *(s.engine.generate(request(f"{i}", max_tokens=4 + i, seed=5)) for i in range(20))
            )
            for c in crowd:
                n = min(10, len(c.token_ids))
                assert c.token_ids[:n] == alone.token_ids[:n]

        self.run(scenario)

    def test_a_session_keeps_its_prefix_until_released(self) -> None:
        async def scenario(s: Subject) -> None:
            prompt = self.PREFIX
            await s.engine.generate(request("a", prompt, session="s"))
            assert (await s.engine.generate(request("b", (*prompt, 14, 15), session="s"))).cached_tokens > 0
            await s.engine.release("s")
            await s.engine.release("never seen")
            again = await s.engine.generate(request("c", (*prompt, 14, 15), session="s"))
            assert again.cached_tokens == 0 or not self.RELEASES

        self.run(scenario)

    def test_another_salt_shares_no_prefix(self) -> None:
        async def scenario(s: Subject) -> None:
            prompt = self.PREFIX
            await s.engine.generate(request("a", prompt, session="s", salt="x"))
            c = await s.engine.generate(request("b", (*prompt, 14), session="s", salt="y"))
            assert c.cached_tokens == 0

        self.run(scenario)

    def test_abort_returns_what_was_sampled(self) -> None:
        async def scenario(s: Subject) -> None:
            await s.engine.pause(PauseMode.KEEP)
            one = asyncio.create_task(s.engine.generate(request("a")))
            two = asyncio.create_task(s.engine.generate(request("b")))
            await until(lambda: _in_flight(s.engine, 2))
            await s.engine.abort([])
            await s.engine.abort(["a", "unknown"])
            c = await one
            check(c, [])
            assert c.finish is FinishReason.ABORT
            assert not two.done()
            await s.engine.resume()
            assert (await two).finish is FinishReason.LENGTH

        self.run(scenario)

    def test_cancelling_aborts_on_the_server(self) -> None:
        async def scenario(s: Subject) -> None:
            await s.engine.pause(PauseMode.KEEP)
            task = asyncio.create_task(s.engine.generate(request("a")))
            await until(lambda: _in_flight(s.engine, 1))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: _in_flight(s.engine, 0))
            again = asyncio.create_task(s.engine.generate(request("a")))
            await until(lambda: _in_flight(s.engine, 1))
            await s.engine.resume()
            assert (await again).finish is FinishReason.LENGTH

        self.run(scenario)

    @pytest.mark.parametrize("mode", list(PauseMode))
    def test_every_pause_ends_in_flight_work_its_own_way(self, mode: PauseMode) -> None:
        """KEEP finishes after resume, WAIT before the pause returns, ABORT never; new requests wait in all three."""

        async def scenario(s: Subject) -> None:
            old, long = await s.engine.stats(), self.LONG
            task = asyncio.create_task(s.engine.generate(request("a", max_tokens=long)))
            await until(lambda: _generated(s.engine, old, 1))
            await s.engine.pause(mode)
            seen = await s.engine.stats()
            still = seen.generated_tokens - old.generated_tokens
            assert (seen.kv_used > 0) == (mode is PauseMode.KEEP and still < long) or not self.GAUGES
            late = asyncio.create_task(s.engine.generate(request("late")))
            await until(lambda: _in_flight(s.engine, 2 if mode is PauseMode.KEEP and still < long else 1))
            assert (await s.engine.stats()).generated_tokens - old.generated_tokens == still
            assert not late.done()
            await s.engine.resume()
            c = await task
            check(c, [0])
            ended = mode is PauseMode.ABORT and still < long
            assert c.finish is (FinishReason.ABORT if ended else FinishReason.LENGTH)
            assert mode is not PauseMode.WAIT or still == long
            check(await late, [0])

        self.run(scenario)

    def test_an_update_in_flight_is_seen_in_the_spans(self) -> None:
        async def scenario(s: Subject) -> None:
            old = await s.engine.stats()
            task = asyncio.create_task(s.engine.generate(request("a", max_tokens=self.LONG)))
            await until(lambda: _generated(s.engine, old, 3))
            await s.engine.pause(PauseMode.KEEP)
            before = (await s.engine.stats()).generated_tokens - old.generated_tokens
            await s.engine.update_weights(s.publish(7))
            await s.engine.resume()
            c = await task
            if before == self.LONG:  # it was faster than we
                check(c, [0])
            else:
                check(c, [0, 7])
                assert c.spans[0] == VersionSpan(0, 0, before)
            check(await s.engine.generate(request("b")), [7])

        self.run(scenario)

    def test_no_prefix_is_reused_across_versions(self) -> None:
        async def scenario(s: Subject) -> None:
            prompt = self.PREFIX
            await s.engine.generate(request("a", prompt, session="s"))
            await s.engine.pause(PauseMode.KEEP)
            await s.engine.update_weights(s.publish(1))
            await s.engine.resume()
            c = await s.engine.generate(request("b", (*prompt, 14), session="s"))
            assert c.cached_tokens == 0
            check(c, [1])

        self.run(scenario)

    def test_an_impossible_request_is_refused_for_good(self) -> None:
        async def scenario(s: Subject) -> None:
            with pytest.raises(EngineError) as refused:
                await s.engine.generate(request("a", (), max_tokens=1))
            assert not refused.value.retryable
            assert "\n" not in str(refused.value)

        self.run(scenario)


@dataclass(frozen=True, slots=True)
class PdSubject:
    """Three engines that just started at version 0 with the same weights: one to prefill, one to decode, one to compare
    with. `end_prefill` ends the first, and the KV that it exports. The rest is as in `Subject`."""

    prefill: Engine
    decode: Engine
    alone: Engine
    publish: Callable[[int], WeightsRef]
    end_prefill: Callable[[], Awaitable[None]]


PdScenario = Callable[[PdSubject], Awaitable[None]]

PROMPT = tuple(range(1, 13))


async def prefilled(
    engine: Engine, turn: GenerateRequest, returned: Mapping[str, object] | None = None
) -> tuple[Completion, GenerateRequest]:
    """The prefill leg of a turn, and the request that goes to the decode engine. What an engine answers is passed on as
    a router does: as JSON, verbatim."""
    kv = {"do_remote_prefill": False, **_wire(returned), "do_remote_decode": True}
    leg = dataclasses.replace(
        turn,
        request_id=f"{turn.request_id}-p",
        sampling=dataclasses.replace(turn.sampling, max_tokens=1),
        kv_transfer=kv,
    )
    answer = await engine.generate(leg)
    assert answer.kv_transfer, "an engine that is to be decoded for says where its KV is"
    return answer, dataclasses.replace(turn, kv_transfer=_wire(answer.kv_transfer))


class PdContract:
    """The contract of engines that hand off KV (vLLM's `kv_transfer_params`, pulled by the decode engine)."""

    def run_pd(self, scenario: PdScenario) -> None:
        raise NotImplementedError

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_prefill_here_and_decode_there_is_one_engine(self, temperature: float) -> None:
        async def scenario(s: PdSubject) -> None:
            turn = request("a", PROMPT, max_tokens=9, seed=3, temperature=temperature)
            first, rest = await prefilled(s.prefill, turn)
            assert first.prompt_tokens == len(PROMPT)
            two, one = await s.decode.generate(rest), await s.alone.generate(turn)
            check(two, [0])
            assert two.token_ids == one.token_ids
            assert two.logprobs == pytest.approx(one.logprobs, abs=1e-5)
            assert two.finish is one.finish
            assert two.cached_tokens >= len(PROMPT) - 1, "at most the last token is computed again"

        self.run_pd(scenario)

    def test_turns_go_on_from_what_the_decode_engine_returned(self) -> None:
        async def scenario(s: PdSubject) -> None:
            prompt, returned, known = PROMPT, None, 0
            for i in range(4):
                turn = request(f"t{i}", prompt, session="s", max_tokens=4, temperature=0.0)
                first, rest = await prefilled(s.prefill, turn, returned)
                assert first.cached_tokens >= known, "it computes only what is new"
                two = await s.decode.generate(rest)
                assert two.token_ids == (await s.alone.generate(turn)).token_ids
                assert two.cached_tokens >= len(prompt) - 1
                returned, known = two.kv_transfer, len(prompt) + 3  # the KV of the last token sampled is not there yet
                assert returned, "it says where the KV of its answer is"
                prompt = (*prompt, *two.token_ids, 3 + i, 5)

        self.run_pd(scenario)

    def test_both_serve_turns_without_a_hand_off(self) -> None:
        async def scenario(s: PdSubject) -> None:
            turn = request("a", PROMPT)
            want = await s.alone.generate(turn)
            for engine in (s.prefill, s.decode):
                answer = await engine.generate(turn)
                assert answer.token_ids == want.token_ids
                assert answer.kv_transfer is None

        self.run_pd(scenario)

    def test_kv_is_handed_over_once(self) -> None:
        async def scenario(s: PdSubject) -> None:
            _, rest = await prefilled(s.prefill, request("a", PROMPT))
            await s.decode.generate(rest)
            await refused(s, dataclasses.replace(rest, request_id="b"))

        self.run_pd(scenario)

    def test_kv_of_an_aborted_prefill_is_gone(self) -> None:
        async def scenario(s: PdSubject) -> None:
            _, rest = await prefilled(s.prefill, request("a", PROMPT))
            await s.prefill.abort(["a-p"])
            await s.prefill.stats()
            await refused(s, rest)

        self.run_pd(scenario)

    @pytest.mark.parametrize("who", ["prefill", "decode"])
    def test_versions_are_never_mixed(self, who: str) -> None:
        """Whichever side has the newer version, the decode engine refuses, without KV of either version."""

        async def scenario(s: PdSubject) -> None:
            _, rest = await prefilled(s.prefill, request("a", PROMPT))
            weights = s.publish(1)
            for engine in (s.prefill, s.decode) if who == "prefill" else (s.decode, s.prefill):
                await _update(engine, weights)
                await refused(s, rest)
            await _update(s.alone, weights)
            again, rest = await prefilled(s.prefill, request("b", PROMPT))
            check(again, [1])
            two = await s.decode.generate(rest)
            check(two, [1])
            assert two.token_ids == (await s.alone.generate(request("b", PROMPT))).token_ids

        self.run_pd(scenario)

    def test_a_prefill_engine_that_ended_costs_only_the_hand_off(self) -> None:
        async def scenario(s: PdSubject) -> None:
            _, rest = await prefilled(s.prefill, request("a", PROMPT))
            await s.end_prefill()
            await refused(s, rest)
            assert await s.decode.healthy()
            local = dataclasses.replace(rest, kv_transfer=None)
            assert (await s.decode.generate(local)).token_ids == (await s.alone.generate(local)).token_ids

        self.run_pd(scenario)

    def test_a_hand_off_waits_for_a_pause_to_end(self) -> None:
        async def scenario(s: PdSubject) -> None:
            _, rest = await prefilled(s.prefill, request("a", PROMPT))
            await s.decode.pause(PauseMode.KEEP)
            task = asyncio.create_task(s.decode.generate(rest))
            await until(lambda: _in_flight(s.decode, 1))
            assert not task.done()
            await s.decode.resume()
            check(await task, [0])

        self.run_pd(scenario)


async def refused(s: PdSubject, rest: GenerateRequest) -> None:
    """The decode engine names the hand-off as the cause, and keeps no state of the request."""
    with pytest.raises(HandoffFailed) as failed:
        await s.decode.generate(rest)
    assert failed.value.retryable
    assert "\n" not in str(failed.value)
    assert await _in_flight(s.decode, 0)


async def _update(engine: Engine, weights: WeightsRef) -> None:
    await engine.pause(PauseMode.KEEP)
    await engine.update_weights(weights)
    await engine.resume()


def _wire(params: Mapping[str, object] | None) -> Any:
    return json.loads(json.dumps(dict(params or {})))


async def _in_flight(engine: Engine, n: int) -> bool:
    stats = await engine.stats()
    return stats.running + stats.waiting == n


async def _generated(engine: Engine, old: EngineStats, n: int) -> bool:
    return (await engine.stats()).generated_tokens - old.generated_tokens >= n
