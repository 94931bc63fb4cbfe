"""Decode steps of a fixed shape: what a GPU captures as a graph, here run operator by operator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.engine.cache import KvCache
from rollart.engine.checkpoint import read_tensors
from rollart.engine.decoding import Decoder, sizes
from rollart.engine.operations import Plain, best, differences
from rollart.engine.runner import Runner
from rollart.engine.sampling import invert_blocks
from tests.engine.models import finish, job, publish, run_one, runner


def decoding(directory: Path, *, slots: int = 8, context: int = 64, step_tokens: int = 2048) -> Runner:
    """A runner that decodes as on a GPU."""
    made = runner(directory, slots=slots, context=context, step_tokens=step_tokens)
    network = made.network
    made.cache = KvCache(
        network.architecture, slots=slots + 1, context=context, device=network.device, dtype=network.dtype
    )
    made.decoder = Decoder(network, made.cache, capture=False)
    return made


@pytest.mark.parametrize("slots", [3, 8])
@pytest.mark.parametrize("model", ["qwen", "llama"])
def test_it_generates_what_the_packed_step_generates(
    model: str, slots: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Prompts of many lengths, requests that come and go, sessions with idle prefixes between, other weights half-way,
    chunks of one token: the same tokens, and log-probabilities up to rounding."""
    directory = request.getfixturevalue(model)
    other = read_tensors(publish(tmp_path / "other", 99, json.loads((directory / "config.json").read_text())))
    both = [decoding(directory, slots=slots), runner(directory, slots=slots)]
    ends = []
    for made in both:
        said = {}
        for turn in range(2):
            for i in range(9):
                prompt = [(5 * i + 3 * j + turn) % 61 for j in range(1 + (7 * i) % 19 + 10 * turn)]
                greedy = 0.0 if i % 2 else 0.9
                sampling = {"top_p": 0.7 if i % 3 else 1.0, "seed": i}
                allowed = (3, 5, 8) if i == 4 else None
                made.add(
                    job(f"{turn}-{i}", prompt, session=f"s{i}", max_tokens=4 + i, temperature=greedy,
                        allowed_token_ids=allowed, **sampling)
                )  # fmt: skip
            for _ in range(5):
                said |= {f.job.request.request_id: f.completion for f in made.step()}
            if turn == 0:
                made.load(other, 1)
            said |= {name: f.completion for name, f in finish(made).items()}
        ends.append(said)
    ours, theirs = ends
    assert {n: c.token_ids for n, c in ours.items()} == {n: c.token_ids for n, c in theirs.items()}
    assert {n: c.spans for n, c in ours.items()} == {n: c.spans for n, c in theirs.items()}
    for name, completion in ours.items():
        assert completion.logprobs == pytest.approx(theirs[name].logprobs, abs=2e-5)


def test_rows_that_are_nobodys_write_into_nobodys_slot(qwen: Path) -> None:
    """Five rows are padded to six: no key of a slot that is not of the step changes."""
    made = decoding(qwen)
    for i in range(5):
        made.add(job(f"{i}", range(3 + i), max_tokens=20))
    made.step()
    before = made.cache.keys.clone()
    made.step()
    changed = (made.cache.keys != before).any(dim=4).any(dim=2).any(dim=0)
    assert [row.nonzero().flatten().tolist() for row in changed[:-1]] == [[3], [4], [5], [6], [7], [], [], []]
    assert changed[-1, 0], "a padding row wrote"


def test_a_chunk_of_one_token_is_not_sampled(qwen: Path) -> None:
    prompt = list(range(9))
    chunked = run_one(decoding(qwen, step_tokens=1), job("0", prompt)).completion
    assert chunked.token_ids == run_one(runner(qwen), job("0", prompt)).completion.token_ids


