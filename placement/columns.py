"""Column generation: selection of the useful paths by their prices.

A large cluster has 100,000 paths and a plan uses a few dozen. A linear program over some paths prices all of them.
Paths with a positive gain are added until none is left, which is the optimum over all paths (Gilmore and Gomory, 1961).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from placement.milp import Floats, MilpSolution, RowKey
from placement.program import PlacementProgram
from placement.tableau import Ints

__all__ = ["MAX_DENSE_PATHS", "solve_relaxation", "seed_columns"]

MAX_DENSE_PATHS = 4000
"""Up to this number, every path has a column: HiGHS' bound then holds for the whole problem, and its cuts for all
paths."""
COLUMNS_PER_ROUND = 200
"""Columns added at a time: a compromise between rounds and the time of each."""
GAIN_TOLERANCE = 1e-7
"""Gains below this are the noise of dual prices, whose activities are near 1."""
BOUND_TOLERANCE = 1e-4
"""Relative distance to the bound at which adding columns ends."""
STALLED_ROUNDS = 3
"""Without a demand for a tight bound, this many rounds that together gain less than `near` end the generation too."""
MAX_ROUNDS = 60
"""Not reached in any known problem; if it is, the bound gives the error of the value."""


def seed_columns(p: PlacementProgram) -> None:
    """Add every path if they are few; otherwise, by domain and pool, the paths with the fewest device-seconds."""
    t = p.tableau
    if len(t.paths) <= MAX_DENSE_PATHS:
        p.extend(np.arange(len(t.paths)))
        return
    tp = np.array([float(u.tp) for u in t.units])
    pool = np.array([u.pool for u in t.units])
    cost = t.paths.load * tp[t.paths.unit] + np.where(t.paths.first >= 0, t.paths.first_load * tp[t.paths.first], 0.0)
    p.extend(_best_by_group(-cost, t.paths.domain * len(p.problem.pools) + pool[t.paths.unit], np.arange(len(cost))))


def solve_relaxation(
    p: PlacementProgram,
    objective: Mapping[int, float],
    *,
    fix: Mapping[int, float] | None = None,
    near: float = BOUND_TOLERANCE,
) -> MilpSolution | None:
    """The optimum with fractional instances over all paths; adds the columns that it needs. Its bound is within `near`
    of its value, and above that of any solution (Farley, 1990)."""
    values: list[float] = []
    unusable = p.unusable_paths(fix)
    for _ in range(MAX_ROUNDS):
        answer = p.matrix.relaxed(p.vector(objective), fix={**p.closed_columns(fix), **(fix or {})})
        if answer is None or len(p.path_at) == len(p.tableau.paths):
            return answer
        gain = p.reduced_gains(answer.duals if fix else _raised_duals(p, answer))
        gain[p.path_at] = 0.0
        gain[unusable] = 0.0
        better = np.nonzero(gain > GAIN_TOLERANCE)[0]
        most = np.zeros(len(p.tableau.weights))
        np.maximum.at(most, p.tableau.paths.domain, gain)
        answer = dataclasses.replace(answer, bound=_bound(p, answer, objective, float(most @ p.tableau.weights)))
        values.append(answer.value)
        stalled = (
            near > BOUND_TOLERANCE
            and len(values) > STALLED_ROUNDS
            and values[-1] - values[-1 - STALLED_ROUNDS] <= near * abs(answer.value)
        )
        if stalled or not len(better) or answer.bound - answer.value <= near * abs(answer.value):
            return answer
        p.extend(_select_columns(p, gain, better))
    return answer


def _bound(p: PlacementProgram, answer: MilpSolution, objective: Mapping[int, float], missed: float) -> float:
    """An upper bound on the value if a trajectory of the mix can gain `missed` over the existing columns."""
    if objective.get(p.rate) == 1.0:
        return answer.value / (1 - missed) if answer.value > 0 and missed < 1 else answer.value + missed
    return answer.value + missed * float(answer.x[p.rate])


def _select_columns(p: PlacementProgram, gain: Floats, better: Ints) -> Ints:
    paths = p.tableau.paths
    best = _best_by_group(gain, paths.domain * len(p.tableau.units) + paths.unit, better)
    return best[np.argsort(-gain[best], kind="stable")[:COLUMNS_PER_ROUND]]


def _best_by_group(gain: Floats, group: Ints, among: Ints) -> Ints:
    """The highest of every group."""
    order = among[np.lexsort((among, -gain[among], group[among]))]
    first = np.ones(len(order), dtype=bool)
    first[1:] = group[order][1:] != group[order][:-1]
    return order[first]


def _raised_duals(p: PlacementProgram, answer: MilpSolution) -> dict[RowKey, float]:
    """Dual prices raised to the price of the devices behind each unit. A unit that no column uses yet has a price of 0,
    which would make every path through it look free; its load price is raised by the difference to the price of its
    devices."""
    duals = dict(answer.duals)
    for u, unit in enumerate(p.tableau.units):
        full = duals["pool", unit.pool] * unit.tp
        missing = full - p.problem.utilisation * duals["load", u] - duals["kv", u]
        if missing > 0:
            duals["load", u] += missing / p.problem.utilisation
    return duals
