"""Predicts a run on a calibrated machine.

Based on the placement of the given instances, with the couplings of the parts of a small machine: trajectories in
training or waiting for it are in flight too (I4), a batch needs its slowest domain, and all parts share the cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from placement.problem import Problem
from placement.roofline import RooflinePerformance
from placement.solve import solve
from placement.types import Infeasible, Placement, Role
from placement.workload import DomainProfile, TrainingWork
from rollart.compose.calibrate import Machine, mix_mean
from rollart.errors import SpecError
from rollart.spec.planning import problem_of
from rollart.spec.resolve import Resolved, deployments_of

__all__ = ["Prediction", "predict"]

BISECTIONS = 10
"""Halvings of the interval around the rate: a thousandth of it remains."""

PUBLISH_SPREAD = 0.2
"""Relative spread of the time between publishes in a run that waits for its environments, as measured in short runs."""

ENGINES = (Role.ENGINE, Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Trained trajectories/s, the bottleneck, the placement behind it, and CPU-seconds per trajectory by part."""

    rate: float
    binds: str
    placement: Placement
    cpu: Mapping[str, float]
    step_s: float
    """Seconds of a training step including its publish."""


def predict(resolved: Resolved, profiles: Sequence[DomainProfile], machine: Machine) -> Prediction:
    """The prediction for a run of these profiles on this machine. The run's quotas override the profiles' weights.
    SpecError if the placer finds no plan."""
    run = resolved.run
    mix = [replace(p, weight=float(resolved.quotas[p.name])) for p in profiles]
    # Functions and environments have no devices of their own: they share the cores with everything else. A publish
    # admits a whole batch at once, and the controller processes all of it before the last trajectory is done.
    latency = machine.reward_latency_s + run.batch.trajectories * machine.controller_s(mix)
    away = [
        replace(p, reward=None, environment=replace(p.environment, core_s=0.0, reset_s=p.environment.reset_s + latency))
        for p in mix
    ]
    problem = problem_of(
        run, resolved.cluster, resolved.prices, away, base=resolved.base, fixed=deployments_of(resolved.plan)
    )
    domains, performance = problem.domains, problem.performance
    assert isinstance(performance, RooflinePerformance)
    device = machine.engine.calibration.device
    train_s, step_s = _step_seconds(resolved, domains, machine)
    tokens = run.training.epochs * mix_mean(domains, lambda p: p.total_tokens) * run.batch.trajectories
    problem = replace(
        problem,
        performance=replace(performance, constants={device: machine.engine.calibration}),
        train=replace(_train(problem), seconds_per_token=train_s / tokens, seconds_per_step=step_s - train_s),
        utilisation=1.0,
    )
    found = _solve_in_flight(problem, step_s)
    return _limit_by_cores(found, resolved, domains, machine, train_s, step_s)


def _solve_in_flight(problem: Problem, step_s: float) -> Placement:
    """The plan whose rate is consistent with the trajectories left in flight. Slots (I4) are also held by trajectories
    in training, by trajectories that wait for a complete batch, and by stale ones (I2) that start again."""
    train = _train(problem)

    def at(rate: float) -> Placement:
        lost = 0.0
        if rate > 0 and train.staleness > 0:
            bound = (train.staleness + 1) * train.batch / rate
            lost = bound * _stale_attempts(slowest, late, bound)
        left = train.in_flight - rate * (step_s + apart + lost) - min(train.batch / 2, rate * late)
        found = solve(replace(problem, in_flight=max(1, round(left))))
        if isinstance(found, Infeasible):
            raise SpecError(f"no plan: {found.message}", remedy="; ".join(found.conflicts) or "see the spec")
        return found

    slowest = late = apart = 0.0
    found = at(0.0)
    slowest, late, apart = _seconds_in_flight(found, problem.domains)
    low, high = 0.0, found.rate
    found = at(high)
    if found.rate >= high * (1.0 - 1e-9):
        return found  # not bound by slots: they suffice even at this rate
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        found = at(middle)
        low, high = (middle, high) if found.rate >= middle else (low, middle)
    return at(low)


def _seconds_in_flight(found: Placement, domains: Sequence[DomainProfile]) -> tuple[float, float, float]:
    """Seconds in flight: of the slowest domain's mean trajectory; in addition, of its late trajectories (90th
    percentile of turns); and of the slowest domain in excess of the mix. Every domain has its own slots and its quota
    of every batch, so the slowest domain limits the rate while slots of the others are idle."""
    rate = sum(flow.rate for flow in found.flows)
    mean = sum(flow.rate * flow.seconds for flow in found.flows) / rate
    slowest, late = 0.0, 0.0
    for p in domains:
        own = [flow for flow in found.flows if flow.domain == p.name]
        seconds = sum(flow.rate * flow.seconds for flow in own) / sum(flow.rate for flow in own)
        if seconds > slowest:
            slowest, late = seconds, seconds * max(0.0, (p.turns.p90 or p.turns.mean) / p.turns.mean - 1.0)
    return slowest, late, max(0.0, slowest - mean)


def _stale_attempts(mean: float, late: float, bound: float) -> float:
    """Stale attempts per fresh one. Seconds in flight are uniform around `mean`, with `late` more at the 90th
    percentile; the time until the publish that makes a trajectory stale is `bound` ± `PUBLISH_SPREAD`."""
    width = late / 0.4
    limits = [bound * (1.0 + PUBLISH_SPREAD * (i - 5) / 5) for i in range(11)]
    beyond = [
        min(1.0, max(0.0, 0.5 + (mean - limit) / width)) if width > 0 else float(mean > limit) for limit in limits
    ]
    share = min(0.9, sum(beyond) / len(beyond))
    return share / (1.0 - share)


def _limit_by_cores(
    found: Placement,
    resolved: Resolved,
    domains: Sequence[DomainProfile],
    machine: Machine,
    train_s: float,
    step_s: float,
) -> Prediction:
    """The rate at which all parts' CPU-seconds fit on the available cores."""
    busy = sum(d.utilisation * d.replicas for role in ENGINES for d in found.of(role))
    controller = machine.controller_s(domains)
    cpu = {
        "engine": busy / found.rate,
        "trainer": train_s / resolved.run.batch.trajectories,
        "controller": controller,
        "functions": machine.function_s,
    }
    cores = sum(pool.count for pool in resolved.cluster.pools if pool.device == "cpu")
    limits = {
        "plan": (found.rate, found.binds[0] if found.binds else "nothing"),
        "cores": (min(machine.cores, cores) / sum(cpu.values()), "the cores, which all parts share"),
        "controller": (1.0 / controller, "the controller, which is one thread"),
    }
    rate, binds = min(limits.values())
    return Prediction(rate, binds, found, cpu, step_s)


def _step_seconds(resolved: Resolved, domains: Sequence[DomainProfile], machine: Machine) -> tuple[float, float]:
    """CPU-seconds of a training step, and wall-clock seconds until its version is published."""
    run = resolved.run
    batch, training = run.batch.trajectories, run.training
    one = mix_mean(
        domains, lambda p: machine.token_s * p.total_tokens + machine.action_s * p.turns.mean * p.output_tokens.mean
    )
    cpu = training.epochs * (training.minibatches * machine.update_s + batch * one)
    return cpu, cpu + machine.publish_s + machine.queue * batch * machine.controller_s(domains)


def _train(problem: Problem) -> TrainingWork:
    assert problem.train is not None, "problem_of always states training"
    return problem.train
