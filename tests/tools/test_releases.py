"""Versions compared: intervals of fault shares, and figures of recorded runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.tools.releases import VersionFigures, fault_difference, wilson
from serverless.types import FaultKind, InfraFault, ModelFault, Scored


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
