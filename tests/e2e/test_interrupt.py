"""Ctrl-C at any moment: exit 130 within seconds, every child gone, and a resume that finishes the run."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest

from tests.e2e.harness import (
    BATCH,
    LIMIT_S,
    ROLLART,
    STEPS,
    Home,
    Launched,
    environment,
    held,
    processes,
    sound,
    tiny,
)

pytestmark = pytest.mark.slow  # real processes, started twice per test: about 12 s

SHUTDOWN_S = 60.0
"""A second or two, and some more for what does not answer; others may use the host. What hangs does so for an hour."""


def trainer_starts(run: Launched) -> None:
    run.part("rollart.train")


def engine_starts(run: Launched) -> None:
    run.part("rollart.engine")


def rollout(run: Launched) -> None:
    run.until_step(1)


def publish(run: Launched) -> None:
    run.until_said("resumed at")
    new = run.step() + 1
    run.until(lambda: any((run.directory / "weights").glob(f"*v{new:06d}")), f"version {new} is written")


def last_evaluation(run: Launched) -> None:
    run.until_said("resumed at")
    run.until_step(STEPS)


def test_ctrl_c_again_and_again(home: Home) -> None:
    """Each life ends at another moment, and the next one goes on from there."""
    free = STEPS * BATCH + 3 * BATCH  # the evaluation's last episodes wait
    run = home.launch(tiny(**held(home, free, turn_s=0.2), evaluation={"episodes": 64, "at": ["end"]}))
    seconds = 0.0
    for moment in (trainer_starts, engine_starts, rollout, publish, last_evaluation):
        moment(run)
        run.kill(signal.SIGINT)
        run.failed(130, "interrupted", "rollart launch --resume", limit_s=SHUTDOWN_S)
        seconds += run.seconds
        if moment is last_evaluation:
            home.open()
        run = home.resume(*(["domains.coin.environment_args.turn_s=0.01"] if moment is last_evaluation else []))
    run.finished()
    sound(home.directory)
    paid(home, seconds + run.seconds)


def paid(home: Home, seconds: float) -> None:
    """The bill holds every second of the controllers' processes, imports and the end of all parts included. What it
    cannot hold is their way into the kernel and out of it, and the report that the last one prints."""
    told = json.loads(home.run("report", "utilization", "tiny-1", "-o", "json").stdout)
    rows = told["tables"]["resources"]
    assert {row["resource"] for row in rows} == {"engine-0", "trainer-0"}
    for row in rows:
        assert seconds - (0.5 + 0.05 * seconds) < row["seconds"] < seconds, told


def test_ctrl_c_twice_in_a_row(home: Home) -> None:
    run = home.launch(tiny(**held(home, turn_s=0.2)))
    rollout(run)
    run.kill(signal.SIGINT)
    run.kill(signal.SIGINT)
    run.failed(130, "interrupted", limit_s=SHUTDOWN_S)


def test_ctrl_c_does_not_wait_for_what_hangs(home: Home) -> None:
    """A stopped engine, a stopped trainer, and environments that never close: each is bounded, and all at once."""
    run = home.launch(tiny(domains__0__environment="tests.e2e.worlds:NeverCloses"))
    run.until_step(0)
    engine, trainer = run.part("rollart.engine"), run.part("rollart.train")
    engine.kill(signal.SIGSTOP)
    trainer.kill(signal.SIGSTOP)
    run.kill(signal.SIGINT)
    run.failed(130, "interrupted", limit_s=SHUTDOWN_S)
    assert not processes(home.path)


def test_a_run_whose_reader_has_left_goes_on(home: Home) -> None:
    """`launch 2>&1 | head -1`: one line is read."""
    home.write(tiny())
    command = [*ROLLART, "launch", "run.yaml", "--cluster", "cluster.yaml"]
    out = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=home.path, env=environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
    ) as run:
        assert run.stdout is not None
        run.stdout.readline()
        run.stdout.close()
        assert run.wait(LIMIT_S) == 0
    sound(home.directory)
