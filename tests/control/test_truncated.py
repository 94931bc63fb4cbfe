"""Trajectories that a length limit cut are marked, and those that an environment or a program limited are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollart.model import Observation, Step
from rollart.sim import loop
from rollart.testing.run import make_simulated_run
from tests.control.test_harness import Programs


class Shows:
    """An episode of one turn that shows `observation`, or one without an end whose second text is `then`."""

    def __init__(self, observation: Observation, then: str | None) -> None:
        self.observation, self.then = observation, then

    async def reset(self, seed: int) -> Observation:
        return self.observation

    async def step(self, action: str) -> Step:
        return Step(Observation(self.then or ""), 1.0, done=self.then is None)

    async def close(self) -> None:
        return None


def truncated(**domain: Any) -> set[bool]:
    """The flags of the trained samples; every answer has three tokens and ends at the engine's limit."""
    run = make_simulated_run(quotas={"a": (4, 2)}, tokens=3, steps=1)
    run.domains = [replace(d, **domain) for d in run.domains]
    loop.run(run.run(), seed=0)
    return {s.truncated for _, samples in run.trainer.batches for s in samples}


@pytest.mark.parametrize(
    ("observation", "then", "cut"),
    [
        (Observation("say"), None, True),
        (Observation("say", max_tokens=10**9), None, True),  # the domain's limit is lower
        (Observation("say", max_tokens=3), None, False),
        (Observation("say", actions=("a",)), None, False),
        (Observation("say", max_tokens=3), "x" * 10_000, True),  # its context is full
    ],
)
def test_only_the_domains_limit_and_the_context_cut(observation: Observation, then: str | None, cut: bool) -> None:
    assert truncated(environment=lambda: Shows(observation, then)) == {cut}


def test_an_agent_program_is_cut_by_the_domain_alone() -> None:
    assert truncated(harness=Programs(asks=1), max_tokens=2) == {True}
    assert truncated(harness=Programs(asks=1), max_tokens=5) == {False}  # it asked for three tokens
