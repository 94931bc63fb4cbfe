"""The conformance suite of the `Runtime` port, run on every implementation that this machine has."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollart.adapters.clusters.local import LocalRuntime
from rollart.errors import NoPlace, PartDied, UsageError
from rollart.fleet import ActorSpec, Bundle, Node
from rollart.ports import Runtime
from rollart.sim import loop as virtual
from tests.contracts.ray_fixture import RayCluster, ray_cluster_of

HERE = "tests.contracts.test_runtime:"


class Counter:
    """A stateful actor."""

    def __init__(self) -> None:
        self.value = 0
        self.peak = self.running = 0
        self.barriers: dict[int, asyncio.Barrier] = {}

    def add(self, n: int) -> int:
        self.value += n
        return self.value

    def keep(self, values: list[int]) -> list[int]:
        self.kept = values
        return values

    def seen(self) -> list[int]:
        return self.kept

    async def slow(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"

    async def held(self, begun: str) -> str:
        """Leaves a file and does not end; done at once where the file was there."""
        if not os.path.exists(begun):
            with open(begun, "w"):
                await asyncio.sleep(3600.0)
        return "done"

    async def meet(self, parties: int) -> None:
        """Return when as many calls are inside: however slow the host, calls that may overlap do."""
        self.running += 1
        self.peak = max(self.peak, self.running)
        await self.barriers.setdefault(parties, asyncio.Barrier(parties)).wait()
        await asyncio.sleep(0.005)
        self.running -= 1

    def top(self) -> int:
        return self.peak

    def fail(self) -> None:
        raise KeyError("no such thing")


def nodes() -> list[Node]:
    return [
        Node("n0", {"gpu": "H800", "zone": "a"}, {"CPU": 2.0, "GPU": 1.0}),
        Node("n1", {"gpu": "H20", "zone": "b"}, {"CPU": 2.0, "GPU": 2.0}),
    ]


Scenario = Callable[[Any], Awaitable[None]]
Run = Callable[[Scenario], None]


def run_virtual(scenario: Callable[[], Awaitable[None]]) -> None:
    virtual.run(scenario())  # type: ignore[arg-type]


def run_real(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Two nodes as `nodes`, and one more that a test may kill."""
    pytest.importorskip("ray")
    spare = Node("n2", {"gpu": "H20", "zone": "c"}, {"CPU": 1.0})
    with ray_cluster_of([*nodes(), spare], tmp_path_factory.mktemp("ray")) as cluster:
        yield cluster


@pytest.fixture(
    params=[
        pytest.param(("local", run_virtual), id="local-virtual"),
        pytest.param(("local", run_real), id="local"),
        pytest.param(("ray", run_real), id="ray", marks=pytest.mark.slow),
    ]
)
def on(request: pytest.FixtureRequest) -> Run:
    """Run a scenario on a started runtime and close it."""
    backend, runner = request.param
    cluster: RayCluster | None = request.getfixturevalue("ray_cluster") if backend == "ray" else None

    def execute(scenario: Scenario) -> None:
        async def main() -> None:
            runtime = LocalRuntime(nodes()) if cluster is None else cluster.runtime()
            await runtime.start()
            try:
                await scenario(runtime)
            finally:
                await runtime.close()
            if isinstance(runtime, LocalRuntime):
                assert runtime.free == {n.id: n.total for n in runtime.nodes()}, "resources came back"
            else:
                assert not runtime.groups.bundles

        runner(main)

    return execute


def spec(name: str, **more: Any) -> ActorSpec:
    return ActorSpec(name, HERE + "Counter", **more)


def test_placement_follows_labels(on: Run) -> None:
    async def scenario(runtime: Runtime) -> None:
        for i, (selector, expected) in enumerate(
            [
                ({"gpu": "H20", "zone": "!c"}, "n1"),
                ({"gpu": "!H20"}, "n0"),
                ({"gpu": "in(H20,L4)", "zone": "b"}, "n1"),
                ({}, ""),
            ]
        ):
            handle = await runtime.spawn(spec(f"a{i}", labels=selector))
            assert handle.node == (expected or handle.node)
            assert handle.node in {n.id for n in runtime.nodes()}

    on(scenario)


