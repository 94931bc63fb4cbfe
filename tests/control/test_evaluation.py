"""Held-out episodes: unknown is not zero, and faults are not hidden behind the survivors."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.control.evaluation import Evaluation, SampledSuccess, pass_at_k
from rollart.control.rewarding import TrajectoryScorer
from rollart.control.scheduler import FaultMeter
from rollart.errors import FaultRateExceeded
from rollart.leases import Leases
from rollart.model import Completion, GenerateRequest, InfraFault, Observation, Outcome, Scored, Step, Trajectory
from rollart.settings.run import EvaluationSpec
from rollart.sim import loop
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.parts import SimulatedEngine
from rollart.testing.run import make_simulated_run
from serverless.types import FaultKind


class Judge:
    """Ends at once with the verdict it is given, or with a reward and none, or breaks."""

    def __init__(self, verdict: Any) -> None:
        self.verdict = verdict

    async def reset(self, seed: int) -> Observation:
        if self.verdict == "broken":
            raise ConnectionError("no world")
        return Observation("look")

    async def step(self, action: str) -> Step:
        if isinstance(self.verdict, float):
            return Step(Observation(""), min(self.verdict, 2.0), done=True)
        return Step(Observation(""), done=True, success=self.verdict)

    async def close(self) -> None:
        return None


class EnvironmentRewards:
    """The rewards of the environment; an infinite one is a fault of the platform."""

    async def score(self, trajectory: Trajectory, deadline_s: float) -> Outcome:
        reward = sum(turn.env_reward for turn in trajectory.turns)
        return Scored(reward) if reward < 2.0 else InfraFault(FaultKind.CRASH, retryable=False)


def evaluate(verdicts: list[Any], faults: FaultMeter, success_at: float | None = None) -> tuple[Any, MemoryRecorder]:
    world = make_simulated_run()
    left = list(verdicts)
    held: list[Any] = []

    async def main() -> None:
        async def run() -> None:
            domain = dataclasses.replace(
                world.domains[0], environment=lambda: Judge(left.pop(0)), success_at=success_at
            )
            runner = world.control.evaluation.runner
            scorer = TrajectoryScorer(
                EnvironmentRewards(), Leases(world.recorder), reward_s=1.0, success_at={"a": success_at}
            )
            evaluation = Evaluation([domain], runner, scorer, world.recorder, faults, seed=0)
            broken = verdicts.count("broken") + verdicts.count(float("inf"))
            episodes = len(verdicts) - broken + broken // 2
            held.append((await evaluation.run("end", 0, EvaluationSpec(episodes=episodes), concurrency=1))["a"])

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(world.run())
            await asyncio.sleep(0)
            await asyncio.sleep(0.1)
            await run()

    loop.run(main(), seed=None)
    return held[0], world.recorder  # type: ignore[return-value]


def test_unknown_is_not_failure() -> None:
    result, _ = evaluate([True, None, False, None], FaultMeter(1.0, 100))
    assert (result.episodes, result.successes, result.unknown, result.faults) == (2, 1, 2, 0)
    assert result.rate == 0.5
    result, _ = evaluate([None, None], FaultMeter(1.0, 100))
    assert result.rate is None


def test_an_episode_is_tried_twice_and_then_counted_as_a_fault() -> None:
    faults = FaultMeter(1.0, 100)
    result, _ = evaluate([True, "broken", "broken", True], faults)
    assert (result.episodes, result.faults) == (2, 1)
    assert faults.faults == 2


def test_faults_of_an_evaluation_end_the_run() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        evaluate(["broken"] * 6, FaultMeter(0.05, 3))
    assert caught.value.subgroup(FaultRateExceeded) is not None


def test_an_open_episode_of_a_domain_with_success_at_is_judged_by_its_score() -> None:
    result, _ = evaluate([True, 0.2, 0.5, False], FaultMeter(1.0, 100), success_at=0.5)
    assert (result.episodes, result.successes, result.unknown) == (4, 2, 0)
    result, _ = evaluate([0.2, 0.5], FaultMeter(1.0, 100))
    assert (result.episodes, result.unknown) == (0, 2)


def test_a_reward_that_fails_in_an_evaluation_is_a_fault() -> None:
    result, _ = evaluate([1.0, float("inf"), float("inf")], FaultMeter(1.0, 100), success_at=0.5)
    assert (result.episodes, result.successes, result.faults) == (1, 1, 1)


@given(n=st.integers(1, 9), data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations(range(n), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(min(subset) < c for subset in subsets) / len(subsets))
    assert pass_at_k(n, c, 1) == pytest.approx(c / n)


def test_prompts_with_too_few_verdicts_leave_pass_at_k() -> None:
    found = SampledSuccess.of(0.6, [[True, False], [True], [False, False], []], [1, 2])
    assert (found.prompts, found.mean) == (3, 0.5)
    assert found.passes == {1: 0.5, 2: 0.5}
    assert SampledSuccess.of(0.6, [[]], [1]).passes == {1: None}


class Noisy:
    """Succeeds by the token that was sampled."""

    async def reset(self, seed: int) -> Observation:
        return Observation(f"look {seed}")

    async def step(self, action: str) -> Step:
        return Step(Observation(""), done=True, success=random.Random(action).random() < 0.5)

    async def close(self) -> None:
        return None


class Asked(SimulatedEngine):
    """Notes its requests."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        self.asked.append(request)
        return await super().generate(request)


