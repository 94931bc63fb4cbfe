"""The end of an environment host in a run: its episodes are tried again elsewhere, and nothing else is touched."""

from __future__ import annotations

import os
import signal

import pytest

from tests.e2e.harness import CLUSTER, Home, events, sound, tiny, wait

pytestmark = pytest.mark.slow  # real processes: about 10 s

HOST = "rollart.adapters.envs.host"


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
