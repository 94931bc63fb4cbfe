"""Environments with Gymnasium's interface, for the adapter's tests: a text game, a slow one, liars."""

from __future__ import annotations

import threading
from typing import Any

import gymnasium
import numpy
from gymnasium import spaces

__all__ = ["Bits", "GuessText", "Liar", "Masked", "Stuck", "bits_of", "told"]


class GuessText:
    """GEM's interface: text in, text out, no spaces. The secret is the seed's."""

    def __init__(self, most: int = 8) -> None:
        self.most = most
        self.secret = self.steps = 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.secret, self.steps = (seed or 0) % self.most, 0
        return f"guess 0 to {self.most - 1}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "explode":
            raise RuntimeError("the game broke")
        self.steps += 1
        if action == str(self.secret):
            return "yes", 1.0, True, False, {"success": True, "board": object()}
        return "no", 0.0, False, self.steps == 3, {"success": False}


class Bits(gymnasium.Env[Any, Any]):
    """Actions that need a parser: three switches. Pays how many agree with the seed's."""

    observation_space = spaces.Dict({"want": spaces.MultiBinary(3), "at": spaces.Box(-1, 1, (2,))})
    action_space = spaces.MultiBinary(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.want = self.np_random.integers(0, 2, 3)
        return {"want": self.want, "at": numpy.array([0.5, -0.123456])}, {}

    def step(self, action: Any) -> Any:
        return {"want": self.want, "at": numpy.zeros(2)}, float((action == self.want).sum()), True, False, {}


class Masked(gymnasium.Env[Any, Any]):
    """Says itself which actions are legal: those not taken before."""

    observation_space = spaces.Text(16)
    action_space = spaces.Discrete(3, start=1)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.free = numpy.ones(3, dtype=numpy.int8)
        return "pick", {"action_mask": self.free}

    def step(self, action: Any) -> Any:
        self.free[action - 1] = 0
        return "pick", 0.0, not self.free.any(), False, {"action_mask": self.free}


class Liar:
    """Answers in the shapes of the old gym."""

    def reset(self, seed: int | None = None) -> Any:
        return "hello", {}

    def step(self, action: str) -> Any:
        return "four values", 0.0, False, {}


class Stuck:
    """A step that returns only when it is let go."""

    let_go = threading.Event()
    closed = threading.Event()

    def reset(self, seed: int | None = None) -> Any:
        return "wait", {}

    def step(self, action: str) -> Any:
        self.let_go.wait()
        return "moved", 0.0, False, False, {}

    def close(self) -> None:
        self.closed.set()


def bits_of(text: str) -> Any:
    """A parser."""
    return numpy.array([int(word) for word in text.split()], dtype=numpy.int8)


def told(observation: Any) -> str:
    """A renderer."""
    return f"told {observation}"
