"""The placement of a problem: the number of instances by pool, role and TP, and the flows through them (RollArt R1 and
P/D; facts: Mélange's cover, Splitwise's and HexGen-2's roles, Little's law for batches, KV and trajectories in flight).

A mixed-integer program over instances (pool × role × TP) and path flows (domain × units × batch × KV mode), solved by
HiGHS. Only instances are integers; a batch size is an operating point at which an instance spends part of its time.

With a window of trajectories in flight, training and rollout share devices so that their durations fit its slots. The
duration of a training step is chosen first, over the relaxed problem. At a given rate the feasible durations are an
interval (linear rows, and `devices × seconds >= work`, which is convex), so that the best value has one peak, which a
golden-section search finds. The window's slopes are recomputed for each duration at the seconds that they lead to: the
slopes of another duration may hide the best plans. The integer program is solved at the peak and beside it, and again
as long as the trainer, with the devices that rounding left over, is faster than assumed.

A problem without a plan is explained with numbers: a domain that nothing can serve, the shortfall to the requested
rate, or the constraints that would have to be relaxed (an elastic program: the least relative violation that makes a
plan possible).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

from placement.milp import Floats
from placement.paths import Tableau, tableau
from placement.problem import Problem, Restriction
from placement.program import (
    PlacementProgram,
    TrainerOption,
    build_program,
    rescaled_program,
    seed_columns,
    set_holding_times,
    solve_relaxation,
)
from placement.result import build_placement
from placement.search import best_plan, cheapest_near_best_rate, plan_value, relaxed_value, search_best
from placement.types import ROLLOUT_ROLES, FirstStage, Infeasible, Objective, Placement, Pool, Role, objective_value
from placement.window import HoldingSlopes, holding_slopes

STEP_TOLERANCE = 0.02
"""Relative distance of step durations at which the search ends: the value is flat near its peak."""
MAX_SOLUTIONS = 3
"""Limit of integer solutions; the second is rarely better by more than rounding."""
MAX_MISSES = 4
"""Trainer sizes without an integer plan after which the search gives up."""
SLOPE_ITERATIONS = 2
"""Iterations until the slopes are those of the seconds that they lead to."""
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
PUBLISH_TIME_FACTOR = 1.05
"""Publish times that differ by less than this factor form one case, with the longest of them."""
MAX_LOSS = 1e-3
"""Share of started but untrained trajectories below which a plan need not account for them."""
MIN_RATE = 1e-3
"""Share of the scale from which a rate counts as positive."""
MAX_EXTRA_INSTANCES = 4096.0
"""Instances that the elastic program may invent."""


def solve(problem: Problem) -> Placement | Infeasible:
    """The best placement, or the reason that there is none. Deterministic. ValueError if rate per dollar is requested
    and nothing has a price; RuntimeError if HiGHS fails."""
    table = tableau(problem)
    missing = _unservable_domain(problem, table)
    if missing is not None:
        return missing
    found = _best_within_window(problem, table, tied=True)
    if found is None:
        return _explain_infeasibility(problem, table)
    p, x = found.p, found.x
    if problem.objective is not Objective.MAX_THROUGHPUT:
        return build_placement(p, x, found.bound)
    first = FirstStage(p.rate_of(x), p.usd_per_hour(x))
    return build_placement(p, cheapest_near_best_rate(p, x), found.bound, first)


def best_objective_value(problem: Problem) -> float:
    """The value of the best plan, comparable with `Placement.worth`; 0 if there is none. Only the first stage is
    solved, which takes a third of the time of `solve`."""
    table = tableau(problem)
    found = None if _unservable_domain(problem, table) else _best_within_window(problem, table, tied=False)
    if found is None:
        return 0.0
    p, x = found.p, found.x
    if problem.objective is Objective.MAX_THROUGHPUT:
        # A window is held at the plan's own seconds by now, and was searched at those of the one before.
        again = solve_relaxation(p, {p.rate: 1.0}, fix={j: float(round(x[j])) for j in p.integers()})
        x = x if again is None else again.x
    return objective_value(problem.objective, p.rate_of(x), p.usd_per_hour(x))


@dataclass(frozen=True, slots=True)
class _Plan:
    """A plan and a bound on the value of any plan. With a window, `p` has the rows at the seconds of its trainer."""

    p: PlacementProgram
    x: Floats
    bound: float

    @property
    def value(self) -> float:
        return plan_value(self.p, self.x)


def _best_within_window(problem: Problem, table: Tableau, *, tied: bool) -> _Plan | None:
    """The best plan of the objective that its window, if any, sustains. `tied`: of equally good plans, the cheapest."""
    p = rescaled_program(problem, table)
    found = best_plan(p, tied=tied)
    if found is None:
        return None
    x, bound = found
    if _fits_its_window(p, x):
        return _Plan(p, x, bound)
    return _search_window(rescaled_program(problem, table), _seconds_in_flight(p, x), tied=tied)


def _fits_its_window(p: PlacementProgram, x: Floats) -> bool:
    """True if a plan that was solved without its window fits it: no started trajectory is lost, and there are enough
    slots. The window's rows are then set in `p` for further solutions."""
    option = p.trainer(x)
    if option is None or not p.matrix.has(("window", 0)):
        return True
    serving = p.serving(x)
    case = _TrainerCase(p, option, p.publish_s(option, serving), serving, _seconds_in_flight(p, x))
    train_s = p.step_s(option, round(x[option.devices]))
    lost = max(slope.started for slope in case.slopes(train_s)) > 1 + MAX_LOSS
    if lost or case.occupancy(p, x, train_s) > 1 + 1e-9:
        return False
    case.hold(p, train_s)
    return True


