"""A run in the background: looked at, read and stopped from another shell."""

from __future__ import annotations

import pytest

from tests.e2e.harness import CLUSTER, Home, processes, sound, tiny, wait

pytestmark = pytest.mark.slow  # real processes: about 10 s


def test_a_detached_run_is_stopped_and_goes_on(home: Home) -> None:
    import yaml

    (home.path / "run.yaml").write_text(yaml.safe_dump(tiny(domains__0__environment_args={"turn_s": 0.15})))
    (home.path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    done = home.run("launch", "run.yaml", "--cluster", "cluster.yaml", "--detach")
    assert done.returncode == 0, done.stderr
    assert "run tiny-1 in" in done.stderr
    assert "running" in home.run("status").stdout
    again = home.run("launch", "--resume", "tiny-1", "--detach")
    assert (again.returncode, "is running" in again.stderr) == (2, True), again.stderr
    log = home.directory / "logs" / "launch.log"
    wait(lambda: "serves v0" in log.read_text(), "an engine serves", 60.0, log.read_text)
    assert home.run("stop").returncode == 0
    wait(lambda: not processes(home.path), "every process has ended", 30.0)
    assert "launch: " in home.run("logs", "--role", "launch").stdout

    assert home.run("launch", "--resume", "tiny-1", "--detach").returncode == 0
    followed = home.run("logs", "-f", "-n", "0")
    assert followed.returncode == 0
    assert "finished: 4 steps" in followed.stdout
    wait(lambda: not processes(home.path), "every process has ended", 30.0)
    sound(home.directory)
