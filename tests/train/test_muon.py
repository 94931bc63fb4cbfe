"""Muon on the matrices of the blocks, AdamW on everything else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollart.errors import SpecError
from rollart.train.config import parse_config
from rollart.train.learner import Learner
from tests.launch.test_trainer_ranks import resolved
from tests.train.trainkit import batch, config, sample

SAMPLES = [sample(str(i), turns=[(2, 2), (3, i % 3)]) for i in range(6)]
LR = 1e-3


def orthogonalized(matrix: Tensor) -> Tensor:
    """Five Newton-Schulz steps in float64, as in Jordan's post (https://kellerjordan.github.io/posts/muon): X is
    replaced by aX + b(XX^T)X + c(XX^T)^2 X, which brings its larger singular values to about 1."""
    x = matrix.double() / matrix.double().norm()
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return x


def updates(optimizer: str, **more: object) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The change of every parameter in one update, and its gradient."""
    learner = Learner(config(lr=LR, optimizer=optimizer, **more))
    parameters = dict(learner.policy.model.named_parameters())
    before = {name: p.detach().clone() for name, p in parameters.items()}
    learner.train(batch(SAMPLES), 0)
    grads = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    return {name: p.detach() - before[name] for name, p in parameters.items()}, grads


def test_one_update_is_muons_on_matrices_and_adamws_elsewhere() -> None:
    moved, gradient = updates("muon")
    plain, _ = updates("adamw")
    matrices = {name for name in moved if "_proj." in name}
    assert len(matrices) == 7
    for name in moved:
        if name not in matrices:
            assert torch.equal(moved[name], plain[name]), name
            continue
        # With one gradient, momentum and Nesterov are a multiple of it. RMS as AdamW's: 0.2 sqrt(max(rows, columns)).
        step = -moved[name] / (LR * 0.2 * max(moved[name].shape) ** 0.5)
        # torch computes in bfloat16, whose rounding fills the directions that the gradient hardly has: leave them out.
        u, s, v = torch.linalg.svd(gradient[name].double(), full_matrices=False)
        u, v = u[:, s > 0.2 * s[0]], v[s > 0.2 * s[0]]
        mine, wanted = (u.T @ one.double() @ v.T for one in (step, orthogonalized(gradient[name])))
        assert (mine - wanted).norm() < 0.05 * wanted.norm(), name


def test_weight_decay_and_the_schedule_reach_both_parts() -> None:
    decayed, _ = updates("muon", weight_decay=0.5)
    plain, _ = updates("muon")
    start = dict(Learner(config()).policy.model.named_parameters())
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"):
        difference = decayed[name] - plain[name]
        assert torch.allclose(difference, -LR * 0.5 * start[name].detach(), atol=1e-8), name
    learner = Learner(config(lr=LR, optimizer="muon", lr_schedule="cosine", steps=4))
    learner.train(batch(SAMPLES), 4)
    assert [group["lr"] for group in learner.optimizer("policy").param_groups] == pytest.approx([LR / 10] * 3)


def test_the_warm_start_uses_adamw() -> None:
    one, other = Learner(config(optimizer="muon")), Learner(config())
    for learner in (one, other):
        learner.imitate(batch(SAMPLES), 2)
    mine, theirs = one.policy.model.state_dict(), other.policy.model.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.slow  # importing peft takes seconds
def test_adapters_are_matrices() -> None:
    moved, _ = updates("muon", lora={"rank": 4})
    plain, _ = updates("adamw", lora={"rank": 4})
    changed = {name for name in moved if moved[name].any()}
    assert changed == {name for name in plain if plain[name].any()}
    assert all("lora_B" in name for name in changed), "A has no gradient while B is zero"
    assert any(not torch.equal(moved[name], plain[name]) for name in changed)


def test_muon_with_sharded_parameters_is_refused(tmp_path: Path) -> None:
    raw = config(tmp_path).model_dump() | {"optimizer": "muon", "parallel": {"ranks": 2}}
    with pytest.raises(ValueError, match="muon orthogonalizes whole matrices"):
        parse_config(raw)
    for trainer in ({"ranks": 2, "threads": 2}, {"dtype": "bfloat16"}):
        with pytest.raises(SpecError, match=r"training\.optimizer is muon, and the trainer has several ranks"):
            resolved(tmp_path, trainer, training__optimizer="muon")