def _search_window(p: PlacementProgram, seconds: Floats, *, tied: bool) -> _Plan | None:
    """The best plan within the window; None if there is none. `p` is a fresh program; `seconds` are the initial seconds
    in flight by domain."""
    found: _Plan | None = None
    best = most = -math.inf
    cases = []
    for case in _cases(p, seconds, tied=tied):
        size, option = p.trainer_size(case.option), case.option
        # Seconds of a step on the largest useful trainer, and on the smallest.
        low, high = (p.step_s(option, n) for n in ((option.most, option.least) if size is None else (size, size)))
        with case.restricted():
            cases.append((case.relaxed_bound(low, high), low, high, case))
    for limit, low, high, case in sorted(cases, key=lambda each: -each[0]):
        if limit <= best:
            continue
        with case.restricted():
            train_s, reached, bound = case.peak(low, high)
            most = max(most, bound)
            one = case.integer_plan(train_s) if reached > best else None
        if one is not None and one.value > best:
            found, best = one, one.value
    if found is None:
        return None
    bound = max(most, best)
    return replace(found, bound=-bound if p.problem.objective is Objective.MIN_COST else bound)


def _cases(p: PlacementProgram, seconds: Floats, *, tied: bool) -> Iterator[_TrainerCase]:
    """One case per trainer and publish time, with the pools that a version reaches in that time; the largest set
    first."""
    serving = frozenset(unit.pool for unit in p.tableau.units)
    for option in p.trainers:
        if p.matrix.high[option.devices] <= 0:
            continue
        takes = {g: p.publish_s(option, {g}) for g in serving}
        shorter = math.inf
        for publish_s in sorted(set(takes.values()), reverse=True):
            if publish_s * PUBLISH_TIME_FACTOR <= shorter:
                reached = frozenset(g for g in serving if takes[g] <= publish_s)
                yield _TrainerCase(p, option, publish_s, reached, seconds, tied)
                shorter = publish_s


