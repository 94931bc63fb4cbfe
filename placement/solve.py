"""The placement of a problem: the number of instances by pool, role and TP, and the flows through them (RollArt R1 and
P/D; facts: Mélange's cover, Splitwise's and HexGen-2's roles, Little's law for batches, KV and trajectories in flight).

A mixed-integer program over instances (pool × role × TP) and path flows (domain × units × batch × KV mode), solved by
HiGHS. Only instances are integers; a batch size is an operating point at which an instance spends part of its time.
Objectives are lexicographic: the requested objective, then dollars, then devices (and changes to a running plan).

The best plan that its window of trajectories in flight sustains: training and rollout share devices so that their
durations fit the slots of the window.

The duration of a training step is chosen first, over the relaxed problem. At a given rate the feasible durations are an
interval (linear rows, and `devices × seconds >= work`, which is convex), so that the best value has one peak, which a
golden-section search finds. The window's slopes are recomputed for each duration at the seconds that they lead to: the
slopes of another duration may hide the best plans. The integer program is solved at the peak and beside it, and again
as long as the trainer, with the devices that rounding left over, is faster than assumed.

Explanation of an infeasible problem, with numbers: a domain that nothing can serve, the shortfall to the requested
rate, or the constraints that would have to be relaxed (an elastic program: the least relative violation that makes a
plan possible).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from placement import program, result, search
from placement.milp import Floats, MilpSolution
from placement.paths import Tableau, tableau
from placement.problem import Problem, Restriction
from placement.program import PlacementProgram, TrainerOption, build_program
from placement.types import ROLLOUT_ROLES, FirstStage, Infeasible, Objective, Placement, Pool, Role, objective_value

STEP_TOLERANCE = 0.02
"""Relative distance of step durations at which the search ends: the value is flat near its peak."""
MAX_SOLUTIONS = 3
"""Limit of integer solutions; the second is rarely better by more than rounding."""
MAX_MISSES = 4
"""Trainer sizes without an integer plan after which the search gives up."""
SLOPE_ITERATIONS = 2
"""Iterations until the slopes are those of the seconds that they lead to."""
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2

ProgramSolver = Callable[[PlacementProgram], tuple[Floats, float] | None]
"""Solves a program: the columns of its best plan, and a bound on the value of any plan."""
RelaxedValuation = Callable[[PlacementProgram], tuple[float, Floats | None]]
"""The optimal value of the relaxed problem, higher being better, and its columns; minus infinity if it is
infeasible."""


@dataclass(frozen=True, slots=True)
class WindowedPlan:
    """A plan within its window: `p` has the rows at the seconds of its own trainer."""

    p: PlacementProgram
    x: Floats
    bound: float


PUBLISH_TIME_FACTOR = 1.05
"""Publish times that differ by less than this factor form one case, with the longest of them."""


@dataclass(slots=True)
class _TrainerCase:
    """A training pool and the pools that may serve with it: all that a version reaches in `publish_s`. `seconds` in
    flight by domain are those of the last solution; slopes are taken there."""

    option: TrainerOption
    publish_s: float
    serving: frozenset[int]
    seconds: Floats
    solved: int = 0

    def hold(self, p: PlacementProgram, train_s: float, least_s: float | None = None) -> None:
        slopes = program.domain_slopes(p, self.seconds, train_s + self.publish_s)
        program.set_holding_times(p, slopes, train_s, self.publish_s, least_s=least_s)

    def worth(self, p: PlacementProgram, worth: RelaxedValuation) -> float:
        value, x = worth(p)
        self.solved += 1
        if x is not None:
            self.seconds = program.mean_seconds_in_flight(p, x)
        return value


def fits_its_window(p: PlacementProgram, x: Floats) -> bool:
    """True if a plan that was solved without its window fits it. The window's rows are then set in `p` for further
    solutions."""
    option = _trainer(p, x)
    if p.problem.window is None or option is None or not p.matrix.has(("window", 0)):
        return True
    serving = frozenset(t.pool for u, t in enumerate(p.tableau.units) if x[p.units[u]] > 0.5)
    train_s, publish_s = program.training_step_s(p, option, round(x[option.devices])), _publish_s(p, option, serving)
    if not program.fits_window(p, x, train_s, publish_s):
        return False
    _TrainerCase(option, publish_s, serving, program.mean_seconds_in_flight(p, x)).hold(p, train_s)
    return True


def solve_within_window(
    p: PlacementProgram, solve: ProgramSolver, worth: RelaxedValuation, *, seconds: Floats
) -> WindowedPlan | None:
    """The best plan within the window; None if there is none. `p` is a fresh program; `seconds` are the initial seconds
    in flight by domain."""
    found: WindowedPlan | None = None
    best = most = -math.inf
    candidates = []
    for case in _cases(p, seconds):
        with _restrict_to_case(p, case):
            low, high = _step_seconds_range(p, case.option)
            candidates.append((_case_bound(p, case, worth, low, high), low, high, case))
    for limit, low, high, case in sorted(candidates, key=lambda each: -each[0]):
        if limit <= best:
            continue
        with _restrict_to_case(p, case):
            train_s, reached, bound = _peak_step_seconds(p, case, worth, low, high)
            most = max(most, bound)
            one = _integer_plan(p, case, train_s, solve, worth) if reached > best else None
        if one is not None and _plan_value(one.p, one.x) > best:
            found, best = one, _plan_value(one.p, one.x)
    if found is None:
        return None
    bound = max(most, best)
    return WindowedPlan(found.p, found.x, -bound if p.problem.objective is Objective.MIN_COST else bound)


def _case_bound(p: PlacementProgram, case: _TrainerCase, worth: RelaxedValuation, low: float, high: float) -> float:
    """An upper bound on a case in an interval of step durations: the shortest training with the smallest trainer, at
    the slopes that this leads to."""
    value = -math.inf
    for _ in range(SLOPE_ITERATIONS):
        case.hold(p, low, high)
        value = case.worth(p, worth)
    return value


def _cases(p: PlacementProgram, seconds: Floats) -> Iterator[_TrainerCase]:
    """One case per trainer and publish time, with the pools that a version reaches in that time; the largest set
    first."""
    serving = frozenset(unit.pool for unit in p.tableau.units)
    for option in p.trainers:
        if p.matrix.high[option.devices] <= 0:
            continue
        takes = {g: _publish_s(p, option, {g}) for g in serving}
        shorter = math.inf
        for publish_s in sorted(set(takes.values()), reverse=True):
            if publish_s * PUBLISH_TIME_FACTOR <= shorter:
                yield _TrainerCase(option, publish_s, frozenset(g for g in serving if takes[g] <= publish_s), seconds)
                shorter = publish_s


def _publish_s(p: PlacementProgram, option: TrainerOption, serving: Iterable[int]) -> float:
    names = [pool.name for pool in p.problem.pools]
    return p.problem.publish_s(names[option.pool], {names[g] for g in serving})


@contextmanager
def _restrict_to_case(p: PlacementProgram, case: _TrainerCase) -> Iterator[None]:
    """Within this context no other pool trains, and only the case's pools serve."""
    m = p.matrix
    shut = [c for t in p.trainers if t is not case.option for c in (t.devices, t.chosen)]
    shut += [p.units[u] for u, unit in enumerate(p.tableau.units) if unit.pool not in case.serving]
    before = [(c, m.high[c]) for c in shut]
    for c in shut:
        m.high[c] = min(m.high[c], max(m.low[c], 0.0))
    try:
        yield
    finally:
        for c, high in before:
            m.high[c] = high


