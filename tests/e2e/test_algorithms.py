"""Algorithms of `training.algorithm` in real runs: each trains to the end, with the switches that it sets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from rollart.ledger.reader import LedgerReader
from tests.e2e.harness import BATCH, Home, tiny

STEPS = 5

pytestmark = pytest.mark.slow  # each run starts a trainer and an engine: torch twice, about 6 s


def metrics(home: Home) -> list[dict[str, float]]:
    """The metrics of each step."""
    with LedgerReader(home.directory) as reader:
        return [dict(row.metrics) for row in reader.versions() if row.version > 0]


@pytest.mark.parametrize(
    ("training", "names"),
    [
        (
            {
                "algorithm": "gspo",
                "loss": {"aggregation": "token", "correction": "mask", "cap": 5.0, "kl": 0.1, "reference_reset": 3},
                "minibatches": 2,
            },
            {"reference_kl"},
        ),
        (
            {
                "algorithm": "cispo",
                "stream": True,
                "loss": {"entropy_target": 9.0, "kl": 0.1, "kl_in": "reward", "kl_estimator": "k1", "kl_target": 0.01},
            },
            {"entropy_factor", "kl_factor", "reference_kl"},
        ),
        (
            {"algorithm": "ppo", "critic": {"warmup_steps": 1}, "loss": {"kl": 0.01, "kl_in": "reward"}},
            {"value_loss", "explained_variance", "return_mean", "reference_kl"},
        ),
    ],
    ids=["gspo", "cispo", "ppo"],
)
def test_an_algorithm_trains_to_the_end(home: Home, training: dict[str, Any], names: set[str]) -> None:
    home.launch(tiny(steps=STEPS, training={"lr": 1e-3, **training})).finished()
    spec = yaml.safe_load((home.directory / "resolved.yaml").read_text())["run"]
    assert spec["training"]["algorithm"] == training["algorithm"]
    steps = metrics(home)
    assert len(steps) == STEPS
    assert all(names <= step.keys() for step in steps)
    assert all(step["samples"] == BATCH for step in steps)
    assert any(step["grad_norm"] > 0 for step in steps)
    if training["algorithm"] == "gspo":
        kept = {int(path.name.removeprefix("v")) for path in (home.directory / "weights").glob("v*")}
        assert kept == {3, 4, 5}, "the last two, and the reference of a next step"


@pytest.mark.parametrize("name", ["dr_grpo", "dapo", "rloo", "reinforce_pp", "topr", "kimi", "online_dpo", "opd"])
def test_a_preset_trains_as_it_is(home: Home, name: str) -> None:
    """Those above, and `sft` (test_given.py), are the other ones, and `grpo`, whose switches are dapo's and gspo's."""
    spec = tiny(steps=2, training={"lr": 1e-3, "algorithm": name})
    if name == "opd":
        teacher = str(home.path / "teacher")
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec["model"]["init"]))
        model.save_pretrained(teacher)
        spec["training"]["loss"] = {"reference": teacher}
    home.launch(spec).finished()
    steps = metrics(home)
    assert [step["samples"] for step in steps] == [BATCH, BATCH]
    assert any(step["grad_norm"] > 0 for step in steps)
