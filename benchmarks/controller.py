"""The cost of the controller: CPU per trajectory, concurrent live trajectories, memory per live trajectory.

    python benchmarks/controller.py [--json]

Six measurements, one process each so that none warms another's caches. The ledger is the real one (SQLite, WAL,
synchronous FULL, its own thread), the event loop is real, and CPU seconds are those of the whole process.

throughput   no-op engine and environment, 3 turns: finished trajectories per CPU-second (target: at least 2,000)
live         20,000 trajectories alive at once, each waiting in an environment: resident bytes per live trajectory
frozen_lake  128 FrozenLake environments (Gymnasium), turn limit 10, a mocked model that answers at random: CPU-ms per
             trajectory of all processes (open ROLL: 70-85 on its own scheduler, same shape; target: at most 3)
turns        `throughput` with the turns of 1 % and of all prompts recorded (`telemetry.turns`) beside none, alternating
             in pairs: median share of CPU that it adds (target: at most 2 % and 30 %). Exports run in a process of
             their own
watched      `throughput` with and without a dashboard, whose page is fetched at each change, alternating in pairs:
             median share of the controller's CPU that it adds (target: at most 2 %), and the dashboard's own CPU
kept         `frozen_lake` with and without `keep: all`, in alternating pairs: the share of CPU that it takes
             (target: at most 3 %)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rollart.control.domain import Domain
from rollart.control.keeping import TrajectoryKeeper
from rollart.ledger.store import Ledger
from rollart.model import Completion, FinishReason, GenerateRequest, VersionSpan
from rollart.settings.run import KeepSpec
from rollart.testing.run import SimulatedRun, make_simulated_run


def cpu() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def timed(run: SimulatedRun, directory: str, *, keep: bool = False) -> tuple[float, int]:
    """CPU seconds of the run with a real ledger, and how many trajectories ended."""
    loop = asyncio.get_running_loop()
    with Ledger(directory, clock=loop.time, kept_mb=256.0 if keep else 0.0) as ledger:
        run.journal = run.recorder = ledger
        if keep:
            run.trace = TrajectoryKeeper(KeepSpec(), ledger.keep)
        began = cpu()
        await run.run()
        await ledger.flush()
    return cpu() - began, sum(len(batch) for _, batch in run.trainer.batches)


def throughput(traced: float = 0.0, steps: int = 24, *, watch: bool = False) -> dict[str, float]:
    run = make_simulated_run(
        quotas={"noop": (512, 1)},
        alpha=1,
        steps=steps,
        engines=4,
        turns=3,
        tokens=1,
        engine_s=lambda _: 0.0,
        traced=traced,
    )
    reading = {}
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, str(Path(__file__).with_name("dashboard.py")), "watch", directory]
        reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True) if watch else None
        if reader is not None:
            assert reader.stdout is not None
            reader.stdout.readline()  # it is ready
        seconds, trained = asyncio.run(timed(run, directory))
        if reader is not None:
            reader.terminate()
            reading = json.loads(reader.communicate()[0])
    return {"trajectories": trained, "cpu_s": seconds, "trajectories_per_cpu_s": trained / seconds, **reading}


def live() -> dict[str, float]:
    count = 20_000
    run = make_simulated_run(
        quotas={"wait": (count, 1)}, alpha=0, steps=1, engines=8, turns=3, env_s=lambda r: 2.0 + r.random()
    )
    peak: list[int] = []

    async def main() -> None:
        before = resident_bytes()

        async def watch() -> None:
            while True:
                await asyncio.sleep(0.25)
                if hasattr(run, "control") and run.control.scheduler.groups.running() == count:
                    peak.append(resident_bytes() - before)

        watcher = asyncio.get_running_loop().create_task(watch())
        await run.run()
        watcher.cancel()

    began = time.process_time()
    asyncio.run(main())
    return {
        "live_at_once": count if peak else 0,
        "kib_per_live_trajectory": max(peak, default=0) / count / 1024,
        "cpu_s": time.process_time() - began,
    }


class RandomEngine:
    """A mocked model on the port of `SimulatedEngine`: a legal action, at random."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    async def generate(self, request: GenerateRequest) -> Completion:
        allowed = request.sampling.allowed_token_ids
        assert allowed is not None
        token = self._random.choice(allowed)
        span = VersionSpan(int(str(request.cache_salt)[1:]), 0, 1)
        return Completion((token,), (-1.4,), (span,), FinishReason.LENGTH, len(request.token_ids), 0)