def _step_seconds_range(p: PlacementProgram, option: TrainerOption) -> tuple[float, float]:
    """Seconds of a step on the largest useful trainer and on the smallest."""
    size = program.fixed_trainer_size(p, option)
    least, most = (option.least, option.most) if size is None else (size, size)
    return program.training_step_s(p, option, most), program.training_step_s(p, option, least)


def _peak_step_seconds(
    p: PlacementProgram, case: _TrainerCase, worth: RelaxedValuation, low: float, high: float
) -> tuple[float, float, float]:
    """The step duration at which the relaxed problem has its best value, that value, and a bound on its value at any
    duration with the slopes of the peak."""

    def at(train_s: float) -> float:
        return _case_bound(p, case, worth, train_s, train_s)

    a, b = low, high
    c, d = a * (b / a) ** (1 - GOLDEN_RATIO), a * (b / a) ** GOLDEN_RATIO
    if b > a * (1 + STEP_TOLERANCE):
        left, right = at(c), at(d)
        while b > a * (1 + STEP_TOLERANCE):
            if left >= right and left > -math.inf:
                b, d, right = d, c, left
                c = a * (b / a) ** (1 - GOLDEN_RATIO)
                left = at(c)
            else:
                a, c, left = c, d, right
                d = a * (b / a) ** GOLDEN_RATIO
                right = at(d)
    train_s = math.sqrt(a * b)
    reached = at(train_s)
    # The peak is unique, so that no value outside the last interval is better than inside.
    case.hold(p, a, b)
    return train_s, reached, max(case.worth(p, worth), reached)


