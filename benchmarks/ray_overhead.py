"""What Ray adds to a trajectory: the same run without it, and beside a cluster that holds its parts.

    python benchmarks/ray_overhead.py [--rounds 3] [--json]

500 trajectories live at once, no-op engines and environments, 3 turns, the real scheduler on a real loop. With Ray: a
private cluster of four nodes, an actor on each with the call that waits for its program's end, and the watch over the
nodes: all that the controller has to do with Ray between starts and deaths. Wall and CPU seconds of this process (Ray's
threads in it included) per trajectory, the least of the rounds, which alternate (target: less than 2 ms of wall added).
The daemons of the cluster run beside both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from rollart.adapters.clusters.ray import RayRuntime
from rollart.adapters.clusters.ray_cluster import PrivateCluster, auth
from rollart.ports import ActorSpec, Node
from rollart.sim.run import make

LIVE, STEPS, NODES = 500, 6, 4


@contextlib.asynccontextmanager
async def on_ray(cluster: PrivateCluster, address: str) -> AsyncIterator[None]:
    """Connected, with an actor per node that is waited for."""
    runtime = RayRuntime(address, env=auth(cluster.token))
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
    """Wall and CPU seconds per trajectory of one run."""
    run = make(quotas={"noop": (LIVE, 1)}, alpha=0, steps=STEPS, engines=NODES, turns=3, tokens=1,
               engine_s=lambda _: 0.0)  # fmt: skip
    wall, cpu = time.perf_counter(), time.process_time()
    await run.run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    trained = sum(len(batch) for _, batch in run.trainer.batches)
    return wall / trained, cpu / trained


async def measure(rounds: int) -> dict[str, float]:
    nodes = [Node(f"n{i}", {"pool": f"p{i}"}, {"CPU": 1.0}, {}) for i in range(NODES)]
    without, with_ray = [], []
    with tempfile.TemporaryDirectory() as directory:
        cluster = PrivateCluster(Path(directory), nodes, health_s=10.0)
        try:
            address = await cluster.start()  # beside both: its processes need the cores too
            await one()  # imports, caches
            for _ in range(rounds):
                without.append(await one())
                async with on_ray(cluster, address):
                    with_ray.append(await one())
        finally:
            await cluster.close()
    (wall, cpu), (ray_wall, ray_cpu) = ([min(column) for column in zip(*rows, strict=True)]
                                        for rows in (without, with_ray))  # fmt: skip
    return {
        "wall_ms": 1e3 * wall, "wall_ms_on_ray": 1e3 * ray_wall, "added_wall_ms": 1e3 * (ray_wall - wall),
        "cpu_ms": 1e3 * cpu, "cpu_ms_on_ray": 1e3 * ray_cpu, "added_cpu_ms": 1e3 * (ray_cpu - cpu),
        "trajectories": LIVE * STEPS, "load": os.getloadavg()[0],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments.rounds))
    print(json.dumps(found, indent=2) if arguments.json else "  ".join(f"{k}={v:,.3f}" for k, v in found.items()))


if __name__ == "__main__":
    main()
