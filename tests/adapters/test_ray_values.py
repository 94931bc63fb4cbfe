"""Values that cross Ray, without a Ray cluster."""

from __future__ import annotations

import asyncio
import pickle
import socket
import sys
import threading
from unittest.mock import Mock

import pytest

import rollart
from rollart.adapters.clusters import ray_link
from rollart.adapters.clusters.ray import RayHandle, RayIncarnation, RayRuntime
from rollart.adapters.clusters.ray_cluster import health_settings
from rollart.adapters.clusters.ray_host import RayActorHost, pack
from rollart.errors import LeaseExpired, PartDied, ProviderError, RunFailed, UsageError
from rollart.fleet import ActorSpec


class Thing:
    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, n: int) -> int:
        self.value += n
        return self.value

    def expire(self) -> None:
        raise LeaseExpired("a", "b", 1.0)


def test_a_tensor_is_refused_wherever_it_is() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(UsageError, match=r"a tensor of \(2, 3\)"):
        pack(({"weights": [torch.zeros(2, 3)]}, {}))
    assert pickle.loads(pack(([1, 2], {"a": "b"}))) == ([1, 2], {"a": "b"})


def test_a_host_answers_with_values_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", Mock())

    async def main() -> None:
        host = RayActorHost()
        booted, _, _ = await host.boot(f"{__name__}:Thing", pack(((1,), {})), rollart.__version__)
        assert booted
        assert pickle.loads((await host.call("add", pack(((2,), {}))))[1]) == 3
        fine, error = await host.call("expire", pack(((), {})))
        assert not fine
        assert isinstance(pickle.loads(error), RunFailed), (
            "an error that does not survive pickling is converted to text"
        )
        assert "waited 1.0 s for b" in str(pickle.loads(error))

    asyncio.run(main())


def test_a_node_of_another_version_refuses_its_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Mock()
    ray.get_runtime_context.return_value.get_node_id.return_value = "0123456789abcdef"
    monkeypatch.setitem(sys.modules, "ray", ray)

    async def main() -> None:
        init = pack(((1,), {}))
        fine, error, node = await RayActorHost().boot(f"{__name__}:Thing", init, "0.0.1")
        assert (fine, node) == (False, "0123456789abcdef")
        raised = pickle.loads(error)
        assert isinstance(raised, UsageError)
        assert f"node 0123456789ab has rollart {rollart.__version__} and the controller 0.0.1" in str(raised)
        assert (await RayActorHost().boot(f"{__name__}:Thing", init, rollart.__version__))[0]

    asyncio.run(main())


@pytest.mark.parametrize("health_s", [0.5, 3.0, 30.0])
def test_a_silent_node_is_lost_in_time(health_s: float) -> None:
    ray = health_settings(health_s)
    checks, period, limit = (ray[f"health_check_{k}"] for k in ("failure_threshold", "period_ms", "timeout_ms"))
    assert checks * limit + (checks - 1) * period <= health_s * 1000


class Stopping(RayHandle):
    """A handle whose actor takes its time to stop, and counts its starts."""

    starts = 0

    async def boot(self) -> None:
        self.starts += 1
        self._incarnation = RayIncarnation(None, "n0")

    async def _stop(self, life: RayIncarnation) -> None:
        await asyncio.sleep(0.01)


def test_an_address_without_a_server_is_refused_before_ray_connects() -> None:
    with socket.socket() as silent:  # bound, so that no other process listens there
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ProviderError, match=f"no Ray cluster at '{address}'"):
            asyncio.run(RayRuntime(address).start())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak gRPC"),
        (b"-ERR\r\n", "does not speak gRPC"),
        (None, "no answer within 0.2 s"),
    ],
)
@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_server_that_is_not_rays_is_found_out_before_ray_is_asked(
    monkeypatch: pytest.MonkeyPatch, scheme: str, answer: bytes | None, message: str
) -> None:
    """Ray would try for minutes to speak to it, and cannot be interrupted."""
    monkeypatch.setattr(ray_link, "ANSWER_S", 0.2)
    monkeypatch.setattr(ray_link, "connect", lambda address: pytest.fail("Ray was asked"))
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answer is None:
            await ended.wait()
        else:
            writer.write(answer)
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            address = f"{scheme}127.0.0.1:{server.sockets[0].getsockname()[1]}"
            with pytest.raises(ProviderError, match=f"no Ray cluster at '{address}': .*{message}"):
                await RayRuntime(address).start()
            ended.set()

    asyncio.run(main())


def test_a_connection_that_ray_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of gRPC that is another program's."""
    monkeypatch.setattr(ray_link, "CONNECTED_S", 0.1)
    ended = threading.Event()
    monkeypatch.setattr(ray_link, "connect", lambda address: ended.wait())

    async def main() -> None:
        async with asyncio.timeout(30.0):
            await ray_link.connect_in_thread("127.0.0.1:6379")

    try:
        with pytest.raises(ProviderError, match=r"does not answer Ray's client within 0\.1 s.*runtime\.address"):
            asyncio.run(main())
    finally:
        ended.set()


def test_a_call_while_an_actor_is_killed_does_not_bring_it_back() -> None:
    async def main() -> None:
        runtime = Mock()
        handle = Stopping(runtime, ActorSpec(name="engine-0", factory="a:B"))
        await handle.boot()
        killing = asyncio.create_task(handle.kill())
        await asyncio.sleep(0)
        with pytest.raises(PartDied, match="no restarts left"):
            await handle.call("start")
        await killing
        assert handle.starts == 1
        assert runtime.forget.called

    asyncio.run(main())
