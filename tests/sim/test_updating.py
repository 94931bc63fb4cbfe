"""Update policies over modelled engines: the product's control plane, the transfer of weights, and its cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollart.ledger.reader import LedgerReader
from rollart.report.rows import collect
from rollart.settings.resolve import Resolved
from rollart.tools.simulate import simulate
from tests.tools.test_simulate import Make, made, specs  # noqa: F401

BASE = ("staleness=2", "placement.train.seconds_per_step=2.0")


def updates(directory: Path) -> list[tuple[int, str]]:
    with LedgerReader(directory) as reader:
        events = [e for e in reader.events() if e.kind == "engine_updated"]
    return [(int(e.fields["version"] or 0), str(e.fields["reason"])) for e in events]


@pytest.mark.slow
@pytest.mark.parametrize("update", ["delayed", "staggered"])
@pytest.mark.parametrize("schedule", ["rollart", "areal", "roll_flash"])
def test_engines_follow_one_by_one(made: Make, tmp_path: Path, update: str, schedule: str) -> None:  # noqa: F811
    resolved: Resolved = made(*BASE, f"weights.update={update}", "weights.overlap=true")
    for fuzz in range(2):
        done = simulate(resolved, tmp_path / str(fuzz), schedule=schedule, steps=5, fuzz=fuzz)
        assert [s.trajectories for s in done.steps] == [16] * 5
        lags = {lag for s in done.steps for lag in s.lags}
        assert max(lags) <= 2 or schedule == "areal"
        followed = updates(done.directory)
        assert followed
        assert {why for _, why in followed} <= {"idle", "waited", "alpha", "new_version"}


@pytest.mark.slow
@pytest.mark.parametrize("update", ["delayed", "staggered"])
def test_where_kv_memory_bounds_what_engines_take_in(made: Make, tmp_path: Path, update: str) -> None:  # noqa: F811
    resolved: Resolved = made(*BASE, f"weights.update={update}", "rollout.concurrency.mode=on")
    done = simulate(resolved, tmp_path / "run", steps=5, fuzz=1)
    assert [s.trajectories for s in done.steps] == [16] * 5
    assert updates(done.directory)


@pytest.mark.slow
def test_the_same_trace_for_the_same_seed(made: Make, tmp_path: Path) -> None:  # noqa: F811
    resolved = made(*BASE, "weights.update=staggered")
    one, same = (simulate(resolved, tmp_path / n, seed=3, steps=3) for n in ("a", "b"))
    assert one.trace == same.trace


@pytest.mark.slow
def test_a_store_of_the_spec_is_the_simulated_ones_too(made: Make, tmp_path: Path) -> None:  # noqa: F811
    """Buckets of 16 MB, as many in flight as the rule allows; the same bytes to every engine."""
    given = [f"weights.store.{one}" for one in ("kind=files", "url=there", "bucket_mb=16")]
    plain, auto = (simulate(made(*o), tmp_path / n, steps=1).moved for n, o in (("plain", ()), ("auto", given)))
    assert sum(m.pulled_gb for m in plain) == pytest.approx(sum(m.pulled_gb for m in auto))
    assert all(m.exposed_s for m in auto)


@pytest.mark.slow
def test_a_schedule_of_whole_batches_updates_all_at_once(made: Make, tmp_path: Path) -> None:  # noqa: F811
    done = simulate(made(*BASE, "weights.update=staggered"), tmp_path / "run", schedule="sync_plus", steps=2)
    assert updates(done.directory) == []
    with LedgerReader(done.directory) as reader:
        assert collect(reader, "run").facts.trained_samples == 32


@pytest.mark.slow
def test_fewer_bytes_are_pulled_where_versions_are_close(made: Make, tmp_path: Path) -> None:  # noqa: F811
    def pulled(name: str, *overrides: str) -> float:
        done = simulate(made("staleness=3", *overrides), tmp_path / name, steps=8)
        assert max(lag for s in done.steps for lag in s.lags) <= 3
        return sum(m.pulled_gb for m in done.moved)

    every = pulled("all")
    near, far = (pulled(f"t{t}", "weights.update=on_divergence", f"weights.threshold={t}") for t in (0.0015, 0.0035))
    assert far < near < 0.9 * every
