"""trainer.json: valid settings, and errors that name the wrong key."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rollart.errors import UsageError
from rollart.train.__main__ import join_service
from rollart.train.config import load_config, parse_config
from rollart.train.ranks import LocalRankProcesses

FULL: dict[str, Any] = {
    "model": {"init": {"vocab_size": 10}, "seed": 3},
    "weights_root": "/w",
    "tokenizer": None,
    "seed": 1,
    "lr": 1,
    "betas": [0.9, 0.95],
    "weight_decay": 0.1,
    "grad_clip": 0.5,
    "domain_balance": "domains",
    "loss": {"kind": "decoupled", "clip_low": 0.2, "clip_high": 0.3, "cap": 5, "entropy": 0.02},
    "epochs": 2,
    "minibatches": 2,
    "max_tokens_per_microbatch": 8192,
    "temperature": 1.0,
    "domains": {
        "frozen_lake": {
            "advantage": {"level": "turn", "gamma": 0.8, "baseline": "domain", "normalize": "batch"},
            "loss_weight": 1.0,
        }
    },
    "imitation": {"lr": 1e-3, "batch": 32},
    "threads": 1,
    "device": "cpu",
}


def test_everything_is_understood() -> None:
    config = parse_config(FULL)
    assert config.lr == 1.0
    assert config.betas == (0.9, 0.95)
    assert config.domains["frozen_lake"].advantage.gamma == 0.8
    assert config.model.init == {"vocab_size": 10}
    assert config.tokenizer is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimiser": {}}, "config.optimiser: Extra inputs are not permitted"),
        ({"loss": {"kin": 1}}, "config.loss.kin: Extra inputs are not permitted"),
        ({"epochs": 2.5}, "config.epochs: .* integer.*, got 2.5"),
        ({"epochs": True}, "config.epochs: a number, got True"),
        ({"epochs": 0}, "config.epochs: Input should be greater than or equal to 1, got 0"),
        ({"loss": {"kind": "grpo"}}, "config.loss.kind: .*'pg', 'ppo', .*, got 'grpo'"),
        ({"loss": []}, "config.loss: "),
        ({"betas": [1]}, "config.betas.1: Field required"),
        (
            {"domains": {"x": {"advantage": {"gamma": 2}}}},
            "config.domains.x.advantage.gamma: .* equal to 1",
        ),
        (
            {"domains": {"x": {"advantage": {"baseline": "domain", "normalize": "group"}}}},
            "config.domains.x.advantage: normalize 'group' with baseline 'group' alone, not 'domain'",
        ),
        ({"domains": {"x": {"loss_weight": 0}}}, "config.domains.x.loss_weight: "),
        ({"domains": []}, "config.domains: "),
        ({"model": {}}, "give exactly one of 'path'"),
        ({"model": {"path": "a", "init": {}}}, "give exactly one of 'path'"),
        ({"temperature": 0}, "config.temperature: "),
        ({"loss": {"clip_low": 0}}, "config.loss.clip_low: Input should be greater than 0, got 0"),
        ({"imitation": {"batch": 0}}, "config.imitation.batch: "),
        ({"lr": -1}, "config.lr: "),
    ],
)
def test_a_wrong_key_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(FULL | change)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ValueError, match=r"config\.weights_root: Field required"):
        parse_config({"model": {"init": {}}})


def test_files_that_cannot_be_read_are_usage_errors(tmp_path: Path) -> None:
    path = tmp_path / "trainer.json"
    with pytest.raises(UsageError, match="cannot read"):
        load_config(path)
    path.write_text('{"model": }')
    with pytest.raises(UsageError, match=r"trainer.json:1:11: not JSON"):
        load_config(path)
    path.write_text(json.dumps(FULL | {"seed": "x"}))
    with pytest.raises(UsageError, match=r"trainer.json: config.seed: .*integer"):
        load_config(path)


def test_gpus_that_are_not_there_are_told_before_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = parse_config({**FULL, "device": "cuda", "parallel": {"ranks": 2}})
    with pytest.raises(UsageError, match="device 'cuda': torch sees no CUDA device"):
        join_service(argparse.Namespace(rank=0, meet=None, here=None, local=0, config=""), config, LocalRankProcesses())
