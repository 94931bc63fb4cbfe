"""What a run must be for its training to be streamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rollart.errors import SpecError
from rollart.settings.load import load_run

Write = Callable[..., Path]
RUN = yaml.safe_load((Path(__file__).parent / "run.yaml").read_text())


def run_file(write: Write, training: dict[str, object], baseline: str) -> Path:
    domains = [d | {"advantage": {"baseline": baseline}} for d in RUN["domains"]]
    return write(yaml.safe_dump(RUN | {"training": training, "domains": domains}))


@pytest.mark.parametrize("baseline", ["group", "none"])
def test_one_pass_and_advantages_of_groups_are_streamed(write: Write, baseline: str) -> None:
    assert load_run(run_file(write, {"stream": True}, baseline)).training.stream
    assert not load_run(run_file(write, {}, baseline)).training.stream


@pytest.mark.parametrize(
    ("training", "baseline", "problem"),
    [
        ({"epochs": 2}, "group", "training.epochs is 2 (rule: 1 with training.stream)"),
        ({"minibatches": 4}, "none", "training.minibatches is 4 (rule: 1 with training.stream)"),
        ({}, "domain", "has advantage.baseline 'domain', a mean over the whole batch (rule: group or none"),
    ],
)
def test_what_needs_the_whole_batch_is_refused(
    write: Write, training: dict[str, object], baseline: str, problem: str
) -> None:
    assert load_run(run_file(write, training, baseline))
    with pytest.raises(SpecError) as caught:
        load_run(run_file(write, training | {"stream": True}, baseline))
    assert problem in caught.value.message
