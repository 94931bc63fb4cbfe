"""`rollart plan --simulate`: a simulation's figures beside the plan's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from placement.types import Deployment, DualPrices, Objective, Placement, Role
from rollart.cli.plan import comparison_table
from tests.cli.conftest import Result
from tests.report.test_simulation_page import found
from tests.tools.test_simulate import CLUSTER, RUN

PLAN = Placement(
    objective=Objective.MAX_THROUGHPUT,
    rate=4.0,
    bound=4.0,
    gap=0.0,
    usd_per_hour=7.2,
    usd_per_hour_all=14.4,
    deployments=(
        Deployment("big", Role.ENGINE, tp=2, replicas=3, utilisation=0.9),
        Deployment("wide", Role.DECODE, tp=1, replicas=2, utilisation=0.5),
        Deployment("big", Role.TRAINER, tp=4, replicas=1, utilisation=0.25),
    ),
    flows=(),
    rewards=(),
    prices=DualPrices(),
    binds=(),
)


def rows(plan: Placement, *findings: Any, publish_s: float | None = None) -> dict[str, dict[str, Any]]:
    table = comparison_table(plan, 64, publish_s, findings)
    named = [dict(zip((c.name for c in table.columns), row, strict=True)) for row in table.rows]
    return {str(row["figure"]): row for row in named}


def test_figure_by_figure_with_the_ratio() -> None:
    told = rows(PLAN, found("rollart", 0), found("rollart", 1))
    step = told["step_s"]
    assert (step["plan"], step["simulated"]) == (16.0, 20.5)
    assert step["ratio"] == pytest.approx(20.5 / 16.0)
    assert step["±"] == pytest.approx(12.7062 * 0.5, rel=1e-4)
    assert (told["train_s"]["plan"], told["waited_s"]["plan"]) == (4.0, 12.0)
    assert (told["publish_s"]["plan"], told["publish_s"]["ratio"]) == (None, None), "nothing is published"
    published = rows(PLAN, found("rollart", 0), publish_s=0.5)["publish_s"]
    assert published["plan"] == 0.5
    assert published["ratio"] == pytest.approx(published["simulated"] / 0.5)
    assert told["trajectories_per_s"]["ratio"] == pytest.approx(0.75)
    assert (told["usd_per_1k"]["plan"], told["usd_per_1k"]["ratio"]) == (pytest.approx(1.0), pytest.approx(40.0))
    assert told["engine_busy"]["plan"] == pytest.approx((6 * 0.9 + 2 * 0.5) / 8)


def test_one_seed_has_no_interval_and_a_plan_of_nothing_no_ratio() -> None:
    assert rows(PLAN, found("rollart", 0))["step_s"]["±"] is None
    nothing = rows(replace(PLAN, rate=0.0), found("rollart", 0))
    assert {row["plan"] for row in nothing.values()} == {row["ratio"] for row in nothing.values()} == {None}


@pytest.fixture
def specs(rollart: Callable[..., Result]) -> Callable[..., Result]:
    Path("run.yaml").write_text(RUN)
    Path("c.yaml").write_text(CLUSTER)
    return lambda *arguments: rollart("plan", "run.yaml", "--cluster", "c.yaml", "--fast", *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--seeds", "2"), "are of --simulate"), (("--simulate", "--what-if", "big=+8"), "--simulate and --what-if")],
)
def test_options_that_do_not_go_together(specs: Callable[..., Result], arguments: tuple[str, ...], said: str) -> None:
    done = specs(*arguments)
    assert done.code == 2
    assert said in done.err


def test_a_plan_that_cannot_be_is_told_as_without(specs: Callable[..., Result]) -> None:
    done = specs("--simulate", "placement.train={pool: wide, devices: 64}")
    assert done.code == 2
    assert "Traceback" not in done.err
    assert done.err == specs("placement.train={pool: wide, devices: 64}").err


def test_a_cluster_of_unknown_speed_is_refused(rollart: Callable[..., Result]) -> None:
    done = rollart("plan", "--simulate")
    assert done.code == 2
    assert "cluster 'local' cannot be simulated" in done.err
    assert "no bf16 figure for cpu" in done.err
    assert not done.out


@pytest.mark.slow
def test_through_the_command_line(specs: Callable[..., Result]) -> None:
    """Slow: plans, and simulates twice."""
    done = specs("--simulate", "--seeds", "2", "--steps", "3", "-o", "json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    figures = {row["figure"]: row for row in told["tables"]["simulated"]}
    (totals,) = told["tables"]["totals"]
    rate = figures["trajectories_per_s"]
    assert rate["plan"] == totals["trajectories_per_s"]
    assert rate["ratio"] == pytest.approx(rate["simulated"] / rate["plan"])
    assert 0.05 < rate["ratio"] < 2, "the same cluster"
    by_plan, simulated = told["tables"]["forecast"]
    ratio = figures["usd_per_1k"]["simulated"] / figures["usd_per_1k"]["plan"]
    assert simulated["usd"] / by_plan["usd"] == pytest.approx(ratio)
    assert simulated["basis"] == "simulation of 3 steps, their start included, of 2 seeds"
    assert any(note.endswith(", 3 steps, 1 left out, seeds: 2") for note in told["notes"])
    assert "Beside a simulation" in specs("--simulate", "--steps", "1").out
