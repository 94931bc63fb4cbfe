"""Executes each idempotency key once, however often a caller with a lost connection resends it."""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["IdempotentResponse", "ResponseGone", "IdempotencyStore", "KeyReused"]


@dataclass(frozen=True, slots=True)
class IdempotentResponse:
    """A complete HTTP answer. `executed` False: the call was refused and not executed, so its key stays free."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    executed: bool = True


class KeyReused(Exception):
    """The key was used for another call."""


class ResponseGone(Exception):
    """The call of this key was abandoned and ended, or its answer is no longer kept. It is not repeated."""


@dataclass(slots=True, eq=False)
class _StoredResponse:
    digest: bytes
    task: asyncio.Task[IdempotentResponse]
    waiting: int = 0
    answer: IdempotentResponse | None = None
    ended_at: float = 0.0
    unattended: asyncio.TimerHandle | None = None


class IdempotencyStore:
    """Owns the keyed calls in flight and the answers of the calls that ended less than `keep_s` ago.

    `call` waits for the single execution of its key, which it starts or joins. A call whose last waiter has left
    continues for `linger_s`, during which a caller may return, and is then cancelled: hanging up still ends a call.
    Bounds: a key is remembered for `keep_s` after its end. Answers take at most `most_bytes`; the oldest are dropped
    first (their keys then raise `ResponseGone`). So no key is executed twice within `keep_s`.
    """

    def __init__(
        self,
        spawn: Callable[[Coroutine[Any, Any, IdempotentResponse]], asyncio.Task[IdempotentResponse]],
        *,
        keep_s: float = 30.0,
        linger_s: float = 1.0,
        most_bytes: int = 32 * 2**20,
    ) -> None:
        self._spawn = spawn
        self._keep_s = keep_s
        self._linger_s = linger_s
        self._most_bytes = most_bytes
        self._kept: dict[Hashable, _StoredResponse] = {}
        self._ended: OrderedDict[Hashable, _StoredResponse] = OrderedDict()
        self._answered: OrderedDict[Hashable, _StoredResponse] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    async def call(
        self, key: Hashable, digest: bytes, run: Callable[[], Coroutine[Any, Any, IdempotentResponse]]
    ) -> IdempotentResponse:
        """Execute or join the call of a key. `digest` is that of the whole call. Raises `KeyReused` if the key came
        with another digest before, `ResponseGone` if its answer is no longer available."""
        self._forget()
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = _StoredResponse(digest, self._spawn(run()))
            kept.task.add_done_callback(functools.partial(self._done, key, kept))
        if kept.digest != digest:
            raise KeyReused
        if kept.answer is not None:
            return kept.answer
        if kept.task.done():
            raise ResponseGone
        return await self._wait(kept)

    def close(self) -> None:
        """Forget all keys. The owner of the tasks ends them."""
        for kept in self._kept.values():
            if kept.unattended is not None:
                kept.unattended.cancel()
        self._kept.clear()
        self._ended.clear()
        self._answered.clear()

    async def _wait(self, kept: _StoredResponse) -> IdempotentResponse:
        kept.waiting += 1
        if kept.unattended is not None:
            kept.unattended.cancel()
            kept.unattended = None
        try:
            return await asyncio.shield(kept.task)
        except asyncio.CancelledError:
            if kept.task.cancelled() and not _is_cancelling():
                raise ResponseGone from None
            raise
        finally:
            kept.waiting -= 1
            if not kept.waiting and not kept.task.done():
                kept.unattended = asyncio.get_running_loop().call_later(self._linger_s, kept.task.cancel)

    def _done(self, key: Hashable, kept: _StoredResponse, task: asyncio.Task[IdempotentResponse]) -> None:
        if self._kept.get(key) is not kept:
            return
        if kept.unattended is not None:
            kept.unattended.cancel()
        if not task.cancelled() and task.exception() is None:
            answer = task.result()
            if not answer.executed:
                del self._kept[key]
                return
            kept.answer = answer
            self._bytes += len(answer.body)
            self._answered[key] = kept
        kept.ended_at = asyncio.get_running_loop().time()
        self._ended[key] = kept
        while self._bytes > self._most_bytes:
            _, oldest = self._answered.popitem(last=False)
            assert oldest.answer is not None
            self._bytes -= len(oldest.answer.body)
            oldest.answer = None

    def _forget(self) -> None:
        """Drop calls that ended more than `keep_s` ago."""
        before = asyncio.get_running_loop().time() - self._keep_s
        while self._ended:
            key, kept = next(iter(self._ended.items()))
            if kept.ended_at > before:
                return
            del self._ended[key]
            del self._kept[key]
            if self._answered.pop(key, None) is not None and kept.answer is not None:
                self._bytes -= len(kept.answer.body)


def _is_cancelling() -> bool:
    """True if this task itself is being cancelled, rather than its awaited task."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
