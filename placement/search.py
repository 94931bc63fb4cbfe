"""The best plan of one program: the exact optimum for a few pools; a good plan and a valid bound for many.

For a large problem, the relaxed problem determines the useful units and trainer pools; the program over these alone is
solved with a limit on its nodes (relaxation-induced neighbourhood: Danna, Rothberg and Le Pape, 2005). Limits count
nodes and never seconds, so that the same problem has the same answer on any machine.

Objectives are lexicographic: the requested objective, then dollars, then devices (and changes to a running plan).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from placement.milp import Floats, MilpSolution
from placement.program import PlacementProgram, Weights, solve_relaxation
from placement.types import Objective

MAX_EXACT_INTEGERS = 30
"""Up to this many integer columns are searched to the end."""
NEIGHBOURHOOD_NODES = 60
"""Node limit of a neighbourhood's search: large problems stop improving there."""
MAX_NODES = 20_000
MAX_TRAINER_CASES = 4
"""Pools tried for the trainer, in the order of the relaxed problem's preference."""
OBJECTIVE_SLACK = 1e-6
"""Relative loss of the first objective that the second may cause, as HiGHS' tolerances require."""
TIE_GAP = 2e-3
"""Relative gap of tie-breaking objectives: a fifth of a per cent of the dollars, unless a smaller gap is requested."""
OWNED_DEVICE_WEIGHT = 1e-2
"""The weight of an owned device's hour beside one that is paid by use: enough to leave the dearer one free."""
NEGLIGIBLE_RATE = 1e-9
"""A rate below this share of the problem's scale counts as zero."""
UNREACHED_PENALTY = 1e30
"""Penalty, in dollars, of a plan that reaches nothing of the requested rate."""
MAX_ITERATIONS = 30
"""Dinkelbach's method converges superlinearly: a handful of rounds do."""


def best_plan(p: PlacementProgram, *, tied: bool = True) -> tuple[Floats, float] | None:
    """Solve for the problem's objective: the plan, and a bound on the value of any plan. `tied`: of equally good plans,
    the cheapest."""
    if p.problem.objective is Objective.MAX_THROUGHPUT:
        return _highest_rate(p, tied=tied)
    return _least_cost(p, tied=tied) if p.problem.objective is Objective.MIN_COST else _best_per_dollar(p)


def cheapest_near_best_rate(p: PlacementProgram, x: Floats) -> Floats:
    """The least cost at no less than the tolerated share of the best rate, then the highest rate at that cost, so that
    no plan dominates it."""
    goal = {p.rate: 1.0, **_change_charge(p)}
    cost = _cost_objective(p, sunk=True)
    best = _value(goal, x)
    p.matrix.limit(("reached",), low=best - max(p.problem.rate_tolerance, OBJECTIVE_SLACK) * abs(best))
    cheap = search_shrunk(p, cost, MilpSolution(x, _value(cost, x), math.inf))
    if not _small(p):
        # Also plans with other instances than the first one has.
        cheap = search_best(p, cost, cheap, gap=_tie_gap(p)) or cheap
    if p.problem.rate_tolerance <= OBJECTIVE_SLACK:
        return cheap.x
    spent = _value(cost, cheap.x)
    p.matrix.row(("spent",), cost.items(), low=spent - OBJECTIVE_SLACK * abs(spent))
    most = search_best(p, goal, MilpSolution(cheap.x, _value(goal, cheap.x), math.inf))
    p.matrix.limit(("spent",))
    return cheap.x if most is None else most.x


def relaxed_value(p: PlacementProgram) -> tuple[float, Floats | None]:
    """The optimal value with fractional instances (rate, negative dollars, or rate per dollar) and its columns; minus
    infinity if infeasible."""
    if p.problem.objective is Objective.MAX_THROUGHPUT:
        most = solve_relaxation(p, {p.rate: 1.0}, near=p.problem.gap)
        if most is None or most.x[p.rate] <= NEGLIGIBLE_RATE:
            return -math.inf, None
        return most.bound * p.scale, most.x
    if p.problem.objective is Objective.MIN_COST:
        asked = (p.problem.rate or 0.0) / p.scale
        with p.matrix.bounded({p.rate: (asked, asked)}):
            least = solve_relaxation(p, {j: -v for j, v in p.cost().items()})
        if least is not None:
            return least.bound, least.x
        most = solve_relaxation(p, {p.rate: 1.0})
        return (-math.inf, None) if most is None else (-UNREACHED_PENALTY * (1.0 - most.value / asked), most.x)
    ratio, cost, x = 0.0, p.cost(), None
    for _ in range(MAX_ITERATIONS):
        found = solve_relaxation(p, _per_dollar(p, ratio, cost))
        dollars = 0.0 if found is None else _value(cost, found.x)
        if found is None or dollars <= 1e-12 or found.x[p.rate] <= NEGLIGIBLE_RATE:
            break
        before, ratio, x = ratio, float(found.x[p.rate]) / dollars, found.x
        if ratio <= before * (1 + p.problem.gap):
            break
    return (ratio * p.scale, x) if ratio > 0 else (-math.inf, None)


