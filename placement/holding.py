"""Program rows for an in-flight window whose slots are held until a publish (`placement.window`).

A slot is held for `a × seconds + b × (training + publish)`, where `a` and `b` are the slopes at the plan's own figures.
The holding time is homogeneous of degree one in both, so that the tangent is exact there. Training takes `batch × work
/ devices` seconds with the number of devices as a variable, so that the row is a product of variables and not linear.
At a given step time it is linear: it fixes the holding time and the fewest devices of the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from placement.milp import Floats
from placement.sides import TrainerOption
from placement.window import HoldingSlopes, holding_slopes

if TYPE_CHECKING:
    from placement.program import PlacementProgram

__all__ = [
    "domain_slopes",
    "set_holding_times",
    "fits_window",
    "mean_seconds_in_flight",
    "fixed_trainer_size",
    "training_step_s",
    "window_occupancy",
    "add_window_rows",
]

MIN_SLOPE = 1e-2
"""Least slope in a trajectory's seconds: the exact slope is 0 where training alone takes longer than any group."""


MAX_LOSS = 1e-3
"""Share of started but untrained trajectories below which a plan need not account for them."""


def add_window_rows(p: PlacementProgram) -> None:
    """Add a row per domain, which binds nothing before `set_holding_times`. No rows without a window or a trainer."""
    problem, m = p.problem, p.matrix
    p.started = (1.0,) * len(p.tableau.weights)
    if problem.window is None or not p.trainers or not math.isfinite(problem.trajectories_in_flight):
        return
    for j in range(len(p.tableau.weights)):
        m.row(("window", j))
    for option in p.rewards:
        if option.unit is None and problem.functions is not None:
            waiting = problem.functions.overhead_s * p.scale / _slots_by_domain(p)[option.domain]
            m.add(("window", option.domain), [option.column], [waiting])


def _slots_by_domain(p: PlacementProgram) -> Floats:
    return p.problem.trajectories_in_flight * p.tableau.weights


def fixed_trainer_size(p: PlacementProgram, option: TrainerOption) -> float | None:
    """The given number of devices of a trainer; None if it is free."""
    train, low, high = p.problem.train, p.matrix.low[option.devices], p.matrix.high[option.devices]
    if low == high:
        return low
    return None if train is None or train.devices is None else float(train.devices)


def training_step_s(p: PlacementProgram, option: TrainerOption, devices: float) -> float:
    """Seconds of a training step on `devices` devices."""
    assert p.problem.train is not None, "there is a place to train"
    return p.problem.train.batch * (option.work / devices + option.fixed)


def mean_seconds_in_flight(p: PlacementProgram, x: Floats) -> Floats:
    """Mean seconds in flight, by domain."""
    flow, paths = np.maximum(x[p.first_path :], 0.0), p.active
    count, total = np.zeros(len(p.tableau.weights)), np.zeros(len(p.tableau.weights))
    np.add.at(count, paths.domain, flow)
    np.add.at(total, paths.domain, flow * paths.seconds)
    return total / np.maximum(count, 1e-300)


def domain_slopes(p: PlacementProgram, seconds: Floats, rest_s: float) -> tuple[HoldingSlopes, ...]:
    """The slopes of the holding time by domain, near these seconds in flight and of training and publish."""
    return tuple(
        holding_slopes(p.problem, domain, float(s), rest_s)
        for domain, s in zip(p.problem.domains, seconds, strict=True)
    )


def set_holding_times(
    p: PlacementProgram, at: Sequence[HoldingSlopes], train_s: float, publish_s: float, *, least_s: float | None = None
) -> None:
    """Set the rows to holding times with a training step of `train_s` seconds, and the trainer to at least the devices
    that such a step takes (or a step of `least_s`, if longer steps are allowed). If the trainer's size is given, its
    own step time counts instead."""
    assert p.problem.train is not None, "there is a place to train"
    m, each = p.matrix, p.scale / p.problem.trajectories_in_flight
    owns = [max(slope.own, MIN_SLOPE) / slope.started for slope in at]  # flows count trajectories that start
    for option in p.trainers:
        size = fixed_trainer_size(p, option)
        if size == 0:
            continue
        rest_s, least = train_s + publish_s, float(option.least)
        if size is not None:
            rest_s = training_step_s(p, option, size) + publish_s
        else:
            left = (least_s or train_s) / p.problem.train.batch - option.fixed
            least = max(least, option.work / left) if left > 0 else p.problem.pools[option.pool].count + 1.0
        terms = [slope.rest / own * rest_s * each for slope, own in zip(at, owns, strict=True)]
        before, fewest = p.held.get(option.pool, ([0.0] * len(terms), float(option.least)))
        for j, term in enumerate(terms):
            m.add(("window", j), [option.rate], [term - before[j]])
        if size is None:
            m.add(("train least", option.pool), [option.chosen], [fewest - least])
        p.held[option.pool] = (terms, least)
    for j, (own, slope) in enumerate(zip(owns, at, strict=True)):
        m.limit(("window", j), high=1.0 / own)
        more = float(p.tableau.weights[j]) * (p.started[j] - slope.started)
        m.add(("domain", j), [p.rate], [more])
        for g, column in p.mixed.items():
            m.add(("mix", j, g), [column], [more])
    p.slopes, p.started = tuple(owns), tuple(slope.started for slope in at)


def fits_window(p: PlacementProgram, x: Floats, train_s: float, publish_s: float) -> bool:
    """True if a solution's flows fit the window at these seconds. A plan that was made without the window fits only if
    no started trajectory is lost."""
    used, started = _occupancy(p, x, train_s + publish_s)
    return max(started) <= 1 + MAX_LOSS and used <= 1 + 1e-9


def window_occupancy(p: PlacementProgram, x: Floats, train_s: float, publish_s: float) -> float:
    """The share of its slots that a solution's flows hold at these seconds, of the domain with the largest share."""
    return _occupancy(p, x, train_s + publish_s)[0]


def _occupancy(p: PlacementProgram, x: Floats, rest_s: float) -> tuple[float, list[float]]:
    seconds = mean_seconds_in_flight(p, x)
    at = domain_slopes(p, seconds, rest_s)
    rate = float(x[p.rate]) * p.scale * p.tableau.weights
    held = np.array([slope.own * s + slope.rest * rest_s for slope, s in zip(at, seconds.tolist(), strict=True)])
    return float((rate * held / _slots_by_domain(p)).max()), [slope.started for slope in at]
