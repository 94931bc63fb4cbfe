"""Adapters through peft: only they are trained, versions contain them merged, and a restored trainer continues with
them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rollart.engine.weights import read_tensors
from rollart.errors import TrainerError, UsageError
from rollart.train import checkpoint
from rollart.train.learner import Learner
from rollart.train.sending import outgoing_version
from tests.train.trainkit import batch, config, publish_version, sample

pytest.importorskip("peft")
pytestmark = pytest.mark.slow  # importing peft takes seconds

SAMPLES = [sample(str(i), turns=[(2, 2), (3, 1 + i % 2)]) for i in range(6)]
LORA = {"rank": 4, "alpha": 8.0}
ROOT = Path(__file__).parent.parent.parent


def learner(root: Path, **changes: Any) -> Learner:
    return Learner(config(root, layers=2, **{"lora": LORA, **changes}))


def test_adapters_start_as_nothing_and_are_all_that_is_trained(tmp_path: Path) -> None:
    plain, own = learner(tmp_path, lora=None), learner(tmp_path)
    assert (plain.logprobs(batch(SAMPLES)) == own.logprobs(batch(SAMPLES))).all()
    frozen = {n: p.clone() for n, p in own.policy.model.named_parameters() if ".lora_" not in n}
    own.train(batch(SAMPLES), 0)
    now = dict(own.policy.model.named_parameters())
    assert all(torch.equal(now[n], p) for n, p in frozen.items())
    assert (plain.logprobs(batch(SAMPLES)) != own.logprobs(batch(SAMPLES))).any()
    trained = sum(p.numel() for g in own.optimizers["policy"].param_groups for p in g["params"])
    assert trained == sum(p.numel() for n, p in now.items() if ".lora_" in n)


def test_a_version_holds_them_merged_under_the_names_of_the_model(tmp_path: Path) -> None:
    own = learner(tmp_path)
    own.train(batch(SAMPLES), 0)
    path = publish_version(own, tmp_path, 1, ())
    plain = learner(tmp_path, lora=None, model={"path": str(path)})
    assert read_tensors(path).keys() == {n for n, _ in plain.policy.model.named_parameters()}
    assert abs(plain.logprobs(batch(SAMPLES)) - own.logprobs(batch(SAMPLES))).max() < 1e-5


def test_a_restored_trainer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    straight, other = learner(tmp_path), learner(tmp_path)
    straight.train(batch(SAMPLES), 0)
    path = publish_version(straight, tmp_path, 1, ())
    straight.train(batch(SAMPLES), 1)
    checkpoint.restore_version(other, path, 1)
    other.train(batch(SAMPLES), 1)
    assert (straight.logprobs(batch(SAMPLES)) == other.logprobs(batch(SAMPLES))).all()


@pytest.mark.parametrize(("wrote", "reads"), [(None, LORA), (LORA, None), (LORA, {"rank": 2})])
def test_a_version_with_other_adapters_is_refused(
    tmp_path: Path, wrote: dict[str, Any] | None, reads: dict[str, Any] | None
) -> None:
    path = publish_version(learner(tmp_path, lora=wrote), tmp_path, 1, ())
    with pytest.raises(TrainerError, match=r"holds a different model|has the shape"):
        checkpoint.restore_version(learner(tmp_path, lora=reads), path, 1)


def test_only_the_named_modules_get_one(tmp_path: Path) -> None:
    own = learner(tmp_path, lora={"targets": ["q_proj", "v_proj"]})
    names = {n.split(".lora_")[0].rpartition(".")[2] for n, _ in own.policy.model.named_parameters() if ".lora_" in n}
    assert names == {"q_proj", "v_proj"}
    with pytest.raises(UsageError, match=r"training\.lora\.targets \['nothing'\]"):
        learner(tmp_path, lora={"targets": ["nothing"]})


COMPILED = pytest.param(
    {"compile": True}, marks=pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
)


@pytest.mark.parametrize("parallel", [{"activation_checkpointing": True}, COMPILED])
def test_blocks_that_are_checkpointed_or_compiled_learn_the_same(tmp_path: Path, parallel: dict[str, Any]) -> None:
    """In a separate process, like a trainer: modules imported by other tests affect the compiler."""
    code = f"from tests.train.test_lora import learn_the_same; learn_the_same({str(tmp_path)!r}, {parallel!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def learn_the_same(directory: str, parallel: dict[str, Any]) -> None:
    tmp_path = Path(directory)
    straight, other = learner(tmp_path, lora=None), learner(tmp_path, lora=None, parallel=parallel)
    for each in (straight, other):
        each.train(batch(SAMPLES), 0)
    assert abs(straight.logprobs(batch(SAMPLES)) - other.logprobs(batch(SAMPLES))).max() < 1e-5
    path = publish_version(other, tmp_path, 1, ())
    checkpoint.restore_version(straight, path, 1)


def test_a_broadcast_holds_adapters_merged_as_files_do(tmp_path: Path) -> None:
    own = learner(tmp_path)
    own.train(batch(SAMPLES), 0)
    sent = outgoing_version(checkpoint.take_snapshot(own))
    files = read_tensors(publish_version(own, tmp_path, 1, ()))
    assert sent.tensors.keys() == files.keys()
    assert all(torch.equal(sent.tensors[name], tensor) for name, tensor in files.items())
