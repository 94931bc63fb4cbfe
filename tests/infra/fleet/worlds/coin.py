"""Heads or tails."""

from rollart import Observation, Step


class Coin:
    async def reset(self, seed: int) -> Observation:
        self._heads = bool(seed % 2)
        return Observation("heads or tails?")

    async def step(self, action: str) -> Step:
        right = (action == "heads") == self._heads
        return Step(Observation(""), float(right), done=True, success=right)

    async def close(self) -> None:
        return None
