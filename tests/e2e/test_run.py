"""A whole run on real processes, watched and ended from outside."""

from __future__ import annotations

import csv
import io
import json
import signal

import pytest

from tests.e2e.harness import BATCH, Home, events, ledger, sound, tiny

pytestmark = pytest.mark.slow  # every test starts a trainer and an engine: torch twice, about 6 s


def test_a_run_reaches_its_end_and_leaves_nothing_behind(home: Home) -> None:
    run = home.launch()
    run.until_step(0)
    running = home.run("status", "-o", "json")
    run.finished()
    sound(home.directory)
    assert events(home.directory, "lease_expired") == []
    assert running.returncode == 0, running.stderr
    assert (_status(running.stdout)["state"], _status(running.stdout)["process"]) == ("running", run.process.pid)
    after = _status(home.run("status", "tiny-1", "-o", "json").stdout)
    assert (after["state"], after["step"], after["trained_trajectories"]) == ("finished", 4, 4 * BATCH)
    rows = csv.reader(io.StringIO(home.run("report", "cost", "-o", "csv").stdout))
    assert sum(1 for _ in rows) > 1


def test_stop_from_another_shell_and_resume(home: Home) -> None:
    run = home.launch(tiny(domains__0__environment_args={"turn_s": 1.0}))
    run.until_step(0)
    again = home.run("launch", "--resume", "tiny-1")
    assert again.returncode == 2
    assert "is running" in again.stderr
    stopped = home.run("stop", "tiny-1")
    assert stopped.returncode == 0, stopped.stderr
    run.failed(130, "interrupted", "--resume")
    assert _status(home.run("status", "-o", "json").stdout)["state"] == "stopped"
    assert home.run("stop").returncode == 2
    home.resume("domains.coin.environment_args.turn_s=0.02").finished()
    sound(home.directory)


def test_a_reward_that_keeps_state_runs_beside_the_environments(home: Home) -> None:
    home.launch(tiny(functions__0__handler="counts")).finished()
    sound(home.directory)
    (said,) = events(home.directory, "reward_beside")
    assert said["subject"] == "rule"
    assert "SEEN" in str(said["why"])
    with ledger(home.directory) as db:
        assert db.execute("SELECT count(*) FROM invocations").fetchone() == (0,)
        assert {s for (s,) in db.execute("SELECT score FROM trajectories WHERE score IS NOT NULL")} == {1.0}


def test_a_run_ends_at_its_budget_of_time(home: Home) -> None:
    run = home.launch(tiny(domains__0__environment_args={"turn_s": 1.0}, budget__wall_s=1.5))
    run.failed(4, "budget", "--resume")


def test_a_finished_run_may_be_resumed_with_more_steps(home: Home) -> None:
    run = home.launch(tiny(steps=2))
    run.finished()
    home.resume("steps=4").finished()
    sound(home.directory)


def test_ctrl_c_before_anything_runs(home: Home) -> None:
    run = home.launch()
    run.until(lambda: home.directory.exists(), "the run has a directory")
    run.kill(signal.SIGINT)
    assert run.end(10.0) == 130, run.said
    assert "Traceback" not in run.said


def _status(text: str) -> dict[str, object]:
    return {row["what"]: row["value"] for row in json.loads(text)["tables"]["status"]}
