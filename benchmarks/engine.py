"""Speed of the embedded engine, without HTTP: tokens per CPU-second of one thread.

    python benchmarks/engine.py [--json FILE] [--rounds 3] [--device cpu]
    python benchmarks/engine.py --adapters 1 2 4      # unmerged adapters of rank 16 in place of the other cases

Decode: 4 layers × 256 hidden, vocabulary 2048 (Qwen3, 4.2 M parameters), context growing from 32 to 160 tokens.
Turns: 1 layer × 64 and 2 layers × 96, 64 sessions with 20 new prompt tokens and one sampled token a turn, like an
agent's actions. CPU time, not wall time, and the best of a few rounds: the machine has other load.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from rollart.architecture import Architecture, architecture_of
from rollart.engine.jobs import EngineJob
from rollart.engine.network import Network
from rollart.engine.runner import Runner
from rollart.lora import Adapter
from rollart.model import GenerateRequest, Sampling

TARGETS = {1: 400.0, 16: 3000.0, 64: 4500.0}
"""Tokens per CPU-second that a batch must reach in the decode benchmark."""

CONTEXT = 256

RANK = 16
"""Of adapters."""


@dataclass(frozen=True, slots=True)
class Result:
    """One line: the case, its rate in `unit` per CPU-second, the target (0: none), and its CPU seconds."""

    name: str
    value: float
    unit: str
    target: float
    cpu_seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--adapters", type=int, nargs="+", default=[], help="numbers of adapters, beside merged weights"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    large = architecture(layers=4, hidden=256, heads=8, head_dim=64, intermediate=768, vocab=2048)
    small = [
        architecture(layers=layers, hidden=hidden, heads=4, head_dim=hidden // 4, intermediate=3 * hidden, vocab=128)
        for layers, hidden in ((1, 64), (2, 96))
    ]
    if args.adapters:
        best: dict[str, Result] = {}
        for _ in range(args.rounds):  # alternately: other load changes meanwhile
            for count in (0, *args.adapters):
                found = [decode(large, n, 1, args.device, target=0.0, adapters=count) for n in (1, 16, 64)]
                found.append(turns(small[1], 1, args.device, adapters=count))
                best |= {r.name: r for r in found if r.name not in best or r.value > best[r.name].value}
        results = list(best.values())
    else:
        results = [decode(large, batch, args.rounds, args.device) for batch in TARGETS]
        for one in small:
            results.append(turns(one, args.rounds, args.device))
            results.append(decode(one, 64, args.rounds, args.device, target=0.0))
    load = os.getloadavg()[0]
    print(f"{'benchmark':32} {'per CPU-second':>16} {'target':>8}   load average {load:.1f}")
    for r in results:
        verdict = "" if not r.target else "ok" if r.value >= r.target else "BELOW"
        print(f"{r.name:32} {r.value:>10,.0f} {r.unit:5} {r.target or '':>8} {verdict}")
    if args.json:
        body = {
            "schema_version": 1,
            "load_average": load,
            "torch": torch.__version__,
            "device": args.device,
            "results": [{k: getattr(r, k) for k in Result.__slots__} for r in results],
        }
        args.json.write_text(json.dumps(body, indent=1) + "\n")


def architecture(*, layers: int, hidden: int, heads: int, head_dim: int, intermediate: int, vocab: int) -> Architecture:
    return architecture_of(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": 2,
            "head_dim": head_dim,
            "intermediate_size": intermediate,
            "vocab_size": vocab,
            "tie_word_embeddings": True,
        },
        "the benchmark",
    )


def runner_of(a: Architecture, slots: int, device: str, adapters: int = 0) -> Runner:
    """A runner with random weights, and some adapters of all linear modules, named '0', '1' …"""
    network = Network(a, context=CONTEXT, device=torch.device(device), dtype=torch.float32)
    torch.manual_seed(0)
    weights = {name: torch.randn(shape) * 0.1 for name, shape in network.shapes()}
    stacked = {
        str(i): Adapter(
            "below",
            2.0,
            {
                name: (torch.randn(RANK, w.shape[1]) * 0.1, torch.randn(w.shape[0], RANK) * 0.1)
                for name, w in weights.items()
                if name.endswith("_proj.weight")
            },
        )
        for i in range(adapters)
    }
    if stacked:
        network.stack_adapters(stacked)
    network.load(weights, stacked)
    return Runner(network, slots=slots, context=CONTEXT)


def adapter_of(i: int, adapters: int) -> str | None:
    return str(i % adapters) if adapters else None


def decode(
    a: Architecture, batch: int, rounds: int, device: str, target: float | None = None, adapters: int = 0
) -> Result:
    """128 tokens for each of `batch` requests, prefill of 32 tokens not counted, sampled at temperature 1. `adapters`:
    requests take them in turn."""
    runner = runner_of(a, batch, device, adapters)
    best = float("inf")
    for attempt in range(rounds * (4 if batch == 1 else 1)):  # short, and bound by memory that others use as well
        for i in range(batch):
            prompt = tuple((7 * i + 3 * j) % a.vocab for j in range(32))
            name, sampling = f"{attempt}-{i}", Sampling(max_tokens=129, seed=i)
            runner.add(EngineJob(GenerateRequest(name, "", prompt, sampling, adapter=adapter_of(i, adapters))))
        runner.step()
        began = time.process_time()
        while runner.busy:
            runner.step()
        best = min(best, time.process_time() - began)
    goal = TARGETS[batch] if target is None else target
    name = f"decode {a.layers}x{a.hidden}, batch {batch}" + _suffix(adapters)
    return Result(name, batch * 128 / best, "tok", goal, best)


def turns(a: Architecture, rounds: int, device: str, sessions: int = 64, adapters: int = 0) -> Result:
    """Turns of 20 new tokens and one of four actions sampled, ten per session, all sessions at once."""
    runner = runner_of(a, sessions, device, adapters)
    best = float("inf")
    for attempt in range(rounds):
        histories = [[(i + j) % a.vocab for j in range(10)] for i in range(sessions)]
        began = time.process_time()
        for turn in range(10):
            for i, history in enumerate(histories):
                history += [(11 * i + 5 * j + turn) % a.vocab for j in range(20)]
                sampling = Sampling(max_tokens=1, seed=i, allowed_token_ids=(1, 2, 3, 4))
                name = f"{attempt}-{turn}-{i}"
                session, adapter = f"{attempt}-{i}", adapter_of(i, adapters)
                runner.add(EngineJob(GenerateRequest(name, session, tuple(history), sampling, adapter=adapter)))
            while runner.busy:
                for over in runner.step():
                    index = int(over.job.request.request_id.rsplit("-", 1)[1])
                    histories[index] += over.completion.token_ids
        best = min(best, time.process_time() - began)
    name = f"turns {a.layers}x{a.hidden}, {sessions} sessions" + _suffix(adapters)
    return Result(name, sessions * 10 / best, "turn", 0.0, best)


def _suffix(adapters: int) -> str:
    return f", {adapters} adapters" if adapters else ""


if __name__ == "__main__":
    main()