def _integer_plan(
    p: PlacementProgram, case: _TrainerCase, train_s: float, solve: ProgramSolver, worth: RelaxedValuation
) -> WindowedPlan | None:
    """The best integer plan near this step duration, then with the trainer that this plan leaves room for and with the
    trajectory lengths that it has. Without a plan there, neighbouring trainer sizes are tried."""
    found: WindowedPlan | None = None
    attempts, tried, missed = list[str](), dict[float, Floats](), 0
    queue = _trainer_sizes(p, case, train_s, worth)
    while queue and len(attempts) < MAX_SOLUTIONS and missed < MAX_MISSES:
        limit, size = queue.pop(0)
        tried[size] = case.seconds
        if found is not None and limit <= _required_value(p, found):
            continue
        answer = _plan_at_size(p, case, size, solve)
        if answer is None:
            missed += 1
            beside = {size - 1, size + 1, *(s for _, s in queue)}
            again = found is None and program.fixed_trainer_size(p, case.option) is None
            queue = [each for each in _ranked_sizes(p, case, beside, worth) if each[1] not in tried] if again else []
            continue
        devices = round(answer.x[case.option.devices])
        attempts.append(f"{float(answer.x[p.rate]) * p.scale:.4g}/s with {devices} devices")
        if found is not None and _plan_value(answer.p, answer.x) <= _required_value(p, found):
            continue
        found = answer
        room = float(_max_trainer_size(answer.p, case, answer.x))
        if room not in tried or not np.allclose(tried[room], case.seconds, rtol=STEP_TOLERANCE):
            queue.insert(0, (math.inf, room))
    if found is not None:
        found.p.notes.append(f"training chosen with the window in {case.solved} linear programs: {', '.join(attempts)}")
    return found


def _required_value(p: PlacementProgram, found: WindowedPlan) -> float:
    """The value above which a plan replaces this one."""
    value = _plan_value(found.p, found.x)  # below 0 where it is a cost
    return value + abs(value) * p.problem.gap


def _plan_at_size(p: PlacementProgram, case: _TrainerCase, size: float, solve: ProgramSolver) -> WindowedPlan | None:
    """The best plan with a trainer of `size` devices, at slopes near its own. Slopes at which the requested rate is
    infeasible may be too far from those of any plan: they are taken once more at the plan with the best rate."""
    train_s = program.training_step_s(p, case.option, size)
    least_cost, last = p.problem.objective is Objective.MIN_COST, None
    once_more = least_cost
    for _ in range(SLOPE_ITERATIONS + 2):
        q = p.copy()
        case.hold(q, train_s)
        answer = solve(q)
        if answer is not None:
            x, bound = answer
            own_s = program.training_step_s(q, case.option, round(x[case.option.devices]))
            case.seconds = program.mean_seconds_in_flight(q, x)
            case.hold(q, own_s)
            last = WindowedPlan(q, x, bound)
            if program.window_occupancy(q, x, own_s, case.publish_s) <= 1 + STEP_TOLERANCE:
                return last
        elif not once_more:
            break
        else:
            once_more = False
            q = p.copy()
            q.problem = dataclasses.replace(p.problem, objective=Objective.MAX_THROUGHPUT, rate=None)
            case.hold(q, train_s)
            most = solve(q)
            if most is None:
                break
            case.seconds = program.mean_seconds_in_flight(q, most[0])
    return None if least_cost else last


