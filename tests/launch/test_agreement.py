"""The probe that engines are compared on: the runs that use one, and its contents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from rollart.adapters.engines.vllm import PROBE_FILE
from rollart.launch.engines import TrainerProgram
from rollart.launch.weight_store import agreement_sample
from rollart.model import TrainSample, WeightsRef
from rollart.settings.load import builtin
from rollart.settings.resolve import resolve_files

VLLM = builtin("clusters/local-vllm.yaml")


def test_the_probe_is_of_the_runs_length_and_scores_all_but_its_first_token() -> None:
    sample = agreement_sample(resolve_files(None, VLLM))
    assert sample is not None
    assert sample.loss_mask == (False, *(True,) * 47)
    assert len(set(sample.token_ids)) == 30
    short = agreement_sample(resolve_files(None, VLLM, ["model.context=32"]))
    assert short is not None
    assert len(short.token_ids) == 31


@pytest.mark.parametrize(
    "changes",
    [
        ["cluster.engines.kind=embedded"],
        ["cluster.engines.vllm.probe=0"],
        ["domains.frozen_lake.temperature=0.7", "domains.spell_backward.temperature=0.7"],
    ],
)
def test_engines_that_cannot_be_compared_are_not(changes: list[str]) -> None:
    assert agreement_sample(resolve_files(None, VLLM, changes)) is None


class Learner:
    """A trainer whose log-probabilities equal its number of steps."""

    def __init__(self, root: Path) -> None:
        self.steps, self._root = 0, root

    async def logprobs(self, samples: Sequence[TrainSample]) -> list[tuple[float, ...]]:
        return [(0.0, *(float(self.steps),) * (len(s.token_ids) - 1)) for s in samples]

    async def stage(self, version: int) -> None:
        pass

    async def publish(self, version: int) -> WeightsRef:
        path = self._root / f"v{version}"
        path.mkdir(exist_ok=True)
        return WeightsRef(version, str(path))


def test_a_version_that_is_written_beside_the_next_step_has_the_probe_of_its_own(tmp_path: Path) -> None:
    """A version that was not staged, or was replaced since, has the probe of the current weights."""
    sample = agreement_sample(resolve_files(None, VLLM))
    assert sample is not None
    none: Any = None
    program = TrainerProgram(none, none, none, none, current=lambda: None, start_s=1.0, agreement=sample)
    learner = Learner(tmp_path)
    program.client = cast(Any, learner)

    async def body() -> None:
        await program.publish(0)
        learner.steps = 1
        await program.stage(1)
        learner.steps = 2
        await program.publish(1)
        await program.publish(2)

    asyncio.run(body())
    said = {v: json.loads((tmp_path / f"v{v}" / PROBE_FILE).read_text()) for v in (0, 1, 2)}
    assert {v: set(probe["logprobs"]) for v, probe in said.items()} == {0: {0.0}, 1: {1.0}, 2: {2.0}}
    assert [f.name for f in (tmp_path / "v1").iterdir()] == [PROBE_FILE], "nothing is left beside it"
    assert tuple(said[1]["token_ids"]) == sample.token_ids
