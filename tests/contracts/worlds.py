"""Environments of the contract suite: one with varied values, another that obeys its actions, faults included."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import random
import sys
import threading
import time
from typing import Any, ClassVar

from rollart.model import Observation, Step

METADATA: dict[str, Any] = {
    "pair": (1, "two", None),
    "bytes": b"\x00\xff",
    "large": 2**100,
    "nested": {"list": [0.1, True, {"$": "not a mark"}], 7: "a key that is no text"},
    "set": {1, 2},
    "nan": math.inf,
    "text": "½ \ud800 \n",
}


class Tale:
    """Shows numbers drawn from its seed and pays their value; over after `turns`."""

    def __init__(self, *, turns: int = 3) -> None:
        self._turns = turns

    async def reset(self, seed: int) -> Observation:
        self._random, self._turn = random.Random(seed), 0
        return self._shown()

    async def step(self, action: str) -> Step:
        await asyncio.sleep(0)
        self._turn += 1
        done = self._turn == self._turns
        metadata = {**METADATA, "said": action, "turn": self._turn} if done else {}
        return Step(self._shown(), self._random.random(), done, self._random.random() > 0.5 if done else None, metadata)

    async def close(self) -> None:
        return None

    def _shown(self) -> Observation:
        return Observation(f"{self._turn}: {self._random.random()}", ("left", "down"), self._turn + 1)


class Told:
    """Obeys its actions. Actions that end the process are for hosts alone."""

    live: ClassVar[int] = 0

    def __init__(self) -> None:
        self._open = False

    async def reset(self, seed: int) -> Observation:
        if not self._open:
            self._open = True
            type(self).live += 1
        return Observation("ready")

    async def step(self, action: str) -> Step:
        word, _, rest = action.partition(" ")
        match word:
            case "raise":
                raise KeyError(rest)
            case "nothing":
                return None  # type: ignore[return-value]
            case "nan":
                return Step(Observation(""), math.nan)
            case "object":
                return Step(Observation(""), metadata={"object": threading.Lock()})
            case "hang":
                await asyncio.Event().wait()
            case "cancel":
                raise asyncio.CancelledError
            case "leave":
                sys.exit(3)
            case "print":
                print("x" * 200_000)
            case "block":
                time.sleep(float(rest))
            case "end":
                return Step(Observation("over"), 1.0, True, True)
            case "die":
                os._exit(int(rest)) if rest else ctypes.string_at(0)
        return Step(Observation(f"{action} {type(self).live} {threading.current_thread() is threading.main_thread()}"))

    async def close(self) -> None:
        if self._open:
            self._open = False
            type(self).live -= 1


class Blocking(Told):
    """The same in a thread of its own."""

    blocking = True
    live = 0
