"""Weights across clusters over a throttled link: waiting time of engines, and traffic on the slow link.

    python -m benchmarks.weights [--mb 48] [--engines 4] [--slow 24] [--fast 48] [--step 5]
    python -m benchmarks.weights --deltas

Real files of random weights are pushed through a link of `--slow` MB/s into a store, and pulled from it by every
engine's host over a link of its own of `--fast` MB/s, bucket by bucket, while a rollout of `--step` seconds goes on.
Then the engines stand still and load the version from their own disk. *Exposed* is how long they stand; *accumulated*
is the sum over a host's buckets of the seconds that each took, one at a time (RollArt's RA-16, where exposed is 0.23 to
0.32 of it). The links are asyncio sleeps: there is no network, and no GPU to load onto.

`--deltas`: a real run, the quickstart's for eight steps, with a store and each published type and learning rate. Per
case the share of elements that a version changed, the bytes that crossed into the store as a share of the version, per
version without the first, and the seconds of CPU of encoding and applying the last delta.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rollart.adapters.weights.buckets import BucketPusher, BucketWeightStore, PullResult, PushResult
from rollart.adapters.weights.delta import apply_delta, encode_delta
from rollart.adapters.weights.objects import FileObjectStore, ObjectStore
from rollart.engine.weights import read_tensors

MB = 10**6


class Link:
    """A way into or out of a store that carries one blob after the other at `bytes_per_s`."""

    def __init__(self, objects: ObjectStore, bytes_per_s: float) -> None:
        self._objects, self._rate = objects, bytes_per_s
        self._busy = asyncio.Lock()
        self.carried = 0

    async def put(self, key: str, data: bytes) -> None:
        await self._carry(len(data))
        await self._objects.put(key, data)

    async def get(self, key: str) -> bytes:
        data = await self._objects.get(key)
        await self._carry(len(data))
        return data

    async def keys(self, prefix: str) -> set[str]:
        return await self._objects.keys(prefix)

    async def delete(self, keys: Iterable[str]) -> None:
        await self._objects.delete(keys)

    async def aclose(self) -> None:
        await self._objects.aclose()

    async def _carry(self, count: int) -> None:
        async with self._busy:
            self.carried += count
            await asyncio.sleep(count / self._rate)


@dataclass(frozen=True, slots=True)
class Round:
    """One version. Seconds."""

    pushed: PushResult
    pulls: list[PullResult]
    exposed_s: list[float]

    def row(self, name: str) -> dict[str, Any]:
        count = len(self.pulls)
        accumulated = sum(p.accumulated_s for p in self.pulls) / count
        exposed = sum(self.exposed_s) / count
        return {
            "version": name,
            "mb": round(self.pushed.bytes / MB, 1),
            "copies_over_slow_link": round(self.pushed.sent / self.pushed.bytes, 3),
            "push_s": round(self.pushed.seconds, 3),
            "accumulated_pull_s": round(accumulated, 3),
            "exposed_s": round(exposed, 3),
            "exposed_share": round(exposed / accumulated, 3) if accumulated else None,
        }


def write_version(root: Path, number: int, mb: float, frozen: float) -> Path:
    """Sixteen tensors; the first `frozen` share of them never change."""
    path = root / f"v{number}"
    path.mkdir()
    tensors = {}
    for i in range(16):
        seed = i if i < 16 * frozen else 1000 * number + i
        generator = torch.Generator().manual_seed(seed)
        tensors[f"w{i:02d}"] = torch.rand(int(mb * MB / 16 / 4), generator=generator)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    (path / "COMPLETE").write_text(json.dumps({"version": number}))
    return path


async def one(
    pusher: BucketPusher, hosts: list[BucketWeightStore], path: Path, number: int, step_s: float, *, overlap: bool
) -> Round:
    exposed: list[float] = []
    pulls: list[PullResult] = []

    async def engine(host: BucketWeightStore, pulling: asyncio.Task[PullResult] | None, still: float) -> None:
        pulls.append(await pulling if pulling is not None else await host.pull(number))
        tensors = await asyncio.to_thread(read_tensors, host.path(number))
        await asyncio.to_thread(lambda: [t.clone() for t in tensors.values()])
        exposed.append(time.perf_counter() - still)

    arrivals = await pusher.prepare(number, str(path))
    async with asyncio.TaskGroup() as group:
        pushing = group.create_task(pusher.push(str(path), arrivals))
        early = [group.create_task(host.pull(number, arrivals)) if overlap else None for host in hosts]
        await asyncio.sleep(step_s)
        pushed = await pushing
        still = time.perf_counter()
        async with asyncio.TaskGroup() as loading:
            for host, pulling in zip(hosts, early, strict=True):
                loading.create_task(engine(host, pulling, still))
    return Round(pushed, pulls, exposed)


async def main(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        store = FileObjectStore(root / "store")
        slow = Link(store, options.slow * MB)
        pusher = BucketPusher(slow, bucket_bytes=int(options.bucket * MB))
        hosts = [
            BucketWeightStore(Link(store, options.fast * MB), root / f"host-{i}", in_flight=1)
            for i in range(options.engines)
        ]
        cases = [("pulled when engines stand still", 0.0, False), ("pulled beside the rollout", 0.0, True)]
        cases += [("three quarters unchanged, first", 0.75, True), ("three quarters unchanged, next", 0.75, True)]
        for number, (name, frozen, overlap) in enumerate(cases):
            path = write_version(root, number, options.mb, frozen)
            done = await one(pusher, hosts, path, number, options.step, overlap=overlap)
            rows.append(done.row(name))
            for host in hosts:
                host.prune([number])
            await pusher.collect([number])
    return rows


def deltas() -> Iterable[dict[str, Any]]:
    """Versions of real runs through a store."""
    from rollart.launch.launch import launch
    from rollart.ledger.reader import LedgerReader
    from rollart.settings.resolve import resolve_files

    for dtype, rate in itertools.product(("bfloat16", "trained"), (1e-6, 1e-5, 1e-4, 7e-4)):
        with tempfile.TemporaryDirectory() as scratch:
            overrides = [f"weights.dtype={dtype}", "weights.store.kind=files", f"weights.store.url={scratch}/store"]
            overrides += [f"training.lr={rate}", "training.lr_schedule=constant", "steps=8", "evaluation.episodes=8"]
            directory = Path(scratch) / "run"
            launch(resolve_files(overrides=overrides), run_dir=directory)
            with LedgerReader(directory) as reader:
                pushed = [event.fields for event in reader.events("weights_pushed")]
            old, new = (path / "model.safetensors" for path in sorted((directory / "weights").glob("v*"))[-2:])
            before, after = load_file(old), load_file(new)
            changed = sum(int((before[name] != tensor).sum()) for name, tensor in after.items())
            a, b, began = old.read_bytes(), new.read_bytes(), time.process_time()
            delta = encode_delta(a, b)
            encoded = time.process_time()
            assert delta is None or apply_delta(a, delta) == b
            yield {
                "published": dtype,
                "lr": rate,
                "changed": round(changed / sum(t.numel() for t in after.values()), 4),
                "sent": [round(float(f["sent_bytes"]) / float(f["bytes"]), 4) for f in pushed[1:]],
                "mb": len(b) / MB,
                "encode_s": round(encoded - began, 4),
                "apply_s": round(time.process_time() - encoded, 4),
            }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=48.0, help="size of a version")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--slow", type=float, default=24.0, help="MB/s into the store")
    parser.add_argument("--fast", type=float, default=48.0, help="MB/s to each host")
    parser.add_argument("--step", type=float, default=5.0, help="seconds of rollout beside which weights move")
    parser.add_argument("--bucket", type=float, default=2.0, help="MB of a bucket")
    parser.add_argument("--deltas", action="store_true", help="versions of real runs in place of the above")
    arguments = parser.parse_args()
    for line in deltas() if arguments.deltas else asyncio.run(main(arguments)):
        print(json.dumps(line), flush=True)
