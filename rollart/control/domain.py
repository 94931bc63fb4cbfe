"""A task domain as the runtime uses it: its environment, its sampling settings and its share of a batch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from rollart.model import Sampling
from rollart.ports import EVAL_SEEDS_FROM, ChatPrompts, EnvironmentFactory, HarnessFactory


@dataclass(frozen=True, slots=True)
class Domain:
    """A task domain. Every batch contains `quota` of its samples, in groups of `group_size`."""

    name: str
    environment: EnvironmentFactory
    quota: int
    group_size: int
    max_turns: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    harness: HarnessFactory | None = None
    """An agent program that replaces the environment."""
    chat: ChatPrompts | None = None
    """Renders observations as messages; None: their text is the prompt."""
    success_at: float | None = None
    """Score from which an episode without a verdict of its environment is a success; None: it stays open."""
    adapter: str | None = None
    """The adapter that its turns are sampled with; None: the policy has no adapters of domains."""

    def sampling(self, *, seed: int, max_tokens: int, allowed: tuple[int, ...] | None, greedy: bool) -> Sampling:
        return Sampling(
            max_tokens=max_tokens,
            temperature=0.0 if greedy else self.temperature,
            top_p=1.0 if greedy else self.top_p,
            seed=seed,
            stop_token_ids=self.stop_token_ids,
            allowed_token_ids=allowed,
        )


def derive_seed(*parts: str | int) -> int:
    """A seed of 63 bits from the run's seed and an entity's id, the same on every machine."""
    text = ":".join([str(p) for p in parts])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def training_seed(run_seed: int, domain: str, index: int) -> int:
    """The seed of a domain's `index`-th prompt; never equal to the seed of a held-out episode."""
    return derive_seed(run_seed, domain, index) % EVAL_SEEDS_FROM
