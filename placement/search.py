"""Integer search: the exact optimum of a problem of a few pools; a good plan and a valid bound for a large one.

For a large problem, the relaxed problem determines the useful units and trainer pools; the program over these alone is
solved with a limit on its nodes (relaxation-induced neighbourhood: Danna, Rothberg and Le Pape, 2005). Limits count
nodes and never seconds, so that the same problem has the same answer on any machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from placement import program
from placement.milp import MilpSolution
from placement.program import PlacementProgram

MAX_EXACT_INTEGERS = 30
"""Up to this many integer columns are searched to the end."""
NEIGHBOURHOOD_NODES = 60
"""Node limit of a neighbourhood's search: large problems stop improving there."""
MAX_NODES = 20_000
MAX_TRAINER_CASES = 4
"""Pools tried for the trainer, in the order of the relaxed problem's preference."""


def search_best(
    p: PlacementProgram,
    objective: Mapping[int, float],
    start: MilpSolution | None = None,
    *,
    gap: float | None = None,
    relaxed: MilpSolution | None = None,
) -> MilpSolution | None:
    """The best integer solution found, with a `bound` valid for all. None if no solution exists or none was found.

    `start` is a fallback solution whose units are searched too; `relaxed` is the relaxed solution, if known.
    """
    gap = p.problem.gap if gap is None else gap
    relaxed = relaxed or program.solve_relaxation(p, objective, near=gap)
    if relaxed is None:
        return start
    goal = p.vector(objective)
    few = _small(p)
    if few and len(p.path_at) == len(p.tableau.paths):
        found = p.matrix.maximise(goal, gap=gap, nodes=MAX_NODES)
        return _better(found, start, objective, p, relaxed.bound)
    found, bounds = start, []
    for fixed in _trainer_cases(p, relaxed):
        near = program.solve_relaxation(p, objective, fix=fixed, near=gap) if fixed else relaxed
        if near is None:
            continue
        bounds.append(near.bound)
        rest = bool(fixed) and 1.0 not in fixed.values()
        if rest or (found is not None and near.value <= _value(p, objective, found) * (1 + gap)):
            continue
        limits = _column_limits(p, _unused_units(p, near, found)) | {
            column: (value, value) for column, value in fixed.items()
        }
        here = p.matrix.maximise(p.vector(objective), gap=gap, nodes=NEIGHBOURHOOD_NODES, within=limits)
        found = _better(here, found, objective, p, relaxed.bound)
    # Only one pool trains, so that the best of all cases bounds the relaxed problem, which spreads training over
    # several pools.
    bound = min(relaxed.bound, max(bounds, default=relaxed.bound))
    near_enough = found is not None and bound - _value(p, objective, found) <= gap * abs(bound)
    if found is None or few or (len(p.path_at) == len(p.tableau.paths) and not near_enough):
        whole = p.matrix.maximise(p.vector(objective), gap=gap, nodes=NEIGHBOURHOOD_NODES * 10)
        found = _better(whole, found, objective, p, bound)
        if whole is not None and len(p.path_at) == len(p.tableau.paths):
            bound = min(bound, whole.bound)
    return _better(None, found, objective, p, bound)


def search_shrunk(
    p: PlacementProgram, objective: Mapping[int, float], start: MilpSolution, *, gap: float
) -> MilpSolution:
    """The best solution with no more instances of any unit than `start` has, for a large problem, where a search among
    all equally good plans takes longer than the first search. For a small problem, the best of all."""
    if _small(p):
        return search_best(p, objective, start, gap=gap) or start
    most = {column: float(round(start.x[column])) for column in p.units}
    found = p.matrix.maximise(p.vector(objective), gap=gap, nodes=NEIGHBOURHOOD_NODES, within=_column_limits(p, most))
    answer = _better(found, start, objective, p, math.inf)
    assert answer is not None
    return answer


def search_improved(
    p: PlacementProgram, objective: Mapping[int, float], start: MilpSolution, *, gap: float
) -> MilpSolution:
    """The best of all plans, including plans with other instances than `start` has; its neighbourhood is searched
    first."""
    shrunk = search_shrunk(p, objective, start, gap=gap)
    return shrunk if _small(p) else search_best(p, objective, shrunk, gap=gap) or shrunk


def _small(p: PlacementProgram) -> bool:
    return len(p.integers()) <= MAX_EXACT_INTEGERS


def _trainer_cases(p: PlacementProgram, relaxed: MilpSolution) -> list[dict[int, float]]:
    """The columns to fix in each case: in turn, each of the likely pools trains; in the last case, none of them
    does."""
    ranked = sorted(p.trainers, key=lambda t: (-relaxed.x[t.chosen], t.pool))
    likely = [t.chosen for t in ranked[:MAX_TRAINER_CASES]]
    cases = [{t.chosen: float(t.chosen == chosen) for t in p.trainers} for chosen in likely]
    if len(ranked) > len(likely):
        cases.append(dict.fromkeys(likely, 0.0))
    return cases or [{}]


def _unused_units(p: PlacementProgram, near: MilpSolution, found: MilpSolution | None) -> dict[int, float]:
    """Units that neither solution uses, fixed at 0."""
    out = {}
    for column in p.units:
        used = near.x[column] > 1e-6 or (found is not None and found.x[column] > 0.5)
        if not used and p.matrix.low[column] <= 0:
            out[column] = 0.0
    return out


def _column_limits(p: PlacementProgram, most: Mapping[int, float]) -> dict[int, tuple[float, float]]:
    """Column limits: at most `most` instances of these units, and no flow on paths of units without instances."""
    return {column: (0.0, high) for column, high in {**p.closed_columns(most), **most}.items()}


def _value(p: PlacementProgram, objective: Mapping[int, float], answer: MilpSolution) -> float:
    return float(sum(v * answer.x[j] for j, v in objective.items()))


def _better(
    a: MilpSolution | None, b: MilpSolution | None, objective: Mapping[int, float], p: PlacementProgram, bound: float
) -> MilpSolution | None:
    """The better of two solutions, extended to all current columns, with the relaxed problem's bound or its own if
    tighter."""
    both = [(_value(p, objective, answer), -k, answer) for k, answer in enumerate((b, a)) if answer is not None]
    if not both:
        return None
    value, _, answer = max(both, key=lambda row: row[:2])
    x = np.concatenate([answer.x, np.zeros(p.matrix.width - len(answer.x))])
    complete = a is not None and len(p.path_at) == len(p.tableau.paths) and a.complete
    tight = min(bound, a.bound) if complete and a is not None else bound
    return MilpSolution(x, value, max(value, tight))