def plan_value(p: PlacementProgram, x: Floats) -> float:
    """The value of a plan under the problem's objective, higher being better: rate, negative dollars, or rate per
    dollar."""
    rate, cost = p.rate_of(x), p.usd_per_hour(x)
    if p.problem.objective is Objective.MIN_COST:
        return -cost
    if p.problem.objective is Objective.MAX_THROUGHPUT:
        return rate
    return rate / cost if cost > 0 else 0.0


def search_best(
    p: PlacementProgram,
    objective: Weights,
    start: MilpSolution | None = None,
    *,
    gap: float | None = None,
    relaxed: MilpSolution | None = None,
) -> MilpSolution | None:
    """The best integer solution found, with a `bound` valid for all. None if no solution exists or none was found.

    `start` is a fallback solution whose units are searched too; `relaxed` is the relaxed solution, if known.
    """
    gap = p.problem.gap if gap is None else gap
    relaxed = relaxed or solve_relaxation(p, objective, near=gap)
    if relaxed is None:
        return start
    goal = p.vector(objective)
    few = _small(p)
    if few and p.complete:
        found = p.matrix.maximise(goal, gap=gap, nodes=MAX_NODES)
        return _better(found, start, objective, p, relaxed.bound)
    found, bounds = start, []
    for fixed in _trainer_cases(p, relaxed):
        near = solve_relaxation(p, objective, fix=fixed, near=gap) if fixed else relaxed
        if near is None:
            continue
        bounds.append(near.bound)
        rest = bool(fixed) and 1.0 not in fixed.values()
        if rest or (found is not None and near.value <= _value(objective, found.x) * (1 + gap)):
            continue
        # Units that neither solution uses have no instance here.
        instances = near.x[p.units] + (0.0 if found is None else np.round(found.x[p.units]))
        unused = [c for c, n in zip(p.units, instances, strict=True) if n <= 1e-6 and p.matrix.low[c] <= 0]
        limits = _column_limits(p, dict.fromkeys(unused, 0.0)) | {c: (value, value) for c, value in fixed.items()}
        here = p.matrix.maximise(p.vector(objective), gap=gap, nodes=NEIGHBOURHOOD_NODES, within=limits)
        found = _better(here, found, objective, p, relaxed.bound)
    # Only one pool trains, so that the best of all cases bounds the relaxed problem, which spreads training over
    # several pools.
    bound = min(relaxed.bound, max(bounds, default=relaxed.bound))
    near_enough = found is not None and bound - _value(objective, found.x) <= gap * abs(bound)
    if found is None or few or (p.complete and not near_enough):
        whole = p.matrix.maximise(p.vector(objective), gap=gap, nodes=NEIGHBOURHOOD_NODES * 10)
        found = _better(whole, found, objective, p, bound)
        if whole is not None and p.complete:
            bound = min(bound, whole.bound)
    return _better(None, found, objective, p, bound)


def search_shrunk(p: PlacementProgram, objective: Weights, start: MilpSolution) -> MilpSolution:
    """The best solution of a tie-breaking objective with no more instances of any unit than `start` has, for a large
    problem, where a search among all equally good plans takes longer than the first search. For a small problem, the
    best of all."""
    gap = _tie_gap(p)
    if _small(p):
        return search_best(p, objective, start, gap=gap) or start
    most = {column: float(round(start.x[column])) for column in p.units}
    found = p.matrix.maximise(p.vector(objective), gap=gap, nodes=NEIGHBOURHOOD_NODES, within=_column_limits(p, most))
    return _better(found, start, objective, p, math.inf) or start


def _highest_rate(p: PlacementProgram, *, tied: bool) -> tuple[Floats, float] | None:
    p.relaxed = solve_relaxation(p, {p.rate: 1.0}, near=p.problem.gap)
    charge = _change_charge(p)
    goal = {p.rate: 1.0, **charge}
    first = search_best(p, goal, relaxed=None if charge else p.relaxed)
    if first is None or first.x[p.rate] <= NEGLIGIBLE_RATE:
        return None
    charged = first.x[p.rate] - first.value
    bound = float(first.bound + charged) * p.scale
    if not tied:
        return first.x, bound
    p.matrix.row(("reached",), goal.items(), low=float(first.value) - OBJECTIVE_SLACK * abs(float(first.value)))
    return search_shrunk(p, _cost_objective(p, sunk=True), first).x, bound