@dataclass(slots=True)
class _TrainerCase:
    """A training pool and the pools that may serve with it: all that a version reaches in `publish_s`. `seconds` in
    flight by domain are those of the last solution; slopes are taken there."""

    p: PlacementProgram
    option: TrainerOption
    publish_s: float
    serving: frozenset[int]
    seconds: Floats
    tied: bool = True
    solved: int = 0
    """Linear programs solved."""

    def restricted(self) -> AbstractContextManager[None]:
        """Within this context no other pool trains, and only the case's pools serve."""
        p, m = self.p, self.p.matrix
        excluded = [c for t in p.trainers if t is not self.option for c in (t.devices, t.chosen)]
        excluded += [p.units[u] for u, unit in enumerate(p.tableau.units) if unit.pool not in self.serving]
        return m.bounded({c: (m.low[c], min(m.high[c], max(m.low[c], 0.0))) for c in excluded})

    def slopes(self, train_s: float) -> tuple[HoldingSlopes, ...]:
        """The slopes of the holding time by domain."""
        pairs, rest_s = zip(self.p.problem.domains, self.seconds, strict=True), train_s + self.publish_s
        return tuple(holding_slopes(self.p.problem, domain, float(s), rest_s) for domain, s in pairs)

    def hold(self, q: PlacementProgram, train_s: float, least_s: float | None = None) -> None:
        """Set the window's rows in a program."""
        set_holding_times(q, self.slopes(train_s), train_s, self.publish_s, least_s=least_s)

    def occupancy(self, q: PlacementProgram, x: Floats, train_s: float) -> float:
        """The share of its slots that a solution's flows hold, of the domain with the largest share."""
        rest_s, weights = train_s + self.publish_s, q.tableau.weights
        pairs = zip(self.slopes(train_s), self.seconds.tolist(), strict=True)
        held = np.array([slope.own * s + slope.rest * rest_s for slope, s in pairs])
        return float((q.rate_of(x) * weights * held / (q.problem.trajectories_in_flight * weights)).max())

    def relaxed_bound(self, low: float, high: float) -> float:
        """An upper bound in an interval of step durations: the shortest training with the smallest trainer, at the
        slopes that this leads to."""
        value = -math.inf
        for _ in range(SLOPE_ITERATIONS):
            value = self._relaxed(low, high)
        return value

    def peak(self, low: float, high: float) -> tuple[float, float, float]:
        """The step duration at which the relaxed problem has its best value, that value, and a bound on its value at
        any duration with the slopes of the peak."""

        def at(train_s: float) -> float:
            return self.relaxed_bound(train_s, train_s)

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
        return train_s, reached, max(self._relaxed(a, b), reached)

    def integer_plan(self, train_s: float) -> _Plan | None:
        """The best integer plan near this step duration, then with the trainer that this plan leaves room for and with
        the trajectory lengths that it has. Without a plan there, neighbouring trainer sizes are tried."""
        p, option = self.p, self.option
        found: _Plan | None = None
        attempts, tried, missed = list[str](), dict[float, Floats](), 0
        queue = self._sizes_near(train_s)
        while queue and len(attempts) < MAX_SOLUTIONS and missed < MAX_MISSES:
            limit, size = queue.pop(0)
            tried[size] = self.seconds
            if found is not None and limit <= self._required(found):
                continue
            answer = self._plan_at_size(size)
            if answer is None:
                missed += 1
                beside = {size - 1, size + 1, *(s for _, s in queue)}
                again = found is None and p.trainer_size(option) is None
                queue = [each for each in self._ranked(beside) if each[1] not in tried] if again else []
                continue
            attempts.append(f"{p.rate_of(answer.x):.4g}/s with {round(answer.x[option.devices])} devices")
            if found is not None and answer.value <= self._required(found):
                continue
            found = answer
            # The largest useful trainer: its devices plus the idle ones of its pool.
            idle = p.problem.pools[option.pool].count - p.devices_used(found.x)[option.pool]
            room = float(min(round(float(found.x[option.devices])) + max(idle, 0), option.most))
            if room not in tried or not np.allclose(tried[room], self.seconds, rtol=STEP_TOLERANCE):
                queue.insert(0, (math.inf, room))
        if found is not None:
            text = f"training chosen with the window in {self.solved} linear programs: {', '.join(attempts)}"
            found.p.notes.append(text)
        return found

    def _required(self, found: _Plan) -> float:
        """The value above which a plan replaces this one."""
        return found.value + abs(found.value) * self.p.problem.gap  # below 0 where it is a cost

    def _plan_at_size(self, size: float) -> _Plan | None:
        """The best plan with a trainer of `size` devices, at slopes near its own. Slopes at which the requested rate is
        infeasible may be too far from those of any plan: they are taken once more at the plan with the best rate."""
        train_s = self.p.step_s(self.option, size)
        last: _Plan | None = None
        least_cost = once_more = self.p.problem.objective is Objective.MIN_COST
        for _ in range(SLOPE_ITERATIONS + 2):
            q = self.p.copy()
            self.hold(q, train_s)
            answer = best_plan(q, tied=self.tied)
            if answer is not None:
                x, bound = answer
                own_s = q.step_s(self.option, round(x[self.option.devices]))
                self.seconds = _seconds_in_flight(q, x)
                self.hold(q, own_s)
                last = _Plan(q, x, bound)
                if self.occupancy(q, x, own_s) <= 1 + STEP_TOLERANCE:
                    return last
            elif not once_more:
                break
            else:
                once_more = False
                q = self.p.copy()
                q.problem = replace(self.p.problem, objective=Objective.MAX_THROUGHPUT, rate=None)
                self.hold(q, train_s)
                most = best_plan(q, tied=self.tied)
                if most is None:
                    break
                self.seconds = _seconds_in_flight(q, most[0])
        return None if least_cost else last

    def _sizes_near(self, train_s: float) -> list[tuple[float, float]]:
        """Integer trainer sizes around the size that a step of `train_s` seconds takes, with their relaxed values, the
        best first."""
        size, train = self.p.trainer_size(self.option), self.p.problem.train
        if size is not None or train is None:
            return [] if size is None else [(math.inf, size)]
        devices = self.option.work / (train_s / train.batch - self.option.fixed)
        return self._ranked(float(around(devices)) + more for around in (math.floor, math.ceil) for more in (-1, 0, 1))

    def _ranked(self, sizes: Iterable[float]) -> list[tuple[float, float]]:
        """The values of the relaxed problem at these trainer sizes, and the sizes; the best first."""
        ranked = []
        for size in sorted({float(max(self.option.least, min(self.option.most, size))) for size in sizes}):
            train_s = self.p.step_s(self.option, size)
            ranked.append((self.relaxed_bound(train_s, train_s), size))
        return sorted(ranked, key=lambda each: (-each[0], each[1]))

    def _relaxed(self, train_s: float, least_s: float) -> float:
        self.hold(self.p, train_s, least_s)
        value, x = relaxed_value(self.p)
        self.solved += 1
        if x is not None:
            self.seconds = _seconds_in_flight(self.p, x)
        return value