def _trainer_sizes(
    p: PlacementProgram, case: _TrainerCase, train_s: float, worth: RelaxedValuation
) -> list[tuple[float, float]]:
    """Integer trainer sizes around the size that a step of `train_s` seconds takes, with their relaxed values, the best
    first."""
    size, train = program.fixed_trainer_size(p, case.option), p.problem.train
    if size is not None or train is None:
        return [] if size is None else [(math.inf, size)]
    devices = case.option.work / (train_s / train.batch - case.option.fixed)
    about = {float(around(devices)) + more for around in (math.floor, math.ceil) for more in (-1, 0, 1)}
    return _ranked_sizes(p, case, about, worth)


def _ranked_sizes(
    p: PlacementProgram, case: _TrainerCase, sizes: Iterable[float], worth: RelaxedValuation
) -> list[tuple[float, float]]:
    """The values of the relaxed problem at these trainer sizes, and the sizes; the best first."""
    least, most = case.option.least, case.option.most

    def at(size: float) -> float:
        train_s = program.training_step_s(p, case.option, size)
        return _case_bound(p, case, worth, train_s, train_s)

    possible = {float(max(least, min(most, size))) for size in sizes}
    return sorted(((at(size), size) for size in sorted(possible)), key=lambda each: (-each[0], each[1]))


def _max_trainer_size(p: PlacementProgram, case: _TrainerCase, x: Floats) -> int:
    """The largest useful trainer: its devices plus the idle ones of its pool."""
    g = case.option.pool
    used = sum(round(float(x[column])) * devices for pool, column, devices in p.device_columns() if pool == g)
    room = round(float(x[case.option.devices])) + max(p.problem.pools[g].count - used, 0)
    return min(room, case.option.most)


def _plan_value(p: PlacementProgram, x: Floats) -> float:
    """The value of a plan under the objective, higher being better."""
    rate, cost = float(x[p.rate]) * p.scale, float(p.vector(p.cost()) @ x)
    match p.problem.objective:
        case Objective.MIN_COST:
            return -cost
        case Objective.MAX_THROUGHPUT_PER_DOLLAR:
            return rate / cost if cost > 0 else 0.0
        case _:
            return rate


def _trainer(p: PlacementProgram, x: Floats) -> TrainerOption | None:
    return next((option for option in p.trainers if x[option.devices] > 0.5), None)


MAX_THROUGHPUT = Objective.MAX_THROUGHPUT
MIN_RATE = 1e-3
"""Share of the scale from which a rate counts as positive."""
MAX_EXTRA_INSTANCES = 4096.0
"""Instances that the elastic program may invent."""


def unservable_domain(problem: Problem, table: Tableau) -> Infeasible | None:
    """The first domain that no pool can serve, with the reason of each pool; None if all are served."""
    served = set(table.paths.domain.tolist())
    for j, domain in enumerate(problem.domains):
        if j in served:
            continue
        allowed = problem.affinity.get(domain.name)
        why = [text for pool, name, text in table.reasons if name in ("", domain.name) and pool in (allowed or (pool,))]
        if not any(role in problem.roles for role in ROLLOUT_ROLES):
            why.append("roles allow neither engines nor prefill and decode")
        elif problem.restriction is Restriction.PD_ONLY and not table.channels:
            why.append("no link is known over which prefill could hand KV to decode")
        elif problem.device_types is not None and not table.units:
            why.append(f"device_types allows only {', '.join(sorted(problem.device_types))}")
        elif not why:
            why.append("no prefill pool that can reach a decode pool")
        where = f"its affinity allows only {', '.join(allowed)}: " if allowed else ""
        first = "; ".join(why[:3]) + (f"; and {len(why) - 3} more" if len(why) > 3 else "")
        return Infeasible(f"no pool can serve {domain.name}: {where}{first}", tuple(why))
    return None