def _least_cost(p: PlacementProgram, *, tied: bool) -> tuple[Floats, float] | None:
    asked = (p.problem.rate or 0.0) / p.scale
    p.matrix.high[p.rate] = asked
    most = solve_relaxation(p, {p.rate: 1.0})
    if most is None or most.value < asked * (1 - OBJECTIVE_SLACK):
        return None
    p.matrix.low[p.rate] = asked
    first = search_best(p, {j: -v for j, v in p.cost().items()})
    if first is None:
        return None
    bound = max(0.0, -first.bound)
    if not tied:
        return first.x, bound
    p.matrix.row(("cost",), p.cost().items(), high=-first.value * (1 + OBJECTIVE_SLACK) + 1e-9)
    return search_shrunk(p, _cost_objective(p), first).x, bound


def _best_per_dollar(p: PlacementProgram) -> tuple[Floats, float] | None:
    """Dinkelbach: the ratio is optimal when `rate - ratio × cost` can no longer be made positive."""
    cost = p.cost()
    found = search_best(p, {p.rate: 1.0})
    if found is None or found.x[p.rate] <= NEGLIGIBLE_RATE:
        return None
    if any(v < 0 for v in cost.values()) or not any(v > 0 for v in cost.values()):
        raise ValueError("max_throughput_per_dollar: nothing here costs anything (rule: some pool has a price)")
    for _ in range(MAX_ITERATIONS):
        dollars = _value(cost, found.x)
        if dollars <= 1e-12:
            raise ValueError("max_throughput_per_dollar: a plan without cost exists (rule: what runs has a price)")
        ratio = float(found.x[p.rate]) / dollars
        better = search_best(p, _per_dollar(p, ratio, cost), found)
        more = 0.0 if better is None else max(0.0, better.bound)
        if better is None or better.x[p.rate] <= NEGLIGIBLE_RATE or better.value <= ratio * dollars * p.problem.gap:
            break
        found = better
    return found.x, (ratio + more / dollars) * p.scale


def _per_dollar(p: PlacementProgram, ratio: float, cost: Weights) -> Weights:
    return {p.rate: 1.0, **{j: -ratio * v for j, v in cost.items()}}


def _change_charge(p: PlacementProgram) -> dict[int, float]:
    """The loss of a changed device while it restarts, as a rate over the horizon: the relaxed plan's rate per
    device."""
    running, relaxed = p.problem.running, p.relaxed
    if running is None or not p.changed or relaxed is None:
        return {}
    devices = sum(float(relaxed.x[p.units[u]]) * unit.tp for u, unit in enumerate(p.tableau.units))
    if devices <= 0:
        return {}
    each = float(relaxed.x[p.rate]) / devices
    return dict.fromkeys(p.changed, -each * running.restart_s / running.horizon_s)


def _cost_objective(p: PlacementProgram, *, sunk: bool = False) -> dict[int, float]:
    """The tie-breaking objective at the reached rate: the least dollars, then devices, then changes.

    `sunk`: pools that are not rented are paid in any case, so that their use has almost no weight.
    """
    price = max((q.usd_per_device_hour for q in p.problem.pools), default=0.0) or 1.0
    terms = {j: -v for j, v in p.cost().items()}
    for c in p.device_columns():
        if sunk and not p.problem.pools[c.pool].rented:
            terms[c.column] *= OWNED_DEVICE_WEIGHT
        terms[c.column] -= 1e-3 * price * c.devices
    return terms | dict.fromkeys(p.changed, -1e-3 * price)


def _tie_gap(p: PlacementProgram) -> float:
    return TIE_GAP if p.problem.gap >= 1e-4 else p.problem.gap


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


def _column_limits(p: PlacementProgram, most: Mapping[int, float]) -> dict[int, tuple[float, float]]:
    """Column limits: at most `most` instances of these units, and no flow on paths of units without instances."""
    return {column: (0.0, high) for column, high in {**p.closed_columns(most), **most}.items()}


def _value(objective: Weights, x: Floats) -> float:
    return sum(v * float(x[j]) for j, v in objective.items())


def _better(
    a: MilpSolution | None, b: MilpSolution | None, objective: Weights, p: PlacementProgram, bound: float
) -> MilpSolution | None:
    """The better of two solutions, extended to all current columns, with the relaxed problem's bound or its own if
    tighter."""
    best = max((answer for answer in (b, a) if answer is not None), key=lambda s: _value(objective, s.x), default=None)
    if best is None:
        return None
    value = _value(objective, best.x)
    x = np.concatenate([best.x, np.zeros(p.matrix.width - len(best.x))])
    tight = min(bound, a.bound) if a is not None and a.complete and p.complete else bound
    return MilpSolution(x, value, max(value, tight))
