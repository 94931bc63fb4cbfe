"""Real runs whose versions are broadcast, and a death in the middle of one: nothing torn, nobody held up."""

from __future__ import annotations

import copy
import json
import signal
from pathlib import Path

import pytest

from tests.e2e.harness import STEPS, Home, Launched, Spec, events, ledger, sound, tiny

pytestmark = pytest.mark.slow  # real processes: about 10 s a run

THREE = {
    "name": "three-cores",
    "pools": [{"name": "here", "device": "cpu", "count": 3}],
    "engines": {"count": 2, "threads": 1, "max_slots": 16},
}


def broadcasting() -> Spec:
    """In step, so that what the trainer makes of a sample is what the engine made of it, if both have the same
    weights; large enough a version that a broadcast of it takes a while."""
    spec = copy.deepcopy(tiny(schedule="sync", staleness=0, weights={"collective": {"bucket_mb": 1}}))
    spec["model"]["init"] |= {"vocab_size": 40_000, "hidden_size": 128}
    return spec


def same_weights(directory: Path) -> None:
    """Every step was trained on log-probabilities that its own weights have: no engine served anything else."""
    with ledger(directory) as db:
        metrics = [json.loads(m) for (m,) in db.execute("SELECT metrics FROM versions WHERE version > 0")]
    assert len(metrics) == STEPS
    assert all(m["behaviour_gap"] < 1e-4 for m in metrics), metrics


def publishing(run: Launched, version: int) -> None:
    run.until(lambda: any((run.directory / "weights").glob(f"*v{version:06d}*")), f"version {version} is on its way")


def test_versions_reach_engines_by_broadcast(home: Home) -> None:
    run = home.launch(broadcasting(), cluster=THREE)
    run.finished()
    sound(home.directory)
    same_weights(home.directory)
    received = [(e["version"], e["subject"]) for e in events(home.directory, "weights_received")]
    assert sorted(received) == [(v, f"engine-{n}") for v in range(1, STEPS + 1) for n in (0, 1)]
    sent = events(home.directory, "weights_sent")
    assert {e["bytes"] for e in events(home.directory, "weights_received")} == {e["bytes"] for e in sent}
    table = json.loads(home.run("report", "utilization", "-o", "json").stdout)
    rows = table["tables"]["broadcasts"]
    assert [(row["engine"], row["received"], row["missed"]) for row in rows] == [("engine-0", 4, 0), ("engine-1", 4, 0)]


def test_an_engine_dies_in_the_middle_of_a_broadcast(home: Home) -> None:
    """The trainer stands still meanwhile, so that it is not over before the signal comes."""
    run = home.launch(broadcasting(), cluster=THREE)
    publishing(run, 1)
    engine, trainer = run.part("rollart.engine"), run.part("rollart.train")
    publishing(run, 2)
    trainer.kill(signal.SIGSTOP)
    engine.kill()
    trainer.kill(signal.SIGCONT)
    run.finished()
    sound(home.directory)
    same_weights(home.directory)
    assert len(events(home.directory, "engine_lost")) == 1
    assert events(home.directory, "trainer_restarted") == []
    assert events(home.directory, "infra_fault") == []
    assert {e["version"] for e in events(home.directory, "weights_received")} >= {1, 3, 4}


def test_the_trainer_dies_in_the_middle_of_a_broadcast(home: Home) -> None:
    run = home.launch(broadcasting(), cluster=THREE)
    trainer = run.part("rollart.train")
    publishing(run, 2)
    trainer.kill()
    run.finished()
    sound(home.directory)
    same_weights(home.directory)
    assert len(events(home.directory, "trainer_restarted")) == 1
    assert events(home.directory, "engine_lost") == []
    assert events(home.directory, "infra_fault") == []
    assert {e["version"] for e in events(home.directory, "weights_received")} >= {1, 3, 4}


def test_adapters_reach_engines_and_lives_of_the_run_that_begin_late(home: Home) -> None:
    """An engine dies, and then the controller: both begin again with files. The rate moves the policy so far that the
    weights below the adapters would show."""
    spec = broadcasting() | {"training": {"lora": {"rank": 2}, "lr": 0.05}}
    run = home.launch(spec, cluster=THREE)
    run.until(lambda: run.step() >= 1, "step 1 is committed")
    run.part("rollart.engine").kill()
    run.until(lambda: run.step() >= 2, "step 2 is committed")
    run.kill()
    run.end()
    home.resume().finished()
    sound(home.directory)
    same_weights(home.directory)
    assert len(events(home.directory, "engine_lost")) == 1
    whole = (home.directory / "weights" / "base" / "model.safetensors").stat().st_size
    received = events(home.directory, "weights_received")
    assert {e["version"] for e in received} >= {1, STEPS}
    assert all(e["bytes"] < whole / 50 for e in received)
