"""Redundancy and tail batching in real runs with sleeping environments: as much shorter as order statistics say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.rollout_real import GROUPS, POLICIES, SIZE, lost, measured, play, predicted
from tests.e2e.harness import Home, ledger

pytestmark = pytest.mark.slow  # sleeps for half a minute, and starts a trainer and an engine for each run

STEPS, SCALE = 5, 0.4
"""Four short rounds and a long one; sleeps of 0.8 to 5 s a step, beside which what the engine takes is little."""

LOADED = 0.25
"""Least part of the predicted shortening that is to be seen: a host that others use adds seconds to short rollouts and
to long ones. On a quiet one they agree within a few percent (benchmarks/rollout_real.py)."""

ATTEMPTS = 3
"""Other load that comes with one run and goes with the next only adds: one run of these without it will do."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = Home(tmp_path_factory.mktemp("real"))
    yield made.path
    made.close()


@pytest.fixture(scope="module")
def without(home: Path) -> float:
    """Seconds of rollout without a policy."""
    directory = play(home / "none", {}, steps=STEPS, scale=SCALE)
    assert lost(directory, STEPS) == []
    return sum(measured(directory))


@pytest.mark.parametrize("name", [n for n in POLICIES if n != "none"])
def test_a_policy_shortens_the_rollout_as_predicted_and_loses_no_prompt(home: Path, without: float, name: str) -> None:
    policy = POLICIES[name]
    least = sum(predicted(policy, steps=STEPS, scale=SCALE))
    gain = sum(predicted({}, steps=STEPS, scale=SCALE)) / least
    assert gain > 1.4, "there is something to measure"
    for attempt in range(ATTEMPTS):
        directory = play(home / f"{name.replace(' ', '-')}-{attempt}", policy, steps=STEPS, scale=SCALE)
        took = measured(directory)
        assert len(took) == STEPS
        assert sum(took) > 0.9 * least, "nothing is shorter than what it sleeps"
        if without / sum(took) > 1.0 + LOADED * (gain - 1.0):
            break
    else:
        raise AssertionError(f"{without:.1f} s without, {sum(took):.1f} s with it; predicted: {gain:.2f} times shorter")
    assert lost(directory, STEPS) == []
    with ledger(directory) as db:
        trained = db.execute("SELECT count(*) FROM samples WHERE state = 1").fetchone()[0]
        prompts = {g.partition("~")[0] for (g,) in db.execute("SELECT id FROM groups WHERE state = 1")}
    assert trained == STEPS * GROUPS * SIZE
    if "tail_batching" in policy:
        assert prompts == {f"sleeper-{i}" for i in range(STEPS * GROUPS)}, "an epoch, whole"
