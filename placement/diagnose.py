"""Explanation of an infeasible problem, with numbers: a domain that nothing can serve, the shortfall to the requested
rate, or the constraints that would have to be relaxed (an elastic program: the least relative violation that makes a
plan possible)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from placement import columns, search
from placement.problem import Problem, Restriction
from placement.program import PlacementProgram, build_program
from placement.tableau import Tableau
from placement.types import ROLLOUT_ROLES, Infeasible, Objective, Pool, Role

__all__ = ["explain_infeasibility", "unservable_domain"]

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
    columns.seed_columns(p)
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
