"""Speed of the local function backend; of the same workers on a host that is reached by sockets, as on a cluster; and
of the same function under AWS's own runtime client beside it.

    python benchmarks/functions.py [--json FILE] [--rounds 3] [--uvloop] [--quick]

`exact` compares two short strings, so the figure measures the layer. Wall time, the best of a few rounds, since the
machine has other load, and beside it the CPU time of the calling process. Latencies are of one caller who waits for
each answer, rates of eight (backend), 256 (pipeline) and 16 (HTTP, from a process of its own). A cold start is from the
call to its answer, after the zygote is ready.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import pathlib
import sys
import tempfile
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from serverless.deploy.package import Package, build
from serverless.pipeline.offload import Offload
from serverless.providers.base import Backend
from serverless.providers.http_server import FunctionHttpServer
from serverless.spec import FunctionSpec
from serverless.types import Item, Scored
from serverless.wire import encode
from serverless.workers.host import FUNCTION_HOST_TOKEN
from serverless.workers.local import LocalBackend, Runtime
from serverless.workers.remote import HostedBackend, WorkerHosts

SOURCE = """
from serverless.declare import reward

@reward(memory_mb=128, timeout_s=30)
def exact(sample):
    return float(sample.completion == sample.reference_answer)
"""

TORCH = """
import torch
from serverless.declare import reward

@reward(memory_mb=1024, timeout_s=30, preload=("torch",))
def by_torch(sample):
    return float(torch.ones(8).sum())
