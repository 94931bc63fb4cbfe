"""The use of an instance by one trajectory of a domain: seconds by phase, and KV held meanwhile.

A trajectory's context grows turn by turn, so its work is a sum over turns. Short sums are taken term by term; long ones
by Gauss–Legendre quadrature over the turn number, which is exact for polynomials in the context and within 1 % where a
phase changes from memory-bound to compute-bound between turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.performance import InstanceModel, ShapeModel
from placement.workload import DomainProfile

__all__ = [
    "AggregatedCost",
    "DecodeCost",
    "PrefillCost",
    "RepresentativeTurns",
    "aggregated_cost",
    "decode_cost",
    "prefill_cost",
    "representative_turns",
]

Floats = NDArray[np.float64]

EXACT_TURNS = 8
"""Sums of up to this many turns are taken term by term."""
QUADRATURE_NODES = 6
"""Quadrature points for the turns of a long trajectory after its second."""


@dataclass(frozen=True, slots=True)
class RepresentativeTurns:
    """Representative turns of a domain's mean trajectory: arrays over them; the sum of `weight` is the mean turns.

    `cached` tokens are in the KV cache before the turn, `new` are prefilled, `output` generated. KV in GB: `kv_cached`
    before the turn, `kv_prompt` with its prompt, `kv_middle` halfway through its output. `kv_wait` is the sum over the
    turns that another one follows of the KV held in between; `kv_prefix` that of the shared prefix. `kv_lent` is the
    sum over the turns of the prompt's KV that a prefill engine still holds while another engine decodes.
    """

    weight: Floats
    cached: Floats
    new: Floats
    output: float
    kv_cached: Floats
    kv_prompt: Floats
    kv_middle: Floats
    kv_wait: float
    kv_lent: float
    kv_prefix: float
    kv_longest: float
    prefix: float

    @property
    def count(self) -> float:
        return float(self.weight.sum())

    @property
    def kv_running(self) -> float:
        """Mean KV of a trajectory that is generating, GB."""
        return float(self.weight @ self.kv_middle) / self.count

    @property
    def context(self) -> float:
        """Mean context over all decode steps, tokens."""
        return float(self.weight @ (self.cached + self.new)) / self.count + self.output / 2

    @property
    def later(self) -> Floats:
        """`weight` without the first turn, which nothing precedes."""
        return np.concatenate([[0.0], self.weight[1:]])


def representative_turns(domain: DomainProfile, shape: ShapeModel) -> RepresentativeTurns:
    """The turns of the domain's mean trajectory. A fractional mean counts the last turn in part."""
    first, new, output = domain.prompt.mean, domain.new_tokens.mean, domain.output_tokens.mean
    prefix = first * domain.shared_prefix
    number, weight = _nodes(domain.turns.mean)

    def prompt(number: Floats) -> tuple[Floats, Floats]:
        """Tokens of these turns that are cached, and that are computed."""
        later = number > 1
        cached = np.where(later, first + output + (number - 2) * (new + output), prefix)
        # A turn without an observation still computes its last sampled token.
        return cached, np.where(later, max(new, 1.0), max(first - prefix, 1.0))

    cached, fresh = prompt(number)

    def kv(tokens: Floats) -> Floats:
        return np.array([shape.kv_bytes(float(t)) / 1e9 for t in tokens])

    after = kv(cached + fresh + output)
    followed = _nodes(domain.turns.mean - 1) if domain.turns.mean > 1 else (np.zeros(0), np.zeros(0))
    waiting = kv(first + output + (followed[0] - 1) * (new + output))
    prompts = kv(cached + fresh)
    lent = weight @ prompts
    if domain.last_turn_known:
        lent = followed[1] @ kv(sum(prompt(followed[0]), np.zeros(len(followed[0]))))
    return RepresentativeTurns(
        weight=weight,
        cached=cached,
        new=fresh,
        output=output,
        kv_cached=kv(cached),
        kv_prompt=prompts,
        kv_middle=kv(cached + fresh + output / 2),
        kv_wait=float(followed[1] @ waiting),
        kv_lent=float(lent),
        kv_prefix=shape.kv_bytes(prefix) / 1e9,
        kv_longest=float(after.max()),
        prefix=prefix,
    )


def _nodes(turns: float) -> tuple[Floats, Floats]:
    """Turn numbers and weights whose weighted sum stands for the sum over `turns` turns."""
    if turns <= EXACT_TURNS:
        number = np.arange(1.0, np.ceil(turns) + 1)
        weight = np.ones_like(number)
        weight[-1] = turns - (len(number) - 1)
        return number, weight
    # The second turn is taken as it is: half a turn before it, a context would be extrapolated below nothing.
    x, w = np.polynomial.legendre.leggauss(QUADRATURE_NODES)
    half = (turns - 2) / 2
    number = np.concatenate([[1.0, 2.0], 2.5 + half * (1 + x)])
    return number, np.concatenate([[1.0, 1.0], w * half])


@dataclass(frozen=True, slots=True)
class AggregatedCost:
    """At each batch size, of one trajectory: instance-seconds, seconds in generation, GB·s of KV while generating."""

    batch: Floats
    load: Floats
    seconds: Floats
    kv_seconds: Floats


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Of one trajectory: instance-seconds of prefill, and GB·s of KV (of the prompts) meanwhile."""

    load: float
    kv_seconds: float


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """At each batch size, of one trajectory: instance-seconds of decode, and seconds in it."""

    batch: Floats
    load: Floats
    seconds: Floats


def batch_sizes(limit: float, most: int) -> Floats:
    """Operating points 1, 2, 4 … up to the lower of both bounds, which is one itself."""
    top = min(limit, float(most))
    grid = [1.0]
    while grid[-1] * 2 < top:
        grid.append(grid[-1] * 2)
    if top > grid[-1]:
        grid.append(top)
    return np.array(grid)


def aggregated_cost(
    instance: InstanceModel, turns: RepresentativeTurns, batch: Floats, *, recompute: bool
) -> AggregatedCost:
    """Every turn prefilled and decoded on one instance. `recompute`: the KV is dropped between turns."""
    cached = np.full_like(turns.cached, turns.prefix) if recompute else turns.cached
    new = turns.cached + turns.new - cached
    rows = list(zip(new.tolist(), cached.tolist(), strict=True))
    turn = np.array([[instance.turn_s(b, n, c, turns.output) for n, c in rows] for b in batch.tolist()])
    load = turn @ turns.weight
    return AggregatedCost(batch, load, batch * load, batch * (turn @ (turns.weight * turns.kv_middle)))


def prefill_cost(instance: InstanceModel, turns: RepresentativeTurns) -> PrefillCost:
    """Every turn's new tokens prefilled, the context before them cached."""
    rows = zip(turns.new.tolist(), turns.cached.tolist(), strict=True)
    seconds = np.array([instance.prefill_s(n, c) for n, c in rows])
    return PrefillCost(float(seconds @ turns.weight), float(seconds @ (turns.weight * turns.kv_prompt)))


def decode_cost(instance: InstanceModel, turns: RepresentativeTurns, batch: Floats) -> DecodeCost:
    """Every output token decoded: the decode engine generates the first one again, as vLLM's does. A batch mixes
    trajectories at all turns, so its step is that of the mean context."""
    step = np.array([instance.decode_step_s(b, turns.context) for b in batch.tolist()])
    seconds = turns.count * turns.output * step
    return DecodeCost(batch, seconds / batch, seconds)
