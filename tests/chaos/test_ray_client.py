"""A run through Ray's client: its server ends, which ends the run in one line, and another one takes it on."""

from __future__ import annotations

from typing import Any

import pytest

from rollart.adapters.clusters.ray_cluster import TOKEN
from rollart.fleet import Node
from tests.chaos.test_ray import CLUSTER, LIMIT_S, placed
from tests.contracts.ray_fixture import client_server_of, ray_cluster_of
from tests.e2e.harness import Home, processes, sound, tiny, wait

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]  # Ray, and a run of real parts that begins twice

STEPS = 8


def test_a_run_through_the_client_outlives_its_server(
    home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_CLIENT_RECONNECT_GRACE_PERIOD", "3")  # 30 s else
    nodes = [
        Node("head", {"gpu": "none"}, {"CPU": 1.0}),
        Node("h800", {"gpu": "H800"}, {"CPU": 1.0}),
        Node("h20", {"gpu": "H20"}, {"CPU": 1.0}),
    ]
    gate = home.path / "gate"  # of each life's games the first 40 begin at once
    games = {"environment": "tests.e2e.worlds:Held", "environment_args": {"free": 40, "gate": str(gate), "turns": 2}}
    spec = tiny(steps=STEPS, leases={"env_step_s": LIMIT_S})
    spec["domains"][0] |= games
    with ray_cluster_of(nodes, tmp_path_factory.mktemp("cluster")) as cluster:
        token = str(cluster.directory / TOKEN)

        def fleet(address: str) -> dict[str, Any]:
            return {**CLUSTER, "runtime": {"backend": "ray", "address": address, "token": token, "wait_s": LIMIT_S}}

        with client_server_of(cluster) as (address, server):
            run = home.launch(spec, cluster=fleet(address))
            run.until(lambda: run.step() >= 1, "step 1 is committed", LIMIT_S)
            assert placed(run)["engine-0"][0] in ("h800", "h20")
            server.kill()
            assert run.end(LIMIT_S) == 3, run.said
        assert "client server at 'ray://" in run.said
        assert "--resume" in run.said
        assert "Traceback" not in run.said
        with client_server_of(cluster) as (address, _):
            run = home.resume(f"cluster.runtime.address={address}")
            gate.touch()
            assert run.end(LIMIT_S) == 0, run.said
        sound(home.directory, steps=STEPS)
        assert "Traceback" not in run.said
    wait(lambda: not processes(home.path), "nothing is left", 60.0)
