"""What every `Engine` promises. Fakes, the simulated engine and `HttpEngine` pass the same suite.

Subclass `EngineContract` in a test module and implement `run`. Nothing here waits on real time: a scenario stops the
engine with `pause` where it needs it to hold still.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import pytest

from rollart.errors import EngineError
from rollart.model import Completion, FinishReason, GenerateRequest, PauseMode, Sampling, VersionSpan, WeightsRef
from rollart.ports import Engine

__all__ = ["EngineContract", "Subject"]

TICKS = 20_000
"""Turns of the loop that a scenario waits for something to happen before it fails."""


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine that just started at version 0. `publish` makes a version that it can load.

    It has at least 8 slots, a context of at least 64 tokens, a vocabulary of at least 32 ids, and no
    end-of-sequence id among those.
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

    def run(self, scenario: Scenario) -> None:
        raise NotImplementedError

    def test_a_completion_accounts_for_every_token(self) -> None:
        async def scenario(s: Subject) -> None:
            c = await s.engine.generate(request("a", max_tokens=7))
            check(c, [0])
            assert len(c.token_ids) == 7
            assert c.finish is FinishReason.LENGTH
            assert c.prompt_tokens == 3
            stats = await s.engine.stats()
            assert (stats.running, stats.waiting) == (0, 0)
            assert (stats.prompt_tokens, stats.generated_tokens, stats.cached_tokens) == (3, 7, 0)
            assert await s.engine.healthy()

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
            prompt = tuple(range(1, 13))
            await s.engine.generate(request("a", prompt, session="s"))
            assert (await s.engine.generate(request("b", (*prompt, 14, 15), session="s"))).cached_tokens > 0
            await s.engine.release("s")
            await s.engine.release("never seen")
            assert (await s.engine.generate(request("c", (*prompt, 14, 15), session="s"))).cached_tokens == 0

        self.run(scenario)

    def test_another_salt_shares_no_prefix(self) -> None:
        async def scenario(s: Subject) -> None:
            prompt = tuple(range(1, 13))
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
        """KEEP finishes after resume, WAIT before the pause returns, ABORT never; newcomers wait in all three."""

        async def scenario(s: Subject) -> None:
            task = asyncio.create_task(s.engine.generate(request("a", max_tokens=40)))
            await until(lambda: _generated(s.engine, 1))
            await s.engine.pause(mode)
            still = (await s.engine.stats()).generated_tokens
            late = asyncio.create_task(s.engine.generate(request("late")))
            await until(lambda: _in_flight(s.engine, 2 if mode is PauseMode.KEEP and still < 40 else 1))
            assert (await s.engine.stats()).generated_tokens == still
            assert not late.done()
            await s.engine.resume()
            c = await task
            check(c, [0])
            assert c.finish is (FinishReason.ABORT if mode is PauseMode.ABORT and still < 40 else FinishReason.LENGTH)
            assert mode is not PauseMode.WAIT or still == 40
            check(await late, [0])

        self.run(scenario)

    def test_an_update_in_flight_is_seen_in_the_spans(self) -> None:
        async def scenario(s: Subject) -> None:
            task = asyncio.create_task(s.engine.generate(request("a", max_tokens=50)))
            await until(lambda: _generated(s.engine, 3))
            await s.engine.pause(PauseMode.KEEP)
            before = (await s.engine.stats()).generated_tokens
            await s.engine.update_weights(s.publish(7))
            await s.engine.resume()
            c = await task
            if before == 50:  # it was faster than we
                check(c, [0])
            else:
                check(c, [0, 7])
                assert c.spans[0] == VersionSpan(0, 0, before)
            check(await s.engine.generate(request("b")), [7])

        self.run(scenario)

    def test_no_prefix_is_reused_across_versions(self) -> None:
        async def scenario(s: Subject) -> None:
            prompt = tuple(range(1, 13))
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


async def _in_flight(engine: Engine, n: int) -> bool:
    stats = await engine.stats()
    return stats.running + stats.waiting == n


async def _generated(engine: Engine, n: int) -> bool:
    return (await engine.stats()).generated_tokens >= n
