"""Kill -9 of the controller at any moment: no process outlives it, and a resume loses and repeats nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos.test_foreign_weights import of_another_run
from tests.e2e.harness import BATCH, GROUP_SIZE, Home, Launched, Spec, held, ledger, sound, tiny, waiting_samples

pytestmark = pytest.mark.slow  # real processes, started at least twice per test: about 14 s

FREE = 2 * BATCH + 2 * GROUP_SIZE
"""Games that begin before the test lets more: two steps' and half of the third's, which wait then."""
FAST = "domains.coin.environment_args.turn_s=0.01"


def slow(home: Home, **arguments: Any) -> Spec:
    return held(home, FREE, **{"turn_s": 0.15, **arguments})


def trainer_starts(run: Launched) -> None:
    run.part("rollart.train")


def engine_starts(run: Launched) -> None:
    run.part("rollart.engine")


def rollout(run: Launched) -> None:
    """Finished samples wait, and others run."""
    run.until(lambda: run.step() >= 1 and len(waiting_samples(run.directory)) > 2, "samples wait for step 2")


def step_line(run: Launched) -> None:
    run.until_said("step   2/4")


def publish(run: Launched, version: int = 2) -> None:
    """While the version is written, or just after: before its commit or behind it, as it comes."""
    run.until(lambda: any((run.directory / "weights").glob(f"*v{version:06d}")), f"version {version} is written")


def later_publish(run: Launched) -> None:
    publish(run, 3)


def test_kill_and_resume_again_and_again(home: Home) -> None:
    """Each life is killed at another moment, and the next one goes on from there; the last one ends the run."""
    run = home.launch(tiny(**slow(home)))
    for moment, more in (
        (trainer_starts, 0),
        (engine_starts, BATCH + 2 * GROUP_SIZE),
        (rollout, BATCH),
        (step_line, BATCH),
        (later_publish, 0),
    ):
        moment(run)
        run.kill()
        assert run.end() == -9  # and every process it started has ended too
        reached = run.step()
        kept = _kept(home) if reached >= 0 else {}
        if moment is later_publish:
            home.open()
        run = home.resume(f"domains.coin.environment_args.free={more}", *([FAST] if moment is later_publish else []))
        if reached >= 0:
            run.until_said(f"resumed at step {reached}, v{reached}")
    run.finished()
    sound(home.directory)
    _used(home, kept)


@pytest.mark.parametrize("moment", [step_line, publish])
def test_kill_with_a_version_on_its_way(home: Home, moment: Callable[[Launched], None]) -> None:
    """Up to two steps may have been trained and not committed: both are trained from what is durable."""
    run = home.launch(tiny(**slow(home), weights={"overlap": True}))
    moment(run)
    run.kill()
    assert run.end() == -9
    home.open()
    resumed = home.resume(FAST)
    resumed.finished()
    sound(home.directory)


def test_kill_before_there_is_a_ledger(home: Home) -> None:
    run = home.launch()
    run.until(run.directory.exists, "the run has a directory")
    run.kill()
    assert run.end() == -9
    shown = home.run("status", "tiny-1")
    assert (shown.returncode, "stopped" in shown.stdout) == (0, True), shown.stderr
    home.resume().finished()
    sound(home.directory)
    for part in home.directory.glob("ledger.sqlite*"):
        part.unlink()
    home.resume().failed(1, "ledger", "v4 of its weights is there", "start a new run")


def test_the_newest_version_is_replaced(home: Home) -> None:
    """The run goes back to the version before it, and trains each later step once, on other groups."""
    run = home.launch(tiny(**slow(home)))
    run.until(lambda: run.step() >= 2 and bool(waiting_samples(run.directory)), "samples wait for step 3")
    run.kill()
    run.end()
    reached = run.step()
    with ledger(home.directory) as db:
        lost = {g for (g,) in db.execute("SELECT id FROM groups WHERE version = ?", (reached,))}
    newest = home.directory / "weights" / f"v{reached:06d}"
    foreign = of_another_run(newest, home.path / "foreign")
    shutil.rmtree(newest)
    foreign.rename(newest)
    home.open()
    resumed = home.resume(FAST)
    resumed.finished()
    assert f"v{reached} of the weights is damaged: the run goes back to v{reached - 1}" in resumed.said
    assert f"resumed at step {reached - 1}, v{reached - 1}" in resumed.said
    sound(home.directory)
    with ledger(home.directory) as db:
        fates = dict(db.execute("SELECT id, reason FROM groups WHERE state = 2").fetchall())
    assert lost
    assert all(fates[group] == "infra_fault" for group in lost)


def test_every_version_is_damaged(home: Home) -> None:
    run = home.launch(tiny(**slow(home)))
    run.until_step(1)
    run.kill()
    run.end()
    reached = run.step()
    for version in (home.directory / "weights").glob("v*"):
        os.truncate(version / "model.safetensors", 100)
    (home.directory / "weights" / f"v{reached:06d}" / "COMPLETE").unlink()
    home.resume().failed(1, "can be restored", f"v{reached:06d} is not complete on disk", "backup")
    assert run.step() == reached, "the ledger is as it was"


def test_sync_schedule(home: Home) -> None:
    """Groups end at different times: the first of a batch wait for the last, as they do not where all end at once."""
    uneven = slow(home, turn_s=0.05, spread_s=0.5)
    run = home.launch(tiny(**uneven, schedule="sync", staleness=0))
    run.until(lambda: run.step() >= 1 and bool(waiting_samples(run.directory)), "samples wait for step 2")
    run.kill()
    run.end()
    kept = _kept(home)
    home.open()
    home.resume(FAST).finished()
    sound(home.directory)
    _used(home, kept)


def test_the_producer_of_an_artefact_does_not_outlive_it(home: Home) -> None:
    run = home.launch(tiny(functions__0__artefact="tests.e2e.worlds:produce_for_ever"))
    run.until(lambda: (run.directory / "artefacts/rule/begun").exists(), "the producer runs")
    run.kill()
    assert run.end() == -9


def _kept(home: Home) -> dict[str, int]:
    """Finished samples that the next step may still train on, with the version of their first token."""
    with ledger(home.directory) as db:
        (version,) = db.execute("SELECT max(version) FROM versions").fetchone()
    return {s: v0 for s, v0 in waiting_samples(home.directory).items() if version - v0 <= 1}


def _used(home: Home, kept: dict[str, int]) -> None:
    """Each was trained as it was, or its group went stale later and says so."""
    with ledger(home.directory) as db:
        for sample, v0 in kept.items():
            now, state, reason, last = db.execute(
                "SELECT s.v0, s.state, g.reason, g.version FROM samples s JOIN groups g ON g.id = s.grp WHERE s.id = ?",
                (sample,),
            ).fetchone()
            assert now == v0, f"{sample} was generated again"
            assert state == 1 or reason == "stale" or (last or 0) > v0 + 1, f"{sample} was lost"
