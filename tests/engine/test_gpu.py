"""What only a GPU shows: compiled kernels and replayed graphs.

`make gpu-test` runs these, and other tests of the engine and the trainer, on the first GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rollart.architecture import read_architecture
from rollart.engine.cache import KvCache
from rollart.engine.decoding import GraphDecoder, captured_sizes
from rollart.engine.network import Network
from rollart.engine.runner import Runner
from rollart.engine.weights import read_tensors
from tests.engine.families import MODELS, make
from tests.engine.models import DEVICE, QWEN, finish, job, publish, runner
from tests.train.trainkit import batch, config, sample

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: make gpu-test"),
]

BY_EXPERTS = "no CUDA graph: the rows of an expert are no fixed shape"
CONTEXT = 64
"""That of phi4 is no longer than the original length of its rotary scaling."""

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def fixed_order() -> Iterator[None]:
    """A deterministic trainer switches this on for its whole process."""
    yield
    torch.use_deterministic_algorithms(False)


def loaded(directory: Path, dtype: torch.dtype) -> Network:
    network = Network(read_architecture(directory), context=CONTEXT, device=DEVICE, dtype=dtype)
    network.load(read_tensors(directory))
    return network


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (8, 1, 64), (6, 6, 128), (16, 4, 128)])
def test_fused_kernels_are_used_and_every_number_of_rows_is_captured(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """`why` holds the reason for not using them, such as a difference from PyTorch's operators."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim}
    r = runner(publish(tmp_path, 0, {**QWEN, **sizes}), context=192, slots=24, dtype=dtype)
    assert r.decoder is not None
    r.decoder.prepare()
    assert r.decoder.why == ""
    assert sorted(rows for rows, _ in r.decoder.graphs) == list(captured_sizes(24))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_replayed_graph_computes_what_the_operators_compute(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """With other tokens, slots and positions than those of the capture, and with weights loaded since, bit for bit."""
    for seed in range(2):
        make(name, tmp_path / str(seed), seed=seed)
    networks = [loaded(tmp_path / "0", dtype) for _ in range(2)]
    caches = [KvCache(n.architecture, slots=10, context=CONTEXT, device=DEVICE, dtype=dtype) for n in networks]
    ours, theirs = (
        GraphDecoder(n, cache, capture=capture)
        for n, cache, capture in zip(networks, caches, (True, False), strict=True)
    )
    ours.prepare()
    rng = np.random.default_rng(0)
    positions = np.zeros(9, np.int64)
    for step in range(30):
        if step == 15:
            for network in networks:
                network.load(read_tensors(tmp_path / "1"))
        slots = np.sort(rng.permutation(9)[: rng.integers(1, 10)])
        tokens = rng.integers(0, 61, len(slots))
        with torch.inference_mode():
            both = [d.step(tokens, positions[slots], slots).clone() for d in (ours, theirs)]
        assert torch.equal(*both), step
        positions[slots] += 1
    if "moe" in name:
        assert (ours.graphs, BY_EXPERTS in ours.why or "fused" in ours.why) == ({}, True)
    else:
        assert ours.graphs, ours.why


def test_a_request_draws_the_same_tokens_on_a_gpu_and_on_a_cpu(tmp_path: Path) -> None:
    """In float32, seeded, in chunks, with sessions: randomness is of the seed alone."""
    directory = publish(tmp_path, 3)
    ended = []
    for device in (DEVICE, torch.device("cpu")):
        network = Network(read_architecture(directory), context=64, device=device, dtype=torch.float32)
        network.load(read_tensors(directory))
        r = Runner(network, slots=5, context=64, step_tokens=16)
        for i in range(12):
            prompt = [(5 * i + 3 * j) % 61 for j in range(1 + (7 * i) % 19)]
            r.add(job(f"{i}", prompt, session=f"{i % 7}", max_tokens=20, temperature=0.9, top_p=0.8, seed=i))
        ended.append({name: f.completion for name, f in finish(r).items()})
    ours, theirs = ended
    assert {n: c.token_ids for n, c in ours.items()} == {n: c.token_ids for n, c in theirs.items()}
    for name, completion in ours.items():
        assert completion.logprobs == pytest.approx(theirs[name].logprobs, abs=5e-5)


def test_the_trainer_computes_the_same_steps_on_a_gpu_and_on_a_cpu(tmp_path: Path) -> None:
    from rollart.train.learner import Learner

    learners = [Learner(config(tmp_path, hidden=32, layers=2, device=d)) for d in ("cuda", "cpu")]
    for version in range(4):
        samples = batch([sample(str(i), turns=[(9, 7), (3, 2 + i)], seed=version) for i in range(6)])
        one, other = (learner.train(samples, version).metrics for learner in learners)
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    models = [dict(learner.policy.model.named_parameters()) for learner in learners]
    for name, weight in models[0].items():
        torch.testing.assert_close(weight.cpu(), models[1][name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3-moe", "qwen3.5", "gemma3"])
def test_deterministic_training_gives_the_same_bits(name: str, tmp_path: Path, fixed_order: None) -> None:
    """Five steps, twice."""
    from rollart.train.learner import Learner

    make(name, tmp_path / "model", scale=0.05)
    found = []
    for _ in range(2):
        setup = config(tmp_path, model={"path": str(tmp_path / "model")}, lr=1e-2, deterministic=True, minibatches=2)
        learner = Learner(setup)
        for version in range(5):
            learner.train(batch([sample(str(i), turns=[(13, 9)], vocab=61) for i in range(12)], 61), version)
        found.append({name: p.detach().cpu() for name, p in learner.policy.model.named_parameters()})
    assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())


def test_deterministic_nuclei_are_the_same_in_any_company(tmp_path: Path) -> None:
    directory = publish(tmp_path, 1, {**QWEN, "vocab_size": 20_000})
    ended = []
    for slots, together in ((12, 12), (3, 4), (12, 1)):
        r, said = runner(directory, slots=slots, deterministic=True), {}
        for first in range(0, 12, together):
            for i in range(first, first + together):
                r.add(job(f"{i}", [*range(3 + i)], max_tokens=24, temperature=1.0, top_p=0.9, seed=i))
            said |= {n: (f.completion.token_ids, f.completion.logprobs) for n, f in finish(r).items()}
        ended.append(said)
    assert ended[0] == ended[1] == ended[2]
