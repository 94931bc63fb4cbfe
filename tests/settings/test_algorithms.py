"""`training.algorithm` sets what a spec leaves open, and switches that do not fit each other are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart.errors import SpecError
from rollart.settings.algorithms import PRESETS
from rollart.settings.load import load_run
from rollart.settings.run import RunSpec
from rollart.settings.training import AdvantageSpec, CriticSpec, LossSpec, TeacherSpec

Write = Callable[..., Path]
RUN = yaml.safe_load((Path(__file__).parent / "run.yaml").read_text())


def loaded(write: Write, training: dict[str, Any], *overrides: str, **domain: Any) -> RunSpec:
    changes = {"training": training, "domains": [d | domain for d in RUN["domains"]]}
    return load_run(write(yaml.safe_dump(RUN | changes)), overrides)


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"sft"}))
def test_an_algorithm_sets_what_is_not_given(write: Write, name: Any) -> None:
    given = {"reference": "teacher"} if name == "opd" else {}
    run = loaded(write, {"algorithm": name, "loss": given})
    assert run.training.loss == LossSpec(**PRESETS[name].loss, **given)
    assert run.domains[0].advantage == AdvantageSpec(**PRESETS[name].advantage)
    own = PRESETS[name].critic
    assert run.training.critic == (None if own is None else CriticSpec(**own))
    assert loaded(write, {"loss": given}, f"training.algorithm={name}") == run
    assert loaded(write, yaml.safe_load(yaml.safe_dump(run.training.model_dump()))).training == run.training


def test_a_teacher_is_a_directory_or_an_endpoint(write: Write) -> None:
    for given, known in (
        ("https/teacher", "https/teacher"),
        ("http://teacher:8000/v1", TeacherSpec(url="http://teacher:8000/v1")),
        ({"url": "https://t/v1", "token_env": "KEY"}, TeacherSpec(url="https://t/v1", token_env="KEY")),
    ):
        assert loaded(write, {"algorithm": "opd", "loss": {"reference": given}}).training.loss.reference == known


def test_without_an_algorithm_the_defaults_are_those_of_the_models(write: Write) -> None:
    run = loaded(write, {})
    assert run.training.algorithm is None
    assert run.training.loss == LossSpec()
    assert run.domains[0].advantage == AdvantageSpec()


def test_what_a_spec_gives_itself_stays(write: Write) -> None:
    training = {"algorithm": "rloo", "loss": {"aggregation": "token", "kl": 0.05}, "epochs": 2}
    run = loaded(write, training, advantage={"level": "turn", "gamma": 0.9})
    assert (run.training.loss.aggregation, run.training.loss.ratio, run.training.loss.kl) == ("token", "product", 0.05)
    assert run.domains[0].advantage == AdvantageSpec(
        level="turn", gamma=0.9, baseline="leave_one_out", normalize="none"
    )
    assert loaded(write, training, "training.loss.ratio=token").training.loss.ratio == "token"
    assert loaded(write, training, "training.loss.kind=decoupled").training.loss.kind == "decoupled"
    run = loaded(write, {"algorithm": "ppo", "critic": {"lr": 0.1}}, "training.critic.value_clip=null")
    assert run.training.critic == CriticSpec(lr=0.1, value_clip=None)
    assert (run.training.epochs, run.training.passes) == (1, 2)


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        ({"kind": "tis", "ratio": "geometric"}, "ratio 'geometric' with kind 'tis', which clips no ratio: use ppo"),
        ({"kind": "pg", "dual_clip": 3.0}, "dual_clip with kind 'pg', which clips no ratio: remove it"),
        ({"dual_clip": 1.1}, "dual_clip 1.1 with clip_high 0.2: give more than 1 + clip_high"),
        (
            {"kind": "ppo", "correction_level": "product"},
            "correction_level 'product' with kind 'ppo', whose loss has no importance",
        ),
        ({"kind": "kimi", "correction": "mask"}, "correction 'mask' with kind 'kimi', whose square bounds the ratio"),
        ({"kind": "dpo"}, "kind 'dpo' with kl 0 in the loss, which is its β: give kl above 0 and kl_in loss"),
        ({"kind": "dpo", "kl": 1, "correction": "mask"}, "correction 'mask' with kind 'dpo', whose pairs are of whole"),
        ({"kind": "decoupled", "floor": 3}, "floor 3 above cap 2: give at most cap"),
        ({"length": 9}, "length with aggregation 'token', which does not divide by it: use constant"),
        ({"kl": 0.1, "kl_estimator": "k1"}, "kl_estimator 'k1' in the loss, where its gradient is 0 in expectation"),
        (
            {"reward_factor": 0.0, "kl": 0.1},
            "reward_factor 0 without a penalty in the reward: give kl above 0 and kl_in",
        ),
        ({"kl_target": 0.1}, "kl_target, reference or reference_reset without a penalty: give kl above 0"),
        ({"kl": 0.1, "reference": "m", "reference_reset": 5}, "reference and reference_reset: give one"),
    ],
)
def test_switches_that_do_not_fit_are_refused(write: Write, loss: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        loaded(write, {"loss": loss})
    assert problem in caught.value.message


@pytest.mark.parametrize(
    ("training", "more", "problem"),
    [
        (
            {"algorithm": "reinforce_pp", "stream": True},
            {},
            "domain 'lake' has advantage.normalize 'whiten', with the mean of the whole batch (rule: group, batch or "
            "none with training.stream)",
        ),
        (
            {"algorithm": "reinforce_pp", "columns": ["advantage"]},
            {},
            "columns has advantage with loss.kl_in 'reward', which changes rewards in the step",
        ),
        (
            {"loss": {"kl": 0.1, "reference_reset": 9}, "columns": ["ref_logprobs"]},
            {},
            "columns has ref_logprobs with loss.reference_reset: the reference may change before the step",
        ),
        (
            {"algorithm": "online_dpo", "stream": True},
            {},
            "training.loss.kind is dpo with training.stream (rule: false",
        ),
        ({"algorithm": "online_dpo"}, {"group_size": 1}, "at least 2 for training.loss.kind dpo, whose pairs are of a"),
        (
            {"algorithm": "kimi", "loss": {"kind": "ppo"}},
            {},
            "algorithm 'kimi' with loss.kind 'ppo', another loss: give kind kimi or none, or remove the algorithm",
        ),
        (
            {"algorithm": "ppo", "stream": True},
            {},
            "critic with stream: values are of the whole batch's step; set stream",
        ),
        (
            {"algorithm": "ppo", "lora": {}},
            {},
            "critic with lora: it is trained in full, beside frozen weights; remove",
        ),
        ({}, {"adapter": "games"}, "domain 'lake' has the adapter 'games' without training.lora: give lora ({} for"),
        ({"lora": {"publish": "merged"}}, {"adapter": "games"}, "with training.lora.publish 'merged': weights can be"),
        ({"lora": {}}, {"adapter": "base"}, "domain 'lake' has the adapter 'base', a directory of every version"),
        (
            {"algorithm": "ppo", "columns": ["advantage"]},
            {},
            "has advantage.baseline 'critic', with values of the step (rule: group or none with advantage in training",
        ),
        ({"loss": {"kind": "dpo", "kl": 1}, "critic": {}}, {}, "critic with loss.kind 'dpo': pairs have no advantage"),
        (
            {"algorithm": "ppo"},
            {"advantage": {"baseline": "none"}},
            "training.critic is given, and no domain has advantage.baseline 'critic': give it to those that the critic",
        ),
        (
            {},
            {"advantage": {"baseline": "critic"}},
            "a domain has advantage.baseline 'critic', and training.critic is not given: give it ({} for its defaults)",
        ),
        ({"algorithm": "opd"}, {}, "algorithm 'opd' without a teacher: give loss.reference, a model with"),
        (
            {"algorithm": "opd", "loss": {"reference": "http://teacher:8000/v1"}},
            {"temperature": 0.7},
            "domain 'lake' has temperature 0.7 with a training.loss.reference behind a URL (rule: 1, at which its",
        ),
        (
            {"algorithm": "opd", "loss": {"reference": {"url": "teacher:8000/v1"}}},
            {},
            "training.loss.reference is {'url': 'teacher:8000/v1'}",
        ),
        ({"algorithm": "rloo"}, {"group_size": 1}, "at least 2 for `advantage.baseline: leave_one_out`"),
        ({"algorithm": "grpo"}, {"advantage": {"baseline": "domain"}}, "normalize 'group' with baseline 'group' alone"),
    ],
)
def test_algorithms_are_refused_where_they_cannot_work(
    write: Write, training: dict[str, Any], more: dict[str, Any], problem: str
) -> None:
    with pytest.raises(SpecError) as caught:
        loaded(write, training, **more)
    assert problem in caught.value.message


def test_a_reset_needs_versions_on_disk_before_the_step(write: Write) -> None:
    training = {"loss": {"kl": 0.1, "reference_reset": 5}}
    assert loaded(write, training).training.loss.reference_reset == 5
    with pytest.raises(SpecError, match=r"reference_reset is given with weights\.overlap \(rule: without it"):
        loaded(write, training, "weights.overlap=true")
