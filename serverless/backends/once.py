"""Calls of one idempotency key are executed once, however often a caller who lost its connection sends them again."""

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
    """A whole HTTP answer. `executed` False: nothing ran (it was refused), so its key stays free."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    executed: bool = True


class KeyReused(Exception):
    """The key was another call's."""


class ResponseGone(Exception):
    """The call of this key was begun and ended with its caller, or its answer is no longer kept. It is not repeated."""


@dataclass(slots=True, eq=False)
class _StoredResponse:
    digest: bytes
    task: asyncio.Task[IdempotentResponse]
    waiting: int = 0
    answer: IdempotentResponse | None = None
    ended_at: float = 0.0
    unattended: asyncio.TimerHandle | None = None


class IdempotencyStore:
    """Owns the keyed calls in flight and the answers of those that ended less than `keep_s` ago.

    `call` waits for the one execution of its key, its own or one that is under way. A call that everybody has left goes
    on for `linger_s`, in which its caller may come back, and is then cancelled: hanging up still ends a call.
    Bounds: a key is remembered for `keep_s` after its end, whatever else comes; of answers `most_bytes` are, oldest
    dropped first (their keys then answer `ResponseGone`). So within `keep_s` no key is executed twice.
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
        """`digest` is that of the whole call: `KeyReused` if the key came with another before, `ResponseGone` if its
        answer is not to be had any more."""
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
        """Forget everything. Whoever spawned the calls ends them."""
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
        """What ended long ago."""
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
    """Whether this task itself is being cancelled, and not what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