def explain_infeasibility(problem: Problem, table: Tableau, again: Callable[[Problem], object]) -> Infeasible:
    """Explain why `problem` has no plan. `again` solves a problem: the best rate without the requested one gives the
    shortfall."""
    p = build_program(problem, table)
    if Role.TRAINER in problem.roles and problem.train is not None and not p.trainers:
        return Infeasible(f"nothing can train: {'; '.join(p.refused)}", tuple(p.refused))
    for key in p.matrix.rows:
        if key[0] == "latency":
            return Infeasible(p.late[0], tuple(p.late))
        if key[0] == "given":
            text = f"the given {key[2]} with {key[3]} devices each cannot run on {key[1]}"
            return Infeasible(text, (text, *(r[2] for r in table.reasons if r[0] == key[1])))
    if problem.objective is Objective.MIN_COST:
        most = again(dataclasses.replace(problem, objective=MAX_THROUGHPUT, rate=None))
        rate, binds = getattr(most, "rate", None), getattr(most, "binds", ())
        if rate is not None and rate < (problem.rate or 0.0):
            asked = f"{problem.rate:g} trajectories/s are asked for"
            return Infeasible(_rate_shortfall(problem, rate, binds, again), (asked, *binds))
        if isinstance(most, Infeasible):
            return most
    return _elastic_diagnosis(p)


def _rate_shortfall(problem: Problem, rate: float, binds: tuple[str, ...], again: Callable[[Problem], object]) -> str:
    asked, budget = f"{problem.rate:g} are asked for", problem.budget_usd_per_hour
    if budget is not None:
        # With whole instances a budget can bind while its price is 0, so that only a solution without it shows its
        # effect.
        free = again(dataclasses.replace(problem, budget_usd_per_hour=None, rate=None, objective=MAX_THROUGHPUT))
        if getattr(free, "rate", 0.0) > rate * (1 + 1e-3):
            return f"the budget of ${budget:g}/h allows {rate:.3g} trajectories/s, {asked}"
    return f"{rate:.3g} trajectories/s are possible, {asked}; what limits it: {', '.join(binds[:3])}"


def _elastic_diagnosis(p: PlacementProgram) -> Infeasible:
    """Relax inventory, budget, changes, replicas and the trainer's size by as little as possible."""
    m, problem = p.matrix, p.problem
    slack: dict[int, float] = {}
    descriptions: list[tuple[int, Callable[[float], str]]] = []

    def relax(key: tuple[object, ...], sign: float, scale: float, describe: Callable[[float], str]) -> None:
        column = m.column(high=MAX_EXTRA_INSTANCES * scale)
        m.add(key, [column], [sign])
        slack[column] = -1.0 / scale
        descriptions.append((column, describe))

    for g, pool in enumerate(problem.pools):
        relax(("pool", g), -1.0, pool.count, functools.partial(_missing_devices, pool))
    if m.has(("budget",)):
        usd = problem.budget_usd_per_hour or 0.0
        everything = sum(q.count * q.usd_per_device_hour for q in problem.pools)
        relax(
            ("budget",),
            -1.0,
            max(1.0, everything / usd),
            lambda v: f"the plan needs ${usd * (1 + v):.4g}/h, the budget is ${usd:g}/h",
        )
    if m.has(("changes",)) and problem.running is not None:
        most = problem.running.max_changed_devices or 0
        relax(("changes",), -1.0, max(1, most), lambda v: f"the plan changes {most + v:.0f} devices, {most} may change")
    for role, least in sorted(problem.min_replicas.items()):
        relax(("replicas", role), 1.0, least, functools.partial(_missing_replicas, role, least))
    for column in [*p.units, *p.reward_units.values(), *p.environments.values()]:
        if m.low[column] < m.high[column]:
            m.high[column] += MAX_EXTRA_INSTANCES
    p.first_path = m.width  # the slack columns come before the paths
    program.seed_columns(p)
    m.low[p.rate] = MIN_RATE
    found = search.search_best(p, slack)
    if found is None:
        return Infeasible("no plan satisfies all constraints together", ("more than one cause",))
    conflicts = tuple(describe(float(found.x[column])) for column, describe in descriptions if found.x[column] > 1e-6)
    if not conflicts:
        return Infeasible("no plan was found within the limits of the search", ())
    return Infeasible("; ".join(conflicts), conflicts)


