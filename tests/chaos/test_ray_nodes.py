"""A run on a faked Ray cluster whose nodes come and go: the plan follows them, and nothing of the run is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollart.adapters.clusters.ray_cluster import TOKEN, auth_environment
from rollart.fleet import Node
from rollart.testing.clusters import add_node, raylet_pid
from tests.chaos.test_ray import placed
from tests.e2e.harness import Home, Launched, events, sound, tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # Ray, and four engines one after the other: about a minute

LIMIT_S, STEPS = 300.0, 8

CLUSTER: dict[str, Any] = {
    "environments": {"workers": 0},
    "name": "fleet",
    "runtime": {"backend": "ray", "health_s": 8, "elastic": {"settle_s": 1.0}},
    "devices": [{"name": kind, "generation": "cpu", "source": "a core of this machine"} for kind in ("fast", "wide")],
    "pools": [
        {"name": "h800", "device": "fast", "count": 1, "labels": {"gpu": "H800"}, "price": 1.0},
        {
            "name": "h20",
            "device": "wide",
            "count": 2,
            "min": 1,
            "devices_per_host": 1,
            "labels": {"gpu": "H20"},
            "price": 1.0,
        },
        {"name": "cores", "device": "cpu", "count": 1, "labels": {"gpu": "none"}},
    ],
    "engines": {"count": 3, "threads": 1, "max_slots": 16},
    "trainer": {"device": "cpu", "threads": 1},
}

DRAIN = """
import sys, time
from ray._raylet import GcsClient
client = GcsClient(address=sys.argv[1])
(node,) = [id for id, info in client.get_all_node_info().items() if info.node_name == sys.argv[2]]
accepted, why = client.drain_node(node.hex(), 2, "spot", int(1000 * (time.time() + 3600)))
assert accepted, why
"""
"""What a provider's watcher tells Ray when a host is preempted; 2 is Ray's reason for that."""


def test_the_plan_follows_nodes_that_join_and_leave(home: Home) -> None:
    pytest.importorskip("ray")
    gate = home.path / "gate"
    games = {"environment": "tests.e2e.worlds:Held", "environment_args": {"free": 40, "gate": str(gate), "turns": 2}}
    spec = tiny(steps=STEPS, leases={"env_step_s": LIMIT_S}, placement={"rebalance": {"restart_s": 1.0}})
    spec["domains"][0] |= games
    run = home.launch(spec, cluster=CLUSTER)
    ray = run.directory / "ray"
    run.until(lambda: run.step() >= 1, "step 1 is committed", LIMIT_S)
    assert sorted(served(run)) == ["h20-0", "h800-0"], "of three engines those that fit"

    add_node(ray, joining("h20-1"))
    run.until(lambda: "h20-1" in served(run), "a third engine serves on the node that joined", LIMIT_S)
    run.until(lambda: len(events(run.directory, "rebalanced")) == 1, "the plan is adopted", LIMIT_S)
    assert status(home)["engines"].count("engine-") == 3
    assert "h20: 2 x engine" in status(home)["plan"]

    drain(ray, "h20-1")
    run.until(lambda: len(events(run.directory, "engine_drained")) == 1, "its engine is drained", LIMIT_S)
    assert [e["subject"] for e in events(run.directory, "node_leaving")] == ["h20-1"]

    os.kill(raylet_pid(ray, "h20-0"), signal.SIGKILL)
    run.until(lambda: len(events(run.directory, "engine_given_up")) == 1, "its engine fits nowhere", LIMIT_S)
    run.until(lambda: "h20-1" in lost(run), "Ray ends the drained node, which is empty", LIMIT_S)
    add_node(ray, joining("h20-2"))
    run.until(lambda: "h20-2" in served(run), "an engine serves on the node that came for the lost one", LIMIT_S)
    gate.touch()
    assert run.end(LIMIT_S) == 0, run.said
    assert "Traceback" not in run.said
    sound(home.directory, steps=STEPS)
    assert lost(run) == {"h20-0", "h20-1"}
    (drained,) = events(home.directory, "engine_drained")
    assert drained["pool"] == "h20"
    assert events(home.directory, "infra_fault") == []
    tables = json.loads(home.run("report", "utilization", "tiny-1", "-o", "json").stdout)["tables"]
    told = [row["what"] for row in tables["nodes"] if row["what"] in ("rebalanced", "node_joined", "node_leaving")]
    assert told == ["node_joined", "rebalanced", "node_leaving", "node_joined", "rebalanced"]


def joining(name: str) -> Node:
    return Node(name, {"pool": "h20", "device": "wide", "gpu": "H20"}, {"CPU": 1.0})


def served(run: Launched) -> list[str]:
    """Nodes that an engine has started on."""
    started = {e["subject"] for e in events(run.directory, "engine_started")}
    return [node for engine, nodes in placed(run).items() if engine in started for node in nodes]


def lost(run: Launched) -> set[str]:
    return {e["subject"] for e in events(run.directory, "node_lost")}


def status(home: Home) -> dict[str, str]:
    rows = json.loads(home.run("status", "-o", "json").stdout)["tables"]["status"]
    return {row["what"]: str(row["value"]) for row in rows}


def drain(directory: Path, node: str) -> None:
    command = Path(f"/proc/{raylet_pid(directory, node)}/cmdline").read_bytes().decode().split("\0")
    (address,) = [word.partition("=")[2] for word in command if word.startswith("--gcs-address=")]
    env = {**os.environ, **auth_environment(directory / TOKEN)}
    done = subprocess.run([sys.executable, "-c", DRAIN, address, node], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
