"""Held-out episodes: unknown is not zero, and faults are not hidden behind the survivors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollart.control.evaluation import Evaluation
from rollart.control.scheduler import FaultMeter
from rollart.errors import FaultRateExceeded
from rollart.model import Observation, Step
from rollart.sim import loop
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.run import make_simulated_run


class Judge:
    """Ends at once with the verdict it is given, or breaks."""

    def __init__(self, verdict: Any) -> None:
        self.verdict = verdict

    async def reset(self, seed: int) -> Observation:
        if self.verdict == "broken":
            raise ConnectionError("no world")
        return Observation("look")

    async def step(self, action: str) -> Step:
        return Step(Observation(""), done=True, success=self.verdict)

    async def close(self) -> None:
        return None


def evaluate(verdicts: list[Any], faults: FaultMeter) -> tuple[Any, MemoryRecorder]:
    world = make_simulated_run()
    left = list(verdicts)
    held: list[Any] = []

    async def main() -> None:
        async def run() -> None:
            import dataclasses

            domain = dataclasses.replace(world.domains[0], environment=lambda: Judge(left.pop(0)))
            runner = world.control.evaluation.runner
            evaluation = Evaluation([domain], runner, world.recorder, faults, seed=0)
            episodes = sum(v != "broken" for v in verdicts) + verdicts.count("broken") // 2
            held.append((await evaluation.run("end", 0, episodes, concurrency=1))["a"])

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
