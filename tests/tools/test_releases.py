"""Versions compared: intervals of fault shares, and figures of recorded runs."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.ledger.database import FILE
from rollart.ledger.events import FUNCTION_HEALTH, FUNCTION_VERSION
from rollart.ledger.store import Ledger
from rollart.ports import RunEvent
from rollart.report.curve import wilson
from rollart.settings.load import builtin, load_prices
from rollart.tools.releases import VersionFigures, fault_difference, recorded_figures
from serverless.meter import TokenBill
from serverless.providers.base import DeployedFunction
from serverless.types import Cause, FaultKind, InfraFault, Invocation, ModelFault, Scored, TokenUsage

OLD, NEW = (DeployedFunction("f", "aws_lambda", digit * 64, digit, digit == "1") for digit in "12")


def figures(faults: int, outcomes: int) -> VersionFigures:
    found = VersionFigures("ab" * 32)
    for n in range(outcomes):
        found.add(InfraFault(FaultKind.CRASH, retryable=False) if n < faults else Scored(1.0))
    return found


def test_newcombes_example_has_newcombes_interval() -> None:
    """Table II of Newcombe 1998, method 10: 56/70 less 48/80 is 0.0524 to 0.3339."""
    difference = fault_difference(figures(48, 80), figures(56, 70))
    assert difference == pytest.approx((0.0524, 0.3339), abs=5e-5)


@given(st.integers(1, 60), st.integers(1, 60), st.data())
def test_an_interval_contains_the_difference_and_turns_with_the_order(n: int, m: int, data: st.DataObject) -> None:
    one, two = figures(data.draw(st.integers(0, n)), n), figures(data.draw(st.integers(0, m)), m)
    there, back = fault_difference(one, two), fault_difference(two, one)
    assert there is not None
    assert back is not None
    share = two.infra_faults / m - one.infra_faults / n
    assert there[0] <= share + 1e-12
    assert there[1] >= share - 1e-12
    assert there == pytest.approx((-back[1], -back[0]))
    low, high = wilson(one.infra_faults, n)
    assert 0.0 <= low <= one.infra_faults / n + 1e-12 <= high + 2e-12
    assert high <= 1.0


@pytest.mark.parametrize(("before", "after", "worse"), [((0, 6), (6, 6), True), ((0, 4), (1, 4), False)])
def test_one_fault_in_four_cases_refuses_no_canary(
    before: tuple[int, int], after: tuple[int, int], worse: bool
) -> None:
    difference = fault_difference(figures(*before), figures(*after))
    assert difference is not None
    assert (difference[0] > 0.0) is worse


def test_faults_of_the_policy_are_scores_and_no_faults_of_the_function() -> None:
    found = VersionFigures("ab" * 32)
    for outcome in (ModelFault(-1.0, "no answer"), Scored(1.0), InfraFault(FaultKind.TIMEOUT, retryable=True)):
        found.add(outcome)
    assert (found.mean, found.outcomes, found.infra_faults) == (0.0, 3, 1)
    assert dict(found.faults) == {"model": 1, "timeout": 1}
    assert fault_difference(found, VersionFigures("cd" * 32)) is None


def record(directory: Path, version: str, *calls: Invocation, outcomes: int, faults: int = 0) -> None:
    """A run of the function `f` with these calls."""
    with contextlib.closing(Ledger(directory, clock=lambda: 0.0, inline=True)) as ledger:
        ledger.event(RunEvent(0.0, FUNCTION_VERSION, "f", {"version": version}))
        for call in calls:
            ledger.invocation(call)
            ledger.tokens(TokenBill("f", call.provider, call.t1, call.cause, TokenUsage("host", "model")))
        ledger.event(RunEvent(9.0, FUNCTION_HEALTH, "f", {"outcomes": outcomes, "fault.crash": faults}))


def call(
    provider: str, seconds: float, cause: Cause = Cause.CALL, *, items: int = 4, status: str = "ok", cold_s: float = 0.0
) -> Invocation:
    return Invocation("f", provider, "w", 0.0, seconds, cold_s, seconds, 1024, items, status, cause)


def test_recorded_figures_are_of_served_calls_at_the_provider_alone(tmp_path: Path) -> None:
    checks = (call("local", 0.001, Cause.CHECK, items=1) for _ in range(16))
    others = (
        call("local", 0.5, Cause.FALLBACK),
        call("aws_lambda", 9.0, Cause.HEDGE),
        call("aws_lambda", 9.0, Cause.SMOKE),
        call("aws_lambda", 8.0, Cause.RETRY, status="timeout"),
        call("aws_lambda", 7.0, cold_s=5.0),
    )
    record(tmp_path / "a", OLD.version, *checks, *others, *(call("aws_lambda", 2.0) for _ in range(10)), outcomes=40)
    record(tmp_path / "elsewhere", NEW.version, call("local", 1.0), outcomes=4, faults=4)
    record(tmp_path / "mixed", NEW.version, call("local", 1.0), call("aws_lambda", 3.0), outcomes=8)
    prices = load_prices(builtin("prices.yaml"))
    (old, new), notes = recorded_figures("f", (OLD, NEW), tmp_path, prices)
    assert old.seconds == [2.0] * 10, "neither failed calls, nor cold ones, nor overhead"
    assert (old.p50_s, old.items, old.outcomes, old.runs) == (2.0, 44, 40, 1)
    billed = prices.function_usd("aws_lambda", billed_s=35.0, memory_mb=1024, requests=12)
    assert old.usd == pytest.approx(billed)
    assert (new.p50_s, new.items, new.outcomes, new.runs) == (3.0, 4, 8, 1), "a run on another provider is none of it"
    assert new.infra_faults == 0
    assert notes == []


def test_a_run_that_cannot_be_read_is_left_out_with_a_note(tmp_path: Path) -> None:
    record(tmp_path / "good", OLD.version, call("aws_lambda", 2.0), outcomes=4)
    record(tmp_path / "foreign", OLD.version, call("aws_lambda", 1.0), outcomes=4)
    with contextlib.closing(sqlite3.connect(tmp_path / "foreign" / FILE)) as connection, connection:
        connection.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    (old, _), notes = recorded_figures("f", (OLD, NEW), tmp_path, load_prices(builtin("prices.yaml")))
    assert (old.runs, old.p50_s) == (1, 2.0)
    (note,) = notes
    assert note.startswith("run foreign is left out: ")
    assert "schema version 99" in note
