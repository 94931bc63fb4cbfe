"""The effect of hedging on tail latency, and a check that calls that are only slow are not executed twice.

    python benchmarks/hedging.py [--calls 4000] [--json]

Real functions in the local backend's worker processes, on a real loop, called through the whole pipeline.

stragglers  a function that sleeps 20-30 ms, one execution in twenty 1 s; with hedging and without. Latencies are those
            of `submit`; executions are counted by the function itself, in a file (target: p99 down at least 4 times, at
            most 5 % more executions)
slow        a function that always sleeps 3 s, which is longer than the read time-outs that make a client send again:
            two waves, of which the second knows the usual time (target: one execution per logical call, exactly)
cpu         CPU time of the pipeline per submit, over a backend in memory that does nothing: all stages on, off, and all
            with an empty result cache
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import resource
import tempfile
import textwrap
from collections.abc import Sequence
from typing import Any

from serverless.deploy.package import Package, build
from serverless.pipeline.offload import Offload
from serverless.pipeline.stages import OffloadStage, PipelineSpec
from serverless.providers.base import Reply
from serverless.spec import FunctionSpec
from serverless.types import Cause, Invocation, Item, Scored
from serverless.workers.local import LocalBackend

NO_STAGE = PipelineSpec.model_validate(
    {name: {"scope": "off"} if name == "limits" else {"enabled": False} for name in PipelineSpec.model_fields}
)
NO_HEDGE = PipelineSpec.model_validate({"hedge": {"enabled": False}})

STRAGGLING = """
    import fcntl, random, time

    def score(sample):
        # The count of all executions, of all workers: it also says which of twenty is the straggler.
        with open(sample.metadata["count"], "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            number = int(file.read() or 0)
            file.seek(0)
            file.write(str(number + 1))
        late = random.Random(number // 20).randrange(20) == number % 20
        time.sleep(1.0 if late else random.uniform(0.02, 0.03))
        return 1.0
"""

SLOW = """
    import time

    def score(sample):
        with open(sample.metadata["count"], "a") as file:
            file.write(sample.metadata["key"] + "\\n")
        time.sleep(3.0)
        return 1.0
"""


def function(directory: pathlib.Path, source: str, **settings: Any) -> Package:
    (directory / "score.py").write_text(textwrap.dedent(source))
    spec = FunctionSpec(name="score", source="score.py", handler="score", batch={"max_items": 1}, **settings)
    return build(spec, base=directory)


def item(n: int, **metadata: str) -> Item:
    return Item(str(n), ({"role": "user", "content": "?"}, {"role": "assistant", "content": str(n)}), None, metadata)


async def straggling(calls: int, callers: int, settings: PipelineSpec | None) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        count = directory / "count"
        count.write_text("")
        one = function(directory, STRAGGLING, concurrency=2 * callers, warm=callers, timeout_s=10.0)
        seconds: list[float] = []
        numbers = iter(range(calls))

        async def caller(offload: Offload) -> None:
            for n in numbers:
                began = loop.time()
                outcome = await offload.submit("score", item(n, count=str(count)), 60.0)
                assert isinstance(outcome, Scored), outcome
                seconds.append(loop.time() - began)

        async with LocalBackend() as backend, Offload([one], backend, settings=settings) as offload:
            began = loop.time()
            async with asyncio.TaskGroup() as group:
                for _ in range(callers):
                    group.create_task(caller(offload))
            makespan = loop.time() - began
            hedges = offload.stages()["score"][OffloadStage.HEDGE]
        executions = int(count.read_text())
    seconds.sort()
    return {
        "calls": calls,
        "executions": executions,
        "p50_ms": 1000 * seconds[calls // 2],
        "p95_ms": 1000 * seconds[int(0.95 * calls)],
        "p99_ms": 1000 * seconds[int(0.99 * calls)],
        "makespan_s": makespan,
        "hedges": hedges.acted,
        "hedges_first": hedges.helped,
    }


async def slow(calls: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        count = directory / "count"
        count.write_text("")
        one = function(directory, SLOW, concurrency=calls, timeout_s=30.0)
        async with LocalBackend() as backend, Offload([one], backend) as offload, asyncio.TaskGroup() as group:
            for wave in range(2):
                tasks = [
                    group.create_task(offload.submit("score", item(n, key=f"{wave}.{n}", count=str(count)), 60.0))
                    for n in range(calls)
                ]
                assert all(isinstance(outcome, Scored) for outcome in await asyncio.gather(*tasks))
        executed = count.read_text().split()
    return {"calls": 2 * calls, "executions": len(executed)}


class Nothing:
    """A backend that answers at once."""

    provider = "nothing"

    async def deploy(self, package: Package) -> None: ...

    async def invoke(
        self, function: str, event: Sequence[dict[str, Any]], *, deadline_s: float, cause: Cause = Cause.CALL
    ) -> Reply:
        await asyncio.sleep(0.0)
        bill = Invocation(function, self.provider, "w", 0.0, 1e-3, 0.0, 1e-3, 512, len(event), "ok", cause)
        return Reply([{"id": e["id"], "aggregate_reward_score": 1.0, "metrics_list": []} for e in event], None, bill)

    async def __aenter__(self) -> Nothing:
        return self

    async def __aexit__(self, *exc: object) -> None: ...


async def cpu(submits: int, items: int, settings: PipelineSpec | None, cache: pathlib.Path | None) -> float:
    """CPU microseconds per submit, of 256 callers."""
    with tempfile.TemporaryDirectory() as name:
        (pathlib.Path(name) / "f.py").write_text("def f(sample): return 1.0\n")
        spec = FunctionSpec(
            name="f", source="f.py", handler="f", concurrency=16, batch={"max_items": items, "max_wait_ms": 1}
        )
        one = build(spec, base=pathlib.Path(name))
    samples = [item(n, key=str(n)) for n in range(submits)]
    waiting = iter(samples)

    async def caller(offload: Offload) -> None:
        for sample in waiting:
            assert isinstance(await offload.submit("f", sample, 30.0), Scored)

    async with Offload([one], Nothing(), settings=settings, cache=cache) as offload:
        before = resource.getrusage(resource.RUSAGE_SELF)
        async with asyncio.TaskGroup() as group:
            for _ in range(256):
                group.create_task(caller(offload))
        after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return 1e6 * used / submits


def per_submit() -> dict[str, float]:
    """The least of three runs each: other work on the machine only ever adds."""
    rows: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        for items in (1, 32):
            for label, settings, cached in (
                ("all", None, False),
                ("none", NO_STAGE, False),
                ("all and a cold cache", None, True),
            ):
                runs = [
                    asyncio.run(
                        cpu(20_000, items, settings, pathlib.Path(name) / f"{items}-{k}.sqlite" if cached else None)
                    )
                    for k in range(3)
                ]
                rows[f"{label}, {items} a call, us"] = min(runs)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Hedging against stragglers, on real processes.")
    parser.add_argument("--calls", type=int, default=4000)
    parser.add_argument("--callers", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    plain = asyncio.run(straggling(options.calls, options.callers, NO_HEDGE))
    hedged = asyncio.run(straggling(options.calls, options.callers, None))
    result = {
        "without": plain,
        "hedged": hedged,
        "p99_down": plain["p99_ms"] / hedged["p99_ms"],
        "more_executions": hedged["executions"] / hedged["calls"] - 1.0,
        "slow": asyncio.run(slow(16)),
        "cpu": per_submit(),
    }
    if options.json:
        print(json.dumps(result))
        return
    for name in ("without", "hedged", "slow", "cpu"):
        row = result[name]
        assert isinstance(row, dict)
        print(f"{name:8s}", "  ".join(f"{key} {value:.4g}" for key, value in row.items()))
    print(f"p99 down {result['p99_down']:.1f} times at {result['more_executions']:.1%} more executions")


if __name__ == "__main__":
    main()
