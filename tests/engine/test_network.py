from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from rollart.architecture import read_architecture
from rollart.engine.network import BlockedLinear, Network
from rollart.engine.weights import read_tensors
from tests.engine.models import finish, greedy, job, reference, runner


@pytest.mark.parametrize("family", ["qwen", "llama"])
def test_logprobs_are_those_of_a_plain_forward(family: str, request: pytest.FixtureRequest) -> None:
    """A mixed batch: prompts of many lengths prefilled together, decoded together, compared token by token."""
    directory: Path = request.getfixturevalue(family)
    r, rng = runner(directory, slots=7), random.Random(0)
    for i in range(12):
        prompt = [rng.randrange(61) for _ in range(rng.choice((1, 2, 3, 7, 8, 9, 20)))]
        r.add(job(f"{i}", prompt, max_tokens=6, temperature=float(i % 2), seed=i))
    for f in finish(r).values():
        prompt_ids, c = f.job.request.token_ids, f.completion
        logp = reference(directory, (*prompt_ids, *c.token_ids))
        for i, (token, value) in enumerate(zip(c.token_ids, c.logprobs, strict=True)):
            assert value == pytest.approx(float(logp[len(prompt_ids) - 1 + i, token]), abs=2e-5)


def test_greedy_is_the_plain_argmax(qwen: Path) -> None:
    r = runner(qwen)
    r.add(job("a", [5, 6, 7], max_tokens=12))
    assert finish(r)["a"].completion.token_ids == greedy(qwen, [5, 6, 7], 12)


def test_the_blocked_order_multiplies_the_same() -> None:
    torch.manual_seed(0)
    matrix = BlockedLinear(torch.randn(300, 256), torch.randn(300))
    x = torch.randn(5, 256)
    plain = matrix(x)
    matrix.pack()
    assert torch.allclose(matrix(x), plain, rtol=1e-4, atol=1e-4)
    part = matrix.rows(10, 20)
    assert torch.allclose(part(x), plain[:, 10:20], rtol=1e-4, atol=1e-4)


def test_weights_for_a_gpu_are_converted_before_they_are_loaded(qwen: Path) -> None:
    """The checkpoint is in float32; a step then waits for a copy of only half the bytes."""
    tensors = read_tensors(qwen)
    meta = Network(read_architecture(qwen), context=8, device=torch.device("meta"), dtype=torch.bfloat16)
    staged = meta.staged(tensors)
    assert {(t.dtype, t.device.type) for t in staged.values()} == {(torch.bfloat16, "cpu")}
    meta.check(staged)
    here = Network(read_architecture(qwen), context=8, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert all(here.staged(tensors)[name] is tensor for name, tensor in tensors.items()), (
        "no copy beside the mapped file"
    )
