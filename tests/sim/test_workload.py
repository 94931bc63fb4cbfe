"""Workloads: published shapes, draws that do not depend on other entities, replay with exact sums."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.workloads import cap_answers
from rollart.ledger.reader import FinishedRow
from rollart.sim.workload import (
    PRESETS,
    AnswerLengths,
    Constant,
    Distribution,
    GeneratedWorkload,
    LogNormal,
    MassTokenizer,
    Normal,
    ParetoTailed,
    ReplayedWorkload,
    Script,
    WorkloadShape,
    entity_generator,
    mass_of,
    scripts_by_group,
)


def scripts(name: str, prompts: int = 300, members: int = 4, seed: int = 0) -> list[list[Script]]:
    found = GeneratedWorkload(PRESETS[name], seed, name=name)
    return [[found.script(p, m) for m in range(members)] for p in range(prompts)]


def quantile(values: Sequence[float], q: float) -> float:
    return sorted(values)[int(q * len(values))]


@settings(max_examples=40)
@given(st.lists(st.integers(1, 10**6), max_size=8))
def test_mass_is_what_the_text_says(masses: list[int]) -> None:
    ids = MassTokenizer().encode(" ".join(map(str, masses)))
    assert (list(ids), mass_of(ids)) == (masses, sum(masses))
    assert MassTokenizer().encode(MassTokenizer().decode(ids)) == ids


@pytest.mark.parametrize("text", ["0", "12 -3", "look"])
def test_what_is_no_mass_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        MassTokenizer().encode(text)


@pytest.mark.parametrize("name", PRESETS)
def test_a_draw_is_a_function_of_seed_prompt_and_member(name: str) -> None:
    order = [(p, m) for p in range(6) for m in range(3)]
    plain = {k: GeneratedWorkload(PRESETS[name], 1, name=name).script(*k) for k in order}
    random.Random(0).shuffle(order)
    other = GeneratedWorkload(PRESETS[name], 1, name=name)
    assert all(other.script(*k) == plain[k] for k in order)
    assert GeneratedWorkload(PRESETS[name], 2, name=name).script(0, 0) != plain[0, 0]
    assert len(set(plain.values())) == len(plain)


@pytest.mark.parametrize("name", PRESETS)
def test_a_script_is_whole_and_within_its_bounds(name: str) -> None:
    shape = PRESETS[name]
    for script in (s for group in scripts(name, 40) for s in group):
        assert 1 <= script.turns == len(script.shown) == len(script.step_s) <= shape.most_turns
        assert min(script.shown) >= 1
        assert 1 <= min(script.answers) <= max(script.answers) <= shape.answers.cap
        assert sum(script.shown + script.answers) <= shape.context
        assert min(script.step_s) >= 0 <= script.reset_s


def test_rp_1_lengths_have_their_quartiles_and_their_tail() -> None:
    """Published of 14B at 16k: median about 540, third quartile 755 to 1,100, the longest at the cap."""
    answers = [s.answers[0] for group in scripts("math_14b", 600) for s in group]
    assert 500 < quantile(answers, 0.5) < 600
    assert 755 < quantile(answers, 0.75) < 1100
    assert 25 * 540 < max(answers) <= 16_384


def test_answers_to_a_prompt_resemble_each_other_and_run_away_together() -> None:
    groups = [[float(s.answers[0]) for s in group] for group in scripts("math_14b", 600)]
    calm = [g for g in groups if max(g) < 6000]
    within = statistics.mean(statistics.pvariance(g) for g in calm)
    total = statistics.pvariance([x for g in calm for x in g])
    assert within < 0.75 * total
    far = [g for g in groups if max(g) > 12_000]
    assert 0.005 < len(far) / len(groups) < 0.04
    assert statistics.mean(sum(x > 12_000 for x in g) for g in far) > 2


@pytest.mark.parametrize("cap", [8_192, 16_384, 32_768])
def test_a_cap_cuts_the_tail_and_no_more(cap: int) -> None:
    found = GeneratedWorkload(cap_answers(PRESETS["math_14b"], cap), 0, name="math_14b")
    answers = [found.script(p, m).answers[0] for p in range(300) for m in range(4)]
    plain = [s.answers[0] for group in scripts("math_14b") for s in group]
    assert max(answers) <= cap
    assert quantile(answers, 0.75) == quantile(plain, 0.75)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("swe", 30, 50), ("frozenlake", 30, 100), ("webshop", 30, 100), ("gem_math", 1, 5), ("gem_game", 1, 5)],
)
def test_turns_are_those_published(name: str, low: int, high: int) -> None:
    turns = [s.turns for group in scripts(name, 60) for s in group]
    assert low <= statistics.mean(turns) <= high
    assert max(turns) <= high


def test_ra_25_production_has_few_turns_and_a_far_tail() -> None:
    turns = [s.turns for group in scripts("production", 700, 1) for s in group]
    assert statistics.mean(turns) < 48
    assert max(turns) > 10 * statistics.mean(turns)


@given(st.floats(0.1, 100), st.floats(0.01, 2), st.integers(0, 100))
def test_distributions_keep_their_bounds(center: float, spread: float, seed: int) -> None:
    body = LogNormal(center, spread, low=center / 9, high=center * 9)
    bounds: list[tuple[Distribution, float, float]] = [
        (Constant(center), center, center),
        (Normal(center, spread), 0.0, center + 20 * spread),
        (body, center / 9, center * 9),
        (ParetoTailed(body, 0.5, center * 9, 1.1, high=center * 50), center / 9, center * 50),
    ]
    rng = entity_generator(seed)
    for distribution, low, high in bounds:
        assert all(low <= distribution.draw(rng) <= high for _ in range(10))


def test_answers_to_math_have_the_published_quartiles() -> None:
    answers = PRESETS["math_14b"].answers
    rng, found = entity_generator(0), LogNormal(answers.median, answers.sigma)
    values = [found.draw(rng) for _ in range(4000)]
    assert quantile(values, 0.5) == pytest.approx(544, rel=0.05)
    assert quantile(values, 0.75) == pytest.approx(971, rel=0.05)


ROWS = st.builds(
    lambda turns, first, later, action, env: FinishedRow(
        "d", turns, first + (turns - 1) * later + turns * action, turns * action, 0.0, 0.0, 1.0, first, 2.0, env
    ),
    st.integers(1, 40),
    st.integers(1, 500),
    st.integers(1, 300),
    st.integers(1, 900),
    st.floats(0, 100),
)


def replayed(rows: list[FinishedRow], *, seed: int = 0, resample: bool = False) -> ReplayedWorkload:
    return ReplayedWorkload(scripts_by_group(rows)["d"], seed=seed, resample=resample)


@settings(max_examples=30)
@given(st.lists(ROWS, min_size=1, max_size=12))
def test_a_replay_has_the_recorded_sums(rows: list[FinishedRow]) -> None:
    found = replayed(rows)
    for row, script in zip(rows, [found.script(p, 0) for p in range(len(rows))], strict=True):
        assert (script.turns, sum(script.shown + script.answers), sum(script.answers)) == (
            row.turns,
            row.tokens,
            row.action_tokens,
        )
        assert (script.shown[0], script.reset_s) == (row.first_tokens, row.reset_s)
        assert sum(script.step_s) == pytest.approx(row.env_s)
    assert found.script(0, 0) == found.groups[0][0], "a prompt keeps its group"
    assert found.script(len(rows), 0) == found.groups[0][0], "over and over"


def test_a_resampled_replay_does_not_hang_on_the_order() -> None:
    rows = [FinishedRow("d", 1, 10 + i, i, 0.0, 0.0, 1.0, 10) for i in range(1, 50)]
    one, two = (replayed(rows, seed=3, resample=True) for _ in range(2))
    forth = [one.script(p, 0) for p in range(30)]
    assert forth == [two.script(p, 0) for p in reversed(range(30))][::-1]
    assert len(set(forth)) > 10


@given(st.booleans(), st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 9))
def test_members_of_a_prompt_are_of_one_group(resample: bool, sizes: list[int], wanted: int) -> None:
    rows = [
        FinishedRow("d", 1, 10 + 10 * g + m, 1 + m, 0.0, 0.0, 1.0, 9 + 10 * g, group=f"g{g}", score=float(m))
        for g, size in enumerate(sizes)
        for m in range(size)
    ]
    found = replayed(rows, seed=5, resample=resample)
    assert [len(group) for group in found.groups] == sizes
    for prompt in range(3):
        members = [found.script(prompt, m) for m in range(wanted)]
        first = next(g for g in found.groups if g[0] == members[0])
        assert members[: len(first)] == list(first[:wanted]), "and of others once it is through"
        assert members == [found.script(prompt, m) for m in range(wanted)]
    assert {s.reward for group in found.groups for s in group} == {float(m) for m in range(max(sizes))}


def test_nothing_to_replay_is_an_error() -> None:
    assert scripts_by_group([]) == {}
    with pytest.raises(ValueError, match="no trajectory to replay"):
        ReplayedWorkload(())


def test_a_shape_without_room_still_answers() -> None:
    tight = WorkloadShape(Constant(9), Constant(500), Constant(400), AnswerLengths(300, 0.1, cap=1000), context=1000)
    script = GeneratedWorkload(tight, 0).script(0, 0)
    assert script.turns == 1
    assert sum(script.shown + script.answers) <= 1000
