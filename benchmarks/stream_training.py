"""The part of a training step that remains once the batch is complete, streamed and not. The real trainer, as a
separate process over HTTP; groups finish one by one, as in a long-tailed rollout.

    python benchmarks/stream_training.py

Predicted before the first run, for G groups whose gradients take g seconds each, with the next group at least g after
the one before:

- Not streamed the whole batch is exposed, about G x g, less what larger micro-batches save (groups share none).
- Streamed the last group and the update are: 1/G of the trainer's work, plus the requests. With 16 groups 6 %, so at
  least 5 times less exposed; and with all groups at once (no tail to hide behind) nothing is won, and streaming has the
  cost of smaller micro-batches and exact sums: at most 2 x.
- The weights after the step are the same bits in whatever order the groups came (asserted, not timed).
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rollart.adapters.trainers.http import HttpTrainer
from rollart.model import GroupId, TrainSample, TrajectoryId

VOCAB, HIDDEN, LAYERS = 128, 96, 2
"""The quickstart's size."""


def group(rng: random.Random, index: int, size: int, tokens: int) -> list[TrainSample]:
    """Members of `tokens` / 2 to `tokens` tokens, half of them sampled."""
    out = []
    for member in range(size):
        n = rng.randint(tokens // 2, tokens)
        mask = tuple(i >= n // 2 for i in range(n))
        rewards = tuple(float(i == n - 1 and rng.random() < 0.5) for i in range(n))
        out.append(
            TrainSample(
                id=TrajectoryId(f"g{index}.{member}"),
                group=GroupId(f"g{index}"),
                domain="a",
                v0=0,
                token_ids=tuple(rng.randrange(VOCAB) for _ in range(n)),
                loss_mask=mask,
                logprobs=tuple(-4.8 if m else 0.0 for m in mask),
                versions=tuple(0 if m else -1 for m in mask),
                turn=tuple(0 if m else -1 for m in mask),
                rewards=rewards,
                score=sum(rewards),
                success=None,
            )
        )
    return out


class Program:
    """`python -m rollart.train` on a private port."""

    def __init__(self, root: Path, *, stream: bool) -> None:
        init = {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": 3 * HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": HIDDEN // 4,
        }
        advantage = {"level": "trajectory", "baseline": "group", "normalize": "batch"}
        config = {
            "model": {"init": init},
            "weights_root": str(root / "weights"),
            "stream": stream,
            "durable": False,
            "domains": {"a": {"advantage": advantage}},
        }
        root.mkdir()
        path = root / "trainer.json"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "rollart.train", "--config", str(path)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.trainer = HttpTrainer(self.process.stdout.readline().split()[1])

    async def close(self) -> None:
        await self.trainer.aclose()
        self.process.terminate()
        self.process.wait()


async def exposed(trainer: HttpTrainer, groups: Sequence[list[TrainSample]], version: int, gap_s: float) -> float:
    """Seconds from the last group's end to the end of the step."""
    if not trainer.streams:
        await asyncio.sleep(gap_s)
        began = time.perf_counter()
        await trainer.train([s for g in groups for s in g], version)
        return time.perf_counter() - began
    await trainer.begin(version)
    if not gap_s:
        began = time.perf_counter()
        await trainer.accumulate([s for g in groups for s in g])
    for each in groups if gap_s else ():
        began = time.perf_counter()
        await trainer.accumulate(each)
        await asyncio.sleep(max(0.0, gap_s - (time.perf_counter() - began)) if each is not groups[-1] else 0.0)
    await trainer.finish()
    return time.perf_counter() - began


async def weights(trainer: HttpTrainer, version: int) -> str:
    path = Path((await trainer.publish(version)).path) / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()


async def main(options: argparse.Namespace, root: Path) -> None:
    rng = random.Random(0)
    steps = [
        [group(rng, index, options.size, options.tokens) for index in range(options.groups)]
        for _ in range(options.steps + 1)
    ]
    hashes = []
    print(f"{options.groups} groups of {options.size}, {options.tokens // 2}-{options.tokens} tokens, 1 thread")
    print(f"{'':34}{'exposed s, median of ' + str(options.steps):>24}")
    whole = 0.0
    for name, stream, tail in (("batch", False, 0), ("stream, all at once", True, 0), ("stream, one by one", True, 1)):
        program = Program(root / name.replace(" ", "-").replace(",", ""), stream=stream)
        try:
            await program.trainer.greet()
            gap = tail * 2.0 * whole / options.groups
            taken = []
            for version, groups in enumerate(steps):
                order = rng.sample(groups, len(groups)) if tail else groups
                taken.append(await exposed(program.trainer, order, version, gap))
            median = statistics.median(taken[1:])
            whole = whole or median
            print(f"{name:34}{median:>16.3f}{median / whole:>8.2f} x")
            if stream:
                hashes.append(await weights(program.trainer, len(steps)))
        finally:
            await program.close()
    assert len(set(hashes)) == 1, "the order of groups changed the weights"
    print(f"weights after {len(steps)} streamed steps, in order at once and shuffled one by one: the same bits")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--steps", type=int, default=5)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(chosen, Path(directory)))