def test_infeasible_request_is_an_error_at_once(on: Run) -> None:
    async def scenario(runtime: Runtime) -> None:
        with pytest.raises(UsageError, match="no node could ever hold it"):
            await runtime.spawn(spec("a", resources={"GPU": 3.0}))
        with pytest.raises(UsageError, match="H100"):
            await runtime.spawn(spec("b", labels={"gpu": "H100"}))

    on(scenario)


def test_arguments_and_results_are_values(on: Run) -> None:
    async def scenario(runtime: Runtime) -> None:
        handle = await runtime.spawn(spec("a"))
        mine = [1, 2]
        answer = await handle.call("keep", mine)
        mine.append(3)
        answer.append(4)
        assert await handle.call("seen") == [1, 2]

    on(scenario)


def test_an_exception_keeps_its_type(on: Run) -> None:
    async def scenario(runtime: Runtime) -> None:
        handle = await runtime.spawn(spec("a"))
        with pytest.raises(KeyError, match="no such thing"):
            await handle.call("fail")
        assert await handle.call("add", 2) == 2

    on(scenario)


def test_fifty_calls_at_once_and_the_concurrency_limit(on: Run) -> None:
    async def scenario(runtime: Runtime) -> None:
        handle = await runtime.spawn(spec("a", max_concurrency=50))
        limited = await runtime.spawn(spec("b", max_concurrency=3))
        async with asyncio.timeout(60):
            await asyncio.gather(*(handle.call("meet", 50) for _ in range(50)))
            await asyncio.gather(*(limited.call("meet", 3) for _ in range(9)))
        assert await handle.call("top") == 50
        assert await limited.call("top") == 3

    on(scenario)


def test_a_dead_actor_is_reported(on: Run, tmp_path: Path) -> None:
    async def scenario(runtime: Runtime) -> None:
        handle = await runtime.spawn(spec("a"))
        async with asyncio.timeout(60.0), asyncio.TaskGroup() as tasks:
            call = tasks.create_task(_swallow(handle.call("held", str(tmp_path / "begun"))))
            await there(tmp_path / "begun")
            await handle.kill()
        assert isinstance(call.result(), PartDied)
        with pytest.raises(PartDied):
            await handle.call("add", 1)

    on(scenario)


async def there(file: Path) -> None:
    """Set when a call has begun, which may be in another process."""
    while not file.exists():
        await asyncio.sleep(0.01)


