"""Real engines that take versions one by one, with a death in between: nothing is lost, alpha holds."""

from __future__ import annotations

import pytest

from tests.e2e.harness import BATCH, Home, events, held, ledger, sound, tiny

pytestmark = pytest.mark.slow  # real processes: about 10 s a run

THREE = {
    "name": "three-cores",
    "pools": [{"name": "here", "device": "cpu", "count": 3}],
    "engines": {"count": 2, "threads": 1, "max_slots": 16},
}


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("update", ["staggered", "delayed"])
def test_engines_follow_one_by_one(home: Home, update: str, dies: bool) -> None:
    spec = tiny(
        **held(home, turn_s=0.15, spread_s=0.1),
        weights={"update": update, "overlap": True},
        evaluation={"episodes": 2, "at": ["end"]},
    )
    run = home.launch(spec, cluster=THREE)
    if dies:
        run.until_step(1)
        run.part("rollart.engine").kill()
    home.open()
    run.finished()
    sound(home.directory)
    assert events(home.directory, "infra_fault") == []
    assert len(events(home.directory, "engine_lost")) == int(dies)
    updated = events(home.directory, "engine_updated")
    assert {e["version"] for e in updated} <= set(range(1, 5))
    assert max(e["version"] for e in updated) == 4, "the evaluation at the end waited for the last version"
    with ledger(home.directory) as db:
        (evaluated,) = db.execute("SELECT count(*) FROM trajectories WHERE purpose = 'eval'").fetchone()
        (trained,) = db.execute("SELECT count(*) FROM samples WHERE state = 1").fetchone()
    assert (evaluated, trained) == (2, 4 * BATCH)


def test_engines_load_what_has_moved_away_from_theirs(home: Home) -> None:
    """The trainer measures it; where nothing moves far, alpha makes engines load."""
    spec = tiny(
        domains__0__environment_args={"turn_s": 0.05, "spread_s": 0.05},
        steps=8,
        staleness=2,
        weights={"update": "on_divergence", "threshold": 50.0},
    )
    run = home.launch(spec, cluster=THREE)
    run.finished()
    probes = events(home.directory, "weights_probe")
    assert len(probes) == 8
    assert all(v >= 0 for p in probes for k, v in p.items() if k.startswith("kl_v"))
    updated = events(home.directory, "engine_updated")
    assert {e["reason"] for e in updated} <= {"alpha", "diverged"}, "diverged: a version that no sample of a batch had"
    assert 0 < len(updated) <= 2 * 8
    with ledger(home.directory) as db:
        lags = {n for (n,) in db.execute("SELECT version - 1 - v0 FROM samples WHERE state = 1")}
    assert lags <= {0, 1, 2}
