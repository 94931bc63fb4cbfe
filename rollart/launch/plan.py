"""The plan of a run: at its start the specs' plan, or on a resume the last plan that the run adopted; later the plans
of its `Planner`, which solves the placement again for measured work, in a separate thread.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from placement.diff import Move as PlacedMove
from placement.diff import MoveCosts, diff
from placement.problem import DomainProfile, EnvironmentCost, Problem, Quantity, RunningPlan
from placement.types import ROLLOUT_ROLES, Assignment, Deployment, Infeasible, Objective, Placement, Plan, Pool, Role
from rollart.errors import RunFailed, SpecError, UsageError
from rollart.fleet import (
    DomainWork,
    EngineKind,
    EngineRole,
    FleetMove,
    FleetMoveKind,
    FleetObservation,
    Proposal,
    Routes,
)
from rollart.launch.layout import free_devices
from rollart.launch.routing import routes_of
from rollart.launch.start_limits import engine_start_limits
from rollart.ledger.events import MODEL_SHAPE, PLAN_ADOPTED, POOL_PEAK
from rollart.ledger.intervals import RESOURCE_OPENED
from rollart.ledger.reader import LedgerReader
from rollart.ports import RunEvent
from rollart.settings.placement import RebalanceSpec
from rollart.settings.planning import model_config, pools_of, run_shape
from rollart.settings.resolve import Resolved
from rollart.supervise.rebalance import RebalanceSettings

A = TypeVar("A")
R = TypeVar("R")

MIN_FINISHED = 20
"""Minimum trajectories of a domain before its measured means replace the profile: the mean of fewer errs by more than
the drift that would change a plan."""


STOP_S = 30.0
"""Allowance for the end of a process and other waits of a move: several times their own bounds."""


def work_events(resolved: Resolved, t: float) -> Iterator[RunEvent]:
    """What reports compute the utilization of devices from: the policy's architecture and the pools' datasheets. None
    for an architecture that the planner does not know."""
    try:
        shape, config = run_shape(resolved), model_config(resolved.run, resolved.base)
    except SpecError:
        return
    fields = {"weight_bytes": shape.weight_bytes_per_parameter, "kv_bytes": shape.kv_bytes_per_element}
    yield RunEvent(t, MODEL_SHAPE, "policy", {"config": json.dumps(config), **fields})
    for pool in pools_of(resolved.cluster, resolved.prices):
        device, fp8 = pool.device, shape.weight_bytes_per_parameter <= 1
        rates = {
            "device": device.name,
            "engine_tflops": device.tflops_fp8 if fp8 else device.tflops_bf16,
            "trainer_tflops": device.tflops_bf16,
            "tb_per_s": device.memory_tb_per_s,
        }
        yield RunEvent(t, POOL_PEAK, pool.name, rates)


def placement_planner(resolved: Resolved) -> PlacementPlanner | None:
    """None without a computed placement, or if the spec turns rebalancing off."""
    settings = resolved.run.placement.rebalance
    follows = bool(settings.reprice_s or settings.flows_s) or resolved.cluster.runtime.elastic is not None
    if resolved.plan.placement is None or resolved.problem is None or not follows:
        return None
    return PlacementPlanner(resolved.problem, resolved.plan.placement, settings)


def engines_are_movable(resolved: Resolved) -> bool:
    """True if the rebalancer may drain and start engines: the plan computed their numbers, the spec permits it, and
    engine sizes do not follow preemptions. Always true in an elastic cluster."""
    run = resolved.run
    if resolved.cluster.runtime.elastic is not None:
        return True
    return not resolved.cluster.engines.fixed and run.placement.rebalance.moves and run.rollout.parallelism is None


def rebalance_settings(resolved: Resolved) -> RebalanceSettings:
    """The spec as rebalancer settings. Drift of measured work is relative to the profiles."""
    spec, leases = resolved.run.placement.rebalance, resolved.run.leases
    domains = () if resolved.problem is None else resolved.problem.domains
    whole = sum(d.weight for d in domains)
    baseline = {
        d.name: DomainWork(
            share=d.weight / whole,
            turns=d.turns.mean,
            first_tokens=d.prompt.mean,
            new_tokens=d.new_tokens.mean,
            output_tokens=d.output_tokens.mean,
            wait_s=d.environment.wait_s,
            finished=0,
        )
        for d in domains
    }
    return RebalanceSettings(
        spec,
        # A move waits for at most two updates, and for a start or for the turns of a draining engine.
        move_s=2 * leases.publish_s
        + max(engine_start_limits(resolved).most_s + leases.publish_s, leases.generate_s)
        + STOP_S,
        baseline=baseline,
    )


class PlacementPlanner:
    """Implements `Planner` over `placement.solve`. Single caller: the rebalancer.

    The plan follows the running engines: engines that do not serve are excluded, and measured work replaces the
    profiles. The mix of domains remains that of the batch, which training consumes independent of the order in which
    trajectories finish.
    """

    def __init__(self, problem: Problem, found: Placement, settings: RebalanceSpec) -> None:
        self._problem = replace(problem, fixed=None)
        self.found = found
        self._settings = settings
        self.routes = routes_of(problem, found)
        self._proposed: tuple[Proposal, Placement, Routes] | None = None
        """The last result of `replan`, until it is adopted."""
        self.computing: asyncio.Future[Any] | None = None

    async def reprice(self, observed: FleetObservation) -> Routes:
        """The current flows and dual prices, always at the planned batches. A turn's share of a step falls with the
        batch: at measured batches the fullest engines would look cheapest, and every trajectory would follow the others
        into one pool. The difference from the plan is each engine's backlog, which the router adds itself."""
        return self.routes

    def adopt(self, proposal: Proposal) -> None:
        """Make the proposed plan the current one, for prices, flows and the next comparison."""
        if self._proposed is not None and self._proposed[0] is proposal:
            _, self.found, self.routes = self._proposed
        self._proposed = None

    async def reflow(self, observed: FleetObservation) -> Routes:
        """Solve the flows of the serving engines. Raises `RunFailed` if they can carry no flow at all."""
        problem = replace(self.updated_problem(observed), fixed=self._serving(observed))
        placement = await self._in_thread(_solve, problem)
        if isinstance(placement, Infeasible):
            raise RunFailed(f"no flows for the engines that serve: {placement.message}")
        self.found, self.routes = placement, routes_of(problem, placement)
        return self.routes

    async def replan(self, observed: FleetObservation, reason: str) -> Proposal | None:
        self._proposed = await self._in_thread(self.compute_plan, observed)
        return None if self._proposed is None else self._proposed[0]

    async def _in_thread(self, compute: Callable[[A], R], argument: A) -> R:
        """Compute in a thread. `RunFailed` while the previous computation runs: a caller that gave up on it cannot stop
        it, and a second one would take more CPU time from the run."""
        if self.computing is not None and not self.computing.done():
            raise RunFailed("the planner still computes its previous request")
        computing = asyncio.get_running_loop().run_in_executor(None, compute, argument)
        computing.add_done_callback(lambda done: done.cancelled() or done.exception())  # its caller may have given up
        self.computing = computing
        return await asyncio.shield(computing)

    def compute_plan(self, observed: FleetObservation) -> tuple[Proposal, Placement, Routes] | None:
        """The best reachable plan; if the caller cannot start engines, other roles for serving engines. None if it is
        the running plan; `RunFailed` if there is none at all."""
        problem = self.updated_problem(observed)
        here = {pool.name for pool in problem.pools}
        serving = tuple(d for d in self._serving(observed) if d.pool in here)
        now = _solve(replace(problem, fixed=serving))
        running = RunningPlan(
            serving,
            restart_s=self._settings.restart_s,
            horizon_s=self._settings.horizon_s,
            max_changed_devices=self._settings.max_changed_devices if observed.movable else 0,
        )
        best = _solve(replace(problem, running=running))
        if isinstance(best, Infeasible):
            raise RunFailed(f"no plan for this work on these engines: {best.message}")
        rate_now = 0.0 if isinstance(now, Infeasible) else now.rate
        costs = MoveCosts.of(problem.pools, running)
        engines = [d for d in serving if d.role in ROLLOUT_ROLES]  # other parts stay in place during a run
        placed = diff(engines, [d for d in best.deployments if d.role in ROLLOUT_ROLES], costs=costs)
        if not placed and best.rate <= rate_now:
            return None
        lost = sum(move.device_seconds for move in placed)
        devices = sum(d.devices for d in engines) or 1
        routes = routes_of(problem, best)
        fast = problem.objective is Objective.MAX_THROUGHPUT
        proposal = Proposal(
            moves=tuple(map(fleet_move, placed)),
            routes=routes,
            rate_now=rate_now,
            rate_after=best.rate,
            cost=rate_now * lost / devices,
            usd_per_hour=None if fast or isinstance(now, Infeasible) else (now.usd_per_hour, best.usd_per_hour),
        )
        return proposal, best, routes

    def _serving(self, observed: FleetObservation) -> tuple[Deployment, ...]:
        """Serving engines, and the plan's other parts, which do not change."""
        engines = [Deployment(*kind, load.healthy) for kind, load in sorted(observed.load.items()) if load.healthy]
        return (*engines, *(d for d in self.found.deployments if d.role not in ROLLOUT_ROLES))

    def updated_problem(self, observed: FleetObservation) -> Problem:
        """The problem with measured work, and with training in its current place."""
        problem = self._problem
        trainer = next((d for d in self.found.deployments if d.role is Role.TRAINER), None)
        train = problem.train
        if train is not None and trainer is not None:
            train = replace(train, pool=trainer.pool, devices=trainer.devices)
        problem = replace(problem, domains=with_measured_work(problem.domains, observed.work), train=train)
        return problem if observed.devices is None else _restricted_to(problem, observed.devices)


