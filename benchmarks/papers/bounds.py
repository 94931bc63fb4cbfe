"""Upper bounds on the gain of asynchrony: ROLL Flash's theory (arXiv 2510.11345), as functions.

Notation of the paper: K workers; N samples per training step; mu and L, the mean and the longest generation time of a
sample; alpha, the asynchronous ratio (versions by which a sample may be behind); E epochs over a batch; beta, the share
of the workers that trains. A sample's generation time is independent of the load: engines do not slow each other down.
Times are in seconds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def lpt_order(lengths: Sequence[float]) -> list[int]:
    """Indices, longest first; ties keep the given order."""
    return sorted(range(len(lengths)), key=lambda n: (-lengths[n], n))


def lpt(lengths: Sequence[float], workers: int) -> list[list[int]]:
    """Longest processing time first: each item goes to the worker that is free first (ties: the lowest number). Returns
    the indices per worker in execution order. Its makespan is at most 4/3 - 1/(3 m) of the optimum (Graham 1969)."""
    free = _workers(workers)
    taken: list[list[int]] = [[] for _ in range(workers)]
    for n in lpt_order(lengths):
        at, worker = free[0]
        heapq.heapreplace(free, (at + lengths[n], worker))
        taken[worker].append(n)
    return taken


def makespan(durations: Iterable[float], workers: int) -> float:
    """Completion time of the last item if each free worker takes the next item in the given order (list scheduling)."""
    free = _workers(workers)
    end = 0.0
    for duration in durations:
        at, worker = free[0]
        heapq.heapreplace(free, (at + duration, worker))
        end = max(end, at + duration)
    return end


def _workers(count: int) -> list[tuple[float, int]]:
    if count < 1:
        raise ValueError(f"{count} workers: at least one")
    return [(0.0, n) for n in range(count)]


def makespan_bound(mean_s: float, longest_s: float, *, workers: int, samples: int) -> float:
    """Upper bound in seconds on processing Q samples, in any order, on K workers that each take the next sample when
    free: Q mu / K + L. (The last sample to finish started when no worker was free, so after at most Q mu / K.)"""
    if workers < 1 or samples < 0:
        raise ValueError(f"{samples} samples on {workers} workers: at least one worker, no negative samples")
    if not 0 <= mean_s <= longest_s < math.inf:
        raise ValueError(f"mean {mean_s} s, longest {longest_s} s: 0 <= mean <= longest, finite")
    return samples * mean_s / workers + longest_s if samples else 0.0


def sample_bound(mean_s: float, longest_s: float, *, workers: int, samples: int, alpha: float = 0.0) -> float:
    """The same bound per sample where `alpha + 1` steps of N samples are generated without a pause between them: mu / K
    + L / ((alpha + 1) N). Alpha 0 is synchronous."""
    if alpha < 0 or samples < 1:
        raise ValueError(f"alpha {alpha}, {samples} samples per step: alpha >= 0, at least one sample")
    makespan_bound(mean_s, longest_s, workers=workers, samples=samples)
    return mean_s / workers + longest_s / ((alpha + 1) * samples)


@dataclass(frozen=True, slots=True)
class AsyncStep:
    """The costs of one training step. `generate_s` and `train_s` are means per sample (one epoch) on one worker;
    `longest_s` is the longest generation."""

    workers: int
    samples: int
    generate_s: float
    longest_s: float
    train_s: float
    epochs: int = 1

    def __post_init__(self) -> None:
        makespan_bound(self.generate_s, self.longest_s, workers=self.workers, samples=self.samples)
        if self.samples < 1 or self.epochs < 1 or not 0 < self.train_s < math.inf or self.generate_s <= 0:
            raise ValueError(f"{self}: at least one sample and one epoch, positive times")

    @property
    def work_s(self) -> float:
        """Seconds of a step in which every worker is always busy: a lower bound for every schedule."""
        return self.samples * (self.generate_s + self.epochs * self.train_s) / self.workers

    def sync_s(self) -> float:
        """Upper bound of a synchronous step, every worker doing both: (N/K)(mu_gen + E mu_train) + L_gen."""
        return self.work_s + self.longest_s

    def async_s(self, alpha: float) -> float:
        """Upper bound of an asynchronous step at `train_share(alpha)`: the tail is paid once per alpha + 1 steps."""
        return self.work_s + self._tail(alpha)

    def train_share(self, alpha: float) -> float:
        """beta*, the share of the workers that trains so that neither side's bound is above `async_s`; in (0, 1).
        E N mu_train / (N mu_gen + K L_gen / (alpha + 1) + E N mu_train)."""
        train = self.epochs * self.samples * self.train_s
        return train / (self.samples * self.generate_s + self.workers * self._tail(alpha) + train)

    def sides(self, alpha: float, train_workers: float) -> tuple[float, float]:
        """Bounds of generation and of training per step when `train_workers` workers train and the others generate."""
        if not 0 < train_workers < self.workers:
            raise ValueError(f"{train_workers} of {self.workers} workers train: some must, and some must generate")
        generate = self.samples * self.generate_s / (self.workers - train_workers) + self._tail(alpha)
        return generate, self.epochs * self.samples * self.train_s / train_workers

    def train_workers(self, alpha: float) -> int:
        """The whole number of training workers with the smallest bound of a step; ties keep more workers generating.
        ValueError with fewer than two workers: they cannot be divided."""
        if self.workers < 2:
            raise ValueError(f"{self.workers} worker cannot both generate and train at once: at least 2")
        return min(range(1, self.workers), key=lambda n: (max(self.sides(alpha, n)), n))

    def speedup(self, alpha: float) -> float:
        """Ratio of the two upper bounds, synchronous over asynchronous; 1 at alpha 0."""
        return self.sync_s() / self.async_s(alpha)

    def max_speedup(self) -> float:
        """The limit of `speedup` as alpha grows: 1 + K L_gen / (N (mu_gen + E mu_train))."""
        return 1.0 + self.longest_s / self.work_s

    def _tail(self, alpha: float) -> float:
        if alpha < 0:
            raise ValueError(f"alpha {alpha}: not negative")
        return self.longest_s / (alpha + 1)
