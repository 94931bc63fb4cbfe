"""The engine pool of a standalone proxy: an answer continues where another engine ended, and no token is emitted
twice."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.adapters.proxy.pool import EnginePool
from rollart.errors import EngineError
from rollart.model import Completion, CompletionChunk, EngineId, FinishReason, GenerateRequest, Sampling, VersionSpan


class Counting:
    """Generates the last token plus one. Ends as scripted: dies or is interrupted after a number of tokens."""

    def __init__(self, number: int, ends: list[tuple[str, int, int]]) -> None:
        self.id, self.version, self.ends = EngineId(f"engine-{number}"), number, ends
        self.requests: list[GenerateRequest] = []

    async def context(self) -> int:
        return 1000

    async def release(self, session: str) -> None: ...

    async def close(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        wanted, first = request.sampling.max_tokens, request.token_ids[-1] + 1
        end, count, told = self.ends.pop(0) if self.ends else ("", wanted, wanted)
        count = min(count, wanted)
        ids = tuple(range(first, first + count))
        logprobs = tuple(-0.001 * i for i in ids)
        if request.on_chunk is not None:
            for at in range(min(told, count - (end == ""))):
                request.on_chunk(CompletionChunk(ids[at : at + 1], logprobs[at : at + 1], self.version))
        if end == "gone":
            raise EngineError(f"{self.id} is gone", retryable=True)
        finish = FinishReason.ABORT if end == "interrupted" else FinishReason.LENGTH
        return Completion(ids, logprobs, (VersionSpan(self.version, 0, count),) if count else (), finish)


ends = st.lists(st.tuples(st.sampled_from(["gone", "interrupted"]), st.integers(0, 6), st.integers(0, 6)), max_size=3)


def ask(engines: list[Counting], max_tokens: int, told: list[CompletionChunk] | None) -> Completion:
    async def body() -> Completion:
        pool = EnginePool(cast(Any, engines))
        await pool.open()
        session = pool.session("s")
        answer = await session.generate(
            (0,), Sampling(max_tokens=max_tokens, seed=3), None if told is None else told.append
        )
        await session.release()
        assert [pool.sessions[e.id] for e in engines] == [0] * len(engines)
        return answer

    return asyncio.run(body())


@settings(deadline=None)
@given(first=ends, second=ends, third=ends, most=st.integers(1, 20))
def test_what_was_told_stays_the_beginning(first: Any, second: Any, third: Any, most: int) -> None:
    told: list[CompletionChunk] = []
    engines = [Counting(n, list(e)) for n, e in enumerate((first, second, third))]
    try:
        answer = ask(engines, most, told)
    except EngineError:
        assert all(e.requests for e in engines), "every engine was asked"
        answer = None
    ids = [t for piece in told for t in piece.token_ids]
    assert ids == list(range(1, len(ids) + 1)), "each token once, in order"
    if answer is not None:
        assert answer.token_ids == tuple(range(1, most + 1))
        assert answer.logprobs == pytest.approx([-0.001 * i for i in answer.token_ids])
        assert [(s.start, s.end) for s in answer.spans][-1][1] == most
        assert len(ids) <= most
        for piece in told:
            (token,) = piece.token_ids[:1]
            (version,) = [s.version for s in answer.spans if s.start < token <= s.end]
            assert piece.version == version


def test_one_that_is_not_heard_begins_anew_and_an_interruption_is_its_own() -> None:
    engines = [Counting(0, [("gone", 4, 4)]), Counting(1, [("interrupted", 3, 0)])]
    answer = ask(engines, 9, None)
    assert [len(e.requests) for e in engines] == [1, 1]
    assert engines[1].requests[0].token_ids == (0,)
    assert (answer.finish, answer.token_ids) == (FinishReason.ABORT, (1, 2, 3))


def test_an_engine_that_refuses_for_good_is_believed() -> None:
    class Refusing(Counting):
        async def generate(self, request: GenerateRequest) -> Completion:
            raise EngineError("too odd", retryable=False)

    other = Counting(1, [])
    with pytest.raises(EngineError, match="too odd"):
        ask([Refusing(0, []), other], 3, [])
    assert other.requests == []


def test_the_rest_is_drawn_with_numbers_of_its_own() -> None:
    engines = [Counting(0, [("gone", 4, 2)]), Counting(1, [])]
    ask(engines, 9, [])
    begun, rest = (e.requests[0] for e in engines)
    assert rest.token_ids == (0, 1, 2)
    assert rest.sampling.max_tokens == 7
    assert rest.sampling.seed not in (None, begun.sampling.seed)


def test_requests_of_one_session_whose_engine_dies_under_them_all_go_on() -> None:
    class Dying(Counting):
        """Dies once all requests have arrived."""

        async def generate(self, request: GenerateRequest) -> Completion:
            self.requests.append(request)
            while len(self.requests) < 3:
                await asyncio.sleep(0)
            raise EngineError(f"{self.id} is gone", retryable=True)

    async def body() -> None:
        engines = [Dying(0, []), Counting(1, [])]
        pool = EnginePool(cast(Any, engines))
        session = pool.session("s")
        answers = await asyncio.gather(*(session.generate((n,), Sampling(max_tokens=2)) for n in (0, 10, 20)))
        assert [a.token_ids for a in answers] == [(1, 2), (11, 12), (21, 22)]
        assert session.engine.id == "engine-1"
        assert [pool.sessions[e.id] for e in engines] == [0, 1]

    asyncio.run(body())
