"""The price of a path for a trajectory in the plan's currency: the rate that its resources would otherwise yield.

The dual price λ of a resource is the trajectories/s that one more unit of it would buy. The price of a path, in
trajectories, is the sum over resources of the use by a turn (or a whole trajectory) times λ. With optimal flows every
path that a domain uses has the same price and no other path is cheaper (complementary slackness): the plan and the
router agree. Measured load moves the router away from the plan by the drift-plus-penalty rule: λ grows with backlog.

Everything here is linear and pure: floats in, floats out. A resource without a price is free.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from placement.performance import InstanceModel, ShapeModel
from placement.types import DualPrices, Role

__all__ = [
    "IDLE_SHARE",
    "DeploymentKey",
    "TurnWork",
    "TurnPrices",
    "ResourceUse",
    "disaggregated_use",
    "corrected_price",
    "aggregated_use",
]

_K = TypeVar("_K", bound=Hashable)

DeploymentKey = tuple[str, Role, int]
"""(pool, role, tp): one kind of deployment, as in `DualPrices.deployments`."""

IDLE_SHARE = 0.05
"""A deployment that is not scarce has λ = 0, and no backlog would ever make it dearer. It is corrected as if its λ were
this share of the highest one, so that a queue is felt there too; without a backlog it stays free."""


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """The resources that a turn, or a trajectory, uses on one path.

    `seconds`: instance-seconds by deployment. `kv`: token-seconds of KV memory held, by deployment (tokens of the size
    of the first one: sliding windows make later ones cheaper). `links`: GB moved, by (a, b) in sorted order.
    `in_flight_s`: seconds in flight.
    """

    seconds: Mapping[DeploymentKey, float] = field(default_factory=dict)
    kv: Mapping[DeploymentKey, float] = field(default_factory=dict)
    links: Mapping[tuple[str, str], float] = field(default_factory=dict)
    in_flight_s: float = 0.0

    def __add__(self, other: ResourceUse) -> ResourceUse:
        return ResourceUse(
            seconds=_sum(self.seconds, other.seconds),
            kv=_sum(self.kv, other.kv),
            links=_sum(self.links, other.links),
            in_flight_s=self.in_flight_s + other.in_flight_s,
        )

    def times(self, factor: float) -> ResourceUse:
        """The use of `factor` such turns."""
        return ResourceUse(
            seconds={k: v * factor for k, v in self.seconds.items()},
            kv={k: v * factor for k, v in self.kv.items()},
            links={k: v * factor for k, v in self.links.items()},
            in_flight_s=self.in_flight_s * factor,
        )


@dataclass(frozen=True, slots=True)
class TurnPrices:
    """Prices of paths: the plan's, corrected by how far behind each deployment is measured to be.

    `backlog` is work waiting over work that may wait (queued seconds per instance over the target), by deployment;
    absent: none. A router that knows the backlog of each instance uses `corrected_price` with `floor` for it.
    """

    prices: DualPrices
    backlog: Mapping[DeploymentKey, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, value in self.backlog.items():
            if not (math.isfinite(value) and value >= 0):
                pool, role, tp = key
                raise ValueError(
                    f"backlog of {role} tp {tp} on '{pool}' is {value} (rule: a finite number, at least 0)"
                )

    def second(self, key: DeploymentKey) -> float:
        """Price of one instance-second of a deployment, backlog included."""
        return corrected_price(self.prices.deployments.get(key, 0.0), self.backlog.get(key, 0.0), floor=self.floor)

    @property
    def floor(self) -> float:
        """The base price of a backlogged deployment that is not scarce."""
        return IDLE_SHARE * max(self.prices.deployments.values(), default=0.0)

    def of(self, use: ResourceUse) -> float:
        """Price of a path: Σ λ × use, in trajectories."""
        return math.fsum(
            [
                *(self.second(key) * seconds for key, seconds in use.seconds.items()),
                *(self.prices.kv.get(key, 0.0) * tokens for key, tokens in use.kv.items()),
                *(self.prices.links.get(ends, 0.0) * gb for ends, gb in use.links.items()),
                self.prices.in_flight * use.in_flight_s,
            ]
        )

    def measured(self, waiting_s: Mapping[DeploymentKey, float], *, target_s: float) -> TurnPrices:
        """The same prices at another backlog: `waiting_s` seconds of queued work per instance, against a target."""
        if not (math.isfinite(target_s) and target_s > 0):
            raise ValueError(f"target_s is {target_s} (rule: a finite number above 0)")
        return TurnPrices(self.prices, {key: seconds / target_s for key, seconds in waiting_s.items()})


@dataclass(frozen=True, slots=True)
class TurnWork:
    """The next turn of a trajectory: `new` tokens to prefill after `cached` ones, about `output` to generate."""

    new: float
    cached: float
    output: float


def aggregated_use(
    key: DeploymentKey, model: InstanceModel, shape: ShapeModel, turn: TurnWork, *, batch: float
) -> ResourceUse:
    """A turn prefilled and decoded on one instance that serves `batch` turns at a time. `cached` tokens are cached on
    that instance: after a change of engine, only the shared prefix."""
    seconds = model.turn_s(batch, turn.new, turn.cached, turn.output)
    held = _tokens(shape, turn.cached + turn.new + turn.output / 2)
    return ResourceUse({key: seconds}, {key: batch * seconds * held}, {}, batch * seconds)


def disaggregated_use(
    prefill: tuple[DeploymentKey, InstanceModel],
    decode: tuple[DeploymentKey, InstanceModel],
    shape: ShapeModel,
    turn: TurnWork,
    *,
    batch: float,
    gb_per_s: float,
    latency_s: float = 0.0,
    returned: float = 0.0,
) -> ResourceUse:
    """A turn prefilled on one instance and decoded on another, in a batch of `batch` there.

    The KV of the new tokens crosses to the decode engine, which holds the rest since the turn before; `returned` tokens
    (generated since then, or the whole context if the prefill engine kept nothing) cross back first.
    """
    (first, prefiller), (home, decoder) = prefill, decode
    prompt = turn.cached + turn.new
    gb = (shape.kv_bytes(prompt) - shape.kv_bytes(max(turn.cached - returned, 0.0))) / 1e9
    moving = gb / gb_per_s + latency_s * (2 if returned else 1)
    computing = prefiller.prefill_s(turn.new, turn.cached)
    decoding = turn.output * decoder.decode_step_s(batch, prompt + turn.output / 2)
    waiting = (computing + moving) * _tokens(shape, prompt)
    return ResourceUse(
        seconds={first: computing, home: decoding / batch},
        kv={first: waiting, home: waiting + decoding * _tokens(shape, prompt + turn.output / 2)},
        links={(min(first[0], home[0]), max(first[0], home[0])): gb},
        in_flight_s=computing + moving + decoding,
    )


def corrected_price(price: float, backlog: float, *, floor: float = 0.0) -> float:
    """λ ← λ × (1 + backlog/target), with `backlog` given in targets. A price below `floor` grows as the floor would."""
    return price + max(price, floor) * backlog


def _tokens(shape: ShapeModel, tokens: float) -> float:
    """KV of a sequence, in tokens of the size of the first one: the unit of `DualPrices.kv`."""
    return shape.kv_bytes(tokens) / shape.kv_bytes(1.0)


def _sum(a: Mapping[_K, float], b: Mapping[_K, float]) -> dict[_K, float]:
    return {key: a.get(key, 0.0) + b.get(key, 0.0) for key in [*a, *(k for k in b if k not in a)]}
