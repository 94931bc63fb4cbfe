"""Streamed training with the real trainer and engine: what it learns, and what a death in a half-grown batch costs."""

from __future__ import annotations

import json

import pytest

from tests.e2e.harness import BATCH, GROUP_SIZE, Home, Launched, events, ledger, sound, tiny

pytestmark = pytest.mark.slow  # real processes: about 10 s a run


def accumulated(run: Launched) -> bool:
    """The trainer has had groups of the step after version 1, and waits for more."""
    with ledger(run.directory) as db:
        published, last = db.execute(
            "SELECT count(*), max(t1) FROM intervals WHERE role = 'trainer' AND state = 'sync'"
        ).fetchone()
        if published < 2:
            return False
        query = "SELECT count(*) FROM intervals WHERE role = 'trainer' AND state = 'busy' AND t0 >= ?"
        return bool(db.execute(query, (last,)).fetchone()[0])


def metrics(run: Launched) -> list[dict[str, float]]:
    with ledger(run.directory) as db:
        rows = db.execute("SELECT metrics FROM versions WHERE version > 0 ORDER BY version").fetchall()
    return [json.loads(text) for (text,) in rows]


def test_a_trainer_that_dies_in_a_half_grown_batch_loses_nothing(home: Home) -> None:
    gate = home.path / "gate"
    free = BATCH + 2 * GROUP_SIZE  # one batch, and half of the next
    run = home.launch(
        tiny(
            training__stream=True,
            domains__0__environment="tests.e2e.worlds:Held",
            domains__0__environment_args={"turns": 2, "free": free, "gate": str(gate)},
        )
    )
    trainer = run.part("rollart.train")
    run.until_step(1)
    run.until(lambda: accumulated(run), "groups of the second step are accumulated")
    assert run.step() == 1
    trainer.kill()
    gate.touch()
    run.finished()
    sound(home.directory)
    assert len(events(home.directory, "trainer_restarted")) == 1
    assert events(home.directory, "infra_fault") == []
    assert [m["samples"] for m in metrics(run)] == [BATCH] * 4, "what had been accumulated was trained as well"


@pytest.mark.parametrize("stream", [False, True])
def test_it_learns_with_and_without(home: Home, stream: bool) -> None:
    """The same task, rate and losses; success goes from a coin's to nearly always in 20 steps."""
    run = home.launch(
        tiny(
            training={"lr": 1e-2, "stream": stream},
            steps=20,
            batch__trajectories=32,
            domains__0__group_size=4,
            domains__0__environment_args={"turn_s": 0.02, "spread_s": 0.2},
        )
    )
    run.finished()
    with ledger(home.directory) as db:
        query = "SELECT avg(success) FROM trajectories WHERE outcome = 'finished' AND v0 BETWEEN ? AND ?"
        first, last = (db.execute(query, span).fetchone()[0] for span in ((0, 0), (14, 20)))
    assert 0.2 < first < 0.8
    assert last > 0.9
    assert all(("exposed_seconds" in m) is stream for m in metrics(run))


def test_what_cannot_be_streamed_is_refused_before_anything_starts(home: Home) -> None:
    run = home.launch(tiny(training={"stream": True, "epochs": 2}, domains__0__advantage={"baseline": "domain"}))
    run.failed(2, "training.epochs is 2 (rule: 1 with training.stream)")
