"""Prediction of trajectory lengths from finished trajectories, for dispatch and lending.

StreamRL (arXiv 2504.15930) trains a small model to rank prompts by length; this module uses running quantiles instead:
of the prompt (the prompts of an epoch recur, and the members of a group finish one after another) and of its domain.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

WINDOW = 512
"""Finished trajectories per domain in the window of its quantiles: a P90 over this many has an error of
about 1.3 % of rank, and a policy whose answers grow is followed within a few steps."""

PROMPT_WINDOW = 32
"""The same per prompt: a few groups."""

PROMPTS = 16_384
"""Prompts remembered, the least recently finished dropped first: about 35 MB at the most."""

PRIOR = 2.0
"""Weight of the domain's quantile in a prompt's estimate, in trajectories: with a smaller weight one odd answer would
determine the rank; with a larger one a group of eight would not."""


class QuantileWindow:
    """Exact quantiles over the last `size` values; O(size) per value to keep them sorted, with a small constant."""

    __slots__ = ("_order", "_sorted", "size")

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a window of {size} values: at least 1")
        self.size = size
        self._order: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, value: float) -> None:
        self._order.append(value)
        bisect.insort(self._sorted, value)
        if len(self._order) > self.size:
            del self._sorted[bisect.bisect_left(self._sorted, self._order.popleft())]

    def quantile(self, q: float) -> float:
        """The value at rank ceil(q n); ValueError without values."""
        if not self._sorted:
            raise ValueError("no quantile of nothing: ask only where something finished")
        return _at(self._sorted, 0, q)


@dataclass(frozen=True, slots=True)
class LengthEstimate:
    """Expected tokens of a trajectory. `own` counts the finished trajectories of the prompt behind the estimate,
    `known` those of its domain."""

    p50: float
    p90: float
    own: int
    known: int


@dataclass(slots=True)
class LengthRanker:
    """Updated once per ended trajectory; estimates depend only on the recorded trajectories, in order.

    The lengths of trajectories that were stopped early are lower bounds: `stopped` records them only where they already
    exceed the estimate, so a batch that keeps its short members does not bias the estimates towards short lengths.
    """

    default_tokens: float = 512.0
    """The estimate before any trajectory has finished; P50 of the published workloads."""
    _domains: dict[str, QuantileWindow] = field(default_factory=dict)
    _all: QuantileWindow = field(default_factory=lambda: QuantileWindow(WINDOW))
    _prompts: OrderedDict[tuple[str, str], QuantileWindow] = field(default_factory=OrderedDict)

    def finished(self, prompt: str, domain: str, tokens: float) -> None:
        """A trajectory generated `tokens` and ended by itself. `prompt` identifies it within its domain (a hash)."""
        if not 0 <= tokens < math.inf:
            raise ValueError(f"{tokens} tokens: finite and not negative")
        self._all.add(tokens)
        if domain not in self._domains:
            self._domains[domain] = QuantileWindow(WINDOW)
        self._domains[domain].add(tokens)
        self._own(prompt, domain).add(tokens)

    def stopped(self, prompt: str, domain: str, tokens: float) -> None:
        """A trajectory was stopped after `tokens`: it was too long, stale or redundant."""
        if tokens > self.estimate(prompt, domain).p50:
            self._own(prompt, domain).add(tokens)

    def estimate(self, prompt: str, domain: str) -> LengthEstimate:
        """Quantiles of the domain, blended with the prompt's own on the log scale with weights PRIOR and n. Without
        data the estimate falls back: domain to all domains, all to `default_tokens`."""
        known = self._domains.get(domain, self._all)
        p50 = known.quantile(0.5) if known else self.default_tokens
        p90 = known.quantile(0.9) if known else self.default_tokens
        own = self._prompts.get((domain, prompt))
        if not own:
            return LengthEstimate(p50, p90, 0, len(known))
        a = _blend(own.quantile(0.5), len(own), p50)
        return LengthEstimate(a, max(_blend(own.quantile(0.9), len(own), p90), a), len(own), len(known))

    def _own(self, prompt: str, domain: str) -> QuantileWindow:
        key = (domain, prompt)
        if key not in self._prompts:
            self._prompts[key] = QuantileWindow(PROMPT_WINDOW)
            if len(self._prompts) > PROMPTS:
                self._prompts.popitem(last=False)
        self._prompts.move_to_end(key)
        return self._prompts[key]

    def overall(self, q: float) -> float:
        """Quantile of all finished trajectories in the window; `default_tokens` if there is none."""
        return self._all.quantile(q) if self._all else self.default_tokens


def conditional_quantile(lengths: Sequence[float], so_far: float, q: float) -> float | None:
    """The q-quantile of ascending lengths among those longer than `so_far`: the expected final length of a trajectory
    that has this length now. None if no length exceeds `so_far`: then only the trajectory's limit is known."""
    start = bisect.bisect_right(lengths, so_far)
    return _at(lengths, start, q) if start < len(lengths) else None


def _at(ascending: Sequence[float], start: int, q: float) -> float:
    if not 0 <= q <= 1:
        raise ValueError(f"quantile {q}: between 0 and 1")
    count = len(ascending) - start
    return ascending[start + max(math.ceil(q * count - 1e-9) - 1, 0)]


def _blend(own: float, count: int, known: float) -> float:
    """Weighted geometric mean: lengths are closer to log-normal than to normal."""
    return math.exp((count * math.log1p(own) + PRIOR * math.log1p(known)) / (count + PRIOR)) - 1.0