def _restricted_to(problem: Problem, devices: Mapping[str, int]) -> Problem:
    """The problem on the present devices. A domain loses its affinity if all its pools are gone."""
    sizes = {p.name: min(p.count, devices.get(p.name, 0)) for p in problem.pools}
    here = {name for name, size in sizes.items() if size > 0}
    if not here:
        raise RunFailed("no node is there")
    affinity = {domain: tuple(p for p in pools if p in here) for domain, pools in problem.affinity.items()}
    return replace(
        problem,
        pools=tuple(replace(p, count=sizes[p.name]) for p in problem.pools if p.name in here),
        links=tuple(link for link in problem.links if {link.a, link.b} <= here),
        affinity={domain: pools for domain, pools in affinity.items() if pools},
    )


def _solve(problem: Problem) -> Placement | Infeasible:
    from placement.solve import solve  # imported late: most runs never plan and need neither numpy nor scipy

    return solve(problem)


def with_measured_work(domains: Sequence[DomainProfile], work: Mapping[str, DomainWork]) -> tuple[DomainProfile, ...]:
    """The profiles, with measured work in domains with enough finished trajectories."""
    found = []
    for domain in domains:
        measured = work.get(domain.name)
        if measured is None or measured.finished < MIN_FINISHED:
            found.append(domain)
            continue
        environment = domain.environment
        found.append(
            replace(
                domain,
                turns=_rescaled(domain.turns, max(measured.turns, 1.0)),
                first_tokens=Quantity(max(measured.first_tokens, 1.0)),
                new_tokens=Quantity(max(measured.new_tokens, 0.0)),
                output_tokens=_rescaled(domain.output_tokens, max(measured.output_tokens, 1.0)),
                environment=EnvironmentCost(max(measured.wait_s, 0.0), environment.core_s, environment.reset_s),
                source="this run",
            )
        )
    return tuple(found)


