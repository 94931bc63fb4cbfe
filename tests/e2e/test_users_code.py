"""Code of users in the controller's process: whatever it does, the run goes on or ends, in bounded time."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.e2e.harness import CLUSTER, Home, Launched, Spec, events, held, sound, tiny

pytestmark = pytest.mark.slow  # whole runs in real processes: about 8 s each

LEASE_S = 3.0


def wrong(home: Home, world: str, **more: object) -> Spec:
    return tiny(
        domains__0__environment=f"tests.e2e.worlds:{world}",
        domains__0__environment_args={"mark": str(home.path / "mark")},
        **{"leases__env_step_s": LEASE_S, **more},
    )


def marked(home: Home, run: Launched) -> None:
    run.until((home.path / "mark").exists, "one environment goes wrong")


def faults(directory: Path) -> list[str]:
    return [str(event["detail"]) for event in events(directory, "infra_fault")]


def test_a_call_that_swallows_its_cancellation_is_left_behind(home: Home) -> None:
    """Under `sync` every step waits for its member."""
    run = home.launch(wrong(home, "Stubborn", schedule="sync", staleness=0))
    run.finished()
    (expired,) = [e for e in events(home.directory, "lease_expired") if "a step" in e["waiting_for"]]
    assert expired["action"] == "gap_fill"
    assert len(faults(home.directory)) == 1
    assert "left behind" in run.said
    sound(home.directory)


def test_the_second_signal_ends_the_run_whatever_a_call_does(home: Home) -> None:
    run = home.launch(wrong(home, "Stubborn", leases__env_step_s=600.0))
    marked(home, run)
    for number in (signal.SIGHUP, signal.SIGINT):
        run.kill(number)
        time.sleep(1.0)
    run.failed(130, "interrupted", limit_s=30.0)


@pytest.mark.parametrize(
    ("world", "words"),
    [
        ("CancelsItsHelper", "CancelledError of its own"),
        ("Busy", "held the controller"),
        ("Backtracks", "held the controller"),
    ],
)
def test_what_an_environment_does_is_a_fault_of_its_member(home: Home, world: str, words: str) -> None:
    run = home.launch(wrong(home, world, schedule="sync", staleness=0))
    run.finished()
    (fault,) = faults(home.directory)
    assert words in fault
    sound(home.directory)


def test_an_environment_that_holds_the_controller_for_good_ends_the_run(home: Home) -> None:
    run = home.launch(wrong(home, "BusyForGood"))
    run.failed(1, "held", "worlds.py", "BusyForGood", limit_s=90.0)


def test_stop_ends_a_run_whose_controller_is_held(home: Home) -> None:
    run = home.launch(wrong(home, "BusyForGood", leases__env_step_s=600.0))
    marked(home, run)
    assert home.run("stop", "tiny-1").returncode == 0
    run.failed(130, "interrupted", limit_s=10.0)


def test_a_pause_of_the_controller_is_no_expiry(home: Home) -> None:
    """Longer than every lease; what it started is not stopped with it."""
    spec = {**held(home, turn_s=0.2), "leases__env_step_s": 8.0}
    run = home.launch(tiny(**spec))
    run.until_step(3)  # the games of the last step wait for the gate
    run.kill(signal.SIGSTOP)
    time.sleep(10.0)
    run.kill(signal.SIGCONT)
    time.sleep(0.5)
    home.open()
    run.finished()
    assert events(home.directory, "lease_expired") == []
    assert faults(home.directory) == []
    (paused,) = events(home.directory, "controller_paused")
    assert paused["seconds"] > 8.0
    sound(home.directory)


def test_an_environment_that_does_not_declare_itself_quick_lives_on_a_host(home: Home) -> None:
    """And whatever it does there, no other's wait is longer for it."""
    cluster = {key: value for key, value in CLUSTER.items() if key != "environments"}
    run = home.launch(wrong(home, "Stubborn", schedule="sync", staleness=0), cluster=cluster)
    run.finished()
    assert "host started: environment-0" in run.said
    (fault,) = faults(home.directory)
    assert "on environment-0" in fault
    sound(home.directory)
