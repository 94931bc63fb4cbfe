"""Profiles of a run's domains without its policy: environments played at random or by worked examples."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

from placement.estimate import ObservedTrajectory, ProfileEstimator
from placement.workload import DomainProfile
from rollart.adapters.text import HubTokenizer
from rollart.compose.prepare import prepare_tokenizer, runtime_domains
from rollart.errors import SpecError
from rollart.ports import Environment
from rollart.runtime.domain import Domain, training_seed
from rollart.spec.resolve import Resolved

__all__ = ["profile_by_play"]

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
    estimator = ProfileEstimator()
    for domain in runtime_domains(resolved, tokenizer):
        seeds = [training_seed(resolved.run.seed, domain.name, index) for index in range(episodes)]
        for seen in await asyncio.gather(*(_episode(domain, seed, tokenizer) for seed in seeds)):
            estimator.add(seen)
    return tuple(
        DomainProfile(
            name=p.name,
            turns=p.turns,
            new_tokens=p.new_tokens,
            output_tokens=p.output_tokens,
            weight=p.weight,
            first_tokens=p.first_tokens,
            environment=p.environment,
            source=f"played, n={episodes}",
        )
        for p in estimator.profiles()
    )


async def _episode(domain: Domain, seed: int, tokenizer: HubTokenizer) -> ObservedTrajectory:
    loop = asyncio.get_running_loop()
    rng = random.Random(seed)
    environment: Environment = domain.environment()
    began = loop.time()
    observation = await environment.reset(seed)
    reset_s, wait_s = loop.time() - began, 0.0
    input_tokens: list[int] = []
    output_tokens = 0
    try:
        for _ in range(domain.max_turns):
            input_tokens.append(len(tokenizer.encode(observation.text)))
            text, tokens = _choose_answer(domain, environment, observation.actions, seed, rng, tokenizer)
            output_tokens += min(tokens, observation.max_tokens or domain.max_tokens)
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
        t=0.0,
        turns=len(input_tokens),
        first_tokens=float(input_tokens[0]),
        new_tokens=float(sum(input_tokens[1:])),
        output_tokens=float(output_tokens),
        wait_s=wait_s,
        reset_s=reset_s,
    )


def _choose_answer(
    domain: Domain,
    environment: Environment,
    actions: Sequence[str] | None,
    seed: int,
    rng: random.Random,
    tokenizer: HubTokenizer,
) -> tuple[str, int]:
    """An answer, and its number of tokens."""
    if actions:
        return rng.choice(actions), 1
    solve = getattr(environment, "worked_example", None)
    if solve is None:
        raise SpecError(
            f"domain '{domain.name}' offers neither legal actions nor worked examples to play with",
            remedy="give it a `profile`",
        )
    _, answer = solve(seed)
    return answer, len(tokenizer.encode(answer))
