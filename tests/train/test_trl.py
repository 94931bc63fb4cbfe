"""The algorithms of `training.algorithm` beside TRL's own losses: the same loss and gradient on random tensors."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollart.train.advantages import batch_advantages
from tests.train.test_algorithms import LONGEST, Case, preset, product_loss
from tests.train.trainkit import batch

pytestmark = pytest.mark.slow  # TRL imports torch, transformers and datasets


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """TRL's trainers on a model of some thousand parameters, which score nothing: tests give the log-probabilities."""
    pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    spec = importlib.util.spec_from_file_location("trl_trainer", "examples/trl_trainer.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    root: Path = tmp_path_factory.mktemp("trl")
    model = example.make_model(root / "model")

    def made(trainer: Any, options: Any) -> Any:
        class Given(trainer):  # type: ignore[misc]
            def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> Any:
                return self.given, torch.zeros_like(self.given), None

        return Given(
            model=AutoModelForCausalLM.from_pretrained(model),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=options(
                output_dir=str(root / "out"),
                num_generations=2,
                max_completion_length=LONGEST,
                per_device_train_batch_size=12,
                report_to=[],
                use_cpu=True,
                bf16=False,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["say"]}),
            processing_class=AutoTokenizer.from_pretrained(model),
        )

    return {"grpo": made(GRPOTrainer, GRPOConfig), "rloo": made(RLOOTrainer, RLOOConfig)}


def padded(case: Case, flat: torch.Tensor) -> torch.Tensor:
    """Values of loss tokens [N] as [S, longest], 0 after a sample's end."""
    first = batch(case.samples).loss.first
    rows = [flat[first[s] : first[s + 1]] for s in range(len(case.samples))]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def trl_loss(trainer: Any, case: Case, advantage: torch.Tensor, **inputs: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Loss and gradient by π of TRL, with the advantages of samples [S]."""
    made = batch(case.samples)
    behaviour = padded(case, torch.from_numpy(made.logprobs[made.loss.position]))
    mask = padded(case, torch.ones(len(made.loss))).long()
    trainer.given = padded(case, case.now)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": torch.zeros((len(made), 1), dtype=torch.long),
            "prompt_mask": torch.ones((len(made), 1), dtype=torch.long),
            "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
            "completion_mask": mask,
            "advantages": advantage,
            "old_per_token_logps": behaviour,
            "old_logps": (behaviour * mask).sum(1),
            "num_items_in_batch": mask.sum(),
            **inputs,
        },
    )
    (gradient,) = torch.autograd.grad(loss, case.now)
    return float(loss.detach()), gradient


def same(one: tuple[float, torch.Tensor], other: tuple[float, torch.Tensor]) -> None:
    assert one[1].abs().max() > 1e-4
    assert one[0] == pytest.approx(other[0], abs=1e-6)
    assert torch.allclose(one[1], other[1], atol=1e-6, rtol=1e-6)


def per_sample(case: Case, setup: Any) -> torch.Tensor:
    """The product's advantages of samples, which have one each."""
    made = batch(case.samples)
    return torch.from_numpy(batch_advantages(made, setup.domains)[made.loss.first[:-1]])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("name", "loss_type", "switches"),
    [
        ("grpo", "grpo", {}),
        ("dr_grpo", "dr_grpo", {}),
        ("dapo", "dapo", {"epsilon_high": 0.28}),
        ("dapo", "bnpo", {"epsilon_high": 0.28}),
        ("gspo", "grpo", {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}),
        ("cispo", "cispo", {"epsilon_high": 5.0}),
    ],
)
def test_losses_and_gradients_are_those_of_grpo_trainer(
    trainers: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    loss_type: str,
    switches: dict[str, Any],
    seed: int,
) -> None:
    trainer, setup = trainers["grpo"], preset(name)
    case = Case.drawn(seed, spread=0.02 if name == "gspo" else 0.5)
    for key, value in {"loss_type": loss_type, **switches}.items():
        monkeypatch.setattr(trainer, key, value)
    same(product_loss(setup, case), trl_loss(trainer, case, per_sample(case, setup)))


def test_dual_clip_is_its_delta_and_the_kl_its_beta(trainers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, case = trainers["grpo"], Case.drawn(3, spread=1.0)
    setup = preset("grpo", dual_clip=1.5, kl=0.2)
    monkeypatch.setattr(trainer, "loss_type", "grpo")
    monkeypatch.setattr(trainer.args, "delta", 1.5)
    monkeypatch.setattr(trainer, "beta", 0.2)
    monkeypatch.setattr(trainer.args, "use_bias_correction_kl", False)  # its default weighs the penalty by the ratio
    reference = padded(case, torch.from_numpy(case.reference[batch(case.samples).loss.position]))
    theirs = trl_loss(trainer, case, per_sample(case, setup), ref_per_token_logps=reference)
    same(product_loss(setup, case), theirs)


@pytest.mark.parametrize(("mode", "level"), [("token", "token"), ("sequence", "product")])
@pytest.mark.parametrize("bound", ["truncate", "mask"])
def test_corrections_are_those_of_its_engine_mismatch(
    trainers: dict[str, Any], monkeypatch: pytest.MonkeyPatch, mode: str, level: str, bound: str
) -> None:
    """TRL clips around the policy at the start of the step and weighs by its ratio to the engine: kind decoupled."""
    trainer, case = trainers["grpo"], Case.drawn(4)
    setup = preset("dapo", kind="decoupled", correction=bound, correction_level=level, floor=0.6, cap=1.6)
    made = batch(case.samples)
    gap = padded(case, case.start - torch.from_numpy(made.logprobs[made.loss.position]))
    ratio = (gap if mode == "token" else gap.sum(1, keepdim=True)).exp()
    outside = (ratio < 0.6) | (ratio > 1.6)
    weight = ratio.clamp(0.6, 1.6) if bound == "truncate" else ratio.masked_fill(outside, 0.0)
    assert outside.any()
    for key, value in {
        "loss_type": "dapo",
        "epsilon_high": 0.28,
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
    }.items():
        monkeypatch.setattr(trainer, key, value)
    theirs = trl_loss(
        trainer,
        case,
        per_sample(case, setup),
        old_per_token_logps=padded(case, case.start),
        importance_sampling_ratio=weight,
        sampling_per_token_logps=padded(case, torch.from_numpy(made.logprobs[made.loss.position])),
    )
    same(product_loss(setup, case), theirs)


@pytest.mark.parametrize("seed", range(2))
def test_losses_and_gradients_are_those_of_rloo_trainer(trainers: dict[str, Any], seed: int) -> None:
    case, setup = Case.drawn(seed), preset("rloo")
    score = np.array([s.score for s in case.samples]).reshape(-1, 4)
    advantage = torch.from_numpy((score - (score.sum(1, keepdims=True) - score) / 3).ravel())
    same(product_loss(setup, case), trl_loss(trainers["rloo"], case, advantage))
