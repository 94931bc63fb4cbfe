"""The asynchronous schedule against the synchronous one, on the product's own control plane.

    python benchmarks/async_vs_sync.py [--scale 0.02] [--json]

512 trajectories of 20 turns, 1 s of generation a turn, environment steps of max(0, N(10, sigma)) seconds: the time of
the batch-level schedule (every turn waits for the slowest environment) over that of the trajectory-level one, on
virtual time and on a real clock scaled down. RollArt (R2) reports 1.23 at sigma 1 and 2.27 at sigma 10. Learning under
both schedules is in learning.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys

from rollart.control.trajectory import WaitLimits
from rollart.sim import loop as virtual
from rollart.testing.run import SimulatedRun, make_simulated_run

SIGMAS = (1.0, 2.5, 5.0, 10.0)
PUBLISHED = {1.0: 1.23, 10.0: 2.27}
"""RollArt, trajectory-level against batch-level rollout under environment latency N(10, sigma)."""


def rollout(sigma: float, *, lockstep: bool, scale: float, trajectories: int = 512, turns: int = 20) -> SimulatedRun:
    def step_seconds(rng: random.Random) -> float:
        return scale * max(0.0, rng.gauss(10.0, sigma))

    return make_simulated_run(
        quotas={"env": (trajectories, 1)},
        alpha=0,
        steps=1,
        engines=4,
        turns=turns,
        tokens=1,
        seed=1,
        engine_s=lambda _: scale * 1.0,
        env_s=step_seconds,
        schedule="sync" if lockstep else "sync_plus",
        waits=WaitLimits(env_reset_s=600.0, env_step_s=600.0),
    )


async def timed(run: SimulatedRun) -> float:
    began = asyncio.get_running_loop().time()
    await run.run()
    return asyncio.get_running_loop().time() - began


def latency(scale: float) -> list[dict[str, float]]:
    """Per sigma: seconds of both schedules (in unscaled seconds) and their ratio, virtual and real."""
    rows = []
    for sigma in SIGMAS:
        row: dict[str, float] = {"sigma": sigma, "published": PUBLISHED.get(sigma, float("nan"))}
        for clock in ("virtual", "real"):
            seconds = {}
            for lockstep in (True, False):
                if clock == "virtual":
                    seconds[lockstep] = virtual.run(timed(rollout(sigma, lockstep=lockstep, scale=1.0)), seed=0)
                else:
                    seconds[lockstep] = asyncio.run(timed(rollout(sigma, lockstep=lockstep, scale=scale))) / scale
            row[f"{clock}_batch_s"], row[f"{clock}_trajectory_s"] = seconds[True], seconds[False]
            row[f"{clock}_ratio"] = seconds[True] / seconds[False]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=0.02)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = {"load": os.getloadavg()[0], "latency": latency(arguments.scale)}
    if arguments.json:
        json.dump(results, sys.stdout, indent=2)
        return
    print(f"load average {results['load']:.1f}")
    for row in results["latency"]:
        published = f"  published {row['published']:.2f}" if row["sigma"] in PUBLISHED else ""
        print(
            f"sigma {row['sigma']:>4}: batch / trajectory = {row['virtual_ratio']:.2f} virtual "
            f"({row['virtual_batch_s']:.0f} s / {row['virtual_trajectory_s']:.0f} s), "
            f"{row['real_ratio']:.2f} real x{arguments.scale}{published}"
        )


if __name__ == "__main__":
    main()
