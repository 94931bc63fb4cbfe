"""Runs on `training.data`: what they need, what makes no sense in them, and the plan and steps that they get."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart.errors import SpecError
from rollart.settings.load import load_run
from rollart.settings.planning import pinned
from rollart.settings.resolve import Resolved, resolve_files, resolve_saved
from rollart.settings.training import LossSpec

Write = Callable[..., Path]
LAKE = {"name": "lake", "environment": "tests.envs:Lake", "max_tokens": 4}
SFT: dict[str, Any] = {
    "name": "test",
    "model": {"init": {"hidden_size": 64}, "context": 128},
    "batch": {"trajectories": 4},
    "training": {"algorithm": "sft", "data": "train.jsonl", "epochs": 3},
}
PARTS = """
name: parts
pools: [{name: big, device: H100, count: 8, price: 2}, {name: small, device: H20, count: 4, price: 1}]
"""


def changed(**values: Any) -> str:
    training = SFT["training"] | values.pop("training", {})
    return yaml.safe_dump(SFT | {"training": training} | values)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"training": {"data": None}}, "loss.kind 'nll' (algorithm sft) without data: give data"),
        ({"training": {"algorithm": "grpo"}}, "data with loss.kind 'ppo', which trains on roll-outs"),
        ({"training": {"loss": {"kind": "ppo"}}}, "algorithm 'sft' with loss.kind 'ppo', another loss"),
        ({"training": {"stream": True}}, "stream or columns with data, where nothing is rolled out meanwhile"),
        ({"training": {"loss": {"kl": 0.1}}}, "kl, entropy, entropy_target, mask_truncated or correction 'mask' with"),
        ({"training": {"loss": {"aggregation": "constant"}}}, "aggregation 'constant' with kind 'nll'"),
        ({"schedule": "sync"}, "schedule is given with training.data, where nothing is rolled out"),
        ({"rollout": {"prefetch": 2}}, "rollout is given with training.data"),
        ({"batch": {"tokens": 99}}, "batch.tokens is given with training.data"),
        ({"warm_start": {"domains": ["lake"]}}, "warm_start is given with training.data"),
        ({"domains": [LAKE]}, "domains is given with training.data, where nothing is rolled out and evaluation.ep"),
        ({"evaluation": {"episodes": 8}}, "evaluation.episodes is 8 without domains"),
        ({"checkpoints": {"best_by": "reward"}}, "checkpoints.best_by is reward with training.data"),
        ({"stop_when": [{"metric": "zero_variance", "above": 1}]}, "stop_when.0.metric is zero_variance with"),
        (
            {"training": {"algorithm": None, "data": None}},
            "domains has no entry (rule: at least one, unless training.algorithm is sft)",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(write: Write, values: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_run(write(changed(**values)))
    assert problem in caught.value.message


def resolved(write: Write, lines: int, cluster: str | None = None, **values: Any) -> Resolved:
    write("{}\n\n" * lines, "train.jsonl")
    return resolve_files(write(changed(**values)), None if cluster is None else write(cluster, "cluster.yaml"))


def test_steps_are_those_of_the_epochs_unless_they_are_given(write: Write) -> None:
    assert resolved(write, 9).run.steps == 3 * 3
    assert resolved(write, 8).run.steps == 3 * 2
    assert resolved(write, 8, steps=20).run.steps == 20
    with pytest.raises(SpecError, match=r"training\.data is 'gone\.jsonl', which cannot be read: No such file"):
        resolved(write, 8, training={"data": "gone.jsonl"})


def test_a_recorded_run_has_the_steps_and_the_file_that_it_began_with(write: Write) -> None:
    run = pinned(resolved(write, 8))
    saved = write(run.to_yaml(), "resolved.yaml")
    write("{}\n" * 99, "train.jsonl")
    again = resolve_saved(saved)
    assert (again.run.steps, again.run.training.data_sha256) == (6, run.run.training.data_sha256)
    assert pinned(again).run.training.data_sha256 == run.run.training.data_sha256 != pinned(resolved(write, 9)).run


@pytest.mark.parametrize(
    ("train", "pool", "devices"),
    [({}, "big", 8), ({"pool": "small"}, "small", 4), ({"pool": "small", "devices": 2}, "small", 2)],
)
def test_the_trainer_has_the_cluster_to_itself(write: Write, train: dict[str, Any], pool: str, devices: int) -> None:
    (part,) = resolved(write, 8, PARTS, placement={"train": train}).plan.assignments
    assert (part.name, part.pool, len(part.devices)) == ("trainer-0", pool, devices)


def test_domains_are_evaluated_on_engines(write: Write) -> None:
    found = resolved(write, 8, domains=[LAKE], evaluation={"episodes": 8})
    assert [part.name for part in found.plan.assignments] == ["engine-0", "trainer-0"]
    assert found.run.training.loss == LossSpec(kind="nll")
