"""Nodes required by a plan's parts, and the errors if there are none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from placement.types import Role
from rollart.adapters.clusters.local import LocalRuntime
from rollart.errors import SpecError, UsageError
from rollart.fleet import ActorSpec, Node
from rollart.launch.clusters import join_commands, place_actor, plan_bundles, record_cluster_events, wait_for_nodes
from rollart.launch.layout import engine_actor, host_nodes, trainer_actors
from rollart.settings.resolve import Resolved, resolve_files
from rollart.sim import loop as virtual

FAKE = Path(__file__).parents[2] / "configs/clusters/ray-fake.yaml"


@pytest.fixture(scope="module")
def fake() -> Resolved:
    return resolve_files(None, FAKE)


def test_every_host_of_a_pool_is_a_node_and_the_head_has_plain_cores(fake: Resolved) -> None:
    assert [(n.id, dict(n.total)) for n in host_nodes(fake)] == [
        ("cores-0", {"CPU": 1.0}),
        ("h800-0", {"CPU": 1.0}),
        ("h20-0", {"CPU": 1.0}),
        ("h20-1", {"CPU": 1.0}),
    ]
    assert dict(host_nodes(fake)[1].labels) == {"pool": "h800", "device": "compute-rich", "gpu": "H800"}


def test_parts_ask_for_the_labels_of_their_pools(fake: Resolved, tmp_path: Path) -> None:
    engines = [engine_actor(fake, tmp_path, a) for a in fake.plan.of(Role.ENGINE)]
    assert sorted(str(dict(e.labels)) for e in engines) == ["{'gpu': 'H20'}", "{'gpu': 'H800'}"]
    trainer = trainer_actors(fake, tmp_path, tmp_path / "trainer.json")[0]
    assert dict(trainer.labels) == {"gpu": "none"}
    assert all(spec.factory.endswith(":NodeProgram") for spec in (*engines, trainer))
    assert all(spec.max_concurrency < 10 for spec in engines), "Ray's default is 1000"


def test_local_clusters_are_as_they_were(tmp_path: Path) -> None:
    here = resolve_files()
    spec = trainer_actors(here, tmp_path, tmp_path / "trainer.json")[0]
    assert (spec.factory, dict(spec.labels)) == ("rollart.adapters.clusters.program:Program", {"pool": "here"})
    assert spec.max_concurrency == ActorSpec("a", "b").max_concurrency


def test_a_part_that_finds_no_room_is_named(fake: Resolved, tmp_path: Path) -> None:
    async def main() -> None:
        engine, _ = (engine_actor(fake, tmp_path, a) for a in fake.plan.of(Role.ENGINE))
        runtime = LocalRuntime([n for n in host_nodes(fake) if n.id != "h20-1"])
        loop = asyncio.get_running_loop()
        await place_actor(fake, runtime, replace(engine, name="of-somebody-else"))
        began = loop.time()
        with pytest.raises(UsageError, match=r"no room for engine-0 \(pool 'h20'\): \{'CPU': 1.0\} on a node with"):
            await place_actor(fake, runtime, engine)
        assert loop.time() - began == pytest.approx(120.0)
        await runtime.close()

    virtual.run(main())


def test_a_plan_is_reserved_whole_and_a_part_that_ends_gives_its_room_back(fake: Resolved, tmp_path: Path) -> None:
    async def main() -> None:
        runtime, found = LocalRuntime(host_nodes(fake)), plan_bundles(fake)
        assert [group.name for group in found] == [a.name for a in fake.plan.assignments]
        await runtime.reserve(found, wait_s=0.0)
        free = {node: amounts["CPU"] for node, amounts in runtime.free.items()}
        assert free == {"cores-0": 0.0, "h800-0": 0.0, "h20-0": 0.0, "h20-1": 1.0}
        engine = engine_actor(fake, tmp_path, fake.plan.of(Role.ENGINE)[0])
        handle = await place_actor(fake, runtime, engine)
        assert {node: amounts["CPU"] for node, amounts in runtime.free.items()} == free
        await place_actor(fake, runtime, replace(engine, name="one-more"))
        await handle.kill()
        await runtime.release(engine.name)
        assert sum(amounts["CPU"] for amounts in runtime.free.values()) == 1.0
        with pytest.raises(UsageError, match="it cannot be made"):
            await place_actor(fake, runtime, replace(engine, factory="tests.launch.test_clusters:Unmade"))
        assert sum(amounts["CPU"] for amounts in runtime.free.values()) == 1.0, "nothing is held for what did not start"
        await runtime.close()

    virtual.run(main())


class Unmade:
    def __init__(self, *args: object, **kwargs: object) -> None:
        raise UsageError("it cannot be made")


def test_hosts_are_told_how_to_join(fake: Resolved) -> None:
    told = dict(join_commands(fake, "10.0.0.1:6379", Path("/runs/a b/token")))
    assert list(told) == ["on 1 host of pool 'cores'", "on 1 host of pool 'h800'", "on 2 hosts of pool 'h20'"]
    assert told["on 2 hosts of pool 'h20'"] == (
        "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH='/runs/a b/token' ray start --address=10.0.0.1:6379 "
        "--labels=pool=h20,device=bandwidth-rich,gpu=H20 --num-cpus=1 --num-gpus=0 --block"
    )


def test_nodes_that_do_not_join_are_named(fake: Resolved) -> None:
    async def main() -> None:
        runtime = LocalRuntime([n for n in host_nodes(fake) if n.id != "h800-0"])
        began = asyncio.get_running_loop().time()
        with pytest.raises(UsageError, match=r"pool 'h800' needs 1 CPU on nodes with \{'gpu': 'H800'\}, there are 0"):
            await wait_for_nodes(fake, runtime)
        assert asyncio.get_running_loop().time() - began == pytest.approx(60.0)
        await wait_for_nodes(fake, LocalRuntime(host_nodes(fake)))

    virtual.run(main())


def test_what_happens_to_the_cluster_is_told() -> None:
    async def main() -> None:
        runtime = LocalRuntime([Node("n0", {}, {"CPU": 1.0})])
        told: list[tuple[str, str, dict[str, str]]] = []
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(
                record_cluster_events(runtime, lambda kind, subject, **f: told.append((kind, subject, f)))
            )
            await runtime.start()
            spec = ActorSpec("a", "tests.contracts.test_runtime:Counter")
            await (await runtime.spawn(spec)).kill()
            await asyncio.sleep(0.1)
            watch.cancel()
        assert told == [
            ("node_joined", "n0", {}),
            ("actor_placed", "a", {"node": "n0"}),
        ]

    virtual.run(main())


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("cluster.runtime.backend=local", None),
        ("cluster.runtime.health_s=0", "health_s"),
        ("cluster.runtime.port=6379", "port is for address: start"),
        ("cluster.runtime.address=", "address"),
        *(
            (f"cluster.runtime.address='{wrong}'", r"\(rule: local, start, auto, HOST:PORT or ray://HOST:PORT\)")
            for wrong in (
                "lokal",
                "10.0.0.1",
                "ray//10.0.0.1:10001",
                "rya://10.0.0.1:10001",
                "ray://10.0.0.1",
                "ray://10.0.0.1:x",
            )
        ),
        ("cluster.runtime.elastic=treu", r"runtime.elastic is 'treu' \(rule: true, false, or a mapping"),
    ],
)
def test_wrong_runtimes_are_refused(override: str, says: str | None) -> None:
    if says is None:
        assert resolve_files(None, FAKE, [override]).cluster.runtime.backend == "local"
        return
    with pytest.raises(SpecError, match=says):
        resolve_files(None, FAKE, [override])


@pytest.mark.parametrize("address", ["auto", "start", "head:6379", "[::1]:6379", "ray://10.0.0.1:10001"])
def test_an_address_has_a_port_or_is_a_word(address: str) -> None:
    assert resolve_files(None, FAKE, [f"cluster.runtime.address='{address}'"]).cluster.runtime.address == address


def test_an_address_is_for_ray() -> None:
    with pytest.raises(SpecError, match="for backend: ray"):
        resolve_files(None, None, ["cluster.runtime.address=10.0.0.1:6379"])


def test_a_token_is_found_beside_the_cluster_file() -> None:
    resolved = resolve_files(None, FAKE, ["cluster.runtime.token=secret", "cluster.runtime.address=a:1"])
    assert resolved.cluster.runtime.token == str(FAKE.resolve().parent / "secret")


def test_a_part_that_takes_no_device_waits_for_a_node_of_its_pool(fake: Resolved) -> None:
    """The plan may use no device of the hosts' pool, so that no other part waits for its nodes."""
    runtime = Growing([n for n in host_nodes(fake) if n.id == "h800-0"])
    light = ActorSpec("reward-0", "tests.launch.test_clusters:Nothing", labels={"pool": "cores"})

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(20.0, runtime.join, host_nodes(fake)[0])
        handle = await place_actor(fake, runtime, light)
        assert (handle.node, loop.time() // 20.0) == ("cores-0", 1.0)
        with pytest.raises(UsageError, match=r"nowhere"):
            await place_actor(fake, runtime, replace(light, name="reward-1", labels={"pool": "nowhere"}))
        assert loop.time() >= 20.0 + fake.cluster.runtime.wait_s
        await runtime.close()

    virtual.run(main())


class Growing(LocalRuntime):
    """A cluster that a node joins later."""

    joined: tuple[Node, ...] = ()

    def join(self, node: Node) -> None:
        self.joined += (node,)

    def nodes(self) -> Sequence[Node]:
        return (*super().nodes(), *self.joined)


class Nothing:
    """An actor without behaviour."""
