"""Decode steps of a fixed shape, which a GPU captures as a graph, here run operator by operator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.architecture import read_architecture
from rollart.engine.cache import KvCache
from rollart.engine.decoding import GraphDecoder, captured_sizes, operation_differences, select_operations, step_inputs
from rollart.engine.network import Network
from rollart.engine.operations import TorchOperations
from rollart.engine.runner import Runner
from rollart.engine.sampling import invert_blocks
from rollart.engine.weights import read_tensors
from tests.engine.graphs import play
from tests.engine.models import finish, job, publish, run_one, runner


def decoding(directory: Path, *, slots: int = 8, context: int = 64, step_tokens: int = 2048, **decoder: Any) -> Runner:
    """A runner that decodes as on a GPU."""
    made = runner(directory, slots=slots, context=context, step_tokens=step_tokens)
    network = made.network
    made.cache = KvCache(
        network.architecture, slots=slots + 1, context=context, device=network.device, dtype=network.dtype
    )
    made.decoder = GraphDecoder(network, made.cache, **{"capture": False, **decoder})
    return made


@pytest.mark.parametrize("slots", [3, 8])
@pytest.mark.parametrize("model", ["qwen", "llama", "hybrid"])
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
                    job(
                        f"{turn}-{i}",
                        prompt,
                        session=f"s{i}",
                        max_tokens=4 + i,
                        temperature=greedy,
                        allowed_token_ids=allowed,
                        **sampling,
                    )
                )
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


class Ragged(TorchOperations):
    """Reads each row up to its own length, as the fused kernels do: one graph per number of rows."""

    ragged = True


def bf16(directory: Path) -> Network:
    """Without oneDNN's second copies of the matrices, as on GPUs."""
    made = Network(read_architecture(directory), context=64, device=torch.device("cpu"), dtype=torch.bfloat16)
    made.load(read_tensors(directory))
    return made