def _missing_devices(pool: Pool, missing: float) -> str:
    return f"the plan needs {pool.count + missing:.0f} devices of {pool.name}, which has {pool.count}"


def _missing_replicas(role: Role, least: int, missing: float) -> str:
    return f"min_replicas asks for {least} of {role}, {least - missing:.0f} fit"


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
    missing = unservable_domain(problem, table)
    if missing is not None:
        return missing
    found = _within_window(problem, table, _solve_by_objective)
    if found is None:
        return explain_infeasibility(problem, table, solve)
    p, x, bound = found
    if problem.objective is not Objective.MAX_THROUGHPUT:
        return result.build_placement(p, x, bound)
    first = FirstStage(float(x[p.rate]) * p.scale, float(p.vector(p.cost()) @ x))
    return result.build_placement(p, _cheapest_near_best_rate(p, x), bound, first)


def best_objective_value(problem: Problem) -> float:
    """The value of the best plan, comparable with `Placement.worth`; 0 if there is none. Only the first stage is
    solved, which takes a third of the time of `solve`."""
    table = tableau(problem)
    found = None if unservable_domain(problem, table) else _within_window(problem, table, _solve_first_stage)
    if found is None:
        return 0.0
    p, x, _ = found
    if problem.objective is Objective.MAX_THROUGHPUT:
        # A window is held at the plan's own seconds by now, and was searched at those of the one before.
        again = program.solve_relaxation(p, {p.rate: 1.0}, fix={j: float(round(x[j])) for j in p.integers()})
        x = x if again is None else again.x
    return objective_value(problem.objective, float(x[p.rate]) * p.scale, float(p.vector(p.cost()) @ x))


def _within_window(
    problem: Problem, table: Tableau, best: ProgramSolver
) -> tuple[PlacementProgram, Floats, float] | None:
    """The best plan's program and columns, and a bound on the value of any plan; None if there is none."""
    p = _rescaled_program(problem, table)
    found = best(p)
    if found is None or fits_its_window(p, found[0]):
        return None if found is None else (p, *found)
    kept = solve_within_window(
        _rescaled_program(problem, table), best, _relaxed_value, seconds=program.mean_seconds_in_flight(p, found[0])
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
        most = program.solve_relaxation(p, {p.rate: 1.0}, near=p.problem.gap)
        return (
            (-math.inf, None) if most is None or most.x[p.rate] <= NEGLIGIBLE_RATE else (most.bound * p.scale, most.x)
        )
    if p.problem.objective is Objective.MIN_COST:
        asked, (low, high) = (p.problem.rate or 0.0) / p.scale, (p.matrix.low[p.rate], p.matrix.high[p.rate])
        p.matrix.low[p.rate] = p.matrix.high[p.rate] = asked
        least = program.solve_relaxation(p, {j: -v for j, v in p.cost().items()})
        p.matrix.low[p.rate], p.matrix.high[p.rate] = low, high
        if least is not None:
            return least.bound, least.x
        most = program.solve_relaxation(p, {p.rate: 1.0})
        return (-math.inf, None) if most is None else (-UNREACHED_PENALTY * (1.0 - most.value / asked), most.x)
    ratio, cost, x = 0.0, p.cost(), None
    for _ in range(MAX_ITERATIONS):
        found = program.solve_relaxation(p, {p.rate: 1.0, **{j: -ratio * v for j, v in cost.items()}})
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
    program.seed_columns(p)
    for _ in range(MAX_RESCALES):
        answer = p.matrix.relaxed(p.vector({p.rate: 1.0}))
        if answer is None or not FAINT < answer.x[p.rate] < SMALL:
            break
        p = build_program(problem, table, p.scale * float(answer.x[p.rate]))
        program.seed_columns(p)
    return p


def _solve_throughput(p: PlacementProgram, *, tied: bool) -> tuple[Floats, float] | None:
    p.relaxed = program.solve_relaxation(p, {p.rate: 1.0}, near=p.problem.gap)
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
    most = program.solve_relaxation(p, {p.rate: 1.0})
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
