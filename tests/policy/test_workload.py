"""The drift of the measured work from the work of a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.fleet import DomainWork
from rollart.policy.workload import drift

WORK = DomainWork(share=0.5, turns=5.0, first_tokens=30.0, new_tokens=10.0, output_tokens=2.0, wait_s=0.1, finished=99)

numbers = st.floats(0.1, 1e6)
works = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.builds(
        DomainWork,
        share=st.floats(0.0, 1.0),
        turns=st.floats(1.0, 50.0),
        first_tokens=numbers,
        new_tokens=numbers,
        output_tokens=numbers,
        wait_s=st.floats(0.0, 100.0),
        finished=st.just(99),
    ),
)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, (0.0, "")),
        ({"turns": 6.0}, (1 / 6, "turns of lake")),
        ({"output_tokens": 2.5}, (0.2, "output tokens of lake")),
        ({"new_tokens": 20.0}, (40 / 110, "prompt tokens of lake")),
        ({"share": 0.25}, (0.5, "share of lake")),
    ],
)
def test_drift_is_the_largest_change(changed: dict[str, float], expected: tuple[float, str]) -> None:
    worst, name = drift({"lake": WORK}, {"lake": replace(WORK, **changed)})  # type: ignore[arg-type]
    assert (worst, name) == (pytest.approx(expected[0]), expected[1])


@given(works, works)
def test_drift_is_symmetric_and_zero_for_equals(a: dict[str, DomainWork], b: dict[str, DomainWork]) -> None:
    assert drift(a, b)[0] == drift(b, a)[0] >= 0
    assert drift(a, a) == (0.0, "")
