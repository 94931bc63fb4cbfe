"""Specs, prices and the plan in one value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.types import Role
from rollart.errors import SpecError
from rollart.settings.load import builtin, load_prices
from rollart.settings.resolve import resolve_files, resolve_saved
from rollart.settings.rules import quotas
from rollart.settings.run import RunSpec

Write = Callable[..., Path]


def test_the_local_cluster_holds_an_engine_and_a_trainer(write: Write) -> None:
    resolved = resolve_files(write())
    (engine,), (trainer,) = resolved.plan.of(Role.ENGINE), resolved.plan.of(Role.TRAINER)
    assert (engine.name, engine.devices, trainer.devices) == ("engine-0", (0,), (1,))
    assert resolved.plan.usd_per_hour == pytest.approx(2 * 0.0472)
    assert resolved.plan.idle == {"here": 0}
    assert resolved.plan.binds == "cpu of pool 'here': 2 of 2 in use"
    assert resolved.quotas == {"lake": 16}


def test_it_is_printable_and_comes_back(write: Write) -> None:
    resolved = resolve_files(write(), None, ["staleness=2", "cluster.pools.here.price=1.5"])
    saved = write(resolved.to_yaml(), "resolved.yaml")
    again = resolve_saved(saved)
    assert again == resolved
    assert resolve_saved(saved, ["steps=7"]).run.steps == 7
    with pytest.raises(SpecError, match="did you mean 'steps'"):
        resolve_saved(saved, ["step=7"])
    with pytest.raises(SpecError, match="'run' is missing"):
        resolve_saved(write("a: 1", "other.yaml"))
    assert again.usd_per_device_hour == {"here": 1.5}


def test_a_pool_that_is_too_small_says_the_numbers(write: Write) -> None:
    with pytest.raises(SpecError) as caught:
        resolve_files(write(), None, ["cluster.engines.count=3"])
    assert caught.value.message == (
        "cluster 'local' cannot hold the run: engine 3 of 3 needs 1 device(s), and pool 'here' has 0 of 2 cpu free"
    )
    assert "engines.count" in caught.value.remedy


def test_a_device_without_a_price(write: Write) -> None:
    cluster = write("name: c\npools: [{name: p, device: H880, count: 2}]\nengines: {count: 1}\n", "c.yaml")
    with pytest.raises(SpecError, match="did you mean 'H800'"):
        resolve_files(write(), cluster)
    price = "price_list=[{name: H880, usd: 2, source: contract, date: 2026-05-05}]"
    assert resolve_files(write(), cluster, [f"cluster.{price}"]).plan.usd_per_hour == 4.0


def test_a_price_list_of_ones_own(write: Write, tmp_path: Path) -> None:
    write("prices: [{name: cpu, usd: 7, source: me, date: 2026-01-01}]\n", "mine.yaml")
    cluster = write("name: c\nprices: mine.yaml\npools: [{name: p, count: 2}]\nengines: {count: 1}\n", "c.yaml")
    assert resolve_files(write(), cluster).plan.usd_per_hour == 14.0


def test_every_shipped_price_has_a_source_and_a_date() -> None:
    assert all(p.source and p.date.year >= 2025 for p in load_prices(builtin("prices.yaml")).prices)


@given(st.lists(st.tuples(st.integers(1, 8), st.floats(0.1, 10)), min_size=1, max_size=5), st.integers(1, 300))
def test_quotas_are_whole_groups_that_fill_the_batch(domains: list[tuple[int, float]], batch: int) -> None:
    run = RunSpec.model_validate(
        {
            "name": "q",
            "model": {"path": "m"},
            "batch": {"trajectories": batch},
            "domains": [
                {"name": f"d{i}", "environment": "a:B", "group_size": g, "weight": w}
                for i, (g, w) in enumerate(domains)
            ],
        }
    )
    try:
        filled = quotas(run)
    except SpecError:
        assert (
            batch % domains[0][0]
            or len({g for g, _ in domains}) > 1
            or batch < len(domains) * domains[0][0]
            or (sum(max(1, int(batch * w / sum(x for _, x in domains) // g)) * g for g, w in domains) > batch)
        )
        return
    assert sum(filled.values()) == batch
    assert all(filled[f"d{i}"] % g == 0 and filled[f"d{i}"] > 0 for i, (g, _) in enumerate(domains))
