"""Weights to several engines of a node, on Ray: one copy per node, and the waiting time of engines.

    python benchmarks/ray_weights.py [--mb 100] [--rounds 3]

A private cluster of two nodes faked on this machine, two engines (real processes) on each. Every round publishes
another version of `--mb` MB: it is pushed into the store once, pulled to the hosts of all engines while these continue
to generate, then the engines pause, load it from their own host and resume. Faked nodes share one disk, so each has a
separate directory here, as separate hosts would have.

The benchmark counts the bytes that the pullers report as received, and, by the kernel, the bytes that the actors of a
node read and wrote meanwhile (`/proc/PID/io`): reads are copies from the store, writes go to the host's directory.
*Exposed* is the time from the request to pause until the last engine resumes; *accumulated* the sum over a host's
buckets of their transfer times (RollArt's RA-16).

Predicted before the first run: 1.0 copies into the store and 1.0 to each node; the second engine of a node receives
nothing. Exit code 1 when that is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rollart.adapters.clusters.ray import RayRuntime
from rollart.adapters.clusters.ray_cluster import TOKEN, auth_environment, private_cluster
from rollart.adapters.engines.http import HttpEngine
from rollart.adapters.weights.hosts import WeightStoreLocation
from rollart.architecture import read_architecture
from rollart.engine.network import Network
from rollart.fleet import ActorSpec, Node
from rollart.launch.weight_store import SharedWeightStore
from rollart.leases import Leases
from rollart.model import EngineId, GenerateRequest, PauseMode, Sampling, WeightsRef
from rollart.ports import Handle
from rollart.testing.ledger import MemoryRecorder

MB = 10**6
NODES, ENGINES_PER_NODE = 2, 2
HIDDEN, BLOCKS = 512, 4


class OnItsNode:
    """A program's handle that gives each node a directory of its own below the store's `local`."""

    def __init__(self, of: Handle) -> None:
        self._of = of

    @property
    def name(self) -> str:
        return self._of.name

    @property
    def node(self) -> str:
        return self._of.node

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], WeightStoreLocation):  # a pull, and notices of arriving buckets
            place, *rest = args
            args = (replace(place, root=f"{place.root}/{self._of.node}"), *rest)
        return await self._of.call(method, *args, **kwargs)


@dataclass
class Part:
    """An engine of the benchmark, and the task that keeps it busy."""

    handle: OnItsNode
    engine: HttpEngine
    actor: int
    """Process id of the actor that holds the engine, and pulls for it."""
    answers: int = 0
    loaded: list[str] = field(default_factory=list)
    """Directories that the engine was given, by version."""


@contextlib.asynccontextmanager
async def opened(directory: Path, store: SharedWeightStore, first: WeightsRef) -> AsyncIterator[list[Part]]:
    """The cluster with its engines, which serve `first`."""
    cores = {"CPU": float(ENGINES_PER_NODE)}
    nodes = [Node(f"n{i}", {"pool": f"p{i}"}, cores) for i in range(NODES)]
    async with private_cluster(directory / "ray", nodes, health_s=30.0) as address:
        runtime = RayRuntime(address, env=auth_environment(directory / "ray" / TOKEN))
        await runtime.start()
        try:
            async with asyncio.TaskGroup() as starting:
                tasks = [
                    starting.create_task(started(runtime, store, first, directory, f"engine-{i}", f"p{i % NODES}"))
                    for i in range(NODES * ENGINES_PER_NODE)
                ]
            parts = [task.result() for task in tasks]
            yield parts
            for part in parts:
                await part.engine.close()
        finally:
            await runtime.close()


async def started(
    runtime: RayRuntime, store: SharedWeightStore, first: WeightsRef, directory: Path, name: str, pool: str
) -> Part:
    arguments = ["--max-slots", "4", "--max-context", "64", "--threads", "1"]
    spec = ActorSpec(
        name,
        "rollart.adapters.clusters.ray_host:NodeProgram",
        args=(name, "rollart.engine", arguments, str(directory / f"{name}.log")),
        labels={"pool": pool},
        max_concurrency=6,
    )
    handle = OnItsNode(await runtime.spawn(spec))
    store.join(handle)  # type: ignore[arg-type]  # it has the called method
    local = functools.partial(store.local, handle)  # type: ignore[arg-type]
    path = await local(first)
    address = await handle.call("start", ["--model", path, "--weight-version", str(first.version)])
    loaded = [path]

    async def local_path(weights: WeightsRef) -> str:
        loaded.append(await local(weights))
        return loaded[-1]

    engine = HttpEngine(EngineId(name), address, version=first.version, local=local_path)
    program = await handle.call("pid")
    actor = int(Path(f"/proc/{program}/stat").read_text().rpartition(")")[2].split()[1])
    return Part(handle, engine, actor, loaded=loaded)


async def generating(part: Part) -> None:
    """Turns one after the other, as a rollout has them."""
    while True:
        sampling = Sampling(max_tokens=4, temperature=0.0)
        name = f"{part.engine.id}-{part.answers}"
        await part.engine.generate(GenerateRequest(name, name, (1, 2, 3), sampling))
        part.answers += 1


def moved(actors: Sequence[int]) -> tuple[int, int]:
    """Bytes that these processes have read and written so far, by the kernel's count."""
    read = written = 0
    for pid in actors:
        rows = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        read, written = read + int(rows["rchar"]), written + int(rows["wchar"])
    return read, written


