"""New weights by broadcast against by files: how long until engines serve them, and how long engines stand still.

    python -m benchmarks.broadcasts [--mb 100] [--rounds 5] [--engines 2]

The embedded trainer and engines as real processes on this machine, over gloo; engines go on generating. Every round
publishes two versions of the same size, one each way, in turn. *Loaded* is from the word to publish until the last
engine resumes with the version; *still* from the request to pause until then. Both ways write the version to disk, for
a resume. Ratios are of medians, within one run: other programs that use the machine slow both.

Predicted before the first run: still for less than half as long, since nothing is read and checked meanwhile, and
loaded at most as late. Neither held on one machine with two busy cores (docs/fleet.md): files there cost only a read
of the page cache, and a broadcast shares the cores with the engines that receive it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rollart.adapters.engines.http import HttpEngine
from rollart.adapters.trainers.http import HttpTrainer
from rollart.launch.broadcasts import WeightBroadcaster
from rollart.leases import Leases
from rollart.model import EngineId, GenerateRequest, PauseMode, Sampling, WeightsRef
from rollart.testing.ledger import MemoryRecorder

MB = 10**6
HIDDEN, BLOCKS = 512, 4


def init(mb: float) -> dict[str, Any]:
    """A decoder of about `mb` MB in float32; the size of the vocabulary fills up the rest."""
    blocks = BLOCKS * HIDDEN * HIDDEN * (4 + 3 * 4)
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "vocab_size": max(64, round((mb * MB / 4 - blocks) / HIDDEN)),
    }


@contextlib.contextmanager
def program(log: Path, *arguments: str) -> Iterator[str]:
    """The address of a program of ours, once it serves."""
    with log.open("wb") as output:
        started = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        assert started.stdout is not None
        word, _, url = started.stdout.readline().strip().partition(" ")
        if word != "ready":
            raise SystemExit(log.read_text(errors="replace"))
        yield url
    finally:
        started.terminate()
        started.communicate(timeout=60)


async def generating(engine: HttpEngine) -> None:
    """Turns one after the other, as a rollout has them."""
    for number in range(10**9):
        name, sampling = f"{engine.id}-{number}", Sampling(max_tokens=4, temperature=0.0)
        await engine.generate(GenerateRequest(name, name, (1, 2, 3), sampling))


async def update(engine: HttpEngine, weights: WeightsRef) -> None:
    await engine.pause(PauseMode.KEEP)
    await engine.update_weights(weights)
    await engine.resume()


async def publish(
    trainer: HttpTrainer, engines: Sequence[HttpEngine], version: int, broadcasts: WeightBroadcaster | None
) -> tuple[float, float]:
    """Seconds until the last engine serves it, and for which engines stood still."""
    began = time.perf_counter()
    await trainer.stage(version, send=broadcasts is not None)
    async with asyncio.TaskGroup() as both:
        writing = both.create_task(trainer.publish(version))
        if broadcasts is not None:
            both.create_task(broadcasts.send(trainer, version))
    still = time.perf_counter()
    async with asyncio.TaskGroup() as loading:
        for engine in engines:
            loading.create_task(update(engine, writing.result()))
    over = time.perf_counter()
    return over - began, over - still


async def measure(root: Path, mb: float, rounds: int, count: int) -> dict[str, list[tuple[float, float]]]:
    config = root / "trainer.json"
    config.write_text(json.dumps({"model": {"init": init(mb)}, "weights_root": str(root / "weights")}))
    found: dict[str, list[tuple[float, float]]] = {"files": [], "broadcast": []}
    recorder = MemoryRecorder()
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(program(root / "trainer.log", "rollart.train", "--config", str(config)))
        trainer = HttpTrainer(address)
        first = await trainer.publish(0)
        options = ["--max-slots", "4", "--max-context", "64"]
        engines = [
            HttpEngine(
                EngineId(f"engine-{n}"),
                stack.enter_context(
                    program(root / f"engine-{n}.log", "rollart.engine", "--model", first.path, *options)
                ),
            )
            for n in range(count)
        ]
        broadcasts = WeightBroadcaster(Leases(recorder), recorder, backend="gloo", bucket_bytes=16 * MB, send_s=300.0)
        for engine in engines:
            broadcasts.join(engine)
        async with asyncio.TaskGroup() as tasks:
            busy = [tasks.create_task(generating(engine)) for engine in engines]
            for number in range(rounds + 1):  # the first is for page faults and connections
                for offset, (way, how) in enumerate((("files", None), ("broadcast", broadcasts))):
                    took = await publish(trainer, engines, 1 + 2 * number + offset, how)
                    if number:
                        found[way].append(took)
            for task in busy:
                task.cancel()
        for engine in engines:
            await engine.close()
        await trainer.aclose()
    received = [e for e in recorder.events if e.kind == "weights_received"]
    if len(received) != count * (rounds + 1):
        raise SystemExit(f"{len(received)} of {count * (rounds + 1)} broadcasts were received: {recorder.events}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = asyncio.run(measure(Path(scratch), arguments.mb, arguments.rounds, arguments.engines))
    loaded, still = ({way: statistics.median(t[i] for t in times) for way, times in found.items()} for i in (0, 1))
    for way, times in found.items():
        row = {"loaded_s": [round(a, 3) for a, _ in times], "still_s": [round(b, 3) for _, b in times]}
        print(json.dumps({"way": way, **row}))
    ratios = {"loaded": loaded["broadcast"] / loaded["files"], "still": still["broadcast"] / still["files"]}
    print(json.dumps({"broadcast / files": {k: round(v, 3) for k, v in ratios.items()}}))
    print(f"load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
