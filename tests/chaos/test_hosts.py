"""The end of an environment host in a run: its episodes are tried again elsewhere, and nothing else is touched."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.e2e.harness import CLUSTER, ZYGOTE, Home, events, sound, tiny, wait

pytestmark = pytest.mark.slow  # real processes: about 10 s

HOST = "rollart.adapters.env_hosts.host"


def test_a_host_dies_with_its_episodes(home: Home) -> None:
    """Killed while it holds some, for certain: they wait for a gate that is opened when it is back."""
    gate = home.path / "gate"
    spec = tiny(
        domains__0__environment="tests.e2e.worlds:Waiting",
        domains__0__environment_args={"free": 6, "gate": str(gate)},
    )
    run = home.launch(spec, cluster={**CLUSTER, "environments": {"workers": 2}})
    host = run.part(HOST)
    run.until(lambda: gate.with_suffix(f".{host.pid}").exists(), "an episode waits on the host")
    said = home.run("status")
    assert "environment-0 environment-1" in said.stdout, said.stdout + said.stderr
    host.kill()
    run.until(lambda: len(events(run.directory, "host_started")) == 3, "the host is back")
    gate.touch()
    run.finished()
    sound(home.directory)
    (lost,) = events(home.directory, "host_lost")
    assert lost["cause"] == "its process was killed by SIGKILL"
    faults = events(home.directory, "infra_fault")
    assert 1 <= len(faults) <= lost["episodes"]
    assert {fault["host"] for fault in faults} == {lost["subject"]}
    told = f" on {lost['subject']}: its connection broke (rollart logs --role {lost['subject']})"
    assert all(fault["detail"].endswith(told) for fault in faults), faults
    assert events(home.directory, "engine_lost") == []
    report = home.run("report", "utilization", "tiny-1")
    assert "host_restart" in report.stdout, report.stdout + report.stderr


def test_the_controller_dies_and_takes_its_hosts_along(home: Home) -> None:
    run = home.launch(
        tiny(domains__0__environment_args={"turn_s": 0.15}), cluster={**CLUSTER, "environments": {"workers": 1}}
    )
    host = run.part(HOST)
    run.until_step(1)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    wait(lambda: not host.alive, "the host has ended", 30.0)
    run = home.resume()
    run.finished()
    sound(home.directory)
    assert [event["subject"] for event in events(home.directory, "host_started")] == ["environment-0"] * 2


def test_a_host_whose_environments_leak_is_started_again(home: Home) -> None:
    """8 MB an episode, of which 16 run at a time: the bound is met halfway to the run's 64."""
    spec = tiny(
        steps=8,
        domains__0__environment="tests.e2e.worlds:Leaking",
        domains__0__environment_args={"mb": 8, "turn_s": 1.0},
    )
    hosts = {"workers": 1, "memory_gb": 0.25, "health_s": 4.0}
    run = home.launch(spec, cluster={**CLUSTER, "environments": hosts})
    run.finished()
    sound(home.directory, steps=8)
    lost = events(home.directory, "host_lost")
    assert lost, run.said
    told = r"its memory is 0\.\d\d GB, its bound 0\.25 GB \(environments\.memory_gb\); it played coin"
    assert all(re.fullmatch(told, one["cause"]) for one in lost), lost
    assert lost[0]["cause"] in run.said
    assert len(events(home.directory, "host_started")) >= 2


@pytest.mark.parametrize("workers", [0, 1])
def test_tools_that_environments_started_end_with_their_process(home: Home, workers: int) -> None:
    """Killed, host or controller, and whatever stands still then: nothing that the run started is left."""
    note = home.path / "tool"
    spec = tiny(
        domains__0__environment="tests.e2e.worlds:Tools",
        domains__0__environment_args={"note": str(note), "turn_s": 0.3},
        faults__max_attempts_per_group=2,
    )
    run = home.launch(spec, cluster={**CLUSTER, "environments": {"workers": workers}})

    def tools() -> list[int]:
        return [int(path.suffix[1:]) for path in home.path.glob("tool.*")]

    run.until(tools, "a tool runs")
    if workers:
        (first,) = tools()
        run.part(HOST).kill()
        run.until(lambda: not alive(first), "the tool of the killed host has ended")
        run.until(lambda: len(tools()) == 2, "the next host has one, too")
        assert events(run.directory, "group_dropped") == [], "one incident is one attempt of a group of two"
    zygote = run.part(ZYGOTE)
    zygote.kill(signal.SIGSTOP)
    run.kill()
    run.end(60.0)
    assert not any(map(alive, tools()))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
