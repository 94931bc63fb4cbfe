"""The placement of a problem: the number of instances by pool, role and TP, and the flows through them (RollArt R1 and
P/D; facts: Mélange's cover, Splitwise's and HexGen-2's roles, Little's law for batches, KV and trajectories in flight).

A mixed-integer program over instances (pool × role × TP) and path flows (domain × units × batch × KV mode), solved by
HiGHS. Only instances are integers; a batch size is an operating point at which an instance spends part of its time.
Objectives are lexicographic: the requested objective, then dollars, then devices (and changes to a running plan).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from placement import columns, diagnose, holding, result, search, windowed
from placement.milp import Floats, MilpSolution
from placement.problem import Problem
from placement.program import PlacementProgram, build_program
from placement.tableau import Tableau, tableau
from placement.types import FirstStage, Infeasible, Objective, Placement, objective_value

__all__ = ["best_objective_value", "solve"]

OBJECTIVE_SLACK = 1e-6
"""Relative loss of the first objective that the second may cause, as HiGHS' tolerances require."""
TIE_GAP = 2e-3
"""Relative gap of tie-breaking objectives: a fifth of a per cent of the dollars, unless a smaller gap is requested."""
OWNED_DEVICE_WEIGHT = 1e-2
"""The weight of an owned device's hour beside one that is paid by use: enough to leave the dearer one free."""
NEGLIGIBLE_RATE = 1e-9
"""A rate below this share of the problem's scale counts as zero."""
SMALL, FAINT = 0.02, 1e-6
"""A rate below SMALL × the scale requires a smaller scale; a rate below FAINT × the scale may be only tolerance."""
MAX_RESCALES = 3
"""Each round gains at least as many digits as SMALL has: after three, a rate of 1e-6 of the guess is exact."""
UNREACHED_PENALTY = 1e30
"""Penalty, in dollars, of a plan that reaches nothing of the requested rate."""
MAX_ITERATIONS = 30
"""Dinkelbach's method converges superlinearly: a handful of rounds do."""


def solve(problem: Problem) -> Placement | Infeasible:
    """The best placement, or the reason that there is none. Deterministic. ValueError if rate per dollar is requested
    and nothing has a price; RuntimeError if HiGHS fails."""
    table = tableau(problem)
    missing = diagnose.unservable_domain(problem, table)
    if missing is not None:
        return missing
    found = _within_window(problem, table, _solve_by_objective)
    if found is None:
        return diagnose.explain_infeasibility(problem, table, solve)
    p, x, bound = found
    if problem.objective is not Objective.MAX_THROUGHPUT:
        return result.build_placement(p, x, bound)
    first = FirstStage(float(x[p.rate]) * p.scale, float(p.vector(p.cost()) @ x))
    return result.build_placement(p, _cheapest_near_best_rate(p, x), bound, first)


def best_objective_value(problem: Problem) -> float:
    """The value of the best plan, comparable with `Placement.worth`; 0 if there is none. Only the first stage is
    solved, which takes a third of the time of `solve`."""
    table = tableau(problem)
    found = None if diagnose.unservable_domain(problem, table) else _within_window(problem, table, _solve_first_stage)
    if found is None:
        return 0.0
    p, x, _ = found
    if problem.objective is Objective.MAX_THROUGHPUT:
        # A window is held at the plan's own seconds by now, and was searched at those of the one before.
        again = columns.solve_relaxation(p, {p.rate: 1.0}, fix={j: float(round(x[j])) for j in p.integers()})
        x = x if again is None else again.x
    return objective_value(problem.objective, float(x[p.rate]) * p.scale, float(p.vector(p.cost()) @ x))


def _within_window(
    problem: Problem, table: Tableau, best: windowed.ProgramSolver
) -> tuple[PlacementProgram, Floats, float] | None:
    """The best plan's program and columns, and a bound on the value of any plan; None if there is none."""
    p = _rescaled_program(problem, table)
    found = best(p)
    if found is None or windowed.fits_its_window(p, found[0]):
        return None if found is None else (p, *found)
    kept = windowed.solve_within_window(
        _rescaled_program(problem, table), best, _relaxed_value, seconds=holding.mean_seconds_in_flight(p, found[0])
    )
    return None if kept is None else (kept.p, kept.x, kept.bound)


