"""Lockstep turns for the batch-level schedule: every live trajectory waits for the slowest environment of the turn."""

from __future__ import annotations

import asyncio

__all__ = ["FreeRunning", "TurnBarrier"]


class FreeRunning:
    """Trajectory-level rollout: no trajectory waits for another."""

    lockstep = False
    """True if `turn` can wait; hot callers check it first."""

    def join(self) -> None:
        return None

    def leave(self) -> None:
        return None

    async def turn(self) -> None:
        return None


class TurnBarrier(FreeRunning):
    """Owns one generation of waiters. `turn` waits until every member that joined has arrived or left; the last to
    arrive, or a leaver, unblocks them. Invariant: 0 <= arrived <= members.
    """

    lockstep = True

    def __init__(self) -> None:
        self._members = 0
        self._arrived = 0
        self._gate = asyncio.Event()

    def join(self) -> None:
        self._members += 1

    def leave(self) -> None:
        self._members -= 1
        self._open_if_all()

    async def turn(self) -> None:
        self._arrived += 1
        gate = self._gate
        self._open_if_all()
        try:
            await gate.wait()
        except asyncio.CancelledError:
            if not gate.is_set():
                self._arrived -= 1
            raise

    def _open_if_all(self) -> None:
        if self._arrived and self._arrived >= self._members:
            self._gate.set()
            self._gate = asyncio.Event()
            self._arrived = 0
