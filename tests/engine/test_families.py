"""Each family agrees with transformers' own forward pass in fp32, under random adds, aborts, sessions and updates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rollart.architecture import read_architecture
from rollart.engine.cache import KvCache
from rollart.engine.decoding import GraphDecoder
from tests.engine.families import MODELS, check_random_requests, make
from tests.engine.models import DEVICE, job, run_one, runner

pytestmark = pytest.mark.slow  # imports transformers


@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_transformers_under_random_requests(name: str, tmp_path: Path) -> None:
    models = [make(name, tmp_path / str(version), seed=version) for version in range(2)]
    assert (tmp_path / "0/model.safetensors.index.json").exists()
    assert read_architecture(tmp_path / "0") == read_architecture(tmp_path / "1")
    check_random_requests([tmp_path / "0", tmp_path / "1"], models, seed=name)
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
