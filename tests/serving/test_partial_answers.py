"""Answers that somebody reads while they are drawn: what was read stays, and who has gone aborts them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from rollart.errors import EngineError
from rollart.leases import Leases
from rollart.ledger.intervals import EngineShares, ResourceClock
from rollart.model import (
    Completion,
    CompletionChunk,
    FinishReason,
    GenerateRequest,
    PauseMode,
    Sampling,
    VersionSpan,
    WeightsRef,
)
from rollart.ports import HarnessRequest
from rollart.serving.engine_registry import GatewayLimits
from rollart.serving.gateway import Gateway
from rollart.sim import loop
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.parts import SimulatedEngine
from tests.control.test_harness import Programs, Scripted, run_of


class Telling(SimulatedEngine):
    """Says one more than the last token, one a second, and tells of each; is gone after `dies` of them. Weight updates
    that abort end it with what it has."""

    def __init__(self, name: str, *, dies: int = 1_000) -> None:
        super().__init__(name, version=0, seed=0)
        self.dies, self.requests = dies, list[GenerateRequest]()
        self._stop = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        await self._resumed.wait()
        version, ids = self._version, list[int]()
        self._stop.clear()
        finish = FinishReason.LENGTH
        while len(ids) < request.sampling.max_tokens:
            try:
                async with asyncio.timeout(1.0):
                    await self._stop.wait()
                finish = FinishReason.ABORT
                break
            except TimeoutError:
                ids.append(request.token_ids[-1] + len(ids) + 1)
            if len(ids) > self.dies:
                raise EngineError(f"{self.id} is gone", retryable=True)
            if request.on_chunk is not None and len(ids) < request.sampling.max_tokens:
                request.on_chunk(CompletionChunk(tuple(ids[-1:]), (-0.5,), version))
        span = (VersionSpan(version, 0, len(ids)),) if ids else ()
        return Completion(tuple(ids), (-0.5,) * len(ids), span, finish, len(request.token_ids))

    async def pause(self, mode: PauseMode) -> None:
        await super().pause(mode)
        self._stop.set()


def gateway_of(engines: list[Telling]) -> Gateway:
    recorder = MemoryRecorder()
    gateway = Gateway(
        Leases(recorder),
        limits=GatewayLimits(engine_s=50.0),
        version=0,
        on_suspect=lambda _: None,
        recorder=recorder,
        pause=PauseMode.ABORT,
    )
    now = asyncio.get_running_loop().time
    for engine in engines:
        clock = ResourceClock(role="engine", resource=engine.id, recorder=recorder, clock=now)
        gateway.join(engine, version=0, shares=EngineShares(clock, clock=now))
    return gateway


def streamed(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    loop.run(scenario())


@pytest.mark.parametrize("listening", [True, False])
def test_a_turn_goes_on_elsewhere_after_what_was_read(listening: bool) -> None:
    async def scenario() -> None:
        engines = [Telling("e0", dies=3), Telling("e1")]
        gateway, told = gateway_of(engines), list[CompletionChunk]()
        answer = await gateway.generate(
            "s", (0,), Sampling(max_tokens=8, seed=5), spend=lambda _: None, on_chunk=told.append if listening else None
        )
        assert answer.token_ids == tuple(range(1, 9))
        first, second = (e.requests[0] for e in engines)
        assert second.token_ids == ((0, 1, 2, 3) if listening else (0,))
        assert (first.sampling == second.sampling) is not listening
        assert [t for p in told for t in p.token_ids] == (list(range(1, 8)) if listening else [])

    streamed(scenario)


def test_a_turn_that_weights_interrupt_goes_on_under_the_new_ones() -> None:
    async def scenario() -> None:
        (engine,) = engines = [Telling("e0")]
        gateway, told, sent = gateway_of(engines), list[CompletionChunk](), list[int]()
        asking = asyncio.ensure_future(
            gateway.generate(
                "s", (0,), Sampling(max_tokens=8), spend=lambda _: None, sent=sent.append, on_chunk=told.append
            )
        )
        while len(told) < 3:
            await asyncio.sleep(0.5)
        await gateway.update(WeightsRef(1, "v1"), lambda _: None)
        answer = await asking
        assert answer.token_ids == tuple(range(1, 9))
        (old, new) = answer.spans
        assert (old.version, old.start, new.version, new.end, old.end) == (0, 0, 1, 8, new.start)
        assert [t for p in told for t in p.token_ids] == list(range(1, 8))
        assert all(p.version == int(p.token_ids[0] > old.end) for p in told)
        assert len(engine.requests) == 2
        assert sent == [0], "its staleness is judged by what is kept"

    streamed(scenario)


def test_who_goes_away_aborts_the_answer_and_the_episode_goes_on() -> None:
    class Leaving(Scripted):
        """Goes away from its first request, and asks again."""

        async def wanted(self) -> HarnessRequest | None:
            wanted = await super().wanted()
            if wanted is None:
                return None
            gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            if self.wanted_so_far == 1:
                asyncio.get_running_loop().call_soon(gone.set_result, None)
                self.captured.clear()
            return replace(wanted, gone=gone)

    class Leavers(Programs):
        def __call__(self, session: str, seed: int) -> Scripted:
            self.begun.append(Leaving(**self.script))
            return self.begun[-1]

    programs = Leavers(asks=3)
    run = run_of(programs, engine_s=lambda _: 1.0)
    loop.run(run.run(), seed=1)
    samples = [s for _, batch in run.trainer.batches for s in batch]
    assert len(samples) == 12
    assert {max(s.turn) for s in samples} == {2}
    assert {s.loss_mask.count(True) for s in samples} == {6}, "two answers of three tokens: nobody read the first"