@pytest.mark.parametrize(("model", "kind"), [("qwen", TorchOperations), ("qwen", Ragged), ("hybrid", TorchOperations)])
def test_a_replayed_graph_computes_with_the_weights_and_tokens_of_its_step(
    model: str,
    kind: type[TorchOperations],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Captured before other weights are loaded, for other slots and positions, so that values wrongly captured as
    constants would show. States of linear attention move on once per step, also where it captures a graph."""
    graphs = play(monkeypatch)
    directory: Path = request.getfixturevalue(model)
    other = read_tensors(publish(tmp_path / "other", 99, json.loads((directory / "config.json").read_text())))
    networks = [bf16(directory), bf16(directory)]
    caches = [KvCache(n.architecture, slots=5, context=64, device=n.device, dtype=n.dtype) for n in networks]
    ours, theirs = (
        GraphDecoder(n, cache, operations=kind(n.architecture, n.tables), capture=capture)
        for n, cache, capture in zip(networks, caches, (True, False), strict=True)
    )
    ours.prepare()
    assert len(ours.graphs) == (4 if kind is Ragged else 0)
    rng = np.random.default_rng(0)
    positions = np.zeros(4, np.int64)
    for step in range(12):
        if step == 7:
            for network in networks:
                network.load(other)
        slots = np.sort(rng.permutation(4)[: rng.integers(1, 5)])
        tokens = rng.integers(0, 61, len(slots))
        with torch.inference_mode():
            both = [d.step(tokens, positions[slots], slots).clone() for d in (ours, theirs)]
        assert torch.equal(*both), step
        positions[slots] += 1
    assert torch.equal(caches[0].keys[:, :4], caches[1].keys[:, :4])
    assert sum(graph.replays for graph in graphs) == 12
    assert len(graphs) == len(ours.graphs) <= 4


def test_where_a_capture_fails_steps_go_on_without_and_on_their_own_stream(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, fails="operation not permitted when stream is capturing\nand more")
    before = torch.cuda.current_stream()
    network = bf16(qwen)
    cache = KvCache(network.architecture, slots=5, context=64, device=network.device, dtype=network.dtype)
    decoder = GraphDecoder(network, cache, operations=Ragged(network.architecture, network.tables))
    decoder.prepare()
    assert torch.cuda.current_stream() is before
    assert (decoder.graphs, decoder.why) == ({}, "no CUDA graph: operation not permitted when stream is capturing")
    one = np.zeros(1, np.int64)
    with torch.inference_mode():
        assert decoder.step(one, one, one).isfinite().all()


def test_what_a_step_needs_is_copied_at_once_without_gaps_and_where_kernels_want_it() -> None:
    for rows in range(1, 9):
        buffer = torch.arange(24)
        staged = step_inputs(buffer, rows)
        assert staged.is_contiguous()
        assert staged.data_ptr() == buffer.data_ptr()
        assert all((row.data_ptr() - buffer.data_ptr()) % 16 == 0 for row in staged)


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


def test_rows_that_decode_beside_a_prefill_go_through_the_graph(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = decoding(qwen)
    seen: list[tuple[int, int]] = []
    step, forward = GraphDecoder.step, Network.forward
    monkeypatch.setattr(GraphDecoder, "step", lambda d, t, *r: (seen.append((len(t), 0)), step(d, t, *r))[1])
    monkeypatch.setattr(Network, "forward", lambda n, b, *r: (seen.append((0, len(b.tokens))), forward(n, b, *r))[1])
    for i in range(3):
        made.add(job(f"{i}", range(4), max_tokens=20))
    made.step()
    made.add(job("late", range(9), max_tokens=20))
    made.step()
    assert seen == [(0, 12), (3, 0), (0, 9)]


def test_a_chunk_of_one_token_is_not_sampled(qwen: Path) -> None:
    prompt = list(range(9))
    chunked = run_one(decoding(qwen, step_tokens=1), job("0", prompt)).completion
    assert chunked.token_ids == run_one(runner(qwen), job("0", prompt)).completion.token_ids


@given(most=st.integers(1, 600), data=st.data())
def test_at_most_a_third_of_the_rows_is_padding(most: int, data: st.DataObject) -> None:
    found = captured_sizes(most)
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
    operations, why = select_operations(network.architecture, network.tables, network.dtype)
    assert isinstance(operations, TorchOperations)
    assert why == "fused kernels are for CUDA devices, this is cpu"


def test_an_operation_that_does_not_write_is_found(qwen: Path) -> None:
    network = runner(qwen).network

    class Forgetful(TorchOperations):
        def place(self, qkv, scale, slots, positions, keys, values, table=0):  # type: ignore[no-untyped-def]
            return super().place(qkv, scale, slots, positions, keys.clone(), values, table)

    a = network.architecture
    plain = TorchOperations(a, network.tables)
    same = operation_differences(plain, plain, context=40)
    assert same == {"add_norm": 0.0, "gate": 0.0, "place": 0.0, "attend": 0.0}
    found = operation_differences(plain, Forgetful(a, network.tables), context=40)
    assert found["place"] != found["place"], "NaN"
    assert found["gate"] == 0.0


TRITON = Path(sys.prefix) / "triton"
"""Directory in which `make` installs Triton for this test alone: if installed normally, it would change PyTorch's
behaviour."""

INTERPRETED = """
import json, sys, torch
from rollart.architecture import read_architecture
from rollart.engine.rotary import rotary_tables
from rollart.engine.decoding import operation_differences
from rollart.engine.kernels import TritonOperations
from rollart.engine.operations import TorchOperations
import dataclasses
found = []
a = read_architecture(sys.argv[1])
wide = dataclasses.replace(a, heads=8, kv_heads=1, qk_norm='none', hidden=40, intermediate=1100)
for shape, dtype, context in ((a, torch.float32, 130), (wide, torch.float16, 60)):
    tables = [rotary_tables(shape.attention[0].rotary, context, torch.device("cpu"), dtype)]
    plain, fused = TorchOperations(shape, tables), TritonOperations(shape, tables)
    found.append(operation_differences(plain, fused, context=context, rows=(1, 5)))
print(json.dumps(found))
"""


@pytest.mark.slow  # an interpreter of Triton's, in a process of its own
def test_the_fused_kernels_compute_what_pytorch_computes(qwen: Path) -> None:
    """Triton's interpreter runs the kernels on the CPU. On a GPU, the engine compares the compiled kernels in the same
    way when it starts."""
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
