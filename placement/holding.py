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
from placement.sides import TrainPlace
from placement.window import Slopes, slopes

if TYPE_CHECKING:
    from placement.program import Program

__all__ = ["at_seconds", "hold", "kept", "seconds_of", "size_of", "step_s", "used", "windows"]

FLAT = 1e-2
"""Least slope in a trajectory's seconds: where training alone takes longer than any group, it is none."""


LOST = 1e-3
"""Trajectories started beyond those trained below which a plan need not be made with them."""


def windows(p: Program) -> None:
    """A row per domain, which binds nothing before `hold`. None without a window or nobody who trains."""
    problem, m = p.problem, p.matrix
    p.started = (1.0,) * len(p.tableau.weights)
    if problem.window is None or not p.trainers or not math.isfinite(problem.trajectories_in_flight):
        return
    for j in range(len(p.tableau.weights)):
        m.row(("window", j))
    for place in p.rewards:
        if place.unit is None and problem.functions is not None:
            waiting = problem.functions.overhead_s * p.scale / _places(p)[place.domain]
            m.add(("window", place.domain), [place.column], [waiting])


def _places(p: Program) -> Floats:
    return p.problem.trajectories_in_flight * p.tableau.weights


def size_of(p: Program, place: TrainPlace) -> float | None:
    """Devices that a trainer's place has to have; None if that is open."""
    train, low, high = p.problem.train, p.matrix.low[place.devices], p.matrix.high[place.devices]
    if low == high:
        return low
    return None if train is None or train.devices is None else float(train.devices)


def step_s(p: Program, place: TrainPlace, devices: float) -> float:
    """Seconds of a training step on so many devices."""
    assert p.problem.train is not None, "there is a place to train"
    return p.problem.train.batch * (place.work / devices + place.fixed)


def seconds_of(p: Program, x: Floats) -> Floats:
    """Mean seconds under way, by domain."""
    flow, paths = np.maximum(x[p.first_path :], 0.0), p.active
    count, total = np.zeros(len(p.tableau.weights)), np.zeros(len(p.tableau.weights))
    np.add.at(count, paths.domain, flow)
    np.add.at(total, paths.domain, flow * paths.seconds)
    return total / np.maximum(count, 1e-300)


def at_seconds(p: Program, seconds: Floats, rest_s: float) -> tuple[Slopes, ...]:
    """By domain how long places are held near these seconds under way, and of training and publish."""
    return tuple(
        slopes(p.problem, domain, float(s), rest_s) for domain, s in zip(p.problem.domains, seconds, strict=True)
    )


def hold(p: Program, at: Sequence[Slopes], train_s: float, publish_s: float, *, least_s: float | None = None) -> None:
    """Places are held for a training step of `train_s` seconds, and the trainer is at least as large as that takes (or
    as `least_s` does: what it is for longer steps). Where its size is given, its own seconds count instead."""
    assert p.problem.train is not None, "there is a place to train"
    m, each = p.matrix, p.scale / p.problem.trajectories_in_flight
    owns = [max(slope.own, FLAT) / slope.started for slope in at]  # flows are of those that start
    for place in p.trainers:
        size = size_of(p, place)
        if size == 0:
            continue
        rest_s, least = train_s + publish_s, float(place.least)
        if size is not None:
            rest_s = step_s(p, place, size) + publish_s
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


def kept(p: Program, x: Floats, train_s: float, publish_s: float) -> bool:
    """Whether a solution's flows are within the window at these seconds, as those of a plan made without it are only
    where nothing that starts is lost."""
    used, started = _used(p, x, train_s + publish_s)
    return max(started) <= 1 + LOST and used <= 1 + 1e-9


def used(p: Program, x: Floats, train_s: float, publish_s: float) -> float:
    """Places that a solution's flows hold at these seconds over those that there are, of the domain with most."""
    return _used(p, x, train_s + publish_s)[0]


def _used(p: Program, x: Floats, rest_s: float) -> tuple[float, list[float]]:
    seconds = seconds_of(p, x)
    at = at_seconds(p, seconds, rest_s)
    rate = float(x[p.rate]) * p.scale * p.tableau.weights
    held = np.array([slope.own * s + slope.rest * rest_s for slope, s in zip(at, seconds.tolist(), strict=True)])
    return float((rate * held / _places(p)).max()), [slope.started for slope in at]