async def _swallow(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except PartDied as error:
        return error


def test_events_report_starts_and_deaths(on: Run) -> None:
    async def scenario(runtime: Runtime) -> None:
        handle = await runtime.spawn(spec("a"))
        await handle.kill()
        kinds = []
        async for event in runtime.events():
            kinds.append((event.kind, event.subject))
            if event.kind == "actor_died":
                break
        assert kinds == [
            *(("node_up", node.id) for node in runtime.nodes()),
            ("actor_started", "a"),
            ("actor_died", "a"),
        ]

    on(scenario)


H20 = {"gpu": "H20", "zone": "b"}


def test_a_gang_is_held_and_its_actors_run_in_it(on: Run) -> None:
    async def scenario(runtime: Runtime) -> None:
        gang = [Bundle("a", {"GPU": 1.0, "CPU": 1.0}, {"gpu": "H800"}), Bundle("b", {"GPU": 2.0}, H20)]
        await runtime.reserve(gang, wait_s=60.0)
        first = await runtime.spawn(spec("first", resources={"GPU": 1.0}, bundle="b"))
        second = await runtime.spawn(spec("second", resources={"GPU": 1.0}, bundle="b"))
        other = await runtime.spawn(spec("other", resources={"GPU": 1.0}, bundle="a"))
        assert [first.node, second.node, other.node] == ["n1", "n1", "n0"]
        assert await first.call("add", 2) == 2
        with pytest.raises(UsageError, match="could never hold it"):
            await runtime.spawn(spec("large", resources={"GPU": 3.0}, bundle="b"))
        with pytest.raises(UsageError, match="none of that name"):
            await runtime.spawn(spec("nowhere", bundle="c"))
        with pytest.raises(UsageError, match="still in bundle 'b'"):
            await runtime.release("b")
        for handle in (first, second):
            await handle.kill()
        await runtime.release("b")
        await runtime.release("b")
        assert [runtime.reserved(name) for name in ("a", "b")] == [True, False]
        await runtime.reserve([Bundle("b", {"GPU": 2.0}, H20)], wait_s=60.0)

    on(scenario)


def test_a_gang_that_waits_holds_nothing(on: Run) -> None:
    async def scenario(runtime: Runtime) -> None:
        await runtime.reserve([Bundle("busy", {"GPU": 1.0}, H20)], wait_s=60.0)
        gang = [Bundle("a", {"GPU": 1.0}, {"gpu": "H800"}), Bundle("b", {"GPU": 2.0}, H20)]
        async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(runtime.reserve(gang, wait_s=100.0))
            await asyncio.sleep(0.01)
            await runtime.reserve([Bundle("between", {"GPU": 1.0}, {"gpu": "H800"})], wait_s=60.0)
            await runtime.release("between")
            assert not waiting.done()
            await runtime.release("busy")
        assert [runtime.reserved(name) for name in ("a", "b")] == [True, True]

    on(scenario)


def test_a_reservation_that_is_given_up_holds_nothing(on: Run) -> None:
    async def scenario(runtime: Runtime) -> None:
        gang = [Bundle("a", {"GPU": 1.0}, {"gpu": "H800"}), Bundle("b", {"GPU": 2.0}, H20)]
        for seconds in (0.0, 0.001, 0.01, 0.03):
            given_up = asyncio.ensure_future(runtime.reserve(gang, wait_s=60.0))
            await asyncio.sleep(seconds)
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
            if not runtime.reserved("a"):  # it was not so quick
                await runtime.reserve(gang, wait_s=60.0)
            for name in "ab":
                await runtime.release(name)

    on(scenario)


def test_two_gangs_that_want_the_same_come_one_after_the_other(on: Run) -> None:
    async def scenario(runtime: Runtime) -> None:
        order: list[str] = []

        async def take(name: str) -> None:
            gang = [Bundle(f"{name}{i}", {"GPU": 1.0}, H20) for i in range(2)]
            await runtime.reserve(gang, wait_s=100.0)
            order.append(name)
            for one in gang:
                await runtime.release(one.name)

        async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
            for name in ("x", "y"):
                tasks.create_task(take(name))
        assert sorted(order) == ["x", "y"]

    on(scenario)


def test_a_gang_without_room_names_the_missing_bundles(on: Run) -> None:
    async def scenario(runtime: Runtime) -> None:
        with pytest.raises(UsageError, match=r"wide \(pool 'h20'\).*no node could ever hold it"):
            await runtime.reserve([Bundle("wide", {"GPU": 3.0}, H20, about="pool 'h20'")], wait_s=60.0)
        with pytest.raises(UsageError, match=r"could never hold all of it at once.*\(pool 'h20'\)"):
            await runtime.reserve(
                [Bundle(f"g{i}", {"GPU": 1.0}, H20, about="pool 'h20'") for i in range(3)], wait_s=60.0
            )
        await runtime.reserve([Bundle("a", {"GPU": 2.0}, H20)], wait_s=60.0)
        with pytest.raises(UsageError, match="already"):
            await runtime.reserve([Bundle("a", {"GPU": 1.0}, H20)], wait_s=60.0)
        both = [Bundle("b", {"GPU": 1.0}, H20), Bundle("c", {"GPU": 1.0}, {"gpu": "H800"})]
        with pytest.raises(UsageError, match=r"after 0.1 s .*no room for b: [^;]*$"):
            await runtime.reserve(both, wait_s=0.1)
        assert [runtime.reserved(name) for name in "abc"] == [True, False, False]

    on(scenario)


@pytest.mark.slow
def test_an_autoscaler_gets_the_request_until_it_is_withdrawn(ray_cluster: RayCluster) -> None:
    """Reason for slow: a real cluster. The test reads the key that Ray's own autoscaler reads."""

    async def main() -> list[object]:
        from ray.autoscaler._private.constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
        from ray.experimental.internal_kv import _internal_kv_get

        async def requested() -> object:
            text = await runtime.link.run_blocking(_internal_kv_get, AUTOSCALER_RESOURCE_REQUEST_CHANNEL)
            return json.loads(text or "null")

        runtime = ray_cluster.runtime()
        await runtime.start()
        try:
            wanted = [Bundle("a", {"GPU": 2.0}, H20), Bundle("b", {}, H20), Bundle("c", {"CPU": 8.0}, {})]
            await runtime.ask(wanted)
            heard = [await requested()]
            await runtime.ask(())
            return [*heard, await requested()]
        finally:
            await runtime.close()

    assert asyncio.run(main()) == [[{"GPU": 2.0}, {"CPU": 8.0}], []]


@pytest.mark.slow
def test_reservations_of_a_killed_controller_are_released(ray_cluster: RayCluster) -> None:
    """Reason for slow: a real cluster, and a controller in a process of its own."""
    program = f"""
import asyncio, os, signal
from pathlib import Path
from tests.contracts.ray_fixture import RayCluster
from rollart.fleet import Bundle
from tests.contracts.test_runtime import H20
async def main():
    runtime = RayCluster(Path({str(ray_cluster.directory)!r}), {ray_cluster.address!r}).runtime()
    await runtime.start()
    await runtime.reserve([Bundle("theirs", {{"GPU": 2.0}}, H20)], wait_s=60.0)
    print("holds", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=120)
    assert (done.stdout, done.returncode) == (b"holds\n", -signal.SIGKILL)

    async def main() -> None:
        runtime = ray_cluster.runtime()
        await runtime.start()
        try:
            await runtime.reserve([Bundle("ours", {"GPU": 2.0}, H20)], wait_s=60.0)
        finally:
            await runtime.close()

    asyncio.run(main())


@pytest.mark.slow
def test_the_death_of_a_ray_node_moves_its_actors(ray_cluster: RayCluster) -> None:
    """Reason for slow: a real cluster. It is the last test of this cluster: a node of it is gone."""

    async def main() -> None:
        runtime = ray_cluster.runtime()
        await runtime.start()
        try:
            await runtime.reserve([Bundle("full", {"CPU": 2.0}, H20)], wait_s=60.0)
            await runtime.reserve([Bundle("held", {"CPU": 1.0}, {"gpu": "H20"})], wait_s=60.0)
            await runtime.release("full")
            inside = await runtime.spawn(spec("d", resources={"CPU": 1.0}, bundle="held"))
            assert inside.node == "n2", "where there was room"
            movable = await runtime.spawn(spec("a", labels={"zone": "in(b,c)"}))
            bound = await runtime.spawn(spec("b", labels={"zone": "c"}))
            both = [movable, bound]
            if movable.node != "n2":  # Ray chose: send it to the node that dies
                both[0] = await runtime.spawn(spec("c", labels={"zone": "c"}))
            calls = [asyncio.ensure_future(_swallow(h.call("slow", 600.0))) for h in both]
            ray_cluster.kill_node("n2")
            async for event in runtime.events():
                if (event.kind, event.subject) == ("node_down", "n2"):
                    break
            died = await asyncio.gather(*calls)
            assert all(isinstance(error, PartDied) for error in died), died
            with pytest.raises(NoPlace, match="no node could ever hold it"):
                await bound.call("add", 1)
            assert await movable.call("add", 1) == 1
            assert movable.node == "n1"
            async with asyncio.timeout(120):
                assert await inside.call("add", 1) == 1
            assert inside.node == "n1", "its bundle is held elsewhere"
        finally:
            await runtime.close()

    asyncio.run(main())
