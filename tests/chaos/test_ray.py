"""A run on a faked Ray cluster: its controller dies, then a node; nothing is left behind, and nothing is lost."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import pytest

from rollart.adapters.clusters.ray_cluster import raylet
from tests.e2e.harness import Home, Launched, events, processes, sound, tiny, wait

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # Ray is started twice: about a minute on idle cores

LIMIT_S, STEPS = 150.0, 12

CLUSTER: dict[str, Any] = {
    "name": "fleet",
    "runtime": {"backend": "ray", "health_s": 8},
    "devices": [{"name": kind, "generation": "cpu", "source": "a core of this machine"} for kind in ("fast", "wide")],
    "pools": [
        {"name": "h800", "device": "fast", "count": 1, "labels": {"gpu": "H800"}, "price": 1.0},
        {"name": "h20", "device": "wide", "count": 2, "devices_per_host": 1, "labels": {"gpu": "H20"}, "price": 1.0},
        {"name": "cores", "device": "cpu", "count": 1, "labels": {"gpu": "none"}},
    ],
    "engines": {"count": 2, "threads": 1, "max_slots": 16},
    "trainer": {"device": "cpu", "threads": 1},
}


def test_a_run_on_ray_survives_its_controller_and_a_node(home: Home) -> None:
    pytest.importorskip("ray")
    gate = home.path / "gate"  # of each life's games the first 40 begin at once, of 96 in all
    games = {"environment": "tests.e2e.worlds:Held", "environment_args": {"free": 40, "gate": str(gate), "turns": 2}}
    spec = tiny(steps=STEPS, leases={"env_step_s": LIMIT_S})
    spec["domains"][0] |= games
    run = home.launch(spec, cluster=CLUSTER)
    run.until(lambda: run.step() >= 1, "step 1 is committed", LIMIT_S)
    assert set(placed(run)["engine-1"]) == {"h800-0"}
    run.kill(signal.SIGKILL)
    run.process.wait()
    wait(lambda: not processes(home.path), "raylets and parts end with the controller", 30.0)

    run = home.resume()
    run.until(lambda: run.step() >= 3, "step 3 is committed", LIMIT_S)
    before, served = placed(run)["engine-0"][-1], starts(run, "engine-0")
    os.kill(raylet(run.directory / "ray", before), signal.SIGKILL)
    run.until(lambda: placed(run)["engine-0"][-1] != before, "the engine's actor is elsewhere", LIMIT_S)
    run.until(lambda: starts(run, "engine-0") > served, "the engine serves again", LIMIT_S)
    gate.touch()
    assert run.end(LIMIT_S) == 0, run.said
    assert "Traceback" not in run.said
    sound(home.directory, steps=STEPS)
    assert placed(run)["engine-0"][-1].startswith("h20-"), "the other host of its pool"
    assert before in [e["subject"] for e in events(home.directory, "node_lost")]
    assert "engine-0" in [e["subject"] for e in events(home.directory, "engine_lost")]
    assert events(home.directory, "infra_fault") == []
    down = home.run("report", "utilization", "tiny-1")
    assert "engine_down" in down.stdout, down.stdout + down.stderr
    assert "engine_restart" in down.stdout


def starts(run: Launched, engine: str) -> int:
    return [event["subject"] for event in events(run.directory, "engine_started")].count(engine)


def placed(run: Launched) -> dict[str, list[str]]:
    """Nodes by part, in order."""
    found: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):
        for event in events(run.directory, "actor_placed"):
            found.setdefault(event["subject"], []).append(event["node"])
    return found
