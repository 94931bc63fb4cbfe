"""The hand-off queue of each decode engine: a bound on the prefills ahead of its free slots."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass, field

from rollart.model import EngineId
from rollart.policy.handing import HandoffDepth
from rollart.runtime.members import RegisteredEngine

__all__ = ["HandoffQueue"]


@dataclass(slots=True)
class _Queue:
    member: RegisteredEngine
    depth: HandoffDepth
    open: int = 0
    """Hand-offs whose KV is being computed, or waits for the decode leg."""
    line: deque[asyncio.Future[None]] = field(default_factory=deque)


class HandoffQueue:
    """Owns the slots of the queue. `enter` waits for a slot in the order of arrival, unblocked by hand-offs that end
    their prefill and by turns that leave the decode engine. Invariant: a hand-off is admitted while fewer than the
    depth are open beyond the engine's free slots, counting turns that wait there for a slot: the bound never idles the
    engine.

    Without the bound every turn routed to the engine is prefilled at once, and its KV occupies prefill engines for as
    long as the decode engine is busy.
    """

    def __init__(self, fixed: int | None, slots: int) -> None:
        """`fixed`: see `HandoffDepth`. `slots`: turns that an engine generates at a time."""
        self._fixed = fixed
        self._slots = slots
        self._queues: dict[EngineId, _Queue] = {}

    def full(self, member: RegisteredEngine) -> bool:
        """True if the next hand-off must wait."""
        queue = self._queue(member)
        queue.member = member  # a returning engine is a new object
        return bool(queue.line) or not self._room(queue)

    async def enter(self, member: RegisteredEngine) -> None:
        """Take a slot; `leave` frees it."""
        queue = self._queue(member)
        if not self.full(member):
            queue.open += 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.line.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                queue.open -= 1
            else:
                with contextlib.suppress(ValueError):  # `_pump` removed it already, in this iteration of the loop
                    queue.line.remove(place)
            self._pump(queue)
            raise

    def prefilled(self, member: RegisteredEngine, seconds: float) -> None:
        """Record the duration of a prefill for this engine."""
        self._queue(member).depth.prefilled(seconds)

    def leave(self, member: RegisteredEngine) -> None:
        """Free the slot of a hand-off that reached the decode engine, or failed."""
        queue = self._queue(member)
        queue.open -= 1
        self._pump(queue)

    def ended(self, member: RegisteredEngine) -> None:
        """Record that a turn left the engine, and admit waiting hand-offs."""
        queue = self._queues.get(member.engine.id)
        if queue is not None:
            queue.depth.ended(asyncio.get_running_loop().time(), idle=not member.running)
            self._pump(queue)

    def _room(self, queue: _Queue) -> bool:
        return queue.open + queue.member.running - self._slots < queue.depth.depth()

    def _pump(self, queue: _Queue) -> None:
        while queue.line and self._room(queue):
            place = queue.line.popleft()
            if not place.done():
                place.set_result(None)
                queue.open += 1

    def _queue(self, member: RegisteredEngine) -> _Queue:
        queue = self._queues.get(member.engine.id)
        if queue is None:
            queue = self._queues[member.engine.id] = _Queue(member, HandoffDepth(self._fixed))
        return queue
