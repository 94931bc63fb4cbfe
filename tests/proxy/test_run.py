"""Whole runs on real processes whose domains are agent programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import BATCH, STEPS, Home, events, ledger, sound, tiny

pytestmark = pytest.mark.slow  # a trainer and an engine: torch twice, about 6 s


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path)
    yield made
    made.close()


def test_agents_are_trained_on_what_they_were_told(home: Home) -> None:
    domains: list[dict[str, Any]] = [
        {
            "name": name,
            "environment": {"harness": f"tests.proxy.agents:{agent}"},
            "group_size": 2,
            "max_turns": 4,
            "max_tokens": 1,
            "trajectories": BATCH // 2,
        }
        for name, agent in (("two", "two_answers"), ("more", "endless"))
    ]
    spec = tiny(domains=domains, functions=[], evaluation={"episodes": 2, "at": ["end"]})
    home.launch(spec).finished()
    sound(home.directory, paid={0.0, 0.5, 1.0})
    assert events(home.directory, "infra_fault") == []
    with ledger(home.directory) as db:
        rows = db.execute(
            "SELECT domain, turns, success, score, action_tokens FROM trajectories "
            "WHERE outcome = 'finished' AND purpose = 'train'"
        ).fetchall()
    trained = [r for r in rows if r[0] == "two"]
    assert len(trained) >= STEPS * BATCH // 2
    assert {r[1] for r in trained} == {2}, "the summary is a branch of its own, and not the longest"
    assert {r[4] for r in trained} == {2}
    assert all(r[3] in (0.0, 0.5, 1.0) and bool(r[2]) == (r[3] == 1.0) for r in trained)
    stopped = [r for r in rows if r[0] == "more"]
    assert {(r[1], r[2], r[3]) for r in stopped} == {(4, 0, 0.0)}, "out of turns is no fault, and no success"
