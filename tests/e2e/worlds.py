"""Environments of the end-to-end tests: two turns, no packages needed, and the ways in which a user's may break."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

from rollart.model import Observation, Step

WORDS = ("left", "down")


class Coin:
    """Says one word per turn; pays 1 for 'left'. A turn takes `turn_s`, and up to `spread_s` more by its seed."""

    def __init__(self, *, turns: int = 2, turn_s: float = 0.02, spread_s: float = 0.0, text: str = "move?") -> None:
        self._turns = turns
        self._turn_s = turn_s
        self._spread_s = spread_s
        self._wait_s = turn_s
        self._text = text
        self._turn = 0

    async def reset(self, seed: int) -> Observation:
        self._turn = 0
        self._wait_s = self._turn_s + self._spread_s * random.Random(seed).random()
        return self._observation()

    async def step(self, action: str) -> Step:
        await asyncio.sleep(self._wait_s)
        self._turn += 1
        won = action == WORDS[0]
        return Step(self._observation(), float(won), self._turn == self._turns, won, {"reference_answer": WORDS[0]})

    async def close(self) -> None:
        return None

    def _observation(self) -> Observation:
        return Observation(self._text, WORDS, 1)


class Waiting(Coin):
    """The first `free` games of each process begin at once; later ones leave a file `GATE.PID` and wait until the file
    `gate` is there."""

    begun: ClassVar[int] = 0

    def __init__(self, *, free: int, gate: str, **more: Any) -> None:
        super().__init__(**more)
        self._free, self._gate = free, Path(gate)

    async def reset(self, seed: int) -> Observation:
        Waiting.begun += 1
        if Waiting.begun > self._free:
            self._gate.with_suffix(f".{os.getpid()}").touch()
            while not self._gate.exists():
                await asyncio.sleep(0.02)
        return await super().reset(seed)


class Held(Coin):
    """Of every kind (by its turns) the first `free` games begin at once; later ones wait until the file `gate` is
    there: a test opens it when what it waits for has happened, however long that took. A game that is given up, as
    on a busy machine whose engine misses a health check, does not count: its trajectory plays another."""

    begun: ClassVar[Counter[int]] = Counter()

    def __init__(self, *, free: int, gate: str, turns: int, **more: Any) -> None:
        super().__init__(turns=turns, **more)
        self._kind, self._free, self._gate = turns, free, Path(gate)
        self._unfinished = 0

    async def reset(self, seed: int) -> Observation:
        self._give_up()
        while Held.begun[self._kind] >= self._free and not self._gate.exists():
            await asyncio.sleep(0.02)
        Held.begun[self._kind] += 1
        self._unfinished = 1
        return await super().reset(seed)

    async def step(self, action: str) -> Step:
        step = await super().step(action)
        self._unfinished = int(not step.done)
        return step

    async def close(self) -> None:
        self._give_up()

    def _give_up(self) -> None:
        Held.begun[self._kind] -= self._unfinished
        self._unfinished = 0


class BrokenReset(Coin):
    """Its service is down."""

    async def reset(self, seed: int) -> Observation:
        raise ConnectionError("the game server is down")


class Unmakeable(Coin):
    def __init__(self) -> None:
        raise RuntimeError("no display found")


def produce_for_ever(directory: str, seed: int) -> None:
    """A producer of an artefact that would outlive the controller if it could."""
    Path(directory, "begun").touch()
    time.sleep(3600)


class NeverCloses(Coin):
    """Its `close` hangs, as one that waits for a lost container does."""

    async def close(self) -> None:
        await asyncio.sleep(3600)


class Once(Coin):
    """Coins of which one, the first to take the file `mark`, goes wrong in its first step."""

    def __init__(self, *, mark: str, **more: Any) -> None:
        super().__init__(**more)
        self._mark = Path(mark)

    async def step(self, action: str) -> Step:
        try:
            self._mark.touch(exist_ok=False)
        except FileExistsError:
            return await super().step(action)
        await self.wrong()
        return await super().step(action)

    async def wrong(self) -> None:
        raise NotImplementedError


class Stubborn(Once):
    """Retries for ever, whatever happens to it."""

    async def wrong(self) -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except:  # noqa: E722 - as users write it
                pass


class Busy(Once):
    """Never yields."""

    async def wrong(self) -> None:
        while True:
            pass


class BusyForGood(Once):
    """Never yields, and swallows whatever is raised in it."""

    async def wrong(self) -> None:
        while True:
            try:
                while True:
                    pass
            except:  # noqa: E722 - as users write it
                pass


class CancelsItsHelper(Once):
    """Lets the cancellation of a task of its own out."""

    async def wrong(self) -> None:
        helper = asyncio.get_running_loop().create_task(asyncio.sleep(3600))
        helper.cancel()
        await helper


class Backtracks(Once):
    """Holds the interpreter's lock, so that no other thread runs."""

    async def wrong(self) -> None:
        re.match(r"(a+)+$", "a" * 60 + "b")


class Tools(Coin):
    """Starts a tool in a session of its own, once per process, and leaves its id in `note`."""

    started: ClassVar[bool] = False

    def __init__(self, *, note: str, **more: Any) -> None:
        super().__init__(**more)
        self._note = Path(note)

    async def reset(self, seed: int) -> Observation:
        if not Tools.started:
            Tools.started = True
            tool = subprocess.Popen(["sh", "-c", "sleep 3600 & wait"], start_new_session=True)
            self._note.with_suffix(f".{tool.pid}").touch()
        return await super().reset(seed)


class Leaking(Coin):
    """Keeps `mb` megabytes of every episode for ever."""

    kept: ClassVar[list[bytes]] = []

    def __init__(self, *, mb: int, **more: Any) -> None:
        super().__init__(**more)
        self._mb = mb

    async def reset(self, seed: int) -> Observation:
        Leaking.kept.append(b"x" * (self._mb * 10**6))
        return await super().reset(seed)
