"""Rows of the program for a window whose places are held until a publish (`placement.window`).

A place is held for `a × seconds + b × (training + publish)`, where `a` and `b` are the slopes at the plan's own
figures: that time grows in proportion with both, so that the tangent meets it there. Training takes `batch × work /
devices` seconds, and devices are a variable: a product of two, so not linear. At a given time of a step it is: places
are held so long, and the trainer has at least the devices that this takes.
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
"""Least slope in a trajectory's seconds: where training alone takes longer than any group, it is none."""


MAX_LOSS = 1e-3
"""Trajectories started beyond those trained below which a plan need not be made with them."""


def add_window_rows(p: PlacementProgram) -> None:
    """A row per domain, which binds nothing before `set_holding_times`. None without a window or nobody who trains."""
    problem, m = p.problem, p.matrix
    p.started = (1.0,) * len(p.tableau.weights)
    if problem.window is None or not p.trainers or not math.isfinite(problem.trajectories_in_flight):
        return
    for j in range(len(p.tableau.weights)):
        m.row(("window", j))
    for place in p.rewards:
        if place.unit is None and problem.functions is not None:
            waiting = problem.functions.overhead_s * p.scale / _slots_by_domain(p)[place.domain]
            m.add(("window", place.domain), [place.column], [waiting])


def _slots_by_domain(p: PlacementProgram) -> Floats:
    return p.problem.trajectories_in_flight * p.tableau.weights


def fixed_trainer_size(p: PlacementProgram, place: TrainerOption) -> float | None:
    """Devices that a trainer's place has to have; None if that is open."""
    train, low, high = p.problem.train, p.matrix.low[place.devices], p.matrix.high[place.devices]
    if low == high:
        return low
    return None if train is None or train.devices is None else float(train.devices)


def training_step_s(p: PlacementProgram, place: TrainerOption, devices: float) -> float:
    """Seconds of a training step on so many devices."""
    assert p.problem.train is not None, "there is a place to train"
    return p.problem.train.batch * (place.work / devices + place.fixed)


def mean_seconds_in_flight(p: PlacementProgram, x: Floats) -> Floats:
    """Mean seconds under way, by domain."""
    flow, paths = np.maximum(x[p.first_path :], 0.0), p.active
    count, total = np.zeros(len(p.tableau.weights)), np.zeros(len(p.tableau.weights))
    np.add.at(count, paths.domain, flow)
    np.add.at(total, paths.domain, flow * paths.seconds)
    return total / np.maximum(count, 1e-300)


def domain_slopes(p: PlacementProgram, seconds: Floats, rest_s: float) -> tuple[HoldingSlopes, ...]:
    """By domain how long places are held near these seconds under way, and of training and publish."""
    return tuple(
        holding_slopes(p.problem, domain, float(s), rest_s)
        for domain, s in zip(p.problem.domains, seconds, strict=True)
    )


def set_holding_times(
    p: PlacementProgram, at: Sequence[HoldingSlopes], train_s: float, publish_s: float, *, least_s: float | None = None
) -> None:
    """Places are held for a training step of `train_s` seconds, and the trainer is at least as large as that takes (or
    as `least_s` does: what it is for longer steps). Where its size is given, its own seconds count instead."""
    assert p.problem.train is not None, "there is a place to train"
    m, each = p.matrix, p.scale / p.problem.trajectories_in_flight
    owns = [max(slope.own, MIN_SLOPE) / slope.started for slope in at]  # flows are of those that start
    for place in p.trainers:
        size = fixed_trainer_size(p, place)
        if size == 0:
            continue
        rest_s, least = train_s + publish_s, float(place.least)
        if size is not None:
            rest_s = training_step_s(p, place, size) + publish_s
        else:
            left = (least_s or train_s) / p.problem.train.batch - place.fixed
            least = max(least, place.work / left) if left > 0 else p.problem.pools[place.pool].count + 1.0
        terms = [slope.rest / own * rest_s * each for slope, own in zip(at, owns, strict=True)]
        before, fewest = p.held.get(place.pool, ([0.0] * len(terms), float(place.least)))
        for j, term in enumerate(terms):
            m.add(("window", j), [place.rate], [term - before[j]])
        if size is None:
            m.add(("train least", place.pool), [place.chosen], [fewest - least])
        p.held[place.pool] = (terms, least)
    for j, (own, slope) in enumerate(zip(owns, at, strict=True)):
        m.limit(("window", j), high=1.0 / own)
        more = float(p.tableau.weights[j]) * (p.started[j] - slope.started)
        m.add(("domain", j), [p.rate], [more])
        for g, column in p.mixed.items():
            m.add(("mix", j, g), [column], [more])
    p.slopes, p.started = tuple(owns), tuple(slope.started for slope in at)


def fits_window(p: PlacementProgram, x: Floats, train_s: float, publish_s: float) -> bool:
    """Whether a solution's flows are within the window at these seconds, as those of a plan made without it are only
    where nothing that starts is lost."""
    used, started = _occupancy(p, x, train_s + publish_s)
    return max(started) <= 1 + MAX_LOSS and used <= 1 + 1e-9


def window_occupancy(p: PlacementProgram, x: Floats, train_s: float, publish_s: float) -> float:
    """Places that a solution's flows hold at these seconds over those that there are, of the domain with most."""
    return _occupancy(p, x, train_s + publish_s)[0]


def _occupancy(p: PlacementProgram, x: Floats, rest_s: float) -> tuple[float, list[float]]:
    seconds = mean_seconds_in_flight(p, x)
    at = domain_slopes(p, seconds, rest_s)
    rate = float(x[p.rate]) * p.scale * p.tableau.weights
    held = np.array([slope.own * s + slope.rest * rest_s for slope, s in zip(at, seconds.tolist(), strict=True)])
    return float((rate * held / _slots_by_domain(p)).max()), [slope.started for slope in at]