async def publish(
    store: SharedWeightStore, recorder: MemoryRecorder, parts: Sequence[Part], weights: WeightsRef
) -> dict[str, Any]:
    """One version to all engines: the bytes transferred, and the engines' pauses."""
    nodes = sorted({part.handle.node for part in parts})
    before = {node: moved([p.actor for p in parts if p.handle.node == node]) for node in nodes}
    answered, seen = sum(part.answers for part in parts), len(recorder.events)
    began = time.perf_counter()
    await store.push(weights)
    pushed_s = time.perf_counter() - began
    answered = sum(part.answers for part in parts) - answered
    after = {node: moved([p.actor for p in parts if p.handle.node == node]) for node in nodes}
    still = time.perf_counter()
    async with asyncio.TaskGroup() as loading:
        for part in parts:
            loading.create_task(update(part, weights))
    exposed = time.perf_counter() - still
    events = recorder.events[seen:]
    (push,) = [e.fields for e in events if e.kind == "weights_pushed"]
    size = int(push["bytes"] or 0)
    received = {part.handle.name: 0 for part in parts}
    for event in events:
        if event.kind == "weights_pulled":
            received[event.subject] += int(event.fields["received_bytes"] or 0)
    by_node = {node: sum(received[p.handle.name] for p in parts if p.handle.node == node) for node in nodes}
    return {
        "version": weights.version,
        "bytes": size,
        "bytes_into_store": int(push["sent_bytes"] or 0),
        "bytes_to_nodes": by_node,
        "engines_that_received": sum(count > 0 for count in received.values()),
        "read_mb_by_nodes": {node: (after[node][0] - before[node][0]) / MB for node in nodes},
        "written_mb_by_nodes": {node: (after[node][1] - before[node][1]) / MB for node in nodes},
        "push_and_pull_s": pushed_s,
        "turns_meanwhile": answered,
        "exposed_s": exposed,
        "directories": len({part.loaded[-1] for part in parts}),
    }


async def update(part: Part, weights: WeightsRef) -> None:
    await part.engine.pause(PauseMode.KEEP)
    await part.engine.update_weights(weights)
    await part.engine.resume()


def write_version(root: Path, number: int, mb: float) -> WeightsRef:
    """A random decoder of about `mb` MB in float32; the size of the vocabulary fills up the rest."""
    path = root / f"v{number}"
    path.mkdir(parents=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "num_hidden_layers": BLOCKS if mb >= 80 else 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    blocks = int(config["num_hidden_layers"]) * HIDDEN * HIDDEN * (4 + 3 * 4)  # type: ignore[call-overload]
    config["vocab_size"] = max(64, round((mb * MB / 4 - blocks) / HIDDEN))
    (path / "config.json").write_text(json.dumps(config))
    architecture = read_architecture(path)
    network = Network(architecture, context=1, device=torch.device("cpu"), dtype=torch.float32)
    generator = torch.Generator().manual_seed(number)
    tensors = {name: torch.rand(shape, generator=generator) * 0.1 for name, shape in network.shapes()}
    save_file(tensors, path / "model.safetensors")
    (path / "COMPLETE").write_text(json.dumps({"version": number}))
    return WeightsRef(number, str(path))


async def measure(mb: float, rounds: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        directory, recorder = Path(scratch), MemoryRecorder()
        place = WeightStoreLocation("files", str(directory / "store"), str(directory / "hosts"))
        store = SharedWeightStore(
            directory / "weights",
            place,
            Leases(recorder),
            recorder,
            bucket_bytes=8 * MB,
            deltas=0,
            ahead=True,
            pull_s=300.0,
        )
        first = write_version(directory / "weights", 0, mb)
        await store.push(first)
        async with opened(directory, store, first) as parts, asyncio.TaskGroup() as tasks:
            busy = [tasks.create_task(generating(part)) for part in parts]
            for number in range(1, rounds + 1):
                weights = write_version(directory / "weights", number, mb)
                rows.append(await publish(store, recorder, parts, weights))
                store.prune([number])
            for task in busy:
                task.cancel()
        await store.aclose()
    return rows


def one_copy_each(row: Mapping[str, Any]) -> bool:
    """True if one copy went into the store (except the few bytes of config.json, which are there already) and one to
    each node, whichever of its engines asked first, and the kernel counted no second copy either."""
    size, sent = row["bytes"], row["bytes_into_store"]
    by_kernel = [*row["read_mb_by_nodes"].values(), *row["written_mb_by_nodes"].values()]
    return bool(
        0 < size - sent < 1000
        and set(row["bytes_to_nodes"].values()) == {sent}
        and row["engines_that_received"] == row["directories"] == NODES
        and all(sent <= MB * moved < 1.5 * size for moved in by_kernel)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rows = asyncio.run(measure(arguments.mb, arguments.rounds))
    for row in rows:
        print(json.dumps(row), flush=True)
    fine = all(map(one_copy_each, rows))
    print(f"one copy per node: {'yes' if fine else 'NO'}; load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
