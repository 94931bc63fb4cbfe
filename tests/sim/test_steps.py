"""The integrable form of the roofline: equal to the roofline, summed exactly, inverted exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.sim.steps import StepTimeLines, seconds_for, tokens_in
from tests.sim.models import roofline, steps

KINDS = st.sampled_from(
    [("H800", 1, "8B"), ("H20", 1, "8B"), ("H800", 4, "32B"), ("H20", 2, "30B-A3B"), ("H800", 8, "30B-A3B")]
)


@given(KINDS, st.integers(1, 300), st.floats(0, 40_000))
def test_a_decode_step_is_the_roofline_s(kind: tuple[str, int, str], n: int, context: float) -> None:
    assert steps(*kind).decoding(n).at(n * context) == pytest.approx(roofline(*kind).decode_step_s(n, context))


@given(KINDS, st.integers(1, 300), st.floats(0, 40_000), st.integers(1, 8000), st.integers(0, 30_000))
def test_a_step_with_a_chunk_of_prefill_is_the_roofline_s(
    kind: tuple[str, int, str], n: int, context: float, new: int, cached: int
) -> None:
    model = steps(*kind)
    work = model.work([(new, cached)], chunk=8192)
    assert work.steps == 1
    mixed = model.mixed(n, work).at(n * context)
    assert mixed == pytest.approx(roofline(*kind).mixed_step_s(n, context, new, cached))
    assert model.mixed(0, work).at(0) == pytest.approx(roofline(*kind).prefill_s(new, cached))
    assert mixed >= model.decoding(n).at(n * context)


def test_accepting_a_request_costs_once_however_many_steps_its_prompt_takes() -> None:
    from rollart.sim.steps import StepModel

    with_cost, without = StepModel(roofline("H800", 1, "8B", 0.5)), StepModel(roofline("H800", 1, "8B", 1e-12))
    for tokens in (100, 20_000):
        totals = []
        for model in (with_cost, without):
            work = model.work([(tokens, 0)], chunk=2048)
            totals.append(work.steps * model.mixed(0, work).at(0))
        assert totals[0] - totals[1] == pytest.approx(0.5)


LINES = st.tuples(st.floats(1e-3, 1e-2), st.floats(0, 1e-8), st.floats(1e-4, 1e-2), st.floats(1e-8, 1e-6)).map(
    lambda t: StepTimeLines(*t)
)


@given(LINES, st.integers(1, 60), st.integers(1, 20_000), st.integers(1, 300))
def test_a_stretch_takes_what_its_steps_take(lines: StepTimeLines, n: int, context: int, tokens: int) -> None:
    """Exactly, but where the lines cross within one step."""
    total = n * context
    one_by_one = sum(lines.at(total + n * k) for k in range(tokens))
    gap = abs(lines.steep_slope - lines.flat_slope) * n
    assert seconds_for(tokens, lines, n, total) == pytest.approx(one_by_one, rel=1e-9, abs=gap)


@given(LINES, st.integers(0, 60), st.integers(1, 20_000), st.floats(1e-3, 1e5))
def test_tokens_and_seconds_are_inverse(lines: StepTimeLines, n: int, context: int, tokens: float) -> None:
    seconds = seconds_for(tokens, lines, n, n * context)
    assert tokens_in(seconds, lines, n, n * context) == pytest.approx(tokens, rel=1e-9)


@given(LINES, st.integers(0, 60), st.integers(1, 20_000), st.floats(0.1, 1e4), st.floats(0.1, 1e4))
def test_two_stretches_take_what_the_whole_takes(
    lines: StepTimeLines, n: int, context: int, one: float, two: float
) -> None:
    whole = seconds_for(one + two, lines, n, n * context)
    first = seconds_for(one, lines, n, n * context)
    assert first + seconds_for(two, lines, n, n * (context + one)) == pytest.approx(whole, rel=1e-9)
