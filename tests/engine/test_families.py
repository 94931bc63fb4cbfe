"""Each family agrees with transformers' own forward pass in fp32, under random adds, aborts, sessions and updates."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollart.architecture import read_architecture
from rollart.engine.cache import KvCache
from rollart.engine.decoding import GraphDecoder
from rollart.engine.jobs import FinishedJob
from rollart.engine.weights import read_tensors
from tests.engine.families import MODELS, VOCAB, make
from tests.engine.models import DEVICE, job, run_one, runner

pytestmark = pytest.mark.slow  # imports transformers


def expected(model: Any, ids: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] of every next token."""
    with torch.no_grad():
        logp: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    return logp


@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_transformers_under_random_requests(name: str, tmp_path: Path) -> None:
    models = [make(name, tmp_path / str(version), seed=version) for version in range(2)]
    assert (tmp_path / "0/model.safetensors.index.json").exists()
    assert read_architecture(tmp_path / "0") == read_architecture(tmp_path / "1")
    r, rng = runner(tmp_path / "0", slots=5, step_tokens=24), random.Random(name)
    history: dict[str, list[int]] = {session: [] for session in "abcdefg"}
    busy: dict[str, str] = {}
    ended: list[FinishedJob] = []
    for step in range(100):
        session = rng.choice([*history])
        if session not in busy and rng.random() < 0.6:
            prompt = [*history[session][:40], *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 12)))]
            budget, temperature = rng.randint(1, 10), rng.choice((0.0, 1.0))
            busy[session] = f"{step}"
            r.add(job(f"{step}", prompt, session=session, max_tokens=budget, temperature=temperature, seed=step))
        over = r.abort([rng.choice([*busy.values()])]) if busy and rng.random() < 0.05 else []
        if rng.random() < 0.07:
            r.load(read_tensors(tmp_path / str(step % 2)), step % 2)
        for one in (*over, *r.step()):
            request = one.job.request
            history[request.session] = [*request.token_ids, *one.completion.token_ids]
            del busy[request.session]
            ended.append(one)
    tokens = 0
    for one in ended:
        ids, drawn = one.job.request.token_ids, one.completion
        for span in drawn.spans:
            logp = expected(models[span.version], (*ids, *drawn.token_ids))[len(ids) - 1 : -1]
            for i in range(span.start, span.end):
                assert drawn.logprobs[i] == pytest.approx(float(logp[i, drawn.token_ids[i]]), abs=5e-5)
                tokens += 1
    assert tokens > 100
    decode_step_agrees(tmp_path / "0")


def decode_step_agrees(directory: Path) -> None:
    """The decode step of GPUs operator by operator, without a graph."""
    r, prompt = runner(directory), [*range(20)]
    cache = KvCache(r.network.architecture, slots=4, context=64, device=DEVICE, dtype=torch.float32)
    decoder = GraphDecoder(r.network, cache, capture=False)
    for position, token in enumerate(prompt):
        logits = decoder.step(np.array([token]), np.array([position]), np.array([2]))
    drawn = run_one(r, job("a", prompt, max_tokens=1)).completion
    assert float(logits[0].log_softmax(-1)[drawn.token_ids[0]]) == pytest.approx(drawn.logprobs[0], abs=5e-5)
