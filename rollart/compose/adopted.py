"""The initial plan of a run: the specs' plan, or on a resume the last plan that the run adopted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from placement.types import Assignment, Deployment, Infeasible, Pool, Role
from rollart.compose.devices import free_devices
from rollart.compose.planner import with_measured_work
from rollart.compose.routing import SERVING_ROLES
from rollart.errors import UsageError
from rollart.fleet import DomainWork, EngineRole
from rollart.ledger.clock import RESOURCE_OPENED
from rollart.ledger.reader import LedgerReader
from rollart.runtime.rebalance import ADOPTED
from rollart.spec.fleet import pools_of
from rollart.spec.resolve import Resolved

__all__ = ["RunStart", "resolve_start"]


@dataclass(frozen=True, slots=True)
class RunStart:
    """A resolved run at its start. `roles`: engines whose role has changed since they were named. `names`: parts of
    earlier lives of the run. `moved`: the plan is an adopted one; `why_not`: the reason why an adopted plan is not
    used."""

    resolved: Resolved
    roles: Mapping[str, EngineRole] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    moved: bool = False
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class _AdoptedEngine:
    name: str
    pool: str
    role: EngineRole
    tp: int


def resolve_start(resolved: Resolved, directory: Path) -> RunStart:
    """On a resume, the last adopted plan with its engine names, if the specs behind it still hold and its devices
    exist; else the specs' plan."""
    try:
        reader = LedgerReader(directory)
    except UsageError:
        return RunStart(resolved)  # the run never wrote a ledger
    with reader:
        names = frozenset(event.subject for event in reader.events(RESOURCE_OPENED))
        adopted = reader.events(ADOPTED)
        before = reader.config()
    start = RunStart(resolved, names=names)
    if not adopted or resolved.cluster.engines.fixed or resolved.problem is None:
        return start
    changed = _changed_section(before, resolved.to_dict())
    if changed:
        return replace(start, why_not=f"{changed} changed since it was adopted")
    fields = adopted[-1].fields
    engines = [
        _AdoptedEngine(n, pool, EngineRole(role), tp) for n, pool, role, tp in json.loads(str(fields["engines"]))
    ]
    work = {domain: DomainWork(**seen) for domain, seen in json.loads(str(fields["work"])).items()}
    found = _with_engines(resolved, engines, work)
    if isinstance(found, str):
        return replace(start, why_not=found)
    return replace(start, resolved=found, roles={e.name: e.role for e in engines}, moved=True)


def _changed_section(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first section of the specs that a plan depends on and that has changed; '' if none has."""
    parts = {"cluster": before.get("cluster") != now["cluster"]}
    for key in ("placement", "hw_affinity", "model"):
        parts[key] = before.get("run", {}).get(key) != now["run"][key]
    return next((part for part, differs in parts.items() if differs), "")


def _with_engines(
    resolved: Resolved, engines: Sequence[_AdoptedEngine], work: Mapping[str, DomainWork]
) -> Resolved | str:
    """The run with these engines in place of its plan's, solved for the measured work; the reason as text if that is
    infeasible."""
    from placement.solve import solve

    plan, problem = resolved.plan, resolved.problem
    assert problem is not None
    assert plan.placement is not None
    pools = {p.name: p for p in pools_of(resolved.cluster, resolved.prices)}
    others = [a for a in plan.assignments if a.role not in SERVING_ROLES]
    placed = _assign_devices(pools, others, engines)
    if isinstance(placed, str):
        return placed
    counts = Counter((e.pool, Role(e.role), e.tp) for e in engines)
    kept = [d for d in plan.placement.deployments if d.role not in SERVING_ROLES]
    fixed = (*(Deployment(*key, n) for key, n in sorted(counts.items())), *kept)
    train, trainer = problem.train, next((d for d in kept if d.role is Role.TRAINER), None)
    if train is not None and trainer is not None:
        train = replace(train, pool=trainer.pool, devices=trainer.devices)
    problem = replace(problem, domains=with_measured_work(problem.domains, work), fixed=fixed, train=train)
    solution = solve(problem)
    if isinstance(solution, Infeasible):
        return solution.message
    used = Counter(a.pool for a in (*others, *placed) for _ in a.devices)
    return replace(
        resolved,
        problem=problem,
        plan=replace(
            plan,
            assignments=(*placed, *others),
            idle={name: pool.count - used[name] for name, pool in pools.items()},
            usd_per_hour=sum((used[n] if p.rented else p.count) * p.usd_per_device_hour for n, p in pools.items()),
            rates={"trajectories": float(solution.rate)},
            binds="; ".join(solution.binds) or plan.binds,
            placement=solution,
        ),
    )


def _assign_devices(
    pools: Mapping[str, Pool], others: Sequence[Assignment], engines: Sequence[_AdoptedEngine]
) -> list[Assignment] | str:
    """Devices for the engines beside the other parts, largest engine first; an error text that names an engine which
    does not fit."""
    taken: dict[str, set[int]] = {name: set() for name in pools}
    for part in others:
        taken[part.pool].update(part.devices)
    placed = []
    for engine in sorted(engines, key=lambda e: (-e.tp, e.name)):
        pool = pools.get(engine.pool)
        devices = None if pool is None else free_devices(pool, taken[engine.pool], engine.tp)
        if devices is None:
            return f"{engine.name} does not fit into pool '{engine.pool}'"
        taken[engine.pool].update(devices)
        role, _, number = engine.name.rpartition("-")
        placed.append(Assignment(Role(role), int(number), engine.pool, devices))
    return placed
