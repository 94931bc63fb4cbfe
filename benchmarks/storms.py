"""Refusals by the hundred, and runs that share an account, on virtual time: no processes, the same figures each time.

    python benchmarks/storms.py [--json]

storm    200 calls of 50 ms that arrive at once, or in four bursts, where 6 run at once; a refusal asks for a pause of
         1 s, or for none. In dips, 2 of the 6 run in the last 0.3 s of each second. Seconds as a multiple of those of
         a semaphore that knows the limit at every moment; refused calls beside them (target: at most 1.3)
           rollart      the pipeline
           SDK          all calls at once, each repeated after its pause, or after the standard mode of AWS's SDKs:
                        full jitter in 1, 2, 4, ... 20 s, without its limit of attempts, which would lose most calls
           semaphore    the null model: 1.00
sharing  runs that always have calls, each 3 s after the one before, where 12 or 24 run at once and the network takes
         4 ms each way: Jain's index of their calls from 10 s after the last began (target: 0.95), the share of the
         capacity that they use together, and the refused share of the calls
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import random
import tempfile
from collections.abc import Awaitable, Callable

from rollart.sim import loop as virtual
from rollart.testing.functions import LimitedAccount, LimitedBackend, fairness
from serverless.deploy.package import Package, build
from serverless.pipeline.offload import Offload
from serverless.spec import FunctionSpec
from serverless.types import Item, Scored

CALLS, CALL_S, LIMIT, NETWORK_S = 200, 0.05, 6, 0.004
SHAPES = {"one burst": (1, None), "four bursts": (4, None), "dips": (1, 2)}


def function(concurrency: int) -> Package:
    with tempfile.TemporaryDirectory() as name:
        (pathlib.Path(name) / "score.py").write_text("def score(item):\n    return 1.0\n")
        spec = FunctionSpec(
            name="score", source="score.py", handler="score", batch={"max_items": 1}, concurrency=concurrency
        )
        return build(spec, base=pathlib.Path(name))


def item(name: str) -> Item:
    return Item(name, ({"role": "assistant", "content": name},))


async def storm(bursts: int, one: Callable[[int], Awaitable[None]]) -> float:
    """Seconds until all calls have been answered."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.TaskGroup() as group:
        for n in range(CALLS):
            if n and n % (CALLS // bursts) == 0:
                await asyncio.sleep(0.5)
            group.create_task(_awaited(one(n)))
    return loop.time() - began


async def _awaited(call: Awaitable[None]) -> None:
    await call


async def with_pipeline(backend: LimitedBackend, bursts: int) -> float:
    async with Offload([function(CALLS)], backend) as offload:

        async def one(n: int) -> None:
            assert isinstance(await offload.submit("score", item(str(n)), 1000.0), Scored)

        return await storm(bursts, one)


async def with_sdk(backend: LimitedBackend, bursts: int) -> float:
    rng = random.Random(0)

    async def one(n: int) -> None:
        wait_s = 1.0
        while (fault := (await backend.invoke("score", [{"id": str(n)}], deadline_s=1000.0)).fault) is not None:
            await asyncio.sleep(fault.retry_after_s or rng.uniform(0.0, wait_s))
            wait_s = min(20.0, 2.0 * wait_s)

    return await storm(bursts, one)


async def with_semaphore(account: LimitedAccount, bursts: int) -> float:
    backend, turn = account.backend(CALL_S), asyncio.Condition()

    async def one(n: int) -> None:
        async with turn:
            await turn.wait_for(lambda: account.running < account.capacity)
            call = asyncio.create_task(backend.invoke("score", [{"id": str(n)}], deadline_s=1000.0))
            await asyncio.sleep(0.0)
        assert (await call).fault is None
        async with turn:
            turn.notify_all()

    async def clock() -> None:
        while True:
            await asyncio.sleep(0.05)
            async with turn:
                turn.notify_all()

    ticking = asyncio.create_task(clock())
    try:
        return await storm(bursts, one)
    finally:
        ticking.cancel()


async def share(runs: int, capacity: int) -> dict[str, float]:
    account, loop, package = LimitedAccount(capacity), asyncio.get_running_loop(), function(64)
    last = 3.0 * (runs - 1)
    end = last + 30.0
    backends = [
        account.backend(CALL_S, spread=0.3, network_s=NETWORK_S, retry_after_s=1.0, seed=n) for n in range(runs)
    ]

    async def run(position: int) -> None:
        await asyncio.sleep(3.0 * position)
        numbers = iter(range(1_000_000))

        async def caller(offload: Offload) -> None:
            while loop.time() < end:
                await offload.submit("score", item(f"{position}.{next(numbers)}"), 1000.0)

        async with (
            Offload([package], backends[position], seed=position) as offload,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(4 * capacity):
                group.create_task(caller(offload))

    async with asyncio.TaskGroup() as group:
        for position in range(runs):
            group.create_task(run(position))
    shares = [sum(last + 10.0 <= time < end for time in backend.ended) for backend in backends]
    calls, refused = sum(len(b.ended) for b in backends), sum(b.refused for b in backends)
    return {
        "fairness": fairness(shares),
        "used": sum(shares) * (CALL_S + 2.0 * NETWORK_S) / (capacity * 20.0),
        "refused": refused / (calls + refused),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    for shape, (bursts, dips) in SHAPES.items():
        known = virtual.run(with_semaphore(LimitedAccount(LIMIT, dips=dips), bursts))
        for pause in (1.0, None):
            row = {"semaphore_s": known}
            for name, client in (("rollart", with_pipeline), ("SDK", with_sdk)):
                backend = LimitedAccount(LIMIT, dips=dips).backend(CALL_S, retry_after_s=pause)
                row[name] = virtual.run(client(backend, bursts)) / known
                row[f"{name}_refused"] = backend.refused
            results[f"storm, {shape}, {'Retry-After 1 s' if pause else 'no header'}"] = row
    for runs, capacity in ((1, 12), (2, 12), (3, 24), (4, 24)):
        results[f"sharing, {runs} runs, {capacity} calls"] = virtual.run(share(runs, capacity))
    if args.json:
        print(json.dumps({"schema_version": 1, "results": results}))
        return
    for name, figures in results.items():
        print(f"{name:36}", "  ".join(f"{key} {value:.3g}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