def _cheapest_near_best_rate(p: PlacementProgram, x: Floats) -> Floats:
    """The least cost at no less than the tolerated share of the best rate, then the highest rate at that cost, so that
    no plan dominates it."""
    goal, charge, cost = {p.rate: 1.0}, _change_charge(p), _cost_objective(p, sunk=True)
    reached = {**goal, **charge}
    best = _objective_at(reached, x)
    p.matrix.limit(("reached",), low=best - max(p.problem.rate_tolerance, OBJECTIVE_SLACK) * abs(best))
    start = MilpSolution(x, _objective_at(cost, x), math.inf)
    cheap = search.search_improved(p, cost, start, gap=_tie_gap(p))
    if p.problem.rate_tolerance <= OBJECTIVE_SLACK:
        return cheap.x
    spent = _objective_at(cost, cheap.x)
    p.matrix.row(("spent",), cost.items(), low=spent - OBJECTIVE_SLACK * abs(spent))
    most = search.search_best(p, reached, MilpSolution(cheap.x, _objective_at(reached, cheap.x), math.inf))
    p.matrix.limit(("spent",))
    return cheap.x if most is None else most.x


def _objective_at(objective: Mapping[int, float], x: Floats) -> float:
    return sum(v * float(x[j]) for j, v in objective.items())


def _solve_by_objective(p: PlacementProgram, *, tied: bool = True) -> tuple[Floats, float] | None:
    """Solve for the problem's objective: the plan, and a bound on the value of any plan. `tied`: of equally good plans,
    the cheapest."""
    if p.problem.objective is Objective.MAX_THROUGHPUT:
        return _solve_throughput(p, tied=tied)
    return _solve_least_cost(p, tied=tied) if p.problem.objective is Objective.MIN_COST else _solve_per_dollar(p)


def _solve_first_stage(p: PlacementProgram) -> tuple[Floats, float] | None:
    return _solve_by_objective(p, tied=False)


def _relaxed_value(p: PlacementProgram) -> tuple[float, Floats | None]:
    """The optimal value with fractional instances: rate, negative dollars, or rate per dollar; minus infinity if
    infeasible."""
    if p.problem.objective is Objective.MAX_THROUGHPUT:
        most = columns.solve_relaxation(p, {p.rate: 1.0}, near=p.problem.gap)
        return (
            (-math.inf, None) if most is None or most.x[p.rate] <= NEGLIGIBLE_RATE else (most.bound * p.scale, most.x)
        )
    if p.problem.objective is Objective.MIN_COST:
        asked, (low, high) = (p.problem.rate or 0.0) / p.scale, (p.matrix.low[p.rate], p.matrix.high[p.rate])
        p.matrix.low[p.rate] = p.matrix.high[p.rate] = asked
        least = columns.solve_relaxation(p, {j: -v for j, v in p.cost().items()})
        p.matrix.low[p.rate], p.matrix.high[p.rate] = low, high
        if least is not None:
            return least.bound, least.x
        most = columns.solve_relaxation(p, {p.rate: 1.0})
        return (-math.inf, None) if most is None else (-UNREACHED_PENALTY * (1.0 - most.value / asked), most.x)
    ratio, cost, x = 0.0, p.cost(), None
    for _ in range(MAX_ITERATIONS):
        found = columns.solve_relaxation(p, {p.rate: 1.0, **{j: -ratio * v for j, v in cost.items()}})
        dollars = 0.0 if found is None else sum(v * float(found.x[j]) for j, v in cost.items())
        if found is None or dollars <= 1e-12 or found.x[p.rate] <= NEGLIGIBLE_RATE:
            break
        before, ratio, x = ratio, float(found.x[p.rate]) / dollars, found.x
        if ratio <= before * (1 + p.problem.gap):
            break
    return (ratio * p.scale, x) if ratio > 0 else (-math.inf, None)


