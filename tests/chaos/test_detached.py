"""A run in the background: looked at, read and stopped from another shell."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.e2e.harness import CLUSTER, Home, processes, sound, tiny, wait

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # real processes: a minute, 15 s of it a dead one's


def test_a_detached_run_is_stopped_and_goes_on(home: Home) -> None:
    import yaml

    gate = home.path / "gate"  # without it the run does not end, however slow the commands are
    games = {"environment": "tests.e2e.worlds:Held", "environment_args": {"free": 8, "gate": str(gate), "turns": 2}}
    spec = tiny(leases={"env_step_s": 600.0})
    spec["domains"][0] |= games
    (home.path / "run.yaml").write_text(yaml.safe_dump(spec))
    (home.path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    done = home.run("launch", "run.yaml", "--cluster", "cluster.yaml", "--detach")
    assert done.returncode == 0, done.stderr
    assert "run tiny-1 in" in done.stderr
    assert "running" in home.run("status").stdout
    again = home.run("launch", "--resume", "tiny-1", "--detach")
    assert (again.returncode, "is running" in again.stderr) == (2, True), again.stderr
    log = home.directory / "logs" / "launch.log"
    wait(lambda: "serves v0" in log.read_text(), "an engine serves", 60.0, log.read_text)
    elsewhere(home)
    assert "somewhere" in home.run("status").stdout
    stopped = home.run("stop")
    assert (stopped.returncode, "tiny-1 stopped on somewhere" in stopped.stderr) == (0, True), stopped.stderr
    wait(lambda: not processes(home.path), "every process has ended", 30.0)
    assert "not running" in home.run("stop").stderr
    assert "launch: " in home.run("logs", "--role", "launch").stdout

    assert home.run("launch", "--resume", "tiny-1", "--detach").returncode == 0
    gate.touch()
    followed = home.run("logs", "-f", "-n", "50")
    assert followed.returncode == 0
    assert "finished: 4 steps" in followed.stdout
    wait(lambda: not processes(home.path), "every process has ended", 30.0)
    sound(home.directory)


def test_a_run_elsewhere_that_is_dead_or_hangs_is_said_to_be(home: Home) -> None:
    home.launch(tiny(steps=1000)).until(lambda: (home.directory / "run.pid").exists(), "it runs", 60.0)
    pid = json.loads((home.directory / "run.pid").read_text())["pid"]
    elsewhere(home)
    again = home.run("launch", "--resume", "tiny-1")
    assert (again.returncode, f"is running (process {pid} on somewhere)" in again.stderr) == (2, True), again.stderr
    os.kill(pid, signal.SIGSTOP)
    said = home.run("stop").stderr
    assert f"is of process {pid} on somewhere, which gives no sign of life" in said
    assert "Traceback" not in said
    os.kill(pid, signal.SIGCONT)
    assert "on somewhere" in home.run("stop", "--wait", "0", "--kill").stderr  # killed, if it was not quicker
    wait(lambda: not processes(home.path), "every process has ended", 30.0)


def elsewhere(home: Home) -> None:
    """From here on, commands of this machine take the controller for one of another."""
    path = home.directory / "run.pid"
    path.write_text(json.dumps({**json.loads(path.read_text()), "place": "another boot", "host": "somewhere"}))
