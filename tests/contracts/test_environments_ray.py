"""Environments on hosts that Ray holds keep the contract of all environments; a node that dies takes its host along."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollart.errors import EnvironmentFault
from rollart.ports import Node
from rollart.runtime.hosting import HostedEnvironment
from tests.contracts.environment_contract import CONTRACT
from tests.contracts.host_fixture import hosts_of, resolved_with
from tests.contracts.ray_fixture import ray_cluster_of
from tests.e2e.harness import CLUSTER, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # a Ray cluster of three nodes: about 20 s on idle cores

LIMIT_S = 300.0

NODES = [
    Node("head", {"gpu": "H800"}, {"CPU": 1.0}, {}),
    Node("cores-0", {"pool": "here"}, {"CPU": 1.0}, {}),
    Node("cores-1", {"pool": "here"}, {"CPU": 1.0}, {}),
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
            before = hosts.fleet._hosts["environment-0"].part._program.node  # type: ignore[attr-defined]
            assert before.startswith("cores-")
            cluster.kill_node(before)
            with pytest.raises(EnvironmentFault, match="on environment-0"):
                await hanging
            await environment.close()
            again = hosts.make("tale")
            await again.reset(0)
            await again.close()
            after = hosts.fleet._hosts["environment-0"].part._program.node  # type: ignore[attr-defined]
            assert {before, after} == {"cores-0", "cores-1"}
            (lost,) = {event["subject"] for event in hosts.events("host_lost")}
            assert lost == "environment-0"

    with ray_cluster_of(NODES, tmp_path / "ray") as cluster:
        asyncio.run(scenario())