def run_with(evaluation: EvaluationSpec, steps: int = 5, **more: Any) -> tuple[Any, MemoryRecorder]:
    world = make_simulated_run(steps=steps, evaluation=evaluation, **more)
    world.domains = [dataclasses.replace(domain, environment=Noisy) for domain in world.domains]
    loop.run(world.run(), seed=1)
    return world, world.recorder  # type: ignore[return-value]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at", [("start", "end"), ()])
def test_every_nth_version_is_evaluated_and_none_becomes_current_meanwhile(overlap: bool, at: Any) -> None:
    spec = EvaluationSpec(episodes=3, at=at, every=2, temperatures=[0.5, 1.0], samples=4, pass_at=[1, 4])
    world, recorder = run_with(spec, steps=4, overlap=overlap, engine_s=lambda rng: rng.uniform(0.1, 2.0))
    found = [(e.fields["label"], e.fields["version"]) for e in recorder.events if e.kind == "evaluation"]
    last = [("end", 4)] if at else [("step4", 4)]
    assert found == [*([("start", 0)] if at else []), ("step2", 2), *last]
    sampled = [e for e in recorder.events if e.kind == "evaluation_sampled"]
    assert [e.fields["temperature"] for e in sampled] == [0.5, 1.0] * len(found)
    assert all(e.fields["avg@4"] == pytest.approx(e.fields["pass@1"]) for e in sampled)
    assert all(e.fields["pass@4"] >= e.fields["pass@1"] for e in sampled)
    held_out = [c for c in recorder.charges if c.trajectory.startswith("eval-step2-")]
    assert len(held_out) == 3 * (1 + 2 * 4)
    assert {c.v0 for c in held_out} == {2}
    assert world.published == [1, 2, 3, 4]


def test_samples_of_a_prompt_differ_and_greedy_ones_are_greedy() -> None:
    spec = EvaluationSpec(episodes=2, at=("end",), temperatures=[0.7], samples=3)
    engine = Asked("e0", version=0, seed=0, tokens=2, seconds=None, load_s=None)
    world = make_simulated_run(steps=1, evaluation=spec)
    world.engines = [engine]
    loop.run(world.run(), seed=1)
    asked = [r for r in engine.asked if r.session.startswith("eval-end-")]
    temperatures = sorted({(r.sampling.temperature, r.sampling.seed) for r in asked})
    assert [t for t, _ in temperatures] == [0.0] * 4 + [0.7] * 12, "two prompts of two turns"
    assert len({seed for _, seed in temperatures}) == 16
