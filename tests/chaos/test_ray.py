"""A run on a faked Ray cluster: its controller dies, then a node; nothing is left behind, and nothing is lost."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollart.fleet import Node
from rollart.testing.clusters import raylet_pid
from tests.contracts.ray_fixture import ray_cluster_of
from tests.e2e.harness import Home, Launched, events, processes, sound, tiny, wait

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # Ray is started twice: about a minute on idle cores

LIMIT_S, STEPS = 150.0, 12

CLUSTER: dict[str, Any] = {
    "environments": {"workers": 0},
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
    os.kill(raylet_pid(run.directory / "ray", before), signal.SIGKILL)
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


def test_a_cluster_whose_programs_are_killed_leaves_nothing(tmp_path: Path) -> None:
    """It is two processes: the death of either one is the end of all of Ray's."""
    pytest.importorskip("ray")
    with ray_cluster_of([Node("n0", {}, {"CPU": 1.0})], tmp_path) as cluster:
        below = parents()
        keeper = next(pid for pid, parent in below.items() if parent == cluster.pid)
        ours = {pid for pid in below if keeper in ancestors(pid, below)}
        assert len(ours) > 3, "Ray's processes"
        os.kill(keeper, signal.SIGKILL)
        wait(lambda: not ours & set(parents()), "every process of Ray has ended", 60.0)


def parents() -> dict[int, int]:
    """Of every process that lives, its parent."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                found[int(stat.parent.name)] = int(fields[1])
    return found


def ancestors(pid: int, below: dict[int, int]) -> set[int]:
    found: set[int] = set()
    while (pid := below.get(pid, 0)) and pid not in found:
        found.add(pid)
    return found


def test_a_cluster_that_accepts_and_never_answers_is_left_at_once(home: Home) -> None:
    pytest.importorskip("ray")
    with socket.create_server(("0.0.0.0", 0)) as silent:
        silent.settimeout(LIMIT_S)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        run = home.launch(tiny(), cluster={**CLUSTER, "runtime": {"backend": "ray", "address": address}})
        asked = [silent.accept()]  # the look whether a gRPC server listens
        asked[0][0].sendall(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))  # as one begins: HTTP/2's frame of no settings
        asked.append(silent.accept())  # Ray, which is not answered
        run.process.send_signal(signal.SIGINT)
        assert run.end(LIMIT_S) == 130, run.said
        for connection, _ in asked:
            connection.close()
    assert "rollart: interrupted" in run.said
    assert "Traceback" not in run.said


@pytest.mark.timeout(900)
def test_a_head_is_started_that_hosts_join_by_its_command(home: Home) -> None:
    pytest.importorskip("ray")
    limit_s = 500.0
    fleet = {**CLUSTER, "pools": [{"name": "cores", "device": "cpu", "count": 2, "labels": {"gpu": "none"}}]}
    fleet["runtime"] = {"backend": "ray", "address": "start", "wait_s": limit_s}
    fleet["engines"] = {**CLUSTER["engines"], "count": 1}
    run = home.launch(tiny(), cluster=fleet)
    run.until(lambda: "--block" in run.said, "the command is printed", limit_s)
    command = re.search(r"on 1 host of pool 'cores': (.*)", run.said)
    assert command is not None, run.said
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    joins = ["sh", "-c", f"exec env {command[1]}"]
    said = home.path / "host.log"
    try:
        for _ in range(5):  # on a machine that is very busy Ray gives its own node up after 30 s
            with said.open("wb") as log:
                host = subprocess.Popen(joins, stdout=log, stderr=log, env=environment, cwd=home.path)
            wait(functools.partial(joined, host, said), "it joins", limit_s)
            if host.poll() is None:
                break
        assert run.process.wait(limit_s) == 0, run.said + said.read_text()
        sound(home.directory)
        assert len(set(placed(run)["engine-0"] + placed(run)["trainer-0"])) == 1, "the host, not the head"
        assert "head" not in placed(run)["engine-0"]
    finally:
        host.terminate()
        host.wait(60)
        for left in processes(home.path):  # Ray's on a host whose head is gone, which give up a minute later
            left.kill()
    wait(lambda: not processes(home.path), "the host's processes have ended", 60.0)


def joined(host: subprocess.Popen[bytes], said: Path) -> bool:
    """Whether it has, or has ended."""
    return host.poll() is not None or b"runtime started" in said.read_bytes()


def starts(run: Launched, engine: str) -> int:
    return [event["subject"] for event in events(run.directory, "engine_started")].count(engine)


def placed(run: Launched) -> dict[str, list[str]]:
    """Nodes by part, in order."""
    found: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):
        for event in events(run.directory, "actor_placed"):
            found.setdefault(event["subject"], []).append(event["node"])
    return found
