"""The best plan that its window of trajectories in flight sustains: training and rollout share devices so that their
durations fit the slots of the window.

The duration of a training step is chosen first, over the relaxed problem. At a given rate the feasible durations are an
interval (linear rows, and `devices × seconds >= work`, which is convex), so that the best value has one peak, which a
golden-section search finds. The window's slopes are recomputed for each duration at the seconds that they lead to: the
slopes of another duration may hide the best plans. The integer program is solved at the peak and beside it, and again
as long as the trainer, with the devices that rounding left over, is faster than assumed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from placement import holding
from placement.milp import Floats
from placement.program import PlacementProgram
from placement.sides import TrainerOption
from placement.types import Objective

__all__ = ["WindowedPlan", "fits_its_window", "solve_within_window"]

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
        slopes = holding.domain_slopes(p, self.seconds, train_s + self.publish_s)
        holding.set_holding_times(p, slopes, train_s, self.publish_s, least_s=least_s)

    def worth(self, p: PlacementProgram, worth: RelaxedValuation) -> float:
        value, x = worth(p)
        self.solved += 1
        if x is not None:
            self.seconds = holding.mean_seconds_in_flight(p, x)
        return value


def fits_its_window(p: PlacementProgram, x: Floats) -> bool:
    """True if a plan that was solved without its window fits it. The window's rows are then set in `p` for further
    solutions."""
    option = _trainer(p, x)
    if p.problem.window is None or option is None or not p.matrix.has(("window", 0)):
        return True
    serving = frozenset(t.pool for u, t in enumerate(p.tableau.units) if x[p.units[u]] > 0.5)
    train_s, publish_s = holding.training_step_s(p, option, round(x[option.devices])), _publish_s(p, option, serving)
    if not holding.fits_window(p, x, train_s, publish_s):
        return False
    _TrainerCase(option, publish_s, serving, holding.mean_seconds_in_flight(p, x)).hold(p, train_s)
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
    size = holding.fixed_trainer_size(p, option)
    least, most = (option.least, option.most) if size is None else (size, size)
    return holding.training_step_s(p, option, most), holding.training_step_s(p, option, least)


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
            again = found is None and holding.fixed_trainer_size(p, case.option) is None
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
    train_s = holding.training_step_s(p, case.option, size)
    least_cost, last = p.problem.objective is Objective.MIN_COST, None
    once_more = least_cost
    for _ in range(SLOPE_ITERATIONS + 2):
        q = p.copy()
        case.hold(q, train_s)
        answer = solve(q)
        if answer is not None:
            x, bound = answer
            own_s = holding.training_step_s(q, case.option, round(x[case.option.devices]))
            case.seconds = holding.mean_seconds_in_flight(q, x)
            case.hold(q, own_s)
            last = WindowedPlan(q, x, bound)
            if holding.window_occupancy(q, x, own_s, case.publish_s) <= 1 + STEP_TOLERANCE:
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
            case.seconds = holding.mean_seconds_in_flight(q, most[0])
    return None if least_cost else last


def _trainer_sizes(
    p: PlacementProgram, case: _TrainerCase, train_s: float, worth: RelaxedValuation
) -> list[tuple[float, float]]:
    """Integer trainer sizes around the size that a step of `train_s` seconds takes, with their relaxed values, the best
    first."""
    size, train = holding.fixed_trainer_size(p, case.option), p.problem.train
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
        train_s = holding.training_step_s(p, case.option, size)
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
