"""The overhead of Ray per trajectory: the same run without it, and connected to a cluster that holds its parts.

    python benchmarks/ray_overhead.py [--pairs 24] [--weights-mb 100]

500 trajectories live at once, no-op engines and environments, 3 turns, the real scheduler on a real loop. With Ray: a
private cluster of four nodes, an actor on each with the call that waits for its program's end, and the watch over the
nodes: all calls of the controller to Ray between starts and deaths.

Two processes run in turn, the first without Ray and the second connected; a round is one run in either process while
the other waits. A pair is a round in each, in alternating order, so that other load on the machine affects both
equally. The result is the median over pairs of (with - without), for wall seconds and for CPU seconds of the
process (Ray's threads in it included), with a 95 % confidence interval from order statistics, which makes no
assumptions about the noise. The cluster's daemons run beside both.

Predicted before the first run: 0.02 to 0.1 ms of CPU per trajectory (two polls of the nodes a second, and Ray's own
threads), wall time by as much; against the target of less than 2 ms. Exit code 1 when the interval's upper end misses
the target, or is too wide to decide. Then `benchmarks/ray_weights.py`: weights to four engines on two nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rollart.adapters.clusters.ray import RayRuntime
from rollart.adapters.clusters.ray_cluster import TOKEN, auth_environment, private_cluster
from rollart.fleet import ActorSpec, Node
from rollart.testing.run import make_simulated_run

LIVE, STEPS, NODES = 500, 2, 4

TARGET_MS = 2.0


@contextlib.asynccontextmanager
async def on_ray(token: Path, address: str) -> AsyncIterator[None]:
    """Connected, with an actor per node that is waited for."""
    runtime = RayRuntime(address, env=auth_environment(token))
    await runtime.start()
    async with asyncio.TaskGroup() as tasks:
        try:
            handles = [
                await runtime.spawn(ActorSpec(f"part-{i}", "asyncio:Event", labels={"pool": f"p{i}"}))
                for i in range(NODES)
            ]
            waits = [tasks.create_task(handle.call("wait")) for handle in handles]
            yield
        finally:
            for wait in waits:
                wait.cancel()
            await runtime.close()


async def one() -> tuple[float, float]:
    """Wall and CPU milliseconds per trajectory of one run."""
    run = make_simulated_run(
        quotas={"noop": (LIVE, 1)}, alpha=0, steps=STEPS, engines=NODES, turns=3, tokens=1, engine_s=lambda _: 0.0
    )
    wall, cpu = time.perf_counter(), time.process_time()
    await run.run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    trained = sum(len(batch) for _, batch in run.trainer.batches)
    return 1e3 * wall / trained, 1e3 * cpu / trained


async def serve(token: Path | None, address: str) -> None:
    """A process of the comparison: a round for every line on stdin, its result on stdout."""
    async with contextlib.AsyncExitStack() as stack:
        if token is not None:
            await stack.enter_async_context(on_ray(token, address))
        await one()  # imports, caches
        print("ready", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await one()), flush=True)


class Worker:
    """The process, as the parent sees it."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, __file__, "--serve", *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._said()

    def round(self) -> tuple[float, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        wall, cpu = json.loads(self._said())
        return wall, cpu

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _said(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a process of the benchmark ended with status {self._process.wait()}")
        return line


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Of the median: the tightest pair of order statistics, as far from both ends, that holds it with at least this
    probability, whatever the distribution. Infinite where there are too few values."""
    n = len(values)
    ordered, outside, k = sorted(values), 0.0, 0
    while outside + math.comb(n, k) / 2**n <= (1 - confidence) / 2:
        outside += math.comb(n, k) / 2**n
        k += 1
    return (ordered[k - 1], ordered[n - k]) if k else (-math.inf, math.inf)


def measure(pairs: int) -> dict[str, Any]:
    nodes = [Node(f"n{i}", {"pool": f"p{i}"}, {"CPU": 1.0}) for i in range(NODES)]
    without: list[tuple[float, float]] = []
    with_ray: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as directory, asyncio.Runner() as runner, contextlib.ExitStack() as stack:
        cluster = contextlib.AsyncExitStack()
        stack.callback(lambda: runner.run(cluster.aclose()))
        address = runner.run(cluster.enter_async_context(private_cluster(Path(directory), nodes, health_s=10.0)))
        plain = Worker()
        stack.callback(plain.close)
        connected = Worker("--token", str(Path(directory) / TOKEN), "--address", address)
        stack.callback(connected.close)
        for pair in range(pairs):
            order = [(plain, without), (connected, with_ray)]
            for worker, rows in order if pair % 2 == 0 else reversed(order):
                rows.append(worker.round())
    found: dict[str, Any] = {"pairs": pairs, "live": LIVE, "trajectories_per_round": LIVE * STEPS}
    for column, name in enumerate(("wall", "cpu")):
        added = [w[column] - o[column] for w, o in zip(with_ray, without, strict=True)]
        low, high = interval(added)
        found |= {
            f"{name}_ms": median(row[column] for row in without),
            f"{name}_ms_on_ray": median(row[column] for row in with_ray),
            f"added_{name}_ms": median(added),
            f"added_{name}_ms_from": low,
            f"added_{name}_ms_to": high,
        }
    return found | {"target_ms": TARGET_MS, "met": found["added_wall_ms_to"] < TARGET_MS, "load": os.getloadavg()[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--weights-mb", type=float, default=100.0, help="0: leave the weights out")
    for hidden in ("--token", "--address"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(Path(arguments.token) if arguments.token else None, arguments.address))
        return 0
    found = measure(arguments.pairs)
    print(json.dumps(found, indent=2), flush=True)
    missed = not found["met"]
    if arguments.weights_mb:
        weights = Path(__file__).with_name("ray_weights.py")
        missed |= subprocess.call([sys.executable, str(weights), "--mb", str(arguments.weights_mb)]) != 0
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
