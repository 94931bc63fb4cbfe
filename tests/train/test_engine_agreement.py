"""Trainer and embedded engine compute the same policy: the trainer's scores equal the engine's sampled
log-probabilities."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rollart.adapters.trainers.http import encode_samples
from rollart.architecture import read_architecture
from rollart.engine.jobs import EngineJob
from rollart.engine.network import Network
from rollart.engine.runner import Runner
from rollart.engine.weights import read_tensors, require_complete
from rollart.model import GenerateRequest, GroupId, Sampling, TrainSample, TrajectoryId
from rollart.train.learner import Learner
from tests.engine.models import DEVICE
from tests.train.trainkit import VOCAB, batch, config, publish_version, sample


@pytest.mark.slow  # two models, some hundred decode steps
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_agree_to_1e_4(tmp_path: Path, temperature: float) -> None:
    learner = Learner(config(tmp_path, hidden=32, layers=2, temperature=temperature, lr=3e-2))
    for version in range(8):
        learner.train(batch([sample(str(i), turns=[(3, 5)]) for i in range(8)]), version)
    path = publish_version(learner, tmp_path, 8, ())
    require_complete(path)
    made = batch(generated(path, torch.float32, temperature))
    assert learner.logprobs(made) == pytest.approx(made.logprobs, abs=1e-4)


@pytest.mark.slow  # two models, some hundred decode steps
def test_in_bfloat16_they_agree_to_its_rounding_and_a_float32_trainer_no_better(tmp_path: Path) -> None:
    """FSDP2 over one rank computes in bfloat16, as on one GPU. Process groups are global to a process, so this runs in
    a separate one. The means are those of `engines.vllm.probe` and `behaviour_gap`."""
    learner = Learner(config(tmp_path, hidden=32, layers=2, lr=3e-2))
    for version in range(8):
        learner.train(batch([sample(str(i), turns=[(3, 5)]) for i in range(8)]), version)
    path = publish_version(learner, tmp_path, 8, ())
    samples = generated(path, torch.bfloat16, 1.0)
    again = Learner(config(tmp_path, hidden=32, layers=2))
    other = publish_version(again, tmp_path, 5, ())
    made = batch(samples)
    exact = np.abs(learner.logprobs(made) - made.logprobs)[made.loss.position]
    assert 1e-5 < exact.mean() < 0.05, "the engine did compute in bfloat16"
    half = tmp_path / "half"  # a published model: converted to float32 for training, one block at a time
    half.mkdir()
    save_file(
        {n: t.to(torch.bfloat16) for n, t in read_tensors(path).items()}, half / "model.safetensors", {"format": "pt"}
    )
    told = json.loads((path / "config.json").read_text())
    (half / "config.json").write_text(json.dumps(told | {"dtype": "bfloat16"}))
    (tmp_path / "samples").write_bytes(msgpack.packb(encode_samples(samples)))
    code = (
        "import sys, pathlib, msgpack, numpy as np, torch\n"
        "from rollart.engine.weights import read_tensors\n"
        "from rollart.train import checkpoint\n"
        "from rollart.train.batch import decode_batch\n"
        "from rollart.train.learner import Learner\n"
        "from rollart.train.ranks import join_ranks, rendezvous\n"
        "from tests.engine.models import DEVICE\n"
        "from tests.train.trainkit import VOCAB, config, publish_version\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "ranks = join_ranks(rendezvous('127.0.0.1', 0, rank=0, size=1), torch.device(DEVICE.type, 0), rank=0, size=1)\n"
        "learner = Learner(config(root, hidden=32, layers=2, parallel={'dtype': 'bfloat16'}), ranks)\n"
        "checkpoint.restore_version(learner, root / 'v000008', 8)\n"
        "made = decode_batch(msgpack.unpackb((root / 'samples').read_bytes()), VOCAB)\n"
        "np.save(root / 'found', learner.logprobs(made))\n"
        "publish_version(learner, root, 0, ())\n"
        "np.save(root / 'reference', learner.reference.logprobs(made))\n"
        "half = {'model': {'path': str(root / 'half')}, 'parallel': {'dtype': 'bfloat16'}}\n"
        "model = Learner(config(root, **half), ranks).policy\n"
        "assert model.scorer.trims_last_layer\n"
        "kept = read_tensors(root / 'half')\n"
        "for name, p in model.model.named_parameters():\n"
        "    assert p.dtype == torch.float32 and torch.equal(p.to_local(), kept[name].float()), name\n"
        "learner.logprobs(made)\n"
        "checkpoint.restore_version(learner, root / 'v000005', 5)\n"
        "publish_version(learner, root, 6, ())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    both = np.abs(np.load(tmp_path / "found.npy") - made.logprobs)[made.loss.position]
    assert 1e-5 < both.mean() < 0.05
    assert both.max() < 0.5
    same = np.abs(np.load(tmp_path / "found.npy") - np.load(tmp_path / "reference.npy"))[made.loss.position]
    assert same.mean() < both.mean() / 10, "a reference in float32 would be as far off as the engine"
    for whence, version in ((path, 0), (other, 6)):  # gathered and rounded parameters are neither written nor kept
        was, now = read_tensors(whence), read_tensors(tmp_path / f"v{version:06d}")
        assert all(torch.equal(was[name], now[name]) for name in was)


def generated(path: Path, dtype: torch.dtype, temperature: float) -> list[TrainSample]:
    """Twenty answers of an engine of this version, half of them over legal sets, with the experts of their tokens."""
    network = Network(read_architecture(path), context=64, device=DEVICE, dtype=dtype)
    network.load(read_tensors(path))
    runner = Runner(network, slots=8, context=64, version=8)
    rng = random.Random(0)
    for i in range(20):
        sampling = Sampling(
            max_tokens=rng.randint(1, 30),
            temperature=temperature,
            seed=i,
            allowed_token_ids=tuple(rng.sample(range(VOCAB), 4)) if i % 2 else None,
        )
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 12)))
        request = GenerateRequest(str(i), str(i), prompt, sampling, experts_from=0)
        runner.add(EngineJob(request, ignore_eos=True))
    samples = []
    while runner.busy:
        for over in runner.step():
            request, drawn = over.job.request, over.completion
            shown, said = len(request.token_ids), len(drawn.token_ids)
            mask = (False,) * shown + (True,) * said
            samples.append(
                TrainSample(
                    id=TrajectoryId(request.request_id),
                    group=GroupId("g"),
                    domain="a",
                    v0=8,
                    token_ids=(*request.token_ids, *drawn.token_ids),
                    loss_mask=mask,
                    logprobs=(*([0.0] * shown), *drawn.logprobs),
                    versions=(*([-1] * shown), *([8] * said)),
                    turn=(*([-1] * shown), *([0] * said)),
                    rewards=(0.0,) * len(mask),
                    score=0.0,
                    success=None,
                    allowed=(*([None] * shown), *([request.sampling.allowed_token_ids] * said)),
                    experts=drawn.experts and (*drawn.experts, b"\xff" * len(drawn.experts[0])),
                )
            )
    assert len(samples) == 20
    return samples
