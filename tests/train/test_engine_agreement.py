"""Trainer and embedded engine compute the same policy: what the engine sampled, the trainer scores the same."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from rollart.engine.checkpoint import read_architecture, read_tensors, require_complete
from rollart.engine.jobs import Job
from rollart.engine.network import Network
from rollart.engine.runner import Runner
from rollart.model import GenerateRequest, GroupId, Sampling, TrainSample, TrajectoryId
from rollart.train import checkpoint
from rollart.train.learner import Learner
from tests.train.trainkit import VOCAB, batch, config, sample


@pytest.mark.slow  # two models, some hundred decode steps
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_agree_to_1e_4(tmp_path: Path, temperature: float) -> None:
    learner = Learner(config(tmp_path, hidden=32, layers=2, temperature=temperature, optimizer={"lr": 3e-2}))
    for version in range(8):
        learner.train(batch([sample(str(i), turns=[(3, 5)]) for i in range(8)]), version)
    path = checkpoint.publish(learner, tmp_path, 8, ())
    require_complete(path)
    network = Network(read_architecture(path), context=64, device=torch.device("cpu"), dtype=torch.float32)
    network.load(read_tensors(path))
    runner = Runner(network, slots=8, context=64, version=8)
    rng = random.Random(0)
    for i in range(20):
        sampling = Sampling(
            max_tokens=rng.randint(1, 30), temperature=temperature, seed=i,
            allowed_token_ids=tuple(rng.sample(range(VOCAB), 4)) if i % 2 else None,
        )  # fmt: skip
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 12)))
        runner.add(Job(GenerateRequest(str(i), str(i), prompt, sampling), ignore_eos=True))
    samples = []
    while runner.busy:
        for over in runner.step():
            request, drawn = over.job.request, over.completion
            shown, said = len(request.token_ids), len(drawn.token_ids)
            mask = (False,) * shown + (True,) * said
            samples.append(
                TrainSample(
                    id=TrajectoryId(request.request_id), group=GroupId("g"), domain="a", v0=8,
                    token_ids=(*request.token_ids, *drawn.token_ids), loss_mask=mask,
                    logprobs=(*([0.0] * shown), *drawn.logprobs), versions=(*([-1] * shown), *([8] * said)),
                    turn=(*([-1] * shown), *([0] * said)), rewards=(0.0,) * len(mask), score=0.0, success=None,
                    allowed=(*([None] * shown), *([request.sampling.allowed_token_ids] * said)),
                )
            )  # fmt: skip
    assert len(samples) == 20
    made = batch(samples)
    assert learner.logprobs(made) == pytest.approx(made.logprobs, abs=1e-4)