def _rescaled_program(problem: Problem, table: Tableau) -> PlacementProgram:
    """The program with a scale at which its rate is near 1: a rate far below 1 is lost in HiGHS' tolerances."""
    p = build_program(problem, table)
    columns.seed_columns(p)
    for _ in range(MAX_RESCALES):
        answer = p.matrix.relaxed(p.vector({p.rate: 1.0}))
        if answer is None or not FAINT < answer.x[p.rate] < SMALL:
            break
        p = build_program(problem, table, p.scale * float(answer.x[p.rate]))
        columns.seed_columns(p)
    return p


def _solve_throughput(p: PlacementProgram, *, tied: bool) -> tuple[Floats, float] | None:
    p.relaxed = columns.solve_relaxation(p, {p.rate: 1.0}, near=p.problem.gap)
    charge = _change_charge(p)
    first = search.search_best(p, {p.rate: 1.0, **charge}, relaxed=None if charge else p.relaxed)
    if first is None or first.x[p.rate] <= NEGLIGIBLE_RATE:
        return None
    charged = first.x[p.rate] - first.value
    bound = float(first.bound + charged) * p.scale
    if not tied:
        return first.x, bound
    least = float(first.value) - OBJECTIVE_SLACK * abs(float(first.value))
    p.matrix.row(("reached",), [(p.rate, 1.0), *charge.items()], low=least)
    second = search.search_shrunk(p, _cost_objective(p, sunk=True), first, gap=_tie_gap(p))
    return second.x, bound


def _solve_least_cost(p: PlacementProgram, *, tied: bool) -> tuple[Floats, float] | None:
    asked = (p.problem.rate or 0.0) / p.scale
    p.matrix.high[p.rate] = asked
    most = columns.solve_relaxation(p, {p.rate: 1.0})
    if most is None or most.value < asked * (1 - OBJECTIVE_SLACK):
        return None
    p.matrix.low[p.rate] = asked
    first = search.search_best(p, {j: -v for j, v in p.cost().items()})
    if first is None:
        return None
    if not tied:
        return first.x, max(0.0, -first.bound)
    p.matrix.row(("cost",), p.cost().items(), high=-first.value * (1 + OBJECTIVE_SLACK) + 1e-9)
    second = search.search_shrunk(p, _cost_objective(p), first, gap=_tie_gap(p))
    return second.x, max(0.0, -first.bound)


def _solve_per_dollar(p: PlacementProgram) -> tuple[Floats, float] | None:
    """Dinkelbach: the ratio is optimal when `rate - ratio × cost` can no longer be made positive."""
    cost = p.cost()
    found = search.search_best(p, {p.rate: 1.0})
    if found is None or found.x[p.rate] <= NEGLIGIBLE_RATE:
        return None
    if any(v < 0 for v in cost.values()) or not any(v > 0 for v in cost.values()):
        raise ValueError("max_throughput_per_dollar: nothing here costs anything (rule: some pool has a price)")
    for _ in range(MAX_ITERATIONS):
        dollars = sum(v * float(found.x[j]) for j, v in cost.items())
        if dollars <= 1e-12:
            raise ValueError("max_throughput_per_dollar: a plan without cost exists (rule: what runs has a price)")
        ratio = float(found.x[p.rate]) / dollars
        better = search.search_best(p, {p.rate: 1.0, **{j: -ratio * v for j, v in cost.items()}}, found)
        more = 0.0 if better is None else max(0.0, better.bound)
        if better is None or better.x[p.rate] <= NEGLIGIBLE_RATE or better.value <= ratio * dollars * p.problem.gap:
            break
        found = better
    return found.x, (ratio + more / dollars) * p.scale


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
    for pool, column, _ in p.device_columns():
        if sunk and not p.problem.pools[pool].rented:
            terms[column] *= OWNED_DEVICE_WEIGHT
    for _, column, devices in p.device_columns():
        terms[column] = terms.get(column, 0.0) - 1e-3 * price * devices
    for column in p.changed:
        terms[column] = -1e-3 * price
    return terms


def _tie_gap(p: PlacementProgram) -> float:
    return TIE_GAP if p.problem.gap >= 1e-4 else p.problem.gap
