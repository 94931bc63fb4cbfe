"""Death and silence of the parts: each is restarted, its work goes on, and the ledger tells it."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.e2e.harness import ZYGOTE, Home, Launched, Spec, events, held, sound, tiny

pytestmark = pytest.mark.slow  # real processes, one of which is started twice: about 10 s


def slow(home: Home) -> Spec:
    return held(home, turn_s=0.15)


def rollout(run: Launched) -> None:
    run.until_step(1)


def weight_update(run: Launched) -> None:
    run.until(lambda: any((run.directory / "weights").glob("v000002")), "version 2 is written")


@pytest.mark.parametrize("moment", [rollout, weight_update])
def test_engine_dies(home: Home, moment: Callable[[Launched], None]) -> None:
    run = home.launch(tiny(**slow(home)))
    engine = run.part("rollart.engine")
    moment(run)
    engine.kill()
    home.open()
    run.finished()
    sound(home.directory)
    (lost,) = events(home.directory, "engine_lost")
    assert "SIGKILL" in lost["cause"]
    assert len(events(home.directory, "engine_started")) == 2
    assert events(home.directory, "infra_fault") == []


def test_one_of_two_engines_dies_and_the_other_goes_on(home: Home) -> None:
    cluster = {
        "name": "three-cores",
        "pools": [{"name": "here", "device": "cpu", "count": 3}],
        "engines": {"count": 2, "threads": 1, "max_slots": 16},
    }
    run = home.launch(tiny(**slow(home), steps=4), cluster=cluster)
    run.until_step(1)
    run.part("rollart.engine").kill()
    home.open()
    run.finished()
    sound(home.directory)
    assert len(events(home.directory, "engine_lost")) == 1
    assert events(home.directory, "infra_fault") == []


def test_engine_hangs(home: Home) -> None:
    """Stopped, not dead: its lease expires, it fails its health check and is replaced; its turns are done again.

    The signal may reach it in a turn, in the update that follows the step, or between them: any wait on it will do.
    """
    run = home.launch(tiny(**slow(home), leases__generate_s=6.0, leases__publish_s=8.0))
    run.until_step(1)
    run.part("rollart.engine").kill(signal.SIGSTOP)
    home.open()
    run.finished()
    sound(home.directory)
    (lost,) = events(home.directory, "engine_lost")
    assert lost["cause"] == "it stopped answering"
    expired = events(home.directory, "lease_expired")
    assert run.said.count("lease expired") >= 1, "whoever watches sees it too"
    assert any("engine-0" in f"{e['subject']}: {e['waiting_for']}" for e in expired), expired
    assert events(home.directory, "infra_fault") == []


@pytest.mark.parametrize("module", ["rollart.engine", "rollart.train"])
def test_a_part_dies_in_its_first_start(home: Home, module: str) -> None:
    run = home.launch(tiny())
    run.part(module).kill()
    run.finished()
    sound(home.directory)
    assert ("engine lost" if module == "rollart.engine" else "trainer restarted") in run.said


def test_trainer_dies_in_a_step(home: Home) -> None:
    run = home.launch(tiny(**slow(home), training__epochs=200))
    trainer = run.part("rollart.train")
    run.until_step(1)
    trainer.kill()
    home.open()
    run.finished()
    sound(home.directory)
    assert len(events(home.directory, "trainer_restarted")) == 1
    assert events(home.directory, "infra_fault") == []


def test_trainer_hangs(home: Home) -> None:
    run = home.launch(tiny(**slow(home), leases__train_s=6.0, leases__publish_s=6.0))
    trainer = run.part("rollart.train")
    run.until_step(1)
    trainer.kill(signal.SIGSTOP)
    home.open()
    run.finished()
    sound(home.directory)
    assert len(events(home.directory, "trainer_restarted")) == 1
    assert not trainer.alive


def test_function_worker_dies(home: Home) -> None:
    run = home.launch(
        tiny(functions__0__handler="slow", functions__0__batch_items=1, domains__0__environment_args={"turn_s": 0.4})
    )
    for _ in range(3):
        run.worker().kill()
    run.finished()
    sound(home.directory)


def test_zygote_dies(home: Home) -> None:
    run = home.launch(tiny(functions__0__handler="slow", functions__0__batch_items=1))
    run.worker()
    run.part(ZYGOTE).kill()
    run.finished()
    sound(home.directory)


def test_everything_dies_once(home: Home) -> None:
    run = home.launch(tiny(**slow(home), functions__0__handler="slow"))
    run.until_step(1)
    for part in (run.part("rollart.train"), run.part("rollart.engine"), run.worker()):
        part.kill()
    home.open()
    run.finished()
    sound(home.directory)