"""


@dataclass(frozen=True, slots=True)
class Result:
    """One line. `target` 0: none; `below` whether less is better."""

    name: str
    value: float
    unit: str
    target: float = 0.0
    below: bool = False

    @property
    def verdict(self) -> str:
        if not self.target:
            return ""
        met = self.value <= self.target if self.below else self.value >= self.target
        return "met" if met else "MISSED"


def main() -> None:
    if sys.argv[1:2] == ["client"]:
        url, body, requests, connections = sys.argv[2:]
        print(asyncio.run(client(url, body.encode(), int(requests), int(connections))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--uvloop", action="store_true", help="run the caller's loop on uvloop")
    parser.add_argument("--quick", action="store_true", help="a tenth of the calls")
    args = parser.parse_args()
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(pathlib.Path(directory), rounds=args.rounds, scale=0.1 if args.quick else 1.0)
        if args.uvloop:
            import uvloop

            uvloop.run(bench.all())
        else:
            asyncio.run(bench.all())
    loop = "uvloop" if args.uvloop else "asyncio"
    print(f"{'':52} {'measured':>12} {'target':>10}   {os.cpu_count()} CPUs, {loop}, load average {before:.1f}")
    for one in bench.results:
        target = f"{'<=' if one.below else '>='} {one.target:g}" if one.target else ""
        print(f"{one.name:52} {one.value:>12,.3g} {target:>10}   {one.unit} {one.verdict}")
    for line in bench.skipped:
        print(line)
    if args.json:
        lines = [asdict(one) | {"verdict": one.verdict} for one in bench.results]
        args.json.write_text(
            json.dumps({"schema_version": 1, "load": before, "loop": loop, "skipped": bench.skipped, "results": lines})
        )


class Bench:
    """Runs every case once; `results` and `skipped` are printed."""

    def __init__(self, directory: pathlib.Path, *, rounds: int, scale: float) -> None:
        self._directory = directory
        self._rounds = rounds
        self._scale = scale
        self.results: list[Result] = []
        self.skipped: list[str] = []
        (directory / "exact.py").write_text(SOURCE)
        (directory / "by_torch.py").write_text(TORCH)

    async def all(self) -> None:
        exact = self._package("exact", concurrency=4)
        await self._backend("local", opened(exact, "rollart"), self._count(20_000), targets=True)
        await self._backend("on a host", hosted(exact), self._count(20_000), targets=False)
        await self._pipeline(self._count(20_000))
        await self._front(self._count(10_000))
        await self._cold("cold start, plain function", "exact", "rollart", 10.0)
        if importlib.util.find_spec("torch") is not None:
            await self._cold("cold start, function that uses torch", "by_torch", "rollart", 40.0)
        else:
            self.skipped.append("skipped: torch is not installed")
        if importlib.util.find_spec("awslambdaric") is not None:
            await self._backend("awslambdaric", opened(exact, "awslambdaric"), self._count(1_000), targets=False)
            await self._cold("awslambdaric, cold start", "exact", "awslambdaric", 0.0)
        else:
            self.skipped.append("skipped: awslambdaric is not installed (pip install awslambdaric)")

    def _count(self, calls: int) -> int:
        return max(200, int(calls * self._scale))

    def _package(self, name: str, **settings: Any) -> Package:
        return build(FunctionSpec(name=name, source=f"{name}.py", **settings), base=self._directory)

    def _add(self, name: str, value: float, unit: str, target: float = 0.0, *, below: bool = False) -> None:
        self.results.append(Result(name, value, unit, target, below))

    async def _best(self, rate: Callable[[], Awaitable[float]]) -> float:
        return max([await rate() for _ in range(self._rounds)])

    async def _backend(
        self, label: str, opening: contextlib.AbstractAsyncContextManager[Backend], calls: int, *, targets: bool
    ) -> None:
        event = [encode(item("a"))]
        batch = [encode(item(str(n))) for n in range(50)]
        async with opening as backend:

            async def call(event: list[dict[str, Any]]) -> None:
                reply = await backend.invoke("exact", event, deadline_s=30.0)
                assert reply.fault is None, reply.fault

            await colocation(200, 8, lambda: call(event))
            latencies = []
            for _ in range(self._rounds):
                times = sorted([await timed(call(event)) for _ in range(calls // 10)])
                latencies.append((times[len(times) // 2], times[int(len(times) * 0.99)]))
            p50, p99 = min(latencies)
            self._add(f"{label}, warm call p50", p50 * 1000.0, "ms", 0.15 if targets else 0.0, below=True)
            self._add(f"{label}, warm call p99", p99 * 1000.0, "ms")
            began = time.process_time()
            singles = await self._best(lambda: colocation(calls, 8, lambda: call(event)))
            spent = (time.process_time() - began) / calls / self._rounds
            self._add(f"{label}, single invocations", singles, "/s", 12_000.0 if targets else 0.0)
            self._add(f"{label}, caller's CPU per invocation", spent * 1e6, "us")
            batched = await self._best(lambda: colocation(calls // 20, 8, lambda: call(batch)))
            self._add(f"{label}, items, 50 a call", batched * 50, "/s", 100_000.0 if targets else 0.0)

    async def _pipeline(self, items: int) -> None:
        for most, target in ((1, 6_000.0), (50, 0.0)):
            one = self._package("exact", concurrency=4, batch={"max_items": most, "max_wait_ms": 1.0})
            async with opened(one, "rollart") as backend, Offload([one], backend) as offload:
                numbers = iter(range(10**9))

                async def submit(offload: Offload = offload, numbers: Any = numbers) -> None:
                    outcome = await offload.submit("exact", item(str(next(numbers))), 60.0)
                    assert isinstance(outcome, Scored), outcome

                await colocation(200, 8, submit)
                began = time.process_time()
                rate = await self._best(lambda work=submit: colocation(items, 256, work))  # type: ignore[misc]
                batching = "one item a call" if most == 1 else f"up to {most} items a call"
                self._add(f"whole pipeline, {batching}", rate, "items/s", target)
                spent = (time.process_time() - began) / items / self._rounds
                self._add(f"whole pipeline, {batching}, caller's CPU per item", spent * 1e6, "us")

    async def _front(self, requests: int) -> None:
        body = json.dumps([encode(item("a"))])
        async with (
            opened(self._package("exact", concurrency=4), "rollart") as backend,
            FunctionHttpServer(backend) as front,
        ):
            for path, label in (
                ("/functions/exact", "HTTP front, plain list"),
                ("/2015-03-31/functions/exact/invocations", "HTTP front, Lambda's Invoke"),
            ):
                rates = [await self._client(front.url + path, body, requests) for _ in range(self._rounds)]
                self._add(label, max(rates), "requests/s", 3_000.0)

    async def _client(self, url: str, body: str, requests: int) -> float:
        arguments = [__file__, "client", url, body, str(requests), "16"]
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        return float(output)

    async def _cold(self, label: str, name: str, runtime: Runtime, target_ms: float) -> None:
        async with opened(self._package(name, keep_alive_s=0.0), runtime) as backend:
            times = []
            for n in range(1 + 10 * self._rounds):
                while backend.load(name).workers:
                    await asyncio.sleep(0.001)
                began = time.perf_counter()
                reply = await backend.invoke(name, [encode(item(str(n)))], deadline_s=60.0)
                times.append(time.perf_counter() - began)
                assert reply.fault is None, reply.fault
                assert reply.invocation is not None
                assert reply.invocation.cold_start_s > 0.0
            times = sorted(times[1:])  # the first one waits for the zygote
            self._add(f"{label}, median", times[len(times) // 2] * 1000.0, "ms", target_ms, below=True)


def item(key: str) -> Item:
    """Each of another content, so that none is a duplicate of another."""
    messages = ({"role": "user", "content": "Say it."}, {"role": "assistant", "content": key})
    return Item(key, messages, key)


@contextlib.asynccontextmanager
async def opened(package: Package, runtime: Runtime) -> AsyncIterator[LocalBackend]:
    async with LocalBackend(runtime=runtime) as backend:
        await backend.deploy(package)
        yield backend


@contextlib.asynccontextmanager
async def hosted(package: Package) -> AsyncIterator[Backend]:
    """Its workers in a host's program on this machine."""
    program = [sys.executable, "-m", "serverless.workers.host"]
    environment = {**os.environ, FUNCTION_HOST_TOKEN: "benchmark"}
    process = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE, env=environment)
    assert process.stdout is not None
    hosts = WorkerHosts()
    try:
        address = (await process.stdout.readline()).decode().split()[1]
        link = await hosts.join("host", address, "benchmark")
        async with HostedBackend(hosts) as backend:
            await backend.deploy(package)
            yield backend
        await link.aclose()
    finally:
        process.terminate()
        await process.wait()


async def timed(work: Awaitable[None]) -> float:
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


async def colocation(count: int, callers: int, work: Callable[[], Awaitable[None]]) -> float:
    """Calls per second, of so many callers at once who go on until `count` calls are made."""
    left = count

    async def caller() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await work()

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(caller())
    return count / (time.perf_counter() - began)


async def client(url: str, body: bytes, requests: int, connections: int) -> float:
    """A load generator that costs little: the same bytes over kept connections. Requests per second."""
    parts = urllib.parse.urlsplit(url)
    head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
    message = head.encode() + body

    async def connection(streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
        streams.append(await asyncio.open_connection(parts.hostname, parts.port))

    streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    for _ in range(connections):
        await connection(streams)

    async def request() -> None:
        reader, writer = streams.pop()
        writer.write(message)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200"), head
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        answer = await reader.readexactly(length)
        assert b'"aggregate_reward_score": 1.0' in answer, answer
        streams.append((reader, writer))

    await colocation(min(200, requests), connections, request)
    rate = await colocation(requests, connections, request)
    for _, writer in streams:
        writer.close()
    return rate


if __name__ == "__main__":
    main()
