"""The parts of the program around rollout: the trainer that takes the trajectories, the rewards that score them and the
environments that run beside them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from placement.problem import Problem
from placement.training import training_layout
from placement.types import Role
from placement.workload import FunctionPrice, RewardCost, TrainingWork

if TYPE_CHECKING:
    from placement.program import PlacementProgram

__all__ = [
    "RewardOption",
    "TrainerOption",
    "add_environments",
    "function_usd",
    "max_training_rate",
    "add_rewards",
    "add_training",
]


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
