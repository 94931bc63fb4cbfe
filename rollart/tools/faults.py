"""Applies a fault plan to a simulation: resolves its names to simulated parts, and counts the losses."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from placement.types import Role
from rollart.launch.hosts import ENVIRONMENT_ROLE, host_count, initial_function_hosts
from rollart.launch.routing import SERVING_ROLES
from rollart.report.simulation import ObservedFaults
from rollart.settings.faults import LINK, FaultPlanSpec, OutageSpec, RateSpec, matching_names
from rollart.settings.resolve import Resolved
from rollart.sim.environments import SimulatedHost
from rollart.sim.faults import FaultPlan, FaultRate, FaultTarget, Outage, engine_target, host_target
from rollart.sim.links import SharedLink
from rollart.sim.run import ModelledRun
from rollart.sim.site import MachineInventory, SimulatedMachine
from serverless.providers.simulated import SimulatedMachines


def fault_targets(resolved: Resolved) -> dict[str, tuple[str, ...]]:
    """Names that faults can address, each with its parts: a part is itself, a machine has all parts on it. A cluster
    without environment hosts has those of the fault plan. In an elastic cluster every machine is addressable, and the
    trainer dies with its machine."""
    found: dict[str, tuple[str, ...]] = {}
    machines: dict[str, list[str]] = {}
    per_host = {pool.name: pool.devices_per_host for pool in resolved.cluster.pools}
    for a in resolved.plan.assignments:
        if a.role not in (*SERVING_ROLES, Role.TRAINER):
            continue
        found[a.name] = (a.name,)
        size = per_host[a.pool]
        for number in sorted({device // size for device in a.devices}) if size else ():
            if a.role is Role.TRAINER or resolved.cluster.runtime.elastic is None:
                machines.setdefault(f"machine-{a.pool}-{number}", []).append(a.name)
    if resolved.cluster.runtime.elastic is not None:
        machines = {name: [name, *machines.get(name, [])] for name in cluster_machines(resolved)}
    links = [
        f"{LINK}weights",
        *(f"{LINK}weights-{a.name}" for a in resolved.plan.assignments if a.role in SERVING_ROLES),
    ]
    links += [f"{LINK}kv-{a}-{b}" for a, b in kv_pairs(resolved)]
    return {
        **found,
        **{name: (name,) for name in (f"{ENVIRONMENT_ROLE}-{n}" for n in range(host_count(resolved)))},
        **{name: (name,) for name in simulated_function_hosts(resolved)},
        **{name: tuple(own) for name, own in sorted(machines.items())},
        **{name: (name,) for name in links},
    }


def simulated_function_hosts(resolved: Resolved) -> tuple[str, ...]:
    """Hosts of function workers, which faults can hit; none if workers are another provider's."""
    if function_provider(resolved) != "local":
        return ()
    domains = () if resolved.problem is None else resolved.problem.domains
    return initial_function_hosts(resolved, profiled=any(d.reward is not None and not d.reward.on_gpu for d in domains))


def function_provider(resolved: Resolved) -> str:
    functions = resolved.cluster.functions
    return functions.price or functions.chain[0]


def kv_pairs(resolved: Resolved) -> list[tuple[str, str]]:
    """Pairs of pools with KV hand-offs, each pair sorted."""
    plan = resolved.plan
    return sorted(
        {(min(p.pool, d.pool), max(p.pool, d.pool)) for p in plan.of(Role.PREFILL) for d in plan.of(Role.DECODE)}
    )


def cluster_machines(resolved: Resolved) -> dict[str, SimulatedMachine]:
    """All machines of each pool, up; a pool without `devices_per_host` is a single machine. Environment hosts take
    their devices themselves."""
    found = {}
    for pool in resolved.cluster.pools:
        size = min(pool.devices_per_host or pool.count, pool.count)
        for number, start in enumerate(range(0, pool.count, size)):
            found[f"machine-{pool.name}-{number}"] = SimulatedMachine(pool.name, min(size, pool.count - start))
    later = (*SERVING_ROLES, Role.ENVIRONMENT) if host_count(resolved) else SERVING_ROLES
    for a in resolved.plan.assignments:
        for device in a.devices if a.role not in later else ():
            found[machine_name(resolved, a.pool, device)].taken += 1
    return found


def machine_name(resolved: Resolved, pool: str, device: int) -> str:
    """Name of the machine that holds a device of the plan."""
    of = next(p for p in resolved.cluster.pools if p.name == pool)
    return f"machine-{pool}-{device // min(of.devices_per_host or of.count, of.count)}"


