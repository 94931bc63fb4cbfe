"""Dedicated reward workers against functions, on a bursty RL load: real processes, a real clock.

    python benchmarks/offload.py [--seconds 30] [--json]

Three jobs, each in steps: trajectories roll out for 40 % of a step and ask for their rewards as they end, then the
model trains and there are no calls. The rewards compute for 0.1 s each. The same calls are served in three ways:

dedicated   four workers of its own for each job, as RollArt's judge had (RA-6: 7.4 % used)
shared      one set of workers for all jobs, always there, as few as keep the p99 of waiting below 0.25 s
functions   one function for all jobs that starts workers as calls come and ends them as they idle (RA-13: 88 % used)

dedicated → shared is the effect of pooling capacity, shared → functions that of elasticity. Utilisation is busy over
all worker-seconds, starts included, as the backend metered them. Dollars: dedicated and shared workers are cores by the
hour, functions Lambda's GB-seconds and requests, both at the dated prices of `configs/prices.yaml`; the last line has
the utilisation above which a dedicated worker would win. Exit status 1 if dedicated is above 10 % or functions below
80 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rollart.settings.load import load_prices
from rollart.testing.functions import Meter
from serverless.deploy.package import build
from serverless.meter import WorkerState
from serverless.pipeline.offload import Offload
from serverless.scaling.replay import CallReplay, ReplayedCall, replay_dedicated, replay_elastic
from serverless.spec import FunctionBatchSpec, FunctionSpec
from serverless.types import Item, Scored
from serverless.workers.local import LocalBackend

JOBS, WORKERS = 3, 4
STEP_S, ROLLOUT_S = 5.0, 2.0
BATCH = 12
WORK_S = 0.1
KEEP_S = 0.004
"""An idle local worker is kept this long: a cold start takes 2 to 10 ms, and idling may cost as much (ski rental)."""
WAIT_S = 0.25
"""Of the p99: a tenth of a second more on a reward moves no training step."""
MEMORY_MB = 256

SOURCE = f"""
import time

def handler(item):
    end = time.perf_counter() + {WORK_S}
    while time.perf_counter() < end:
        pass
    return 1.0
"""


@dataclass(frozen=True, slots=True)
class Way:
    """How the calls were served: worker-seconds, utilisation and waits as measured, dollars per 1,000 rewards."""

    workers: int
    worker_s: float
    utilisation: float
    p50_s: float
    p99_s: float
    cold_starts: int
    usd_per_thousand: float
    rewards: int


def trace(seconds: float, seed: int = 0) -> list[ReplayedCall]:
    """The calls of all jobs, by time. A job's steps begin where those of the others do not."""
    rng, calls = random.Random(seed), []
    for job in range(JOBS):
        start = job * STEP_S / JOBS
        while start < seconds:
            for _ in range(BATCH):
                after = ROLLOUT_S * (0.4 + 0.6 * rng.random())
                calls.append(ReplayedCall(start + after, WORK_S, start, "code", f"job-{job}"))
            start += STEP_S
    return sorted(calls, key=lambda c: c.t)


