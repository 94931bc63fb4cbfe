"""Predicts a run on a calibrated machine.

Based on the placement of the given instances, with the couplings of the parts of a small machine: trajectories in
training or waiting for it are in flight too (I4), a batch needs its slowest domain, and all parts share the cores.

`profile_by_play` makes the profiles of a run's domains without its policy: environments played at random or by worked
examples.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from placement.estimate import ObservedTrajectory, estimate_profiles
from placement.problem import DomainProfile, Problem
from placement.solve import solve
from placement.types import ROLLOUT_ROLES, Infeasible, Placement
from rollart.adapters.text import HubTokenizer
from rollart.control.domain import Domain, training_seed
from rollart.errors import SpecError
from rollart.launch.prepare import prepare_tokenizer, runtime_domains
from rollart.ports import Environment
from rollart.settings.planning import planning_problem
from rollart.settings.resolve import Resolved, deployments_of
from rollart.tools.calibrate import Machine, mix_mean

BISECTIONS = 10
"""Halvings of the interval around the rate: a thousandth of it remains."""

PUBLISH_SPREAD = 0.2
"""Relative spread of the time between publishes in a run that waits for its environments, as measured in short runs."""


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
    problem = planning_problem(replace(resolved, measured=tuple(away)), deployments_of(resolved.plan)).problem
    domains, performance = problem.domains, problem.performance
    assert problem.train is not None, "planning_problem always states training"
    device = machine.engine.calibration.device
    batch, training, controller = run.batch.trajectories, run.training, machine.controller_s(domains)
    one = mix_mean(
        domains, lambda p: machine.token_s * p.total_tokens + machine.action_s * p.turns.mean * p.output_tokens.mean
    )
    # CPU-seconds of a training step, and wall-clock seconds until its version is published.
    train_s = training.passes * (training.minibatches * machine.update_s + batch * one)
    step_s = train_s + machine.publish_s + machine.queue * batch * controller
    tokens = training.passes * mix_mean(domains, lambda p: p.total_tokens) * batch
    problem = replace(
        problem,
        performance=replace(performance, constants={device: machine.engine.calibration}),
        train=replace(problem.train, seconds_per_token=train_s / tokens, seconds_per_step=step_s - train_s),
        utilisation=1.0,
    )
    found = _solve_in_flight(problem, step_s)
    busy = sum(d.utilisation * d.replicas for role in ROLLOUT_ROLES for d in found.of(role))
    cpu = {
        "engine": busy / found.rate,
        "trainer": train_s / batch,
        "controller": controller,
        "functions": machine.function_s,
    }
    # All parts' CPU-seconds have to fit on the available cores.
    cores = sum(pool.count for pool in resolved.cluster.pools if pool.device == "cpu")
    limits = {
        "plan": (found.rate, found.binds[0] if found.binds else "nothing"),
        "cores": (min(machine.cores, cores) / sum(cpu.values()), "the cores, which all parts share"),
        "controller": (1.0 / controller, "the controller, which is one thread"),
    }
    rate, binds = min(limits.values())
    return Prediction(rate, binds, found, cpu, step_s)


def _solve_in_flight(problem: Problem, step_s: float) -> Placement:
    """The plan whose rate is consistent with the trajectories left in flight. Slots (I4) are also held by trajectories
    in training, by trajectories that wait for a complete batch, and by stale ones (I2) that start again."""
    train = problem.train
    assert train is not None, "planning_problem always states training"

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


EPISODES = 256
"""Per domain. If the number of turns varies as much as its mean, 256 episodes determine the mean to 6 %."""


async def profile_by_play(
    resolved: Resolved, directory: Path, *, episodes: int = EPISODES
) -> tuple[DomainProfile, ...]:
    """A profile per domain, `source` "played": each answer is a random legal action or, without legal actions, the
    worked example's. Waits are those of the environment. Games of the policy may be longer or shorter: a policy that
    learns to win early takes fewer turns. Files are written under `directory`.

    SpecError for an environment without legal actions and worked examples.
    """
    tokenizer = HubTokenizer(prepare_tokenizer(resolved, directory))
    seen: list[ObservedTrajectory] = []
    for domain in runtime_domains(resolved, tokenizer):
        seeds = [training_seed(resolved.run.seed, domain.name, index) for index in range(episodes)]
        seen += await asyncio.gather(*(_episode(domain, seed, tokenizer) for seed in seeds))
    return tuple(replace(p, source=f"played, n={episodes}") for p in estimate_profiles(seen))


async def _episode(domain: Domain, seed: int, tokenizer: HubTokenizer) -> ObservedTrajectory:
    loop = asyncio.get_running_loop()
    rng = random.Random(seed)
    environment: Environment = domain.environment()
    began = loop.time()
    observation = await environment.reset(seed)
    reset_s, wait_s = loop.time() - began, 0.0
    input_tokens: list[int] = []
    output_tokens, answer = 0, tuple[int, ...]()
    try:
        for turn in range(domain.max_turns):
            input_tokens.append(len(_encoded(domain, tokenizer, observation.text, answer)))
            if observation.actions:
                text = rng.choice(observation.actions)
                answer = tokenizer.encode(text)[:1]
            elif (example := getattr(environment, "worked_example", None)) is not None:
                text = (*example(seed)[1::2][turn : turn + 1], "")[0]
                answer = tokenizer.encode(text) if domain.chat is None else domain.chat.answer(text)
            else:
                raise SpecError(
                    f"domain '{domain.name}' offers neither legal actions nor worked examples to play with",
                    remedy="give it a `profile`",
                )
            output_tokens += min(len(answer), observation.max_tokens or domain.max_tokens)
            began = loop.time()
            step = await environment.step(text)
            wait_s += loop.time() - began
            if step.done:
                break
            observation = step.observation
    finally:
        await environment.close()
    return ObservedTrajectory(
        domain=domain.name,
        turns=len(input_tokens),
        first_tokens=float(input_tokens[0]),
        new_tokens=float(sum(input_tokens[1:])),
        output_tokens=float(output_tokens),
        wait_s=wait_s,
        reset_s=reset_s,
    )


def _encoded(domain: Domain, tokenizer: HubTokenizer, text: str, answer: Sequence[int]) -> tuple[int, ...]:
    """The tokens of an observation after an answer, as a trajectory has them."""
    if domain.chat is None:
        return tokenizer.encode(text)
    return domain.chat.following(text, answer) if answer else domain.chat.opening(text)
