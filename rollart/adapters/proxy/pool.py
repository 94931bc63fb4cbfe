"""Engines behind a proxy of their own: sessions stay where their prefix is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from rollart.adapters.engines.http import HttpEngine
from rollart.errors import EngineError, WrongAnswer
from rollart.model import Completion, CompletionChunk, EngineId, FinishReason, GenerateRequest, Sampling
from rollart.policy.answers import wrong_answer, wrong_tokens
from rollart.policy.continuing import completion_from_chunks, continuation_sampling, join_completions

__all__ = ["EnginePool"]

MAX_INTERRUPTIONS = 8
"""How often a streamed answer goes on after its engine ended it, as some weight updates do. It waits there until the
engine goes on."""


UNKNOWN_VOCAB_SIZE = 1 << 31
"""More than any vocabulary has."""


class EnginePool:
    """Gives every session an engine, the one with the fewest; `open` once, then any number of sessions.

    `vocab`: size of the model's vocabulary, above which no token id of an answer is; None: it is not known. Which
    versions were published is not known here."""

    def __init__(self, engines: Sequence[HttpEngine], *, vocab: int | None = None) -> None:
        self.vocab = UNKNOWN_VOCAB_SIZE if vocab is None else vocab
        self._engines = tuple(engines)
        self._sessions = {e.id: 0 for e in self._engines}
        self.context = 0

    async def open(self) -> None:
        """Ask how much the engines take. EngineError: one does not answer."""
        self.context = min(await asyncio.gather(*(e.context() for e in self._engines)))

    async def paused(self) -> bool:
        """Whether an engine stands still, as for new weights. EngineError: none answers."""
        found = await asyncio.gather(*(e.paused() for e in self._engines), return_exceptions=True)
        failed = [f for f in found if isinstance(f, BaseException)]
        if len(failed) == len(found):
            raise failed[0]
        return any(f is True for f in found)

    def session(self, name: str) -> PooledSession:
        engine = min(self._engines, key=lambda e: (self._sessions[e.id], e.id))
        self._sessions[engine.id] += 1
        return PooledSession(self, engine, name)

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()

    def left(self, engine: HttpEngine) -> None:
        self._sessions[engine.id] -= 1

    def load(self, engine: HttpEngine) -> int:
        """Sessions that live there."""
        return self._sessions[engine.id]

    def move(self, session: PooledSession, tried: Sequence[EngineId]) -> bool:
        """To the engine with the fewest sessions that was not tried; False: there is none."""
        others = [e for e in self._engines if e.id not in tried]
        if others:
            self.left(session.engine)
            session.follow(min(others, key=lambda e: (self._sessions[e.id], e.id)))
            self._sessions[session.engine.id] += 1
        return bool(others)


class PooledSession:
    """A session's engine. Implements `Policy`.

    A request whose engine is gone goes on at another, if there is one, and the session with it. What was told of the
    answer stays its beginning: it is sent as part of the prompt, and none of it is told again. Where nobody knows
    which version drew that (vLLM says so at the end), the answer fails: it can neither be kept nor unsaid."""

    def __init__(self, pool: EnginePool, engine: HttpEngine, name: str) -> None:
        self._pool, self._engine, self._name = pool, engine, name
        self._requests = 0

    @property
    def context(self) -> int:
        return self._pool.context

    async def generate(
        self, token_ids: tuple[int, ...], sampling: Sampling, told: Callable[[CompletionChunk], None] | None = None
    ) -> Completion:
        kept: Completion | None = None
        tried: list[EngineId] = []
        interrupted = 0
        while True:
            pieces: list[CompletionChunk] = []
            asked = self._engine
            try:
                part = await self._ask(token_ids, sampling, told, pieces)
            except EngineError as error:
                tried.append(asked.id)
                part = completion_from_chunks(pieces)
                unknown = any(piece.version is None for piece in pieces)
                moved = self._engine.id not in tried  # with another of its requests
                if not error.retryable or not (moved or self._pool.move(self, tried)) or unknown:
                    raise
            else:
                interrupted += 1
                if part.finish is not FinishReason.ABORT or told is None or interrupted > MAX_INTERRUPTIONS:
                    return join_completions(kept, part)
                _emit_remaining(part, pieces, told)
            if part.sampled:
                kept = join_completions(kept, part)
                token_ids, sampling = token_ids + part.token_ids, continuation_sampling(sampling, part.sampled)
            if sampling.max_tokens < 1:
                return join_completions(None, replace(kept or part, finish=FinishReason.LENGTH))

    async def release(self) -> None:
        self._pool.left(self._engine)
        with contextlib.suppress(EngineError):
            await self._engine.release(self._name)

    @property
    def engine(self) -> HttpEngine:
        return self._engine

    def follow(self, engine: HttpEngine) -> None:
        self._engine = engine

    async def _ask(
        self,
        token_ids: tuple[int, ...],
        sampling: Sampling,
        told: Callable[[CompletionChunk], None] | None,
        pieces: list[CompletionChunk],
    ) -> Completion:
        self._requests += 1
        engine = self._engine

        def tell(piece: CompletionChunk) -> None:
            if wrong := wrong_tokens(piece.token_ids, piece.logprobs, self._pool.vocab):
                raise WrongAnswer(f"{engine.id}: {wrong}")
            pieces.append(piece)
            if told is not None:
                told(piece)

        request = GenerateRequest(f"{self._name}-{self._requests}", self._name, token_ids, sampling)
        answer = await engine.generate(request if told is None else replace(request, told=tell))
        if wrong := wrong_answer(answer, sampling, vocab=self._pool.vocab):
            raise WrongAnswer(f"{engine.id}: {wrong}")
        return answer


def _emit_remaining(part: Completion, pieces: list[CompletionChunk], told: Callable[[CompletionChunk], None]) -> None:
    """What of an interrupted answer was not told yet."""
    begin = sum(len(piece.token_ids) for piece in pieces)
    for span in part.spans:
        at = slice(max(begin, span.start), span.end)
        if at.start < at.stop:
            told(CompletionChunk(part.token_ids[at], part.logprobs[at], span.version))
