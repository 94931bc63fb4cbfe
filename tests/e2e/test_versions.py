"""Versions of a real run outlive it: kept, evaluated, and the start of another run."""

from __future__ import annotations

import pytest
from safetensors.numpy import load_file

from tests.e2e.harness import Home, Launched, events, tiny

pytestmark = pytest.mark.slow  # two runs, each with a trainer and an engine: about 6 s each


def test_a_run_starts_from_a_kept_version_of_another(home: Home) -> None:
    home.launch(tiny(steps=4, checkpoints={"every": 2})).finished()
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
