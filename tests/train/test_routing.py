"""The trainer runs each token through the experts that the engine chose (R3)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from rollart.errors import RollartError, UsageError
from rollart.train.batch import InvalidSamples, TrainingBatch
from rollart.train.learner import Learner
from rollart.train.routing import RouterReplay
from tests.engine.families import EXPERTS, VOCAB
from tests.train.test_engine_agreement import generated
from tests.train.trainkit import batch, config, publish_version, sample

pytestmark = pytest.mark.slow  # imports transformers

INIT = EXPERTS | {
    "model_type": "qwen3_moe",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}


def learner_of(root: Path, **changes: object) -> Learner:
    return Learner(config(root, model={"init": INIT | changes}, lr=1e-2))


def trained(root: Path, **changes: object) -> Learner:
    """After four updates, so that its routers decide."""
    learner = learner_of(root, **changes)
    for version in range(4):
        learner.train(batch([sample(str(i), turns=[(13, 9)], vocab=VOCAB) for i in range(8)], VOCAB), version)
    return learner


def gap(learner: Learner, made: TrainingBatch) -> npt.NDArray[np.float64]:
    """|log π − log μ| of each token with loss."""
    return np.abs(learner.logprobs(made) - made.logprobs)[made.loss.position]


@pytest.mark.parametrize("normalized", [True, False])
def test_given_experts_are_weighted_by_the_models_own_router(normalized: bool) -> None:
    """Output and gradients of a layer are those of its formula, one token at a time."""
    learner = learner_of(Path(), norm_topk_prob=normalized)
    mlp = learner.policy.model.model.layers[1].mlp
    torch.manual_seed(0)
    x, wanted = torch.randn(1, 9, 32), torch.randn(9, 32)
    chosen = torch.stack([torch.randperm(6)[:2] for _ in range(9)])
    own = mlp.gate(x)[2]
    replay = RouterReplay([mlp.gate])
    replay.chosen = chosen[:, None].clone()
    replay.chosen[4] = -1  # unknown: the router's own

    def expert(number: int, token: Tensor) -> Tensor:
        gate, up = (mlp.experts.gate_up_proj[number] @ token).chunk(2)
        inner: Tensor = mlp.experts.down_proj[number] @ (torch.nn.functional.silu(gate) * up)
        return inner

    rows = []
    for n, token in enumerate(x[0]):
        picked = own[n] if n == 4 else chosen[n]
        shares = (mlp.gate.weight @ token).softmax(0)[picked]
        shares = shares / shares.sum() if normalized else shares
        rows.append(sum((s * expert(int(e), token) for s, e in zip(shares, picked, strict=True)), torch.zeros(32)))
    parameters = [mlp.gate.weight, mlp.experts.gate_up_proj, mlp.experts.down_proj]
    found = mlp(x)[0]
    torch.testing.assert_close(found, torch.stack(rows), atol=1e-6, rtol=1e-5)
    ours = torch.autograd.grad((found * wanted).sum(), parameters)
    theirs = torch.autograd.grad((torch.stack(rows) * wanted).sum(), parameters)
    assert all(g.abs().max() > 0 for g in ours)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_a_replay_agrees_with_the_engine_and_leaves_a_batch_without_experts_alone(tmp_path: Path) -> None:
    learner = trained(tmp_path)
    samples = generated(publish_version(learner, tmp_path, 8), torch.float32, 1.0)
    made = batch(samples, VOCAB, learner.policy.experts)
    assert gap(learner, made).max() < 1e-4
    without = dataclasses.replace(made, experts=None)
    own = learner.logprobs(without)
    bare = [dataclasses.replace(one, experts=()) for one in samples]
    assert np.array_equal(learner.logprobs(batch(bare, VOCAB, learner.policy.experts)), own)
    mixed = learner.logprobs(batch([*samples[:10], *bare[10:]], VOCAB, learner.policy.experts))
    assert mixed == pytest.approx(own, abs=1e-4)
    assert made.experts is not None
    others = dataclasses.replace(made, experts=np.where(made.experts < 0, -1, (made.experts + 1) % 6).astype(np.int16))
    assert gap(learner, others).mean() > 1e-3, "the given experts are those that are used"
    again = Learner(config(tmp_path, model={"path": str(tmp_path / "v000008")}, lr=1e-2))
    publish_version(again, tmp_path, 0)
    assert learner.reference.logprobs(others) == pytest.approx(own, abs=1e-4), "the reference has routers of its own"


def test_experts_of_another_model_are_refused(tmp_path: Path) -> None:
    learner = learner_of(tmp_path)
    one = dataclasses.replace(sample("x", turns=[(3, 2)], vocab=VOCAB), experts=(b"\x00\x01\x02\x03\x04\x05",) * 5)
    assert len(batch([one], VOCAB, learner.policy.experts))
    with pytest.raises(InvalidSamples, match="sample x: an expert is none of the 6 of the model"):
        batch([dataclasses.replace(one, experts=(b"\x00\x01\x02\x03\x04\x06",) * 5)], VOCAB, learner.policy.experts)
    with pytest.raises((ValueError, RollartError), match="malformed samples"):
        batch([dataclasses.replace(one, experts=(b"\x00\x01\x02\x03",) * 5)], VOCAB, learner.policy.experts)


@pytest.mark.parametrize(("experts", "active", "scale"), [(32, 2, 0.2), (64, 8, 0.15)])
def test_a_replay_closes_the_gap_of_routing(tmp_path: Path, experts: int, active: int, scale: float) -> None:
    """The table of docs/training.md, which `pytest -s` prints."""
    shape = {"num_hidden_layers": 8, "num_experts": experts, "num_experts_per_tok": active, "norm_topk_prob": True}
    learner = trained(tmp_path, **shape, initializer_range=scale)
    path = publish_version(learner, tmp_path, 8)
    made = {
        dtype: batch(generated(path, dtype, 1.0), VOCAB, learner.policy.experts)
        for dtype in (torch.float32, torch.bfloat16)
    }

    def gaps(what: str, dtype: torch.dtype) -> tuple[float, float]:
        one = made[dtype]
        found = gap(learner, one), gap(learner, dataclasses.replace(one, experts=None))
        for name, values in zip(("replay", "no replay"), found, strict=True):
            print(f"{active} of {experts} {what} {name}: mean {values.mean():.2g}, largest {values.max():.2g}")
        return float(found[0].mean()), float(found[1].mean())

    assert gaps("float32", torch.float32)[0] < 1e-6
    replayed, routed = gaps("bfloat16", torch.bfloat16)
    assert replayed < routed / 1.5
    learner.config = learner.config.model_copy(update={"lr": 1e-3})
    learner.optimizers.clear()
    learner.train(batch([sample(str(i), turns=[(13, 9)], vocab=VOCAB) for i in range(8)], VOCAB), 4)
    replayed, routed = gaps("float32, an update later", torch.float32)
    assert replayed < routed


def test_adapters_are_of_the_attention_alone(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    learner = Learner(config(tmp_path, model={"init": INIT}, lr=1e-2, lora={"rank": 2}))
    adapted = {n for n, p in learner.policy.model.named_parameters() if p.requires_grad}
    assert len(adapted) == 3 * 4 * 2
    assert all(".self_attn." in name for name in adapted)
    learner.train(batch([sample(str(i), turns=[(13, 9)], vocab=VOCAB) for i in range(4)], VOCAB), 0)
    made = batch(generated(publish_version(learner, tmp_path, 1), torch.float32, 1.0), VOCAB, learner.policy.experts)
    assert gap(learner, made).max() < 1e-4
    with pytest.raises(UsageError, match="targets has 'gate_proj'"):
        Learner(config(tmp_path, model={"init": INIT}, lora={"rank": 2, "targets": ["q_proj", "gate_proj"]}))
