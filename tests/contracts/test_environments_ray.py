"""Environments on hosts that Ray holds keep the contract of all environments; a node that dies takes its host along."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from placement.types import Assignment, Role
from rollart.errors import EnvironmentFault
from rollart.fleet import Node
from rollart.launch.clusters import elastic_nodes, follow_nodes
from rollart.launch.hosts import host_count, host_count_keepers
from rollart.supervise.environment_hosts import EnvironmentHostSupervisor, HostedEnvironment
from rollart.testing.clusters import add_node
from tests.chaos.test_ray_nodes import drain
from tests.contracts.environment_contract import CONTRACT
from tests.contracts.host_fixture import DOMAINS, hosts_of, resolved_with
from tests.contracts.ray_fixture import ray_cluster_of
from tests.e2e.harness import CLUSTER, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # a Ray cluster of three nodes: about 20 s on idle cores

LIMIT_S = 300.0

NODES = [
    Node("head", {"gpu": "H800"}, {"CPU": 1.0}),
    Node("cores-0", {"pool": "here"}, {"CPU": 1.0}),
    Node("cores-1", {"pool": "here"}, {"CPU": 1.0}),
]


def test_hosts_on_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    pytest.importorskip("gymnasium")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    on_ray = {**CLUSTER, "runtime": {"backend": "ray"}, "pools": [{"name": "here", "device": "cpu", "count": 2}]}
    on_ray["pools"][0]["labels"] = {"pool": "here"}
    resolved = resolved_with(tmp_path, cluster=on_ray, workers=1, health_s=10.0)

    async def scenario() -> None:
        async with asyncio.timeout(LIMIT_S), hosts_of(resolved, tmp_path, cluster.runtime()) as hosts:
            for promise in CONTRACT:
                await promise(hosts.make)
            assert hosts.events("host_lost") == []
            environment = hosts.make("told")
            assert isinstance(environment, HostedEnvironment)
            await environment.reset(0)
            hanging = asyncio.get_running_loop().create_task(environment.step("hang"))
            before = hosts.fleet.hosts["environment-0"].part.program.node  # type: ignore[attr-defined]
            assert before.startswith("cores-")
            cluster.kill_node(before)
            with pytest.raises(EnvironmentFault, match="on environment-0"):
                await hanging
            await environment.close()
            again = hosts.make("tale")
            await again.reset(0)
            await again.close()
            after = hosts.fleet.hosts["environment-0"].part.program.node  # type: ignore[attr-defined]
            assert {before, after} == {"cores-0", "cores-1"}
            (lost,) = {event["subject"] for event in hosts.events("host_lost")}
            assert lost == "environment-0"

    with ray_cluster_of(NODES, tmp_path / "ray") as cluster:
        asyncio.run(scenario())


def test_hosts_follow_nodes_that_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reason for slow: a Ray cluster again, one of whose nodes joins later and another is drained."""
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pool = {"name": "here", "device": "cpu", "count": 4, "min": 1, "labels": {"pool": "here"}, "devices_per_host": 2}
    elastic = {"backend": "ray", "elastic": {"settle_s": 1.0}}
    on_ray = {**CLUSTER, "runtime": elastic, "pools": [pool], "trainer": {"device": "cpu", "threads": 1}}
    resolved = resolved_with(tmp_path, cluster=on_ray, workers="auto", domains={"told": (DOMAINS["told"], {})})
    given = tuple(Assignment(Role.ENVIRONMENT, n, "here", (n,)) for n in range(2))
    whole = replace(resolved, plan=replace(resolved.plan, assignments=given))
    begun = replace(whole, plan=replace(whole.plan, assignments=given[:1]))
    assert [host_count(whole, {"here": n}) for n in range(4)] == [1, 1, 2, 2]

    async def scenario() -> None:
        runtime = cluster.runtime()
        async with asyncio.timeout(LIMIT_S), hosts_of(begun, tmp_path, runtime, whole) as hosts:
            fleet, nodes = hosts.fleet, elastic_nodes(whole, dict)
            assert nodes is not None
            (keeper,) = host_count_keepers(whole, nodes, fleet, None, hosts.recorder)
            async with asyncio.TaskGroup() as tasks:
                watching = [tasks.create_task(follow_nodes(runtime, whole, nodes)), tasks.create_task(keeper.run())]
                assert list(fleet.where().values()) == ["cores-0"]
                playing = hosts.make("told")
                await playing.reset(0)

                add_node(cluster.directory, Node("cores-1", {"pool": "here"}, {"CPU": 1.0}))
                await until(fleet, lambda: len(fleet.up()) == 2)
                assert sorted(fleet.where().values()) == ["cores-0", "cores-1"], "one has the plan's core on each"
                drain(cluster.directory, "cores-0")
                await until(fleet, lambda: list(fleet.where().values()) == ["cores-1"])
                assert (await playing.step("say")).observation  # the leaving host finishes its episodes
                await playing.close()
                await until(fleet, lambda: len(hosts.events("host_retired")) == 1)
                await asyncio.sleep(2.0)  # it has settled
                assert (len(fleet.names), hosts.events("host_lost")) == (1, [])
                for task in watching:
                    task.cancel()

    with ray_cluster_of(NODES[:2], tmp_path / "ray") as cluster:
        asyncio.run(scenario())


async def until(fleet: EnvironmentHostSupervisor, there: Callable[[], bool]) -> None:
    while not there():
        await asyncio.sleep(0.05)
