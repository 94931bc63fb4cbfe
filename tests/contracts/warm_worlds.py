"""Environments that are made in advance and report their history."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import ClassVar

from rollart.model import Observation, Step

__all__ = ["Again", "Once", "Pictured"]


class Once:
    """Shows its own number, whether it was started, and the episodes that it played. `break` breaks it."""

    numbers: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(self) -> None:
        self.number, self.began, self.closed = next(self.numbers), False, False
        self.seeds: list[int] = []

    async def start(self) -> None:
        self.began = True

    async def reset(self, seed: int) -> Observation:
        if self.closed:
            raise RuntimeError("it was closed")
        self.seeds.append(seed)
        return Observation(f"{self.number} {self.began} {self.seeds}")

    async def step(self, action: str) -> Step:
        if action == "break":
            raise RuntimeError("broken")
        return Step(Observation(""), done=action == "end")

    async def close(self) -> None:
        self.closed = True


class Again(Once):
    """The same, reset for another episode."""

    reusable = True


class Pictured(Once):
    """Needs the image of its seed on its host, and shows its content."""

    def images(self, seed: int) -> list[str]:
        return ["base", f"task{seed % 3}"]

    async def reset(self, seed: int) -> Observation:
        return Observation((Path(os.environ["ROLLART_TEST_IMAGES"]) / f"task{seed % 3}" / "words").read_text())
