"""A trainer of two ranks with adapters in a real run: what happens to the run when one of the ranks dies in a step."""

from __future__ import annotations

import pytest

from rollart.engine.weights import read_tensors
from tests.e2e.harness import Home, Process, events, processes, sound, tiny

pytestmark = pytest.mark.slow  # real processes, three of which are started twice: about 30 s

PATIENT_S = 150.0

CLUSTER = {
    "name": "three-cores",
    "pools": [{"name": "here", "device": "cpu", "count": 3}],
    "engines": {"count": 1, "threads": 1, "max_slots": 16},
    "trainer": {"threads": 2, "ranks": 2, "activation_checkpointing": True},
}


def test_a_rank_dies_in_a_step_and_the_run_goes_on(home: Home) -> None:
    run = home.launch(
        tiny(domains__0__environment_args={"turn_s": 0.15}, training__epochs=60, training__lora={"rank": 2}),
        cluster=CLUSTER,
    )
    run.until(lambda: run.step() >= 1, "step 1 is committed", PATIENT_S)
    [rank] = followers(home)
    rank.kill()
    assert run.end(PATIENT_S) == 0, run.said
    assert "Traceback" not in run.said
    sound(home.directory)
    assert len(events(home.directory, "trainer_restarted")) == 1
    assert events(home.directory, "infra_fault") == []
    weights = home.directory / "weights"
    first, last = (read_tensors(weights / f"v{version:06d}") for version in (3, 4))
    assert first.keys() == last.keys()
    assert not any("lora" in name for name in last), "adapters are merged"
    moved = {name for name in last if not first[name].equal(last[name])}
    assert moved == {name for name in last if "_proj." in name}, "all linear modules but the head"


def followers(home: Home) -> list[Process]:
    return [process for process in processes(home.path) if "--rank 1" in process.command]
