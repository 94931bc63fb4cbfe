"""The engine pool of a standalone proxy: each session stays on one engine, which holds its prefix KV."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from rollart.adapters.engines.http import HttpEngine
from rollart.errors import EngineError, WrongAnswer
from rollart.model import Completion, CompletionChunk, EngineId, FinishReason, GenerateRequest, Sampling
from rollart.policy.continuing import completion_from_chunks, continuation_sampling, join_completions
from rollart.policy.engine_health import wrong_answer, wrong_tokens

MAX_INTERRUPTIONS = 8
"""Maximum resumptions of a streamed generation that its engine aborted, as some weight updates do. The resumed request
waits in the engine until the engine resumes."""


class EnginePool:
    """Assigns every session to the engine with the fewest sessions; `open` once, then any number of sessions.

    `vocab`: size of the model's vocabulary, the upper bound of valid token ids; None if unknown. The pool does not
    know which versions were published."""

    def __init__(self, engines: Sequence[HttpEngine], *, vocab: int | None = None) -> None:
        self.vocab = 1 << 31 if vocab is None else vocab  # larger than any vocabulary
        self._engines = tuple(engines)
        self.sessions = {e.id: 0 for e in self._engines}
        """Number of sessions by engine."""
        self.context = 0

    async def open(self) -> None:
        """Query the engines' context sizes. EngineError if one does not answer."""
        self.context = min(await asyncio.gather(*(e.context() for e in self._engines)))

    async def paused(self) -> bool:
        """True if an engine is paused, e.g. for new weights. EngineError if no engine answers."""
        found = await asyncio.gather(*(e.paused() for e in self._engines), return_exceptions=True)
        failed = [f for f in found if isinstance(f, BaseException)]
        if len(failed) == len(found):
            raise failed[0]
        return any(f is True for f in found)

    def session(self, name: str) -> PooledSession:
        engine = self.assign()
        assert engine is not None
        return PooledSession(self, engine, name)

    def assign(self, tried: Sequence[EngineId] = ()) -> HttpEngine | None:
        """The engine with the fewest sessions, for one session more; None if all were tried."""
        others = [e for e in self._engines if e.id not in tried]
        engine = min(others, key=lambda e: (self.sessions[e.id], e.id), default=None)
        if engine is not None:
            self.sessions[engine.id] += 1
        return engine

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()


class PooledSession:
    """A session's engine. Implements `SessionPolicy`.

    If the engine fails, the request continues on another engine, if there is one, and the session moves with it. The
    tokens emitted so far remain the start of the completion: they are sent as part of the prompt and not emitted
    again. If their policy version is unknown (vLLM reports it only at the end), the request fails: the tokens cannot
    be labelled, and they cannot be retracted."""

    def __init__(self, pool: EnginePool, engine: HttpEngine, name: str) -> None:
        self._pool, self.engine, self._name = pool, engine, name
        self.context = pool.context
        self._requests = 0

    async def generate(
        self, token_ids: tuple[int, ...], sampling: Sampling, on_chunk: Callable[[CompletionChunk], None] | None = None
    ) -> Completion:
        kept: Completion | None = None
        tried: list[EngineId] = []
        interrupted = 0
        while True:
            pieces: list[CompletionChunk] = []
            asked = self.engine
            try:
                part = await self._ask(token_ids, sampling, on_chunk, pieces)
            except EngineError as error:
                tried.append(asked.id)
                part = completion_from_chunks(pieces)
                if not error.retryable:
                    raise
                if self.engine.id in tried:  # otherwise another request of this session has moved it
                    other = self._pool.assign(tried)
                    if other is None:
                        raise
                    self._pool.sessions[self.engine.id] -= 1
                    self.engine = other
                if any(piece.version is None for piece in pieces):
                    raise
            else:
                interrupted += 1
                if part.finish is not FinishReason.ABORT or on_chunk is None or interrupted > MAX_INTERRUPTIONS:
                    return join_completions(kept, part)
                _emit_remaining(part, pieces, on_chunk)
            if part.sampled:
                kept = join_completions(kept, part)
                token_ids, sampling = token_ids + part.token_ids, continuation_sampling(sampling, part.sampled)
            if sampling.max_tokens < 1:
                return join_completions(None, replace(kept or part, finish=FinishReason.LENGTH))

    async def release(self) -> None:
        self._pool.sessions[self.engine.id] -= 1
        with contextlib.suppress(EngineError):
            await self.engine.release(self._name)

    async def _ask(
        self,
        token_ids: tuple[int, ...],
        sampling: Sampling,
        on_chunk: Callable[[CompletionChunk], None] | None,
        pieces: list[CompletionChunk],
    ) -> Completion:
        self._requests += 1
        engine = self.engine

        def forward(piece: CompletionChunk) -> None:
            if wrong := wrong_tokens(piece.token_ids, piece.logprobs, self._pool.vocab):
                raise WrongAnswer(f"{engine.id}: {wrong}")
            pieces.append(piece)
            if on_chunk is not None:
                on_chunk(piece)

        request = GenerateRequest(f"{self._name}-{self._requests}", self._name, token_ids, sampling)
        answer = await engine.generate(request if on_chunk is None else replace(request, on_chunk=forward))
        if wrong := wrong_answer(answer, sampling, vocab=self._pool.vocab):
            raise WrongAnswer(f"{engine.id}: {wrong}")
        return answer


def _emit_remaining(
    part: Completion, pieces: list[CompletionChunk], on_chunk: Callable[[CompletionChunk], None]
) -> None:
    """Emit the tokens of an interrupted generation that were not emitted yet."""
    begin = sum(len(piece.token_ids) for piece in pieces)
    for span in part.spans:
        at = slice(max(begin, span.start), span.end)
        if at.start < at.stop:
            on_chunk(CompletionChunk(part.token_ids[at], part.logprobs[at], span.version))