def _seconds_in_flight(p: PlacementProgram, x: Floats) -> Floats:
    """Mean seconds in flight, by domain."""
    flow, paths = np.maximum(x[p.first_path :], 0.0), p.active
    count, total = np.zeros(len(p.tableau.weights)), np.zeros(len(p.tableau.weights))
    np.add.at(count, paths.domain, flow)
    np.add.at(total, paths.domain, flow * paths.seconds)
    return total / np.maximum(count, 1e-300)


def _unservable_domain(problem: Problem, table: Tableau) -> Infeasible | None:
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


def _explain_infeasibility(problem: Problem, table: Tableau) -> Infeasible:
    """The reason that `problem` has no plan. The best rate without the requested one gives the shortfall."""
    p = build_program(problem, table)
    if Role.TRAINER in problem.roles and problem.train is not None and not p.trainers:
        return Infeasible(f"nothing can train: {'; '.join(p.refused)}", tuple(p.refused))
    if p.late:
        return Infeasible(p.late[0], tuple(p.late))
    for key in p.matrix.rows:
        if key[0] == "given":
            text = f"the given {key[2]} with {key[3]} devices each cannot run on {key[1]}"
            return Infeasible(text, (text, *(r[2] for r in table.reasons if r[0] == key[1])))
    if problem.objective is Objective.MIN_COST:
        free = replace(problem, objective=Objective.MAX_THROUGHPUT, rate=None)
        most, budget = solve(free), problem.budget_usd_per_hour
        if isinstance(most, Infeasible):
            return most
        if most.rate < (problem.rate or 0.0):
            asked, limits = f"{problem.rate:g} are asked for", ", ".join(most.binds[:3])
            text = f"{most.rate:.3g} trajectories/s are possible, {asked}; what limits it: {limits}"
            # With whole instances a budget can bind while its price is 0: only a solution without it shows its effect.
            unpaid = None if budget is None else solve(replace(free, budget_usd_per_hour=None))
            if isinstance(unpaid, Placement) and unpaid.rate > most.rate * (1 + 1e-3):
                text = f"the budget of ${budget:g}/h allows {most.rate:.3g} trajectories/s, {asked}"
            return Infeasible(text, (f"{problem.rate:g} trajectories/s are asked for", *most.binds))
    return _elastic_diagnosis(p)


def _elastic_diagnosis(p: PlacementProgram) -> Infeasible:
    """Relax inventory, budget, changes and the trainer's size by as little as possible."""
    m, problem = p.matrix, p.problem
    slack: dict[int, float] = {}
    descriptions: list[tuple[int, Callable[[float], str]]] = []

    def relax(key: tuple[object, ...], scale: float, describe: Callable[[float], str]) -> None:
        column = m.column(high=MAX_EXTRA_INSTANCES * scale)
        m.add(key, [column], [-1.0])
        slack[column] = -1.0 / scale
        descriptions.append((column, describe))

    for g, pool in enumerate(problem.pools):
        relax(("pool", g), pool.count, functools.partial(_missing_devices, pool))
    if m.has(("budget",)):
        usd = problem.budget_usd_per_hour or 0.0
        everything = sum(q.count * q.usd_per_device_hour for q in problem.pools)
        relax(
            ("budget",),
            max(1.0, everything / usd),
            lambda v: f"the plan needs ${usd * (1 + v):.4g}/h, the budget is ${usd:g}/h",
        )
    if m.has(("changes",)) and problem.running is not None:
        most = problem.running.max_changed_devices or 0
        relax(("changes",), max(1, most), lambda v: f"the plan changes {most + v:.0f} devices, {most} may change")
    for c in p.device_columns():
        if c.role is not Role.TRAINER and m.low[c.column] < m.high[c.column]:
            m.high[c.column] += MAX_EXTRA_INSTANCES
    p.first_path = m.width  # the slack columns come before the paths
    seed_columns(p)
    m.low[p.rate] = MIN_RATE
    found = search_best(p, slack)
    if found is None:
        return Infeasible("no plan satisfies all constraints together", ("more than one cause",))
    conflicts = tuple(describe(float(found.x[column])) for column, describe in descriptions if found.x[column] > 1e-6)
    if not conflicts:
        return Infeasible("no plan was found within the limits of the search", ())
    return Infeasible("; ".join(conflicts), conflicts)


def _missing_devices(pool: Pool, missing: float) -> str:
    return f"the plan needs {pool.count + missing:.0f} devices of {pool.name}, which has {pool.count}"
