"""A placement problem as one mixed-integer program: its columns, the rows that bind them, and its hourly cost.

Rates are columns in units of `scale` trajectories/s, so that all activities are near 1 whatever the problem's size.

The parts of the program around rollout: the trainer that takes the trajectories, the rewards that score them and the
environments that run beside them.

Program rows for an in-flight window whose slots are held until a publish (`placement.window`).

A slot is held for `a × seconds + b × (training + publish)`, where `a` and `b` are the slopes at the plan's own figures.
The holding time is homogeneous of degree one in both, so that the tangent is exact there. Training takes `batch × work
/ devices` seconds with the number of devices as a variable, so that the row is a product of variables and not linear.
At a given step time it is linear: it fixes the holding time and the fewest devices of the trainer.

Column generation: selection of the useful paths by their prices.

A large cluster has 100,000 paths and a plan uses a few dozen. A linear program over some paths prices all of them.
Paths with a positive gain are added until none is left, which is the optimum over all paths (Gilmore and Gomory, 1961).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from placement.milp import ConstraintMatrix, Floats, MilpSolution, RowKey
from placement.paths import Ints, Paths, Tableau
from placement.problem import FunctionPrice, Problem, Restriction, RewardCost, RunningPlan, TrainingWork
from placement.training import training_layout
from placement.types import ROLLOUT_ROLES, Deployment, Role
from placement.window import HoldingSlopes, holding_slopes


@dataclass(frozen=True, slots=True)
class TrainerOption:
    """A pool that can train: columns of its `devices`, of its choice (`chosen`), and of the `rate` it takes.

    `work` device-seconds per trajectory, and `fixed` seconds that more devices do not shorten. At least `least` devices
    hold the state, and more than `most` shorten no step.
    """

    pool: int
    devices: int
    chosen: int
    rate: int
    work: float
    fixed: float
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class RewardOption:
    """An option to score a domain: `pool` (-1: functions) by unit `unit`, at `usd` per trajectory for functions."""

    domain: int
    pool: int
    column: int
    unit: tuple[int, int, int] | None = None
    usd: float = 0.0


def add_training(p: PlacementProgram) -> None:
    """Add the trainer: one pool trains, on at least the devices that hold the state, and the trainer's rate bounds the
    rate. A step's fixed seconds make the trainer's rate concave in the devices: chords at whole numbers bound it."""
    problem, m, train = p.problem, p.matrix, p.problem.train
    if train is None or Role.TRAINER not in problem.roles:
        return
    for g, pool in enumerate(problem.pools):
        found = training_layout(problem, pool, train)
        if isinstance(found, str):
            p.refused.append(found)
            continue
        least = found.least
        if train.devices is not None:
            if not least <= train.devices <= pool.count:
                p.refused.append(
                    f"training does not fit on {pool.name}: it is given {train.devices} devices, needs at least "
                    f"{least}, and the pool has {pool.count}"
                )
                continue
        elif least > pool.count:
            p.refused.append(f"training needs {least} devices of {pool.name} to hold its state, which has {pool.count}")
            continue
        if pool.device.is_cpu and pool.memory_gb is None:
            p.notes.append(f"host memory of {pool.name} is not stated: whether training fits there is not checked")
        devices, chosen = m.column(high=float(pool.count), whole=True), m.column(high=1.0, whole=True)
        option = TrainerOption(
            g,
            devices,
            chosen,
            m.column(),
            found.work,
            train.seconds_per_step / train.batch,
            least,
            min(found.most, pool.count),
        )
        p.trainers.append(option)
        _add_trainer_rows(p, option, train)
    m.row(("trained",), [(p.rate, -1.0), *((t.rate, 1.0) for t in p.trainers)], low=0.0, high=0.0)
    m.row(("one trainer",), [(t.chosen, 1.0) for t in p.trainers], low=1.0, high=1.0)


def _add_trainer_rows(p: PlacementProgram, option: TrainerOption, train: TrainingWork) -> None:
    m, g = p.matrix, option.pool
    if train.devices is not None:
        m.row(("train size", g), [(option.devices, 1.0), (option.chosen, -float(train.devices))], low=0.0, high=0.0)
    else:
        m.row(("train most", g), [(option.devices, 1.0), (option.chosen, -float(option.most))], high=0.0)
        m.row(("train least", g), [(option.devices, 1.0), (option.chosen, -float(option.least))], low=0.0)
    points = [train.devices - 1, train.devices] if train.devices else _chord_points(option.most, option.fixed)

    def rate(devices: int) -> float:
        return devices / (option.work + option.fixed * devices)

    for a, b in itertools.pairwise(points):
        slope = (rate(b) - rate(a)) / (b - a)
        base = rate(a) - slope * a
        terms = [(option.rate, 1.0), (option.devices, -slope / p.scale), (option.chosen, -base / p.scale)]
        m.row(("train", g, a), terms, high=0.0)


def _chord_points(count: int, fixed: float) -> list[int]:
    """The points where the chords meet: every whole number to 32, then every 5 %. The rate is exact there and slightly
    low in between."""
    if fixed == 0:
        return [0, count]
    points = list(range(min(count, 32) + 1))
    while points[-1] < count:
        points.append(min(count, math.ceil(points[-1] * 1.05)))
    return points


def max_training_rate(problem: Problem) -> float:
    """Trajectories/s of the best pool if it only trained; infinite without training."""
    train, rates = problem.train, []
    if train is None:
        return math.inf
    for pool in problem.pools:
        found = training_layout(problem, pool, train)
        if not isinstance(found, str):
            devices = train.devices or min(found.most, pool.count)
            rates.append(devices / max(found.work + devices * train.seconds_per_step / train.batch, 1e-300))
    return max(rates, default=math.inf)


def add_rewards(p: PlacementProgram) -> None:
    """Add rewards: every scored domain divides its rate over functions and dedicated devices. A domain without either
    is left out with a note: rewards without a price or a pool do not make a plan infeasible."""
    problem, m = p.problem, p.matrix
    if Role.REWARD not in problem.roles:
        return
    for j, domain in enumerate(problem.domains):
        if domain.reward is None:
            continue
        options = list(_reward_options(p, j, domain.reward))
        if not options:
            why = _unplaced_reason(problem, domain.name, domain.reward)
            if domain.reward.latency_s is not None and domain.reward.seconds > domain.reward.latency_s:
                m.row(("latency", j), low=1.0, high=1.0)  # infeasible on purpose
                p.late.append(why)
            else:
                p.notes.append(why)
            continue
        p.rewards += options
        share = float(p.tableau.weights[j])
        m.row(("reward", j), [(p.rate, -share), *((q.column, 1.0) for q in options)], low=0.0, high=0.0)
        for option in options:
            if option.unit is not None:
                m.add(("scoring", *option.unit), [option.column], [domain.reward.seconds * p.scale])
            elif m.has(("in flight",)) and problem.functions is not None:
                waiting = problem.functions.overhead_s * p.scale / problem.trajectories_in_flight
                m.add(("in flight",), [option.column], [waiting])


def _reward_options(p: PlacementProgram, j: int, reward: RewardCost) -> Iterator[RewardOption]:
    problem, m = p.problem, p.matrix
    usd = function_usd(problem.functions, reward)
    if usd is not None:
        yield RewardOption(j, -1, m.column(), None, usd)
    if reward.latency_s is not None and reward.seconds > reward.latency_s:
        return
    devices = 1 if reward.on_gpu else max(1, math.ceil(reward.cores))
    for g, pool in enumerate(problem.pools):
        if pool.device.is_cpu == reward.on_gpu or devices > pool.count:
            continue
        if reward.on_gpu and (pool.device.memory_gb is None or pool.device.memory_gb < reward.memory_gb):
            continue
        # Reward models of different domains do not share a GPU: each holds its own weights.
        unit = (g, devices, j if reward.on_gpu else -1)
        if unit not in p.reward_units:
            column = m.column(high=float(pool.count // devices), whole=True)
            p.reward_units[unit] = column
            m.row(("scoring", *unit), [(column, -problem.utilisation)], high=0.0)
        yield RewardOption(j, g, m.column(), unit)


def function_usd(price: FunctionPrice | None, reward: RewardCost) -> float | None:
    """Dollars of one call; None if functions cannot run it: not stateless, no GPU on offer, or too slow."""
    if price is None or not reward.stateless or (reward.on_gpu and price.usd_per_gpu_s is None):
        return None
    if reward.latency_s is not None and reward.seconds + price.overhead_s > reward.latency_s:
        return None
    per_second = reward.memory_gb * price.usd_per_gb_s + reward.cores * price.usd_per_core_s
    if reward.on_gpu:
        per_second = price.usd_per_gpu_s or 0.0
    return reward.seconds * per_second + price.usd_per_million_requests / 1e6


def _unplaced_reason(problem: Problem, name: str, reward: RewardCost) -> str:
    what = f"the reward of {name} is not placed"
    if reward.latency_s is not None and reward.seconds > reward.latency_s:
        return f"the reward of {name} takes {reward.seconds:g} s, more than its bound of {reward.latency_s:g} s"
    kind = "GPU" if reward.on_gpu else "CPU"
    if problem.functions is None:
        return f"{what}: no functions are priced and no {kind} pool fits it"
    return f"{what}: functions cannot run it (state, latency or no GPU on offer) and no {kind} pool fits it"


def add_environments(p: PlacementProgram) -> None:
    """Add the CPU cores of environments, where CPU pools exist to run them."""
    problem, m = p.problem, p.matrix
    shares = zip(problem.domains, p.tableau.weights, strict=True)
    cores = sum(float(w) * d.turns.mean * d.environment.core_s for d, w in shares)
    if Role.ENVIRONMENT not in problem.roles or cores <= 0:
        return
    for g, pool in enumerate(problem.pools):
        if pool.device.is_cpu:
            p.environments[g] = m.column(high=float(pool.count), whole=True)
    if not p.environments:
        p.notes.append("environments are not placed: there is no CPU pool")
        return
    terms = [(p.rate, cores * p.scale), *((c, -problem.utilisation) for c in p.environments.values())]
    m.row(("environments",), terms, high=0.0)


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


@dataclass(slots=True)
class PlacementProgram:
    """The program and the indices of its columns. `units[u]`, `reward_units` and `environments` count instances."""

    problem: Problem
    tableau: Tableau
    matrix: ConstraintMatrix
    scale: float
    rate: int
    units: list[int]
    trainers: list[TrainerOption]
    rewards: list[RewardOption]
    reward_units: dict[tuple[int, int, int], int]
    environments: dict[int, int]
    path_at: Ints
    """Which path of the tableau each path column is; the columns start at `first_path`."""
    first_path: int = 0
    changed: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """The reasons that pools cannot train."""
    late: list[str] = field(default_factory=list)
    """Rewards whose latency bound cannot be met."""
    slopes: tuple[float, ...] = ()
    """With a binding window, by domain: seconds that a slot is held per second in flight."""
    mixed: dict[int, int] = field(default_factory=dict)
    """By pool, the column of its share, if every pool has the same mix."""
    started: tuple[float, ...] = ()
    """By domain: trajectories started per trained trajectory."""
    held: dict[int, tuple[list[float], float]] = field(default_factory=dict)
    """By the trainer's pool, the last values of `holding.set_holding_times`: the window's terms and the fewest
    devices."""
    relaxed: MilpSolution | None = None
    """The best rate with fractional instances, once it is known: its duals are the value of a device."""
    fixed_usd: float = 0.0
    """$/h that are paid in any case: pools that are not rented."""

    def copy(self) -> PlacementProgram:
        """A copy whose rows and columns are independent from now on."""
        lists = {"changed": list(self.changed), "notes": list(self.notes), "held": dict(self.held)}
        return replace(self, matrix=self.matrix.copy(), **lists)  # type: ignore[arg-type]

    def vector(self, terms: Mapping[int, float]) -> Floats:
        out = np.zeros(self.matrix.width)
        for j, v in terms.items():
            out[j] += v
        return out

    def device_columns(self) -> list[tuple[int, int, int]]:
        """(pool, column, devices per unit of the column) of every column that takes devices."""
        t = self.tableau
        out = [(unit.pool, self.units[u], unit.tp) for u, unit in enumerate(t.units)]
        out += [(option.pool, option.devices, 1) for option in self.trainers]
        out += [(pool, column, devices) for (pool, devices, _), column in self.reward_units.items()]
        return out + [(pool, column, 1) for pool, column in self.environments.items()]

    def cost(self) -> dict[int, float]:
        """$/h of the resources in use, functions included."""
        out: dict[int, float] = {}
        for pool, column, devices in self.device_columns():
            out[column] = self.problem.pools[pool].usd_per_device_hour * devices
        for option in self.rewards:
            if option.pool < 0:
                out[option.column] = 3600.0 * option.usd * self.scale
        return out

    def terms(self, paths: Paths) -> Iterator[tuple[list[RowKey], Ints, Floats]]:
        """The coefficients of paths in the rows: row keys, the index of the key by path (-1: none), and the
        coefficients."""
        t, n = self.tableau, len(paths)
        units, size = range(len(t.units)), np.array([unit.kv_gb for unit in t.units])
        load: list[RowKey] = [("load", u) for u in units]
        kv: list[RowKey] = [("kv", u) for u in units]
        yield [("domain", j) for j in range(len(t.weights))], paths.domain, np.ones(n)
        yield load, paths.unit, paths.load * self.scale
        yield load, paths.first, paths.first_load * self.scale
        yield kv, paths.unit, paths.kv * self.scale / size[paths.unit]
        yield kv, paths.first, paths.first_kv * self.scale / size[paths.first]
        if t.channels:
            speed = np.array([c.gb_per_s for c in t.channels])
            yield [("link", c.pools) for c in t.channels], paths.link, paths.link_gb * self.scale / speed[paths.link]
        if self.matrix.has(("in flight",)):
            seconds = paths.seconds * self.scale / self.problem.trajectories_in_flight
            yield [("in flight",)], np.zeros(n, dtype=np.int64), seconds
        if self.matrix.has(("window", 0)):
            held = paths.seconds * self.scale / (self.problem.trajectories_in_flight * t.weights[paths.domain])
            yield [("window", j) for j in range(len(t.weights))], paths.domain, held
        kind = {Restriction.STRICT: "strict", Restriction.NO_AFFINITY: "mix"}.get(self.problem.restriction)
        if kind is not None:
            pools = len(self.problem.pools)
            where = np.array([unit.pool for unit in t.units])[paths.unit]
            every: list[RowKey] = [(kind, j, g) for j in range(len(t.weights)) for g in range(pools)]
            yield every, paths.domain * pools + where, np.ones(n)

    def extend(self, which: Ints) -> None:
        """Add columns for these paths of the tableau."""
        paths = self.tableau.paths.take(which)
        first = self.matrix.columns(len(which))
        for keys, rows, values in self.terms(paths):
            self.matrix.scatter(keys, rows, first, values)
        self.path_at = np.concatenate([self.path_at, which])

    def reduced_gains(self, duals: Mapping[RowKey, float]) -> Floats:
        """The reduced gain of every path of the tableau: its addition to the objective per unit, at these dual
        prices."""
        gain = np.zeros(len(self.tableau.paths))
        for keys, rows, values in self.terms(self.tableau.paths):
            price = np.array([*(duals.get(k, 0.0) for k in keys), 0.0])
            gain -= price[rows] * values
        return gain

    def unusable_paths(self, within: Mapping[int, float] | None = None) -> NDArray[np.bool_]:
        """A mask of the tableau's paths that can carry nothing, because one of their units has no instance by its own
        bound or by the upper limit that `within` gives its column."""
        most = np.array([min(self.matrix.high[j], (within or {}).get(j, math.inf)) for j in self.units])
        closed = np.array([*(most <= 0), False])  # the last: paths of one unit have -1 for the other
        paths = self.tableau.paths
        unusable: NDArray[np.bool_] = closed[paths.unit] | closed[paths.first]
        return unusable

    def closed_columns(self, within: Mapping[int, float] | None = None) -> dict[int, float]:
        """The columns of the paths in the mask of `unusable_paths`, fixed at 0."""
        dead = np.nonzero(self.unusable_paths(within)[self.path_at])[0] + self.first_path
        return dict.fromkeys(dead.tolist(), 0.0)

    @property
    def active(self) -> Paths:
        """The paths that have columns, in their order."""
        return self.tableau.paths.take(self.path_at)

    def integers(self) -> list[int]:
        return [j for j, whole in enumerate(self.matrix.whole) if whole]


def build_program(problem: Problem, tableau: Tableau, scale: float | None = None) -> PlacementProgram:
    """Build the program without any path; `PlacementProgram.extend` adds paths. `scale` comes from a solution, or is
    guessed."""
    m = ConstraintMatrix()
    rate = m.column()
    units = [m.column(high=unit.most, whole=True) for unit in tableau.units]
    p = PlacementProgram(
        problem=problem,
        tableau=tableau,
        matrix=m,
        scale=scale or _scale(problem, tableau),
        rate=rate,
        units=units,
        trainers=[],
        rewards=[],
        reward_units={},
        environments={},
        path_at=np.zeros(0, dtype=np.int64),
    )
    _add_resource_rows(p)
    add_training(p)
    add_rewards(p)
    add_environments(p)
    add_window_rows(p)
    _add_inventory_rows(p)
    _add_restriction_rows(p)
    for role, least in sorted(problem.min_replicas.items()):
        columns = _columns_of(p, role)
        m.row(("replicas", role), [(c, 1.0) for c in columns], low=least)
    if problem.fixed is not None:
        _fix_instances(p, problem.fixed)
    if problem.running is not None:
        _add_change_rows(p)
    p.first_path = m.width
    return p


def _scale(problem: Problem, tableau: Tableau) -> float:
    """The order of magnitude of the rate: the rate of the scarcest domain if it had all resources."""
    paths = tableau.paths
    if not len(paths):
        return 1.0
    most = np.array([float(u.most) for u in tableau.units])
    best = math.inf
    for j, weight in enumerate(tableau.weights):
        mine = paths.domain == j
        if mine.any():
            rates = most[paths.unit[mine]] / np.maximum(paths.load[mine], 1e-300)
            best = min(best, float(rates.max()) / weight)
    seconds = paths.seconds.min()
    if math.isfinite(problem.trajectories_in_flight):
        best = min(best, problem.trajectories_in_flight / seconds)
    if problem.rate is not None:
        best = min(best, problem.rate)
    if Role.TRAINER in problem.roles:
        best = min(best, max_training_rate(problem))
    return float(best) if math.isfinite(best) and best > 0 else 1.0


def _add_resource_rows(p: PlacementProgram) -> None:
    """Every domain gets its share of the rate; units, KV, links and trajectories in flight bound the paths."""
    m, t = p.matrix, p.tableau
    for j, weight in enumerate(t.weights):
        m.row(("domain", j), [(p.rate, -float(weight))], low=0.0, high=0.0)
    for u, column in enumerate(p.units):
        m.row(("load", u), [(column, -p.problem.utilisation)], high=0.0)
        m.row(("kv", u), [(column, -1.0)], high=0.0)
    for channel in t.channels:
        m.row(("link", channel.pools), high=1.0)
    if math.isfinite(p.problem.trajectories_in_flight):
        m.row(("in flight",), high=1.0)


def _add_inventory_rows(p: PlacementProgram) -> None:
    m, pools = p.matrix, p.problem.pools
    for g, pool in enumerate(pools):
        m.row(("pool", g), high=float(pool.count))
    for g, column, devices in p.device_columns():
        m.add(("pool", g), [column], [float(devices)])
    p.fixed_usd = sum(q.count * q.usd_per_device_hour for q in pools if not q.rented)
    budget = p.problem.budget_usd_per_hour
    if budget is not None:
        cost = p.cost()
        for g, column, _ in p.device_columns():
            if not pools[g].rented:
                cost.pop(column, None)
        m.row(("budget",), [(j, v / budget) for j, v in cost.items()], high=(budget - p.fixed_usd) / budget)


def _add_restriction_rows(p: PlacementProgram) -> None:
    m, t, paths = p.matrix, p.tableau, p.tableau.paths
    if p.problem.restriction is Restriction.NO_AFFINITY:
        pools = sorted({unit.pool for unit in t.units})
        p.mixed = shares = {g: m.column() for g in pools}
        for j, weight in enumerate(t.weights):
            for g in pools:
                m.row(("mix", j, g), [(shares[g], -float(weight))], low=0.0, high=0.0)
    if p.problem.restriction is Restriction.STRICT:
        tp = np.array([float(u.tp) for u in t.units])
        pool = np.array([u.pool for u in t.units])
        for j in range(len(t.weights)):
            chosen = []
            for g in sorted({unit.pool for unit in t.units}):
                mine = np.nonzero((paths.domain == j) & (pool[paths.unit] == g))[0]
                unit, load = paths.unit[mine], paths.load[mine]
                # All of the pool's devices at the domain's best path bound its flow.
                best = float((1.0 / (load * tp[unit])).max()) if len(mine) else 0.0
                large = best * p.problem.pools[g].count / p.scale
                chosen.append(m.column(high=1.0, whole=True))
                m.row(("strict", j, g), [(chosen[-1], -large)], high=0.0)
            m.row(("one pool", j), [(z, 1.0) for z in chosen], high=1.0)


def _columns_of(p: PlacementProgram, role: Role) -> list[int]:
    if role in ROLLOUT_ROLES:
        return [p.units[u] for u, unit in enumerate(p.tableau.units) if unit.role is role]
    if role is Role.TRAINER:
        return [option.chosen for option in p.trainers]
    return list(p.reward_units.values()) if role is Role.REWARD else list(p.environments.values())


def _fix_instances(p: PlacementProgram, fixed: tuple[Deployment, ...]) -> None:
    """Fix the counts of the given roles; rollout roles are always given."""
    m, names = p.matrix, [pool.name for pool in p.problem.pools]
    given: dict[tuple[str, Role, int], int] = {}
    for d in fixed:
        given[d.pool, d.role, d.tp] = given.get((d.pool, d.role, d.tp), 0) + d.replicas
    roles = {d.role for d in fixed}
    for u, unit in enumerate(p.tableau.units):
        count = given.pop((names[unit.pool], unit.role, unit.tp), 0)
        m.low[p.units[u]] = m.high[p.units[u]] = float(count)
    for option in p.trainers:
        if Role.TRAINER in roles:
            devices = sum(k[2] * given.pop(k) for k in list(given) if k[:2] == (names[option.pool], Role.TRAINER))
            m.low[option.devices] = m.high[option.devices] = float(devices)
            m.low[option.chosen] = m.high[option.chosen] = float(devices > 0)
    for (g, tp, _), column in p.reward_units.items():
        if Role.REWARD in roles:
            m.low[column] = m.high[column] = float(given.pop((names[g], Role.REWARD, tp), 0))
    for g, column in p.environments.items():
        if Role.ENVIRONMENT in roles:
            m.low[column] = m.high[column] = float(given.pop((names[g], Role.ENVIRONMENT, 1), 0))
    for (pool, role, tp), count in given.items():
        if count and role in (*ROLLOUT_ROLES, Role.TRAINER):
            m.row(("given", pool, role, tp), low=1.0, high=1.0)  # infeasible on purpose: this unit does not exist here


def _add_change_rows(p: PlacementProgram) -> None:
    """Count the devices that change their use, by pool: the larger of the started and the stopped devices. The
    aggregated, prefill and decode roles count as one: a role flip only changes the router."""
    running, m = p.problem.running, p.matrix
    if running is None:
        return
    before = _running_devices(running)
    for g, pool in enumerate(p.problem.pools):
        now: dict[tuple[str, str, int], list[tuple[int, float]]] = {k: [] for k in before if k[0] == pool.name}
        for u, unit in enumerate(p.tableau.units):
            if unit.pool == g:
                now.setdefault((pool.name, "rollout", unit.tp), []).append((p.units[u], float(unit.tp)))
        for option in p.trainers:
            if option.pool == g:
                now.setdefault((pool.name, "trainer", 1), []).append((option.devices, 1.0))
        if not now:
            continue
        changed = m.column()
        p.changed.append(changed)
        m.row(("started", g), [(changed, -1.0)], high=0.0)
        m.row(("stopped", g), [(changed, -1.0)], high=0.0)
        for key, terms in sorted(now.items()):
            up, down = m.column(), m.column()
            m.row(("change", *key), [*terms, (up, -1.0), (down, 1.0)], low=before.get(key, 0), high=before.get(key, 0))
            m.add(("started", g), [up], [1.0])
            m.add(("stopped", g), [down], [1.0])
    if running.max_changed_devices is not None:
        m.row(("changes",), [(c, 1.0) for c in p.changed], high=float(running.max_changed_devices))


def _running_devices(running: RunningPlan) -> dict[tuple[str, str, int], int]:
    """Devices of the running plan by pool, kind and size of instance."""
    before: dict[tuple[str, str, int], int] = {}
    for d in running.deployments:
        if d.role in ROLLOUT_ROLES or d.role is Role.TRAINER:
            key = (d.pool, "rollout", d.tp) if d.role in ROLLOUT_ROLES else (d.pool, "trainer", 1)
            before[key] = before.get(key, 0) + d.devices
    return before


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
