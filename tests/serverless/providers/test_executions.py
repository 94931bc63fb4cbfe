"""How often a call is executed when its connection is lost, refused, or given up by a caller who has no patience."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from aiohttp import web

from serverless.deploy.package import Package
from serverless.pipeline.offload import Offload
from serverless.pipeline.stages import PipelineSpec
from serverless.providers.http import Bearer, Endpoint, HttpBackend
from serverless.providers.http_server import FunctionHttpServer
from serverless.types import FaultKind, InfraFault, Item, Outcome, Scored
from serverless.workers.local import LocalBackend
from tests.serverless.support import item, package, until

pytestmark = pytest.mark.slow  # real sockets and processes


class Cutting:
    """A TCP proxy that sends requests on and loses the connections numbered in `cut`, where their answer would be."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.cut: set[int] = set()
        self.until: Callable[[], bool] | None = None
        """Events before a connection is lost; by default it is lost after a while."""
        self.seen = 0
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.seen += 1
        lose = self.seen in self.cut
        onward, answers = await asyncio.open_connection("127.0.0.1", self._port)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                answers.write(head + await reader.readexactly(length))
                if lose:
                    await (asyncio.sleep(0.2) if self.until is None else until(self.until))
                    writer.transport.abort()
                    await asyncio.sleep(0.05)
                    break
                answer = await onward.readuntil(b"\r\n\r\n")
                length = int(answer.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                writer.write(answer + await onward.readexactly(length))
        answers.transport.abort()
        writer.transport.abort()

    async def __aenter__(self) -> Cutting:
        self._server = await asyncio.start_server(self._one, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()


def counted(**settings: Any) -> Package:
    return package("counted", deterministic=settings.pop("deterministic", True), **settings)


@contextlib.asynccontextmanager
async def fronted(host: Package) -> AsyncIterator[Cutting]:
    """Our own front over real workers, behind a proxy."""
    async with LocalBackend() as local, FunctionHttpServer(local, token="t") as front:
        await local.deploy(host)
        async with Cutting(int(front.url.rpartition(":")[2])) as proxy:
            yield proxy


async def ask(proxy: Cutting, items: Sequence[Item], one: Package, warm: Item | None = None) -> list[Outcome]:
    """Through the whole pipeline; `warm` first, on the first connection."""
    endpoint = Endpoint(f"http://127.0.0.1:{proxy.port}/functions/counted", Bearer("t"))
    async with HttpBackend({"counted": endpoint}) as backend, Offload([one], backend) as offload:
        if warm is not None:
            assert await offload.submit("counted", warm, 60.0) == Scored(7.0)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(offload.submit("counted", i, 60.0)) for i in items]
        return [task.result() for task in tasks]


def executions(file: pathlib.Path) -> Counter[str]:
    return Counter(file.read_text().split()) if file.exists() else Counter()


@pytest.mark.parametrize("max_items", [1, 4])
def test_a_function_slower_than_the_read_time_out_is_executed_once_per_call(
    max_items: int, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "count"
    items = [item(str(n), file=str(file), seconds=5.0, n=n) for n in range(4)]
    shape = {"batch": {"max_items": max_items, "max_wait_ms": 50.0}, "concurrency": 4}

    async def main() -> list[Outcome]:
        async with fronted(counted(warm=4, **shape)) as proxy:
            return await ask(proxy, items, counted(timeout_s=1.0, init_timeout_s=1.0, **shape))

    outcomes = asyncio.run(main())
    assert {o.kind for o in outcomes if isinstance(o, InfraFault)} == {FaultKind.TIMEOUT}
    assert len(outcomes) == 4
    # The items of one call run one after the other, and unreached items end with it.
    assert set(executions(file).values()) == {1}
    assert max_items == 4 or set(executions(file)) == set("0123")


@pytest.mark.parametrize("seconds", [0.0, 0.5], ids=["when it had ended", "while it ran"])
def test_a_call_that_our_front_lost_the_connection_of_is_answered_and_executed_once(
    seconds: float, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "count"
    one = counted(concurrency=8, batch={"max_items": 1})
    items = [item(str(n), file=str(file), seconds=seconds, n=n) for n in range(4)]

    async def main() -> list[Outcome]:
        async with fronted(one) as proxy:
            proxy.cut = {2, 3, 4}  # the first is the warm one's, which is kept and used again
            return await ask(proxy, items, one, warm=item("warm", file=str(file)))

    assert asyncio.run(main()) == [Scored(7.0)] * 4
    assert executions(file) == Counter(["warm", *"0123"])


def test_a_front_that_has_not_said_that_it_knows_keys_is_not_asked_twice(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "count"
    one = counted(batch={"max_items": 1})

    async def main() -> list[Outcome]:
        async with fronted(one) as proxy:
            proxy.cut, proxy.until = {1}, file.exists
            return await ask(proxy, [item("a", file=str(file))], one)

    [fault] = asyncio.run(main())
    assert isinstance(fault, InfraFault)
    assert (fault.kind, fault.retryable) == (FaultKind.UNAVAILABLE, False)
    assert "may have been executed" in fault.detail
    assert executions(file) == Counter("a")


@pytest.mark.parametrize(
    ("deterministic", "allowed", "requests"), [(True, False, 1), (False, True, 1), (True, True, 2)]
)
@pytest.mark.parametrize("gateway", [0, 502, 504], ids=["cut", "502", "504"])
def test_a_foreign_host_is_called_again_only_if_that_does_no_harm_and_is_allowed(
    deterministic: bool, allowed: bool, requests: int, gateway: int
) -> None:
    seen: list[str] = []

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        seen.append(request.headers["Idempotency-Key"])
        if len(seen) == 1 and gateway:
            return web.Response(status=gateway, text="upstream", headers={"X-Amzn-RequestId": "gateway-7"})
        if len(seen) == 1:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response([{"id": "a", "aggregate_reward_score": 3.0}])

    async def main() -> Outcome:
        handler = web.Server(handle, access_log=None)
        server = await asyncio.get_running_loop().create_server(handler, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/f"
        one = counted(deterministic=deterministic)
        settings = PipelineSpec.model_validate({"retry": {"lost": allowed}})
        try:
            async with (
                HttpBackend({"counted": Endpoint(url)}) as backend,
                Offload([one], backend, settings=settings) as offload,
            ):
                return await offload.submit("counted", item("a"), 60.0)
        finally:
            server.close()
            await handler.shutdown(1.0)

    outcome = asyncio.run(main())
    assert len(seen) == requests
    if requests == 2:
        assert outcome == Scored(3.0)
        assert seen[0] != seen[1], "it is another call, and says so"
    else:
        assert isinstance(outcome, InfraFault)
        assert (outcome.kind, outcome.retryable) == (FaultKind.UNAVAILABLE, False)


def test_a_caller_who_hangs_up_for_good_ends_its_keyed_call(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "count"
    one = counted(batch={"max_items": 1})

    async def main() -> None:
        async with LocalBackend() as local, FunctionHttpServer(local) as front:
            await local.deploy(one)
            endpoints = {"counted": Endpoint(f"{front.url}/functions/counted")}
            async with HttpBackend(endpoints) as backend, asyncio.TaskGroup() as group:
                await backend.deploy(one)
                event = [{"id": "a", "messages": [], "metadata": {"file": str(file), "seconds": 60.0}}]
                call = group.create_task(backend.invoke("counted", event, deadline_s=60.0))
                await until(file.exists)
                assert local.load("counted").workers == 1
                call.cancel()
                await until(lambda: local.load("counted").workers == 0)

    asyncio.run(main())
    assert executions(file) == Counter("a")
