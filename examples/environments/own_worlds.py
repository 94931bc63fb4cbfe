"""What the examples name: words for Gymnasium's lake; an environment of one's own, and what brings its images."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from rollart import Observation, Step

LAYOUTS = {"north": "bcde", "south": "edcb"}
"""Two layouts of a workshop, by the name of their image: which drawer each of a, b, c and d lies in."""

CACHE = Path(tempfile.gettempdir()) / "rollart-example-layouts"


def place(observation: Any) -> str:
    """FrozenLake's cell as the quickstart's tokenizer has words for it."""
    row, column = divmod(int(observation), 4)
    return f"<lake> at:{row},{column} move?"


class Workshop:
    """Two tools are asked for, each is in one of four drawers. The layout is an image that the host must have.

    `reusable`: a reset leaves nothing of the episode before, so `environments.reuse` applies.
    """

    reusable = True

    def __init__(self, turns: int = 2) -> None:
        self._turns = turns

    async def start(self) -> None:
        """What takes long and needs no seed: ahead of need with `environments.warm`."""
        await asyncio.sleep(0.1)

    def images(self, seed: int) -> list[str]:
        return [self._layout(seed)]

    async def reset(self, seed: int) -> Observation:
        drawers = json.loads((CACHE / self._layout(seed)).read_text())
        self._sign = "<spell>" if self._layout(seed) == "north" else "<lake>"
        self._asked = [(seed // 2 + turn) % 4 for turn in range(self._turns)]
        self._drawers, self._turn, self._found = drawers, 0, 0
        return self._shown()

    async def step(self, action: str) -> Step:
        right = action == self._drawers[self._asked[self._turn]]
        self._turn, self._found = self._turn + 1, self._found + right
        if self._turn < self._turns:
            return Step(self._shown(), float(right))
        return Step(Observation(""), float(right), done=True, success=self._found == self._turns)

    async def close(self) -> None:
        return None

    def _layout(self, seed: int) -> str:
        return sorted(LAYOUTS)[seed % 2]

    def _shown(self) -> Observation:
        return Observation(f"{self._sign} {'abcd'[self._asked[self._turn]]} =", actions=tuple("bcde"), max_tokens=1)


class Layouts:
    """Brings an image to this host: here a file is written, elsewhere a container's image is pulled."""

    async def images(self) -> list[str]:
        return [path.name for path in CACHE.glob("*") if path.name in LAYOUTS]

    async def ensure(self, image: str) -> int:
        text = json.dumps(list(LAYOUTS[image]))
        CACHE.mkdir(parents=True, exist_ok=True)
        part = CACHE / f"{image}.{id(self)}.part"
        part.write_text(text)
        part.replace(CACHE / image)  # whole or not at all: another host of this machine may read it
        return len(text)

    async def remove(self, image: str) -> None:
        (CACHE / image).unlink(missing_ok=True)
