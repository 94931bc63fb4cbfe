"""Applies a fault plan to a simulation: resolves its names to simulated parts, and counts the losses."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

from placement.types import ROLLOUT_ROLES, Role
from rollart.launch.hosts import ENVIRONMENT_ROLE, host_count, initial_function_hosts
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
        if a.role not in (*ROLLOUT_ROLES, Role.TRAINER):
            continue
        found[a.name] = (a.name,)
        size = per_host[a.pool]
        for number in sorted({device // size for device in a.devices}) if size else ():
            if a.role is Role.TRAINER or resolved.cluster.runtime.elastic is None:
                machines.setdefault(f"machine-{a.pool}-{number}", []).append(a.name)
    if resolved.cluster.runtime.elastic is not None:
        machines = {name: [name, *machines.get(name, [])] for name in cluster_machines(resolved)}
    engines = [a.name for a in resolved.plan.assignments if a.role in ROLLOUT_ROLES]
    links = [f"{LINK}weights", *(f"{LINK}weights-{name}" for name in engines)]
    links += [f"{LINK}kv-{a}-{b}" for a, b in kv_pairs(resolved)]
    return {
        **found,
        **{name: (name,) for name in (*_environment_hosts(resolved), *simulated_function_hosts(resolved))},
        **{name: tuple(own) for name, own in sorted(machines.items())},
        **{name: (name,) for name in links},
    }


def _environment_hosts(resolved: Resolved) -> list[str]:
    return [f"{ENVIRONMENT_ROLE}-{n}" for n in range(host_count(resolved))]


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
    later = (*ROLLOUT_ROLES, Role.ENVIRONMENT) if host_count(resolved) else ROLLOUT_ROLES
    for a in resolved.plan.assignments:
        for device in a.devices if a.role not in later else ():
            found[machine_name(resolved, a.pool, device)].taken += 1
    return found


def machine_name(resolved: Resolved, pool: str, device: int) -> str:
    """Name of the machine that holds a device of the plan."""
    of = next(p for p in resolved.cluster.pools if p.name == pool)
    return f"machine-{pool}-{device // min(of.devices_per_host or of.count, of.count)}"


class SimulationFaults:
    """The fault plan of one simulation. `hosts` run its environments. Call `begin` once the run is made, and `losses`
    after it."""

    def __init__(self, plan: FaultPlanSpec, resolved: Resolved, seed: int) -> None:
        self.plan, self._resolved = plan, resolved
        # Simulations with different seeds under one plan get different faults.
        self._seed = plan.seed * 1_000_003 + seed
        self._faults = FaultPlan({})
        names = _environment_hosts(resolved) or [f"host-{n}" for n in range(plan.hosts)]
        self.hosts = [SimulatedHost(name) for name in names]
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

    def begin(self, run: ModelledRun, links: Mapping[str, SharedLink], workers: SimulatedMachines | None) -> None:
        """Run the plan beside the run. `workers`: the hosts of function workers."""
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
        remaining: dict[str, list[float]] = {name: [] for name in links}

        def named(entry: OutageSpec | RateSpec) -> list[tuple[str, ...]]:
            """The subjects of an entry; a link has one subject for each share of bandwidth that a fault leaves."""
            found: dict[tuple[str, ...], None] = {}
            for pattern in entry.parts:
                for name in matching_names(pattern, members):
                    if name.startswith(LINK):
                        if name not in links:
                            continue  # a replay uses recorded publishes, without links
                        subject = f"{name} at {entry.left:g}" if entry.left else name
                        subjects[subject] = _link_target(links[name], remaining[name], entry.left)
                        found[(subject,)] = None
                    else:
                        found[members[name]] = None
            return list(found)

        outages = [
            Outage([n for names in named(o) for n in names], o.at_s, o.seconds or math.inf) for o in self.plan.outages
        ]
        for outage, of in zip(self.plan.outages, list(outages), strict=True):
            warned = [f"{name} to go" for name in of.subjects if f"{name} to go" in subjects]
            if warned and outage.warning_s and outage.at_s:
                outages.append(Outage(warned, max(0.0, outage.at_s - outage.warning_s), outage.warning_s))
        rates = [FaultRate(named(r), r.every_s, r.seconds) for r in self.plan.rates]
        self._faults = FaultPlan(subjects, outages, rates, seed=self._seed)
        run.background = [self._faults.run] if outages or rates else []

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
            kind = occurrence.subject.partition("-")[0]  # `engine` of `engine-12`, `link` of `link-weights`
            if not occurrence.up:
                outages[kind] += 1
                since[occurrence.subject] = occurrence.t
            else:
                down_s[kind] += occurrence.t - since.pop(occurrence.subject)
        for subject, t in since.items():
            down_s[subject.partition("-")[0]] += max(0.0, run.ended - t)
        engines = [placed.engine for placed in run.engines]
        return ObservedFaults(
            outages, down_s, sum(e.lost_tokens for e in engines), sum(e.lost_kv_tokens for e in engines)
        )


def _link_target(link: SharedLink, remaining: list[float], left: float) -> FaultTarget:
    """A link that keeps the share `left`; under concurrent faults, the lowest of the `remaining` shares."""

    def down() -> None:
        remaining.append(left)
        link.rate = min(remaining)

    def up() -> None:
        remaining.remove(left)
        link.rate = min(remaining, default=1.0)

    return FaultTarget(down, up)