def frozen_lake(*, steps: int = 24, keep: bool = False) -> dict[str, float]:
    from rollart.adapters.envs.frozen_lake import FrozenLakeText
    from rollart.adapters.text import HubTokenizer
    from rollart.quickstart.tokenizer import write_tokenizer

    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory))
        tokenizer = HubTokenizer(directory)
        run = make_simulated_run(quotas={"lake": (64, 1)}, alpha=1, steps=steps, engines=1)
        run.tokenizer = tokenizer
        run.domains = [
            Domain(
                name="lake",
                environment=lambda: FrozenLakeText(max_turns=10),
                quota=64,
                group_size=1,
                max_turns=10,
                max_tokens=1,
            )
        ]
        mock = RandomEngine(0)
        run.engines[0].generate = mock.generate  # type: ignore[method-assign]
        turns: list[int] = []
        run.on_step = lambda done: turns.extend(len(set(s.turn)) - 1 for g in done.groups for s in g.samples)
        seconds, trained = asyncio.run(timed(run, directory, keep=keep))
    return {
        "trajectories": trained,
        "turns_mean": sum(turns) / len(turns),
        "cpu_ms_per_trajectory": 1000 * seconds / trained,
    }


PAIRS = 5


def turns() -> dict[str, float]:
    throughput(steps=2)  # what a first run imports is no part of any
    more: dict[float, list[float]] = {0.01: [], 1.0: []}
    for n in range(PAIRS):
        for share, found in more.items():
            cpu_s = {traced: throughput(traced, 4)["cpu_s"] for traced in ((0.0, share) if n % 2 else (share, 0.0))}
            found.append(cpu_s[share] / cpu_s[0.0] - 1.0)
    return {f"{100 * share:g}_percent_of_prompts_add": statistics.median(found) for share, found in more.items()}


WATCHED_STEPS = 24


def watched() -> dict[str, float]:
    throughput(steps=2)
    added, own = [], []
    for n in range(PAIRS):
        runs = {watch: throughput(steps=WATCHED_STEPS, watch=watch) for watch in (n % 2 == 0, n % 2 == 1)}
        added.append(runs[True]["cpu_s"] / runs[False]["cpu_s"] - 1.0)
        own.append(runs[True])
    return {
        "share": statistics.median(added),
        "trajectories": own[0]["trajectories"],
        "refreshes": statistics.median(one["refreshes"] for one in own),
        "dashboard_cpu_s": statistics.median(one["dashboard_cpu_s"] for one in own),
    }


KEPT_PAIRS, STEPS = 24, 8


def kept() -> dict[str, float]:
    frozen_lake()  # the first run of a process warms its caches
    cpu: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(KEPT_PAIRS):
        for keep in (False, True):
            cpu[keep].append(frozen_lake(steps=STEPS, keep=keep)["cpu_ms_per_trajectory"])
    # The least is what other load on the machine disturbs least.
    least, median = ({keep: of(values) for keep, values in cpu.items()} for of in (min, statistics.median))
    return {
        "cpu_ms_without": least[False],
        "cpu_ms_with": least[True],
        "share": least[True] / least[False] - 1.0,
        "share_of_medians": median[True] / median[False] - 1.0,
    }


CASES = {
    "throughput": throughput,
    "live": live,
    "frozen_lake": frozen_lake,
    "turns": turns,
    "watched": watched,
    "kept": kept,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=sorted(CASES))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(CASES[arguments.case]()))
        return
    results = {"load": os.getloadavg()[0]}
    for case in CASES:
        answer = subprocess.run([sys.executable, __file__, "--case", case], check=True, capture_output=True, text=True)
        results[case] = json.loads(answer.stdout)
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    print(f"load average {results['load']:.1f}")
    for case in CASES:
        print(case, "  ".join(f"{k}={v:,.2f}" for k, v in results[case].items()))


if __name__ == "__main__":
    main()
