"""Distributions of trajectory properties, and the generators that draw from them.

Every entity has its own generator, made from a 64-bit hash of the run's seed and the entity's id, so that a draw is a
pure function of the two: other entities and their order change nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

__all__ = ["Constant", "Distribution", "Empirical", "LogNormal", "Normal", "ParetoTailed", "entity_generator"]


class Distribution(Protocol):
    """A number at least 0. `draw` uses the generator alone."""

    def draw(self, rng: Random) -> float: ...


def entity_generator(*parts: str | int) -> Random:
    """The generator of an entity."""
    text = ":".join(map(str, parts)).encode()
    return Random(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big"))


@dataclass(frozen=True, slots=True)
class Constant:
    value: float

    def draw(self, rng: Random) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class Normal:
    """Normal, clipped at 0, as RollArt's experiment with N(10, σ) seconds of environment needs (RA-12)."""

    mean: float
    sigma: float

    def draw(self, rng: Random) -> float:
        return max(0.0, rng.gauss(self.mean, self.sigma))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal by its median and the standard deviation of its logarithm, clipped to [low, high]."""

    median: float
    sigma: float
    low: float = 0.0
    high: float = math.inf

    def draw(self, rng: Random) -> float:
        drawn = self.median * math.exp(self.sigma * rng.gauss(0.0, 1.0))
        if drawn < self.low:
            return self.low
        return drawn if drawn < self.high else self.high

    @staticmethod
    def of_quartiles(median: float, p75: float, *, high: float = math.inf) -> LogNormal:
        """0.6745 is the normal distribution's third quartile."""
        return LogNormal(median, math.log(p75 / median) / 0.6745, high=high)


@dataclass(frozen=True, slots=True)
class ParetoTailed:
    """A body, and with probability `share` a Pareto tail from `start` with exponent `alpha`, cut at `high` (RA-5)."""

    body: Distribution
    share: float
    start: float
    alpha: float
    high: float = math.inf

    def draw(self, rng: Random) -> float:
        if rng.random() >= self.share:
            return self.body.draw(rng)
        return min(self.high, self.start * math.pow(1.0 - rng.random(), -1.0 / self.alpha))


@dataclass(frozen=True, slots=True)
class Empirical:
    """One of the samples, each as likely as the others."""

    samples: Sequence[float]

    def __post_init__(self) -> None:
        if not self.samples or min(self.samples) < 0:
            raise ValueError(f"{len(self.samples)} samples (rule: at least one, none below 0)")

    def draw(self, rng: Random) -> float:
        return self.samples[int(rng.random() * len(self.samples))]
