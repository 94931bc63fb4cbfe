"""Function workers on a faked Ray cluster: a node dies under their calls, and every reward is paid, once and right."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rollart.testing.clusters import raylet_pid
from tests.chaos.test_ray import ancestors, parents, placed
from tests.e2e.harness import GROUP_SIZE, GROUPS, STEPS, Home, Launched, events, ledger, sound, tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a Ray cluster of four nodes: about a minute on idle cores

LIMIT_S = 300.0

CLUSTER: dict[str, Any] = {
    "name": "fleet",
    "runtime": {"backend": "ray", "health_s": 8},
    "devices": [{"name": "fast", "generation": "cpu", "source": "a core of this machine"}],
    "pools": [
        {"name": "cores", "device": "cpu", "count": 1, "labels": {"gpu": "none"}},
        {"name": "h800", "device": "fast", "count": 1, "labels": {"gpu": "H800"}, "price": 1.0},
        {"name": "spare", "device": "cpu", "count": 2, "devices_per_host": 1, "labels": {"for": "functions"}},
    ],
    "engines": {"count": 1, "threads": 1, "max_slots": 16, "device": "fast"},
    "trainer": {"device": "cpu", "threads": 1},
    "functions": {"local": {"pool": "spare"}},
}

REWARD = """
import os, pathlib, time

def gated(sample):
    gate = pathlib.Path({gate!r})
    gate.with_suffix("." + str(os.getpid())).touch()
    while not gate.exists():
        time.sleep(0.02)
    return 1.0 if sample.messages[-1]["content"] == sample.reference_answer else 0.25
"""


def test_a_node_dies_under_function_calls(home: Home) -> None:
    pytest.importorskip("ray")
    gate = home.path / "gate"
    (home.path / "gated.py").write_text(REWARD.format(gate=str(gate)))
    gated = {
        "name": "gated",
        "source": str(home.path / "gated.py"),
        "handler": "gated",
        "memory_mb": 128,
        "batch_items": 1,
        "concurrency": 4,
        "timeout_s": LIMIT_S,
        "init_timeout_s": LIMIT_S,
        "stateless": True,
        "deterministic": False,
    }
    spec = tiny(leases={"reward_s": LIMIT_S}, functions=[gated])
    spec["domains"][0]["rewards"] = [{"function": "gated"}]
    run = home.launch(spec, cluster=CLUSTER)
    run.until(lambda: len(marks(gate)) == 4, "four calls are under way", LIMIT_S)
    hosts = {host: nodes[-1] for host, nodes in placed(run).items() if host.startswith("reward-")}
    assert sorted(hosts) == ["reward-0", "reward-1"]
    assert sorted(hosts.values()) == ["spare-0", "spare-1"], "a machine each"
    under = {host: [pid for pid in marks(gate) if below(pid, run, node)] for host, node in hosts.items()}
    assert {host: len(pids) for host, pids in under.items()} == {"reward-0": 2, "reward-1": 2}

    os.kill(raylet_pid(run.directory / "ray", hosts["reward-1"]), signal.SIGKILL)
    run.until(lambda: placed(run)["reward-1"][-1] == hosts["reward-0"], "the host's actor is elsewhere", LIMIT_S)
    run.until(lambda: starts(run, "reward-1") >= 2, "it serves again", LIMIT_S)
    run.until(lambda: len(marks(gate)) >= 6, "the calls that were lost are made again", LIMIT_S)
    gate.touch()
    assert run.end(LIMIT_S) == 0, run.said
    assert "Traceback" not in run.said

    sound(home.directory)
    assert events(home.directory, "infra_fault") == []
    assert {e["subject"] for e in events(home.directory, "host_lost")} == {"reward-1"}
    assert hosts["reward-1"] in [e["subject"] for e in events(home.directory, "node_lost")]
    with ledger(home.directory) as db:
        calls = db.execute("SELECT status, cause, items FROM invocations WHERE items > 0").fetchall()
    assert [(status, cause) for status, cause, _ in calls if status != "ok"] == [("crash", "call")] * 2
    assert [cause for status, cause, _ in calls if status == "ok"].count("retry") == 2
    answered = sum(items for status, _, items in calls if status == "ok")
    assert answered >= STEPS * GROUPS * GROUP_SIZE
    tables = json.loads(home.run("report", "utilization", "tiny-1", "-o", "json").stdout)["tables"]
    rows = {row["resource"]: row for row in tables["resources"]}
    assert rows["reward-0"]["role"] == rows["reward-1"]["role"] == "reward"
    assert "host_down" in {row["cause"] for row in tables["down"] if row["resource"] == "reward-1"}
    said = home.run("logs", "tiny-1", "--role", "reward")
    assert said.returncode == 0, said.stderr


def marks(gate: Path) -> list[int]:
    """Workers that are, or were, in a call."""
    return [int(path.suffix[1:]) for path in gate.parent.glob(f"{gate.name}.*")]


def below(pid: int, run: Launched, node: str) -> bool:
    return raylet_pid(run.directory / "ray", node) in ancestors(pid, parents())


def starts(run: Launched, host: str) -> int:
    return [event["subject"] for event in events(run.directory, "host_started")].count(host)