async def serve(
    calls: list[ReplayedCall], directory: Path, *, names: dict[str, str], warm: int, most: int, keep_s: float
) -> Way:
    """The calls on the local backend as they come; `names` gives each job's function."""
    (directory / "work.py").write_text(SOURCE)
    meter, loop = Meter(), asyncio.get_running_loop()
    packages = [
        build(
            FunctionSpec(
                name=name,
                source="work.py",
                memory_mb=MEMORY_MB,
                warm=warm,
                concurrency=most,
                keep_alive_s=keep_s,
                batch=FunctionBatchSpec(max_items=1, max_wait_ms=0),
                deterministic=False,
            ),
            base=directory,
        )
        for name in sorted(set(names.values()))
    ]
    latencies: list[float] = []

    async def ask(n: int, call: ReplayedCall, began: float) -> None:
        await asyncio.sleep(began + call.t - loop.time())
        asked = loop.time()
        outcome = await offload.submit(names[call.job], Item(str(n), ()), 60.0)
        assert outcome == Scored(1.0), outcome
        latencies.append(loop.time() - asked)

    async with LocalBackend(meter=meter) as backend, Offload(packages, backend) as offload:
        if warm:
            while sum(backend.load(name).workers for name in set(names.values())) < warm * len(packages):
                await asyncio.sleep(0.01)
        began = loop.time()
        async with asyncio.TaskGroup() as group:
            for n, call in enumerate(calls):
                group.create_task(ask(n, call, began))
        span = loop.time() - began
    usage = meter.usage.values()
    busy = sum(u.worker_s[WorkerState.BUSY] for u in usage)
    everything = span * warm * len(packages) if warm else sum(u.total_worker_s for u in usage)
    latencies.sort()
    return Way(
        workers=warm * len(packages) if warm else most,
        worker_s=everything,
        utilisation=busy / everything,
        p50_s=latencies[len(latencies) // 2] - WORK_S,
        p99_s=latencies[int(0.99 * len(latencies))] - WORK_S,
        cold_starts=sum(u.cold_starts for u in usage),
        usd_per_thousand=1000.0 * (_hourly(everything) if warm else _by_use(meter)) / len(calls),
        rewards=len(calls),
    )


PRICES = load_prices(Path(__file__).parents[1] / "configs" / "prices.yaml")


def _price(name: str, unit: str) -> float:
    return next(p.usd for p in PRICES.prices if (p.name, p.unit) == (name, unit))


def _hourly(worker_s: float) -> float:
    return worker_s / 3600.0 * _price("cpu", "device-hour")


def _by_use(meter: Meter) -> float:
    gb_s = sum(u.gb_s for u in meter.usage.values())
    calls = sum(u.invocations for u in meter.usage.values())
    return gb_s * _price("aws_lambda", "GB-second") + calls / 1e6 * _price("aws_lambda", "million-requests")


def enough(calls: list[ReplayedCall]) -> int:
    """The fewest shared workers that keep the p99 of waiting low, by replay."""
    return next(k for k in range(1, JOBS * WORKERS + 1) if replay_dedicated(calls, k).wait(0.99) <= WAIT_S)


async def measured(seconds: float) -> dict[str, Way]:
    calls = trace(seconds)
    jobs = sorted({c.job for c in calls})
    shared = dict.fromkeys(jobs, "reward")
    found = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        own = {job: job for job in jobs}
        found["dedicated"] = await serve(calls, directory, names=own, warm=WORKERS, most=WORKERS, keep_s=3600)
        few = enough(calls)
        found["shared"] = await serve(calls, directory, names=shared, warm=few, most=few, keep_s=3600)
        found["functions"] = await serve(calls, directory, names=shared, warm=0, most=JOBS * WORKERS, keep_s=KEEP_S)
    return found


def replayed(seconds: float) -> dict[str, CallReplay]:
    """The same by replay, without the noise of this machine."""
    calls = trace(seconds)
    return {
        "dedicated": replay_dedicated([c for c in calls if c.job == "job-0"], WORKERS),
        "shared": replay_dedicated(calls, enough(calls)),
        "functions": replay_elastic(calls, cold_s=0.005, keep_s=KEEP_S),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    ways, model = asyncio.run(measured(arguments.seconds)), replayed(arguments.seconds)
    even = ways["functions"].usd_per_thousand
    alone = 1000.0 * WORK_S / 3600.0 * _price("cpu", "device-hour")
    if arguments.json:
        rows = {n: {k: getattr(w, k) for k in Way.__slots__} for n, w in ways.items()}
        print(json.dumps({"load": load, "ways": rows, "dedicated_wins_above": alone / even}, indent=2))
    else:
        print(f"load average {load:.1f}; {JOBS} jobs, {ways['functions'].rewards} rewards of {WORK_S * 1e3:.0f} ms")
        print(
            f"{'':<12}{'workers':>8}{'worker-s':>10}{'used':>8}{'replay':>8}{'p50 wait':>10}{'p99 wait':>10}"
            f"{'cold':>6}{'$ / 1k':>10}"
        )
        for name, way in ways.items():
            print(
                f"{name:<12}{way.workers:>8}{way.worker_s:>10.1f}{way.utilisation:>8.1%}"
                f"{model[name].utilisation:>8.1%}{way.p50_s * 1e3:>8.1f}ms{way.p99_s * 1e3:>8.1f}ms"
                f"{way.cold_starts:>6}{way.usd_per_thousand:>10.5f}"
            )
        pooled = ways["dedicated"].worker_s / ways["shared"].worker_s
        elastic_ = ways["shared"].worker_s / ways["functions"].worker_s
        print(f"worker-seconds: pooling ÷ {pooled:.2f}, elasticity ÷ {elastic_:.2f}, both ÷ {pooled * elastic_:.2f}")
        print(f"a dedicated core wins above {alone / even:.0%} used")
    sys.exit(0 if ways["dedicated"].utilisation < 0.10 and ways["functions"].utilisation >= 0.80 else 1)


if __name__ == "__main__":
    main()