class SimulationFaults:
    """The fault plan of one simulation. `hosts` and `resets` configure its environments. Call `begin` once the run is
    made, and `losses` after it."""

    def __init__(self, plan: FaultPlanSpec, resolved: Resolved, seed: int) -> None:
        self.plan, self._resolved = plan, resolved
        # Simulations with different seeds under one plan get different faults.
        self._seed = plan.seed * 1_000_003 + seed
        self._faults = FaultPlan({})
        launched = [f"{ENVIRONMENT_ROLE}-{n}" for n in range(host_count(resolved))]
        names = launched or [f"host-{n}" for n in range(plan.hosts)]
        self.hosts: Sequence[SimulatedHost] = [SimulatedHost(name) for name in names]
        self.machines: MachineInventory | None = None
        if resolved.cluster.runtime.elastic is not None:
            self.machines = MachineInventory(cluster_machines(resolved))
            late = [o for o in plan.outages if o.at_s == 0]
            for name, machine in self.machines.machines.items():
                machine.up = not any(matching_names(pattern, [name]) for o in late for pattern in o.parts)

    @property
    def affects_hosts(self) -> bool:
        """True if faults may hit environment hosts, or if there are several hosts."""
        names = [h.name for h in self.hosts]
        entries: Sequence[OutageSpec | RateSpec] = [*self.plan.outages, *self.plan.rates]
        return len(names) > 1 or any(matching_names(pattern, names) for entry in entries for pattern in entry.parts)

    @property
    def background_tasks(self) -> Sequence[Callable[[], Coroutine[Any, Any, None]]]:
        return [lambda: self._faults.run()] if self.plan.outages or self.plan.rates else []

    def begin(
        self, run: ModelledRun, links: Mapping[str, SharedLink], workers: SimulatedMachines | None = None
    ) -> None:
        """`workers`: the hosts of function workers."""
        subjects: dict[str, FaultTarget] = {h.name: host_target(h) for h in self.hosts}
        if workers is not None:
            subjects |= {
                name: FaultTarget(partial(workers.turn, name, up=False), partial(workers.turn, name, up=True))
                for name in workers.names
            }
        for placed in run.engines:
            subjects[str(placed.engine.id)] = engine_target(placed.engine, lambda: run.control.gateway.version)
        subjects[run.trained_by.name] = FaultTarget(run.trainer.leave, run.trainer.come_back)
        if (machines := self.machines) is not None:
            for name in machines.machines:
                subjects[name] = FaultTarget(partial(machines.go, name), partial(machines.come, name))
                subjects[f"{name} to go"] = FaultTarget(partial(machines.warn, name), lambda: None)
        members = {**fault_targets(self._resolved), **{h.name: (h.name,) for h in self.hosts}}
        narrow = {name: _DegradedLink(of) for name, of in links.items()}

        def named(entry: OutageSpec | RateSpec) -> list[tuple[str, ...]]:
            """The subjects of an entry; a link has one subject for each share of bandwidth that a fault leaves."""
            found: dict[tuple[str, ...], None] = {}
            for pattern in entry.parts:
                for name in matching_names(pattern, members):
                    if name.startswith(LINK):
                        if name not in narrow:
                            continue  # a replay uses recorded publishes, without links
                        subject = f"{name} at {entry.left:g}" if entry.left else name
                        subjects[subject] = narrow[name].subject(entry.left)
                        found[(subject,)] = None
                    else:
                        found[members[name]] = None
            return list(found)

        outages = [
            Outage([n for names in named(o) for n in names], o.at_s, math.inf if o.seconds is None else o.seconds)
            for o in self.plan.outages
        ]
        for outage, of in zip(self.plan.outages, list(outages), strict=True):
            warned = [f"{name} to go" for name in of.subjects if f"{name} to go" in subjects]
            if warned and outage.warning_s and outage.at_s:
                outages.append(Outage(warned, max(0.0, outage.at_s - outage.warning_s), outage.warning_s))
        rates = [FaultRate(named(r), r.every_s, r.seconds) for r in self.plan.rates]
        self._faults = FaultPlan(subjects, outages, rates, seed=self._seed)

    def losses(self, run: ModelledRun) -> ObservedFaults | None:
        """The counted losses; None for an empty fault plan."""
        plan = self.plan
        if not (plan.outages or plan.rates or plan.resets or plan.functions):
            return None
        outages, down_s = Counter[str](), defaultdict[str, float](float)
        since: dict[str, float] = {}
        for occurrence in self._faults.happened:
            if occurrence.subject.endswith(" to go"):
                continue
            kind = _kind(occurrence.subject)
            if not occurrence.up:
                outages[kind] += 1
                since[occurrence.subject] = occurrence.t
            else:
                down_s[kind] += occurrence.t - since.pop(occurrence.subject)
        for subject, t in since.items():
            down_s[_kind(subject)] += max(0.0, run.ended - t)
        engines = [placed.engine for placed in run.engines]
        return ObservedFaults(
            outages, down_s, sum(e.lost_tokens for e in engines), sum(e.lost_kv_tokens for e in engines)
        )


class _DegradedLink:
    """A link under concurrent faults: the lowest remaining share applies."""

    def __init__(self, of: SharedLink) -> None:
        self._link = of
        self._remaining: list[float] = []

    def subject(self, left: float) -> FaultTarget:
        def down() -> None:
            self._remaining.append(left)
            self._link.rate = min(self._remaining)

        def up() -> None:
            self._remaining.remove(left)
            self._link.rate = min(self._remaining, default=1.0)

        return FaultTarget(down, up)


def _kind(subject: str) -> str:
    """`engine_target` of `engine_target-12`, `link` of `link-weights`."""
    return subject.split("-", 1)[0]
