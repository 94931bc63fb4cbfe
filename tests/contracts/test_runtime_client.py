"""The conformance suite of the `Runtime` port through Ray's client, and the end of its server."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from rollart.adapters.clusters import ray_link
from rollart.adapters.clusters.ray import RayRuntime
from rollart.adapters.clusters.ray_cluster import TOKEN, auth_environment
from rollart.errors import PartDied, ProviderError
from rollart.fleet import Node
from tests.contracts import test_runtime as suite
from tests.contracts.ray_fixture import IMPORTS, RayCluster, client_server_of, ray_cluster_of
from tests.contracts.test_runtime import Run, Scenario, nodes, spec

pytestmark = pytest.mark.slow
"""Reason: a real cluster, and a real client server."""

globals().update(
    {
        name: test
        for name, test in vars(suite).items()
        if name.startswith("test_") and "on" in inspect.signature(test).parameters
    }
)


@dataclass(frozen=True)
class Served:
    address: str
    cluster: RayCluster
    process: Any

    def runtime(self, **env: str) -> RayRuntime:
        return RayRuntime(self.address, env={**auth_environment(self.cluster.directory / TOKEN), **env})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    ray = pytest.importorskip("ray")
    spare = Node("n2", {"gpu": "H20", "zone": "c"}, {"CPU": 1.0})
    with (
        ray_cluster_of([*nodes(), spare], tmp_path_factory.mktemp("ray"), IMPORTS) as cluster,
        client_server_of(cluster) as (address, process),
    ):
        yield Served(address, cluster, process)
        ray.shutdown()


@pytest.fixture
def on(served: Served, monkeypatch: pytest.MonkeyPatch) -> Run:
    """One connection for all runtimes of a module: the server starts a process for each that is made."""
    import ray

    connect = ray_link.connect_in_thread

    async def connect_once(address: str) -> None:
        if not ray.is_initialized():
            await connect(address)

    monkeypatch.setattr("rollart.adapters.clusters.ray.connect_in_thread", connect_once)
    monkeypatch.setattr(ray, "shutdown", lambda: None)

    def execute(scenario: Scenario) -> None:
        async def main() -> None:
            runtime = served.runtime()
            await runtime.start()
            try:
                await scenario(runtime)
            finally:
                await runtime.close()
            assert not runtime.groups.bundles

        asyncio.run(main())

    return execute


def test_a_call_that_is_given_up_while_it_is_made_is_cancelled(on: Run) -> None:
    async def scenario(runtime: Any) -> None:
        handle = await runtime.spawn(spec("a", max_concurrency=2))
        for _ in range(5):  # of two places none is left taken
            call = asyncio.ensure_future(handle.call("slow", 3600.0))
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        async with asyncio.timeout(60):
            await asyncio.gather(*(handle.call("meet", 2) for _ in range(2)))

    on(scenario)


def test_the_end_of_the_server_ends_every_call_with_one_line(served: Served) -> None:
    """It is the last test of this cluster: its client server is gone."""
    import ray

    ray.shutdown()

    async def main() -> None:
        runtime = served.runtime(RAY_CLIENT_RECONNECT_GRACE_PERIOD="3")  # 30 s else
        await runtime.start()
        try:
            handle = await runtime.spawn(spec("a"))
            call = asyncio.ensure_future(handle.call("slow", 3600.0))
            assert await handle.call("add", 1) == 1
            served.process.kill()
            async with asyncio.timeout(240):
                with pytest.raises(ProviderError, match=r"client server at 'ray://.* is lost.*--resume") as caught:
                    await call
                assert "\n" not in str(caught.value)
                with pytest.raises(ProviderError, match="is lost"):
                    await handle.call("add", 1)
                with pytest.raises((ProviderError, PartDied), match="is lost"):
                    await runtime.spawn(spec("b"))
        finally:
            with contextlib.suppress(ProviderError):
                async with asyncio.timeout(120):
                    await runtime.close()

    asyncio.run(main())
    assert not ray.is_initialized(), "no cluster of its own was made"
