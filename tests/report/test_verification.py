"""The audit of a ledger: sound ones are sound, and each kind of damage is found, with its row."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.ledger.reader import LedgerReader
from rollart.ledger.store import Ledger
from rollart.ports import Interval
from rollart.report.verification import (
    DOLLARS,
    ENGINES,
    ONCE,
    PROMPTS,
    SECONDS,
    STALENESS,
    TRAJECTORIES,
    VERSIONS,
    LedgerAudit,
    untiled,
    verify,
)
from rollart.settings.run import EvaluationSpec
from rollart.sim import loop
from rollart.testing.laws import find_tiling_errors
from rollart.testing.run import make_simulated_run


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ledger of a simulated run of three steps."""
    directory = tmp_path_factory.mktemp("sound")
    run = make_simulated_run(
        quotas={"a": (4, 2)}, engine_s=lambda r: 0.1 + r.random(), env_s=lambda r: r.random(), train_s=lambda r: 1.0
    )
    run.evaluation = EvaluationSpec(episodes=2, at=("end",))
    config = {"run": {"schedule": "rollart", "staleness": 1}}

    async def main() -> None:
        with Ledger(directory, clock=asyncio.get_running_loop().time, inline=True, config=config) as ledger:
            run.journal = run.recorder = ledger
            await run.run()

    loop.run(main())
    return directory


def audit(directory: Path) -> LedgerAudit:
    with LedgerReader(directory) as reader:
        return verify(reader)


def test_a_sound_ledger_has_no_violation(sound: Path) -> None:
    found = audit(sound)
    assert found.violations == []
    assert found.prompts == {("a", "trained"): 6}
    assert found.dispositions == {("a", "train", "trained"): 12, ("a", "eval", "evaluated"): 2}
    assert found.incarnations == 1
    assert all(found.checked[rule] for rule in (PROMPTS, ONCE, VERSIONS, STALENESS, TRAJECTORIES, SECONDS, ENGINES))


DAMAGE = {
    PROMPTS: "UPDATE groups SET state = 2, reason = '' WHERE id = 'a-1'",
    ONCE: "INSERT INTO trajectories SELECT * FROM trajectories WHERE id LIKE 'a-1.%' AND outcome = 'finished'",
    VERSIONS: "UPDATE versions SET samples = samples + 1 WHERE version = 2",
    STALENESS: "UPDATE samples SET v0 = -3 WHERE id LIKE 'a-1.%'",
    TRAJECTORIES: "UPDATE trajectories SET env_s = 1e6 WHERE id LIKE 'a-1.%'",
    SECONDS: "DELETE FROM intervals WHERE rowid = (SELECT rowid FROM intervals WHERE resource = 'e0' LIMIT 1 OFFSET 2)",
    DOLLARS: "UPDATE intervals SET price = -1.0 WHERE resource = 'e0'",
    ENGINES: "UPDATE trajectories SET engine_seconds = 1e6 WHERE id LIKE 'a-1.%'",
}


@pytest.mark.parametrize("rule", DAMAGE)
def test_damage_is_found_with_its_rows(sound: Path, tmp_path: Path, rule: str) -> None:
    shutil.copytree(sound, tmp_path / "damaged")
    connection = sqlite3.connect(tmp_path / "damaged" / "ledger.sqlite")
    assert connection.execute(DAMAGE[rule]).rowcount > 0
    connection.commit()
    connection.close()
    found = [violation for violation in audit(tmp_path / "damaged").violations if violation.rule == rule]
    assert found
    named = {PROMPTS: "a-1", VERSIONS: "v2", SECONDS: "e0", DOLLARS: "e0", ENGINES: "all"}
    assert all(violation.row.startswith(named.get(rule, "a-1.")) for violation in found)


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        ("DELETE FROM versions WHERE version = 2", VERSIONS),
        ("UPDATE samples SET version = 1 WHERE version = 2", ONCE),
        ("UPDATE samples SET state = 0 WHERE id = (SELECT id FROM samples LIMIT 1)", ONCE),
        ("INSERT INTO intervals SELECT * FROM intervals WHERE resource = 'trainer'", SECONDS),
    ],
)
def test_other_damage_is_found_too(sound: Path, tmp_path: Path, damage: str, rule: str) -> None:
    shutil.copytree(sound, tmp_path / "damaged")
    connection = sqlite3.connect(tmp_path / "damaged" / "ledger.sqlite")
    connection.execute(damage)
    connection.commit()
    connection.close()
    assert rule in {violation.rule for violation in audit(tmp_path / "damaged").violations}


times = st.integers(0, 12).map(float)


@given(st.lists(st.tuples(times, times), min_size=1, max_size=8))
def test_stretches_tile_as_the_law_says(stretches: list[tuple[float, float]]) -> None:
    law = find_tiling_errors([Interval("engine", "e", t0, t1, "busy") for t0, t1 in stretches])
    assert bool(list(untiled("e", stretches))) == bool(law)


@pytest.mark.parametrize(("opened", "gaps"), [([0.0], 1), ([0.0, 7.0], 0), ([0.0, 8.0], 0), ([0.0, 6.0], 1)])
def test_a_gap_ends_with_the_next_incarnation(opened: list[float], gaps: int) -> None:
    assert len(list(untiled("e", [(0.0, 5.0), (7.0, 9.0)], opened))) == gaps
