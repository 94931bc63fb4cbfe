"""A placement problem as one mixed-integer program: its columns, the rows that bind them, and its hourly cost.

Rates are columns in units of `scale` trajectories/s, so that all activities are near 1 whatever the problem's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from placement import holding, sides
from placement.milp import ConstraintMatrix, Floats, MilpSolution, RowKey
from placement.problem import Problem, Restriction, RunningPlan
from placement.sides import RewardOption, TrainerOption
from placement.tableau import Ints, Paths, Tableau
from placement.types import ROLLOUT_ROLES, Deployment, Role

__all__ = ["PlacementProgram", "build_program"]


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
    sides.add_training(p)
    sides.add_rewards(p)
    sides.add_environments(p)
    holding.add_window_rows(p)
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
        best = min(best, sides.max_training_rate(problem))
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
