"""A real run that stops early, and its versions: kept, evaluated, and the start of another run."""

from __future__ import annotations

import pytest
from safetensors.numpy import load_file

from tests.e2e.harness import Home, Launched, events, tiny

pytestmark = pytest.mark.slow  # two runs, each with a trainer and an engine: about 6 s each


def test_a_run_stops_early_and_another_starts_from_one_of_its_versions(home: Home) -> None:
    enough = {"metric": "grad_norm", "above": -1.0, "for_steps": 4}
    first = home.launch(tiny(steps=9, checkpoints={"every": 2}, stop_when=[enough], evaluation={"episodes": 2}))
    first.failed(6, "stopped after step 4 of 9: grad_norm was above -1 4 times in a row", "saved (estimate: ")
    (stop,) = events(home.directory, "stopped_early")
    assert (stop["step"], stop["saved_usd_estimate"] >= 0.0) == (4, True)
    assert [event["version"] for event in events(home.directory, "evaluation")] == [0, 4]
    weights = home.directory / "weights"
    assert sorted(path.name for path in weights.iterdir()) == ["v000000", "v000002", "v000003", "v000004"]
    home.write(tiny(steps=1, checkpoints={"every": 1}))
    arguments = ["launch", "run.yaml", "--cluster", "cluster.yaml", "--from", "tiny-1@v2", "--optimizer"]
    Launched(home.path, [*arguments, "--name", "fork"]).finished()
    fork = home.path / "runs" / "fork"
    (forked,) = events(fork, "forked")
    assert (forked["version"], forked["optimizer"]) == (2, True)
    old, new, later = (
        load_file(path / "model.safetensors")
        for path in (weights / "v000002", fork / "weights" / "v000000", fork / "weights" / "v000001")
    )
    assert all((old[name] == new[name]).all() for name in old)
    assert any((old[name] != later[name]).any() for name in old)