@given(most=st.integers(1, 600), data=st.data())
def test_at_most_a_third_of_the_rows_is_padding(most: int, data: st.DataObject) -> None:
    found = sizes(most)
    assert found[-1] == most
    assert sorted(set(found)) == list(found)
    n = data.draw(st.integers(1, most))
    size = next(s for s in found if s >= n)
    assert size <= max(n, 1.5 * (n - 1)), (n, size)


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), vocab=st.integers(1, 1000), zeros=st.floats(0, 0.99))
def test_tokens_drawn_in_two_levels_are_those_of_the_running_sum(seed: int, vocab: int, zeros: float) -> None:
    """Of float32 sums in another order: the token whose interval holds the uniform, or its neighbour where that is
    within rounding of an edge; never one without probability."""
    rng = np.random.default_rng(seed)
    mass = rng.gamma(0.3, size=(4, vocab)) * (rng.random((4, vocab)) >= zeros)
    mass[:, rng.integers(vocab)] += 1e-3
    probs = mass / mass.sum(1, keepdims=True)
    u = rng.choice([0.0, 1.0 - 2.0**-24, *rng.random(6)], size=(4, 1))
    drawn = invert_blocks(torch.from_numpy(probs).float(), torch.from_numpy(u).float()).numpy()
    exact = probs.cumsum(1)
    for row, token in enumerate(drawn):
        assert 0 <= token < vocab
        assert probs[row, token] > 0
        low, high = exact[row, token] - probs[row, token], exact[row, token]
        assert low - 1e-6 <= u[row, 0] <= high + 1e-6


def test_elsewhere_than_on_a_gpu_the_operations_are_pytorchs(qwen: Path) -> None:
    network = runner(qwen).network
    operations, why = best(network.architecture, *network.rope)
    assert isinstance(operations, Plain)
    assert why == "fused kernels are for CUDA devices, this is cpu"


def test_an_operation_that_does_not_write_is_found(qwen: Path) -> None:
    network = runner(qwen).network

    class Forgetful(Plain):
        def place(self, qkv, scale, slots, positions, keys, values):  # type: ignore[no-untyped-def]
            return super().place(qkv, scale, slots, positions, keys.clone(), values)

    a, cpu = network.architecture, torch.device("cpu")
    plain = Plain(a, *network.rope)
    same = differences(a, plain, plain, device=cpu, dtype=torch.float32, context=40)
    assert same == {"add_norm": 0.0, "gate": 0.0, "place": 0.0, "attend": 0.0}
    found = differences(a, plain, Forgetful(a, *network.rope), device=cpu, dtype=torch.float32, context=40)
    assert found["place"] != found["place"], "NaN"
    assert found["gate"] == 0.0


TRITON = Path(sys.prefix) / "triton"
"""Where `make` puts Triton for this test alone: beside it PyTorch would take other ways."""

INTERPRETED = """
import json, sys, torch
from rollart.engine.checkpoint import read_architecture
from rollart.engine.network import _rope_tables
from rollart.engine.operations import Fused, Plain, differences
import dataclasses
found = []
a = read_architecture(sys.argv[1])
wide = dataclasses.replace(a, heads=8, kv_heads=1, qk_norm=False, hidden=40, intermediate=1100)
for shape, dtype, context in ((a, torch.float32, 130), (wide, torch.float16, 60)):
    cos, sin = _rope_tables(shape, context, torch.device("cpu"), dtype)
    found.append(differences(shape, Plain(shape, cos, sin), Fused(shape, cos, sin), device=torch.device("cpu"),
                             dtype=dtype, context=context, rows=(1, 5)))
print(json.dumps(found))
"""


@pytest.mark.slow  # an interpreter of Triton's, in a process of its own
def test_the_fused_kernels_compute_what_pytorch_computes(qwen: Path) -> None:
    """Triton's interpreter runs them on the CPU. How they run when compiled is for a GPU to say: the engine compares
    them in the same way when it starts there."""
    path = [os.environ.get("PYTHONPATH", ""), str(Path.cwd()), str(TRITON)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "TRITON_INTERPRET": "1"}
    known = subprocess.run([sys.executable, "-c", "import triton"], env=env, capture_output=True, check=False)
    if known.returncode:
        pytest.skip("there is no Triton: make test-slow installs it")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, str(qwen)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    exact, half = json.loads(done.stdout)
    assert max(exact.values()) < 1e-6
    assert max(half.values()) < 2e-3
    assert exact.keys() == half.keys() == {"add_norm", "gate", "place", "attend"}