def _rescaled(before: Quantity, mean: float) -> Quantity:
    """A measured mean with quantiles scaled from the profile's: the window waits for the longest trajectories."""
    scale = mean / before.mean if before.mean > 0 else 1.0
    p50, p90 = (None if q is None else q * scale for q in (before.p50, before.p90))
    return Quantity(mean, p50, p90)


def fleet_move(placed: PlacedMove) -> FleetMove:
    """A move between plans, as a move of the fleet."""
    return FleetMove(
        FleetMoveKind(placed.kind),
        placed.pool,
        placed.tp,
        placed.replicas,
        placed.before,
        placed.after,
    )


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


def resolve_start(resolved: Resolved, directory: Path) -> RunStart:
    """On a resume, the last adopted plan with its engine names, if the specs behind it still hold and its devices
    exist; else the specs' plan."""
    try:
        reader = LedgerReader(directory)
    except UsageError:
        return RunStart(resolved)  # the run never wrote a ledger
    with reader:
        names = frozenset(event.subject for event in reader.events(RESOURCE_OPENED))
        adopted = reader.events(PLAN_ADOPTED)
        before = reader.config()
    start = RunStart(resolved, names=names)
    if not adopted or resolved.cluster.engines.fixed or resolved.problem is None:
        return start
    now, run = resolved.to_dict(), before.get("run", {})
    parts = {"cluster": before.get("cluster") != now["cluster"]}
    parts |= {key: run.get(key) != now["run"][key] for key in ("placement", "hw_affinity", "model")}
    if (changed := next((part for part, differs in parts.items() if differs), None)) is not None:
        return replace(start, why_not=f"{changed} changed since it was adopted")
    fields = adopted[-1].fields
    engines = {
        name: EngineKind(pool, EngineRole(role), tp) for name, pool, role, tp in json.loads(str(fields["engines"]))
    }
    work = {domain: DomainWork(**seen) for domain, seen in json.loads(str(fields["work"])).items()}
    found = _with_engines(resolved, engines, work)
    if isinstance(found, str):
        return replace(start, why_not=found)
    return replace(start, resolved=found, roles={name: kind.role for name, kind in engines.items()}, moved=True)


