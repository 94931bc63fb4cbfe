"""Adapters through peft: only they are trained, versions contain them alone or merged, and a restored trainer continues
with them."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollart.architecture import read_architecture, stamp_of
from rollart.collective import BroadcastOrder
from rollart.engine.network import Network
from rollart.engine.weights import WeightStaging, read_checkpoint, read_tensors
from rollart.errors import TrainerError, UsageError
from rollart.lora import ADAPTER_MODEL
from rollart.train import checkpoint
from rollart.train.learner import Learner
from rollart.train.policy import published_tensors
from rollart.train.sending import BroadcastSender, outgoing_version
from tests.engine.families import check_random_requests, expected
from tests.train.trainkit import VOCAB, batch, config, publish_version, sample

pytest.importorskip("peft")
pytestmark = pytest.mark.slow  # importing peft takes seconds

SAMPLES = [sample(str(i), turns=[(2, 2), (3, 1 + i % 2)]) for i in range(6)]
LORA = {"rank": 4, "alpha": 8.0}
EMBEDDING = "model.embed_tokens.weight"
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


@pytest.mark.parametrize("publish", ["adapter", "merged"])
def test_what_reads_a_version_finds_the_policy(tmp_path: Path, publish: str) -> None:
    """An engine, and a trainer or a reference policy that starts with it."""
    own = learner(tmp_path, lora={**LORA, "publish": publish})
    own.train(batch(SAMPLES), 0)
    path = publish_version(own, tmp_path, 1, ())
    plain = learner(tmp_path, lora=None, model={"path": str(path)})
    assert read_tensors(path).keys() == {n for n, _ in plain.policy.model.named_parameters()}
    assert all(torch.equal(read_tensors(path)[n], p) for n, p in plain.policy.model.named_parameters())
    assert abs(plain.logprobs(batch(SAMPLES)) - own.logprobs(batch(SAMPLES))).max() < 1e-5


def test_versions_hold_the_adapters_and_share_the_weights_below(tmp_path: Path) -> None:
    own = learner(tmp_path)
    paths = [publish_version(own, tmp_path, 0, ())]
    own.train(batch(SAMPLES), 0)
    paths += [publish_version(own, tmp_path, 1, ())]
    again = learner(tmp_path)
    checkpoint.restore_version(again, paths[1], 1)
    paths += [publish_version(again, tmp_path, 2, ())]
    below = [path / "base/model.safetensors" for path in (*paths, tmp_path)]
    assert len({file.stat().st_ino for file in below}) == 1, "of a restarted trainer too"
    assert not list(paths[1].glob("model*"))
    assert len({stamp_of(path) for path in paths}) == 3, "v2 has the weights of v1, and the learner's later counters"
    assert (paths[1] / ADAPTER_MODEL).read_bytes() == (paths[2] / ADAPTER_MODEL).read_bytes()
    other = learner(tmp_path, model={"init": own.config.model.init, "seed": 1})
    moved = publish_version(other, tmp_path, 3, ())
    assert torch.equal(read_tensors(moved)["model.norm.weight"], other.policy.model.state_dict()["model.norm.weight"])
    assert not torch.equal(read_tensors(moved)[EMBEDDING], read_tensors(paths[0])[EMBEDDING]), "another model's are not"
    assert (paths[0] / "base/model.safetensors").stat().st_ino == below[0].stat().st_ino


def test_an_engine_computes_what_peft_computes_without_merging(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    own = learner(tmp_path, lr=0.05)
    paths = []
    for version in range(3):
        paths.append(publish_version(own, tmp_path, version, ()))
        own.train(batch(SAMPLES), version)
    models = [PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(p / "base"), p).eval() for p in paths]
    check_random_requests(paths, models, seed="adapters", vocab=VOCAB)
    gap = expected(models[0], (1, 2, 3)) - expected(models[2], (1, 2, 3))
    assert gap.abs().max() > 0.01, "or the versions could not be told apart"


def test_weights_below_keep_a_type_that_holds_them(tmp_path: Path) -> None:
    """Published in bfloat16: those that were of it, and no others. The merged sum is not rounded on its way."""
    exact = learner(tmp_path, lora=None)
    with torch.no_grad():
        for name, parameter in exact.policy.model.named_parameters():
            if "layers.0" in name:
                parameter.copy_(parameter.bfloat16())
    start = publish_version(exact, tmp_path / "start", 0, ())
    own = learner(tmp_path, model={"path": str(start)}, published_dtype="bfloat16")
    own.train(batch(SAMPLES), 0)
    path = publish_version(own, tmp_path, 1, ())
    below, found = read_checkpoint(path), read_tensors(path)
    assert {t.dtype for n, t in below.items() if "layers.0" in n} == {torch.bfloat16}
    assert {t.dtype for n, t in below.items() if "layers.1" in n and "norm" not in n} == {torch.float32}
    for name, tensor in published_tensors(own.policy.model).items():
        assert torch.equal(found[name].float(), tensor.merge(tensor.parts, tensor.scale).detach())


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


def test_blocks_that_are_checkpointed_or_compiled_learn_the_same(tmp_path: Path) -> None:
    """In a separate process, like a trainer: modules imported by other tests affect the compiler."""
    kinds = [{"activation_checkpointing": True}]
    kinds += [{"compile": True}] if shutil.which("g++") else []  # torch.compile needs a compiler
    code = f"from tests.train.test_lora import learn_the_same; learn_the_same({str(tmp_path)!r}, {kinds!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def learn_the_same(directory: str, kinds: list[dict[str, Any]]) -> None:
    tmp_path = Path(directory)
    for parallel in kinds:
        straight, other = learner(tmp_path, lora=None), learner(tmp_path, lora=None, parallel=parallel)
        for each in (straight, other):
            each.train(batch(SAMPLES), 0)
        assert abs(straight.logprobs(batch(SAMPLES)) - other.logprobs(batch(SAMPLES))).max() < 1e-5
        path = publish_version(other, tmp_path, 1, ())
        checkpoint.restore_version(straight, path, 1)


@pytest.mark.parametrize("publish", ["adapter", "merged"])
def test_a_broadcast_arrives_as_the_files_are(tmp_path: Path, publish: str) -> None:
    own = learner(tmp_path, lora={**LORA, "publish": publish})
    start = publish_version(own, tmp_path, 0, ())
    own.train(batch(SAMPLES), 0)
    outgoing = outgoing_version(checkpoint.take_snapshot(own))
    path = publish_version(own, tmp_path, 1, ())
    plain = publish_version(learner(tmp_path, lora=None), tmp_path / "plain", 0, ())
    shutil.rmtree(start)  # a joined engine has opened the weights below, and one without them loads files
    sender, engines = BroadcastSender(torch.device("cpu"), rank=0, host="127.0.0.1"), []
    for directory in (path, plain):
        network = Network(read_architecture(directory), context=8, device=torch.device("cpu"), dtype=torch.float32)
        engines.append(WeightStaging(network, str(directory)))
    order = BroadcastOrder(sender.address(), "g", "gloo", 3, 1, "v1-a", 1, limit_s=60.0)
    try:
        for number, engine in enumerate(engines, start=1):
            engine.take_part(asdict(replace(order, first=number)))
        sent = sender.send(order, outgoing, bucket=4096)
        _, found, stamp, _ = asyncio.run(engines[0].stage({"path": "/gone", "stamp": "v1-a"}))
    finally:
        sender.leave(wait_s=60.0)
        for engine in engines:
            engine.receiver.close()
    assert stamp == "v1-a"
    want = read_tensors(path)
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
    if publish == "adapter":
        assert list(sent.errors) == [2]
        assert "lacks the weights below the adapter" in sent.errors[2]
        assert sent.bytes < (path / ADAPTER_MODEL).stat().st_size + 64 * len(outgoing.tensors)
    else:
        assert not sent.errors
