"""Supervised fine-tuning: the loss and the gradient of plain code that takes one sample at a time, and of TRL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rollart.adapters.conversations import read_samples
from rollart.control.given import GivenBatches
from rollart.model import TrainSample
from rollart.train.learner import Learner
from tests.adapters.test_chat import write_tokenizer
from tests.adapters.test_conversations import MARKED, conversation, model
from tests.train.trainkit import VOCAB, batch, config

SFT: dict[str, Any] = {"loss": {"kind": "nll"}, "data": "train.jsonl", "grad_clip": 0.0, "domains": {}}


def answers(count: int = 7) -> list[TrainSample]:
    """Conversations of one to three turns, of different lengths."""
    found = []
    for i in range(count):
        turn = sum(((-1,) * (1 + (i + turn) % 3) + (0,) * (1 + i % 4) for turn in range(1 + i % 3)), ())
        tokens = tuple((7 * i + 3 * at + 1) % VOCAB for at in range(len(turn)))
        found.append(TrainSample.given(str(i), "data", tokens, turn))
    return found


def by_hand(model: torch.nn.Module, samples: list[TrainSample], aggregation: str) -> torch.Tensor:
    """The mean negative log-likelihood, of all tokens or of samples' means."""
    each = []
    for one in samples:
        logprobs = model(input_ids=torch.tensor([one.token_ids])).logits[0].log_softmax(-1)
        each.append([-logprobs[i - 1, one.token_ids[i]] for i, loss in enumerate(one.loss_mask) if loss])
    if aggregation == "token":
        return torch.stack([value for of in each for value in of]).mean()
    return torch.stack([torch.stack(of).mean() for of in each]).mean()


def gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("aggregation", ["token", "sample"])
@pytest.mark.parametrize("most", [24, 4096])
def test_loss_and_gradient_are_those_of_plain_code(aggregation: str, most: int) -> None:
    learner = Learner(
        config(
            **SFT | {"loss": {"kind": "nll", "aggregation": aggregation}},
            max_tokens_per_microbatch=most,
            model={"init": config(layers=2).model.init, "dtype": "float64"},
        )
    )
    samples, policy = answers(), learner.policy.model
    loss = by_hand(policy, samples, aggregation)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*policy.parameters()])])
    report = learner.train(batch(samples), version=0)
    assert report.metrics["loss"] == pytest.approx(loss.item(), abs=1e-12)
    assert torch.allclose(gradient(policy), expected, atol=1e-12)
    assert report.trained_tokens == report.metrics["trained_tokens"] == sum(map(sum, (s.loss_mask for s in samples)))


def test_a_step_has_its_updates_at_the_rate_of_its_version() -> None:
    learner = Learner(config(**SFT, minibatches=3, lr=0.1, lr_schedule="linear", steps=10, warmup=4))
    first = learner.train(batch(answers()), version=0).metrics
    assert (first["updates"], first["samples"], first["lr"]) == (3, 7, pytest.approx(0.1 * 3 / 4))
    assert learner.train(batch(answers()), version=10).metrics["lr"] == pytest.approx(0.01)
    assert learner.train(batch(answers()), version=10).metrics["loss"] < first["loss"]


@pytest.mark.slow  # TRL imports torch, transformers and datasets
def test_loss_and_gradient_are_those_of_sft_trainer(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    tokenizer = model(write_tokenizer(tmp_path), tmp_path / "tokenizer", MARKED)
    lines = [{"messages": conversation(turns)} for turns in ([("the", "answer")], [("é", "12"), ("is", "the other")])]
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    found = GivenBatches(read_samples(path, "", tokenizer, 512), 2, 0)((), 0)

    learner = Learner(config(**SFT, vocab=400))
    learner.policy.model.save_pretrained(tmp_path / "weights")
    theirs = PreTrainedTokenizerFast.from_pretrained(tokenizer, pad_token="</s>")
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(tmp_path / "weights"),
        args=SFTConfig(
            output_dir=str(tmp_path / "out"),
            assistant_only_loss=True,
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list(lines),
        processing_class=theirs,
    )
    inputs = next(iter(trainer.get_train_dataloader()))
    assert int((inputs["labels"] != -100).sum()) == sum(map(sum, (s.loss_mask for s in found)))
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    metrics = learner.train(batch(found, vocab=400), version=0).metrics
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert torch.allclose(gradient(learner.policy.model), gradient(trainer.model), atol=1e-6)