def _with_engines(
    resolved: Resolved, engines: Mapping[str, EngineKind], work: Mapping[str, DomainWork]
) -> Resolved | str:
    """The run with these engines in place of its plan's, solved for the measured work; the reason as text if that is
    infeasible."""
    plan, problem = resolved.plan, resolved.problem
    assert problem is not None
    assert plan.placement is not None
    pools = {p.name: p for p in pools_of(resolved.cluster, resolved.prices)}
    others = [a for a in plan.assignments if a.role not in ROLLOUT_ROLES]
    placed = _assign_devices(pools, others, engines)
    if isinstance(placed, str):
        return placed
    counts = Counter(engines.values())
    kept = [d for d in plan.placement.deployments if d.role not in ROLLOUT_ROLES]
    fixed = (*(Deployment(*key, n) for key, n in sorted(counts.items())), *kept)
    train, trainer = problem.train, next((d for d in kept if d.role is Role.TRAINER), None)
    if train is not None and trainer is not None:
        train = replace(train, pool=trainer.pool, devices=trainer.devices)
    problem = replace(problem, domains=with_measured_work(problem.domains, work), fixed=fixed, train=train)
    solution = _solve(problem)
    if isinstance(solution, Infeasible):
        return solution.message
    plan = replace(
        plan_with(resolved, (*placed, *others)),
        rates={"trajectories": float(solution.rate)},
        binds="; ".join(solution.binds) or plan.binds,
        placement=solution,
    )
    return replace(resolved, problem=problem, plan=plan)


def plan_with(resolved: Resolved, assignments: Sequence[Assignment]) -> Plan:
    """The plan with other parts: its idle devices and its cost follow."""
    used = Counter(a.pool for a in assignments for _ in a.devices)
    pools = pools_of(resolved.cluster, resolved.prices)
    return replace(
        resolved.plan,
        assignments=tuple(assignments),
        idle={pool.name: pool.count - used[pool.name] for pool in pools},
        usd_per_hour=sum((used[p.name] if p.rented else p.count) * p.usd_per_device_hour for p in pools),
    )


def _assign_devices(
    pools: Mapping[str, Pool], others: Sequence[Assignment], engines: Mapping[str, EngineKind]
) -> list[Assignment] | str:
    """Devices for the engines beside the other parts, largest engine first; an error text that names an engine which
    does not fit."""
    taken: dict[str, set[int]] = {name: set() for name in pools}
    for part in others:
        taken[part.pool].update(part.devices)
    placed = []
    for name, kind in sorted(engines.items(), key=lambda engine: (-engine[1].tp, engine[0])):
        pool = pools.get(kind.pool)
        devices = None if pool is None else free_devices(pool, taken[kind.pool], kind.tp)
        if devices is None:
            return f"{name} does not fit into pool '{kind.pool}'"
        taken[kind.pool].update(devices)
        role, _, number = name.rpartition("-")
        placed.append(Assignment(Role(role), int(number), kind.pool, devices))
    return placed
