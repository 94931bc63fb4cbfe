"""The length ranker on the published shape of lengths: log-normal, with prompts that run away."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.bounds import makespan
from rollart.policy import lengths as module
from rollart.policy.lengths import LengthEstimate, LengthRanker, QuantileWindow, conditional_quantile


def longest_first(lengths: list[float]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda n: -lengths[n])


@settings(max_examples=50)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=40), st.integers(1, 8), st.sampled_from([0, 0.5, 0.9, 1]))
def test_a_window_is_exact(values: list[int], size: int, q: float) -> None:
    window = QuantileWindow(size)
    for n, value in enumerate(values, 1):
        window.add(value)
        last = sorted(values[max(n - size, 0) : n])
        assert len(window) == len(last)
        assert window.quantile(q) in last
        assert sum(x <= window.quantile(q) for x in last) >= q * len(last)


def test_quantiles_by_rank() -> None:
    window = QuantileWindow(10)
    for value in range(1, 11):
        window.add(value)
    assert [window.quantile(q) for q in (0, 0.1, 0.5, 0.9, 1)] == [1, 1, 5, 9, 10]
    with pytest.raises(ValueError, match="nothing"):
        QuantileWindow(1).quantile(0.5)
    with pytest.raises(ValueError, match="between 0 and 1"):
        window.quantile(1.1)


def test_it_falls_back_step_by_step() -> None:
    ranker = LengthRanker()
    assert ranker.estimate("p", "math") == LengthEstimate(512.0, 512.0, 0, 0)
    for _ in range(10):
        ranker.finished("other", "math", 100)
    assert ranker.estimate("p", "math") == LengthEstimate(100, 100, 0, 10)
    assert ranker.estimate("p", "code").p50 == 100, "another domain was not seen yet"


def test_a_prompts_own_lengths_take_over() -> None:
    ranker = LengthRanker()
    for _ in range(100):
        ranker.finished("other", "math", 100)
    seen = [ranker.estimate("p", "math").p50]
    for _ in range(16):
        ranker.finished("p", "math", 8000)
        seen.append(ranker.estimate("p", "math").p50)
    assert seen == sorted(seen)
    assert seen[1] < 1000 < seen[8], "one odd answer is not enough, a group is"
    assert seen[-1] > 4000


def test_a_prompt_belongs_to_its_domain() -> None:
    ranker = LengthRanker()
    ranker.finished("p", "math", 8000)
    assert ranker.estimate("p", "code").own == 0


def test_a_stopped_trajectory_is_a_lower_bound() -> None:
    ranker = LengthRanker()
    for _ in range(100):
        ranker.finished("other", "math", 1000)
    ranker.stopped("p", "math", 10)
    assert ranker.estimate("p", "math").own == 0, "a trajectory stopped early gives no final length"
    ranker.stopped("p", "math", 9000)
    assert ranker.estimate("p", "math").p50 > 1000
    assert ranker.estimate("q", "math").p90 == 1000, "and never into the distribution of finished lengths"


def test_the_memory_of_prompts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROMPTS", 4)
    ranker = LengthRanker()
    for n in range(4):
        ranker.finished(str(n), "d", 10)
    ranker.finished("0", "d", 10)
    ranker.finished("4", "d", 10)
    assert [ranker.estimate(str(n), "d").own for n in range(5)] == [2, 0, 1, 1, 1], "the least recently finished goes"


@settings(max_examples=50)
@given(st.lists(st.integers(1, 100), max_size=30).map(sorted), st.integers(0, 110), st.sampled_from([0.1, 0.5, 0.9, 1]))
def test_what_has_come_so_far_ends_later(ascending: list[int], so_far: int, q: float) -> None:
    got = conditional_quantile(ascending, so_far, q)
    longer = [x for x in ascending if x > so_far]
    if not longer:
        assert got is None
    else:
        assert got in longer
        assert sum(x <= got for x in longer) >= q * len(longer)


def workload(seed: int, prompts: int = 200) -> list[tuple[str, float, float]]:
    """(prompt, its own median, sigma): P50 about 540, and one prompt in twelve runs away."""
    rng = random.Random(seed)
    return [(f"p{n}", rng.lognormvariate(6.3, 0.6) * (12 if rng.random() < 1 / 12 else 1), 0.5) for n in range(prompts)]


def learned(seed: int, epochs: int) -> tuple[LengthRanker, list[tuple[str, float, float]], random.Random]:
    prompts, rng, ranker = workload(seed), random.Random(seed + 1), LengthRanker()
    for _ in range(epochs):
        for prompt, median, sigma in prompts:
            for _ in range(4):
                ranker.finished(prompt, "math", min(median * rng.lognormvariate(0, sigma), 32_768))
    return ranker, prompts, rng


def test_it_finds_the_long_prompts_and_its_p90_covers_nine_in_ten() -> None:
    ranker, prompts, rng = learned(1, 1)
    tenth = len(prompts) // 10
    truly = set(longest_first([median for _, median, _ in prompts])[:tenth])
    guessed = set(longest_first([ranker.estimate(p, "math").p50 for p, _, _ in prompts])[:tenth])
    assert len(truly & guessed) / len(truly) >= 0.8
    covered = [
        median * rng.lognormvariate(0, sigma) <= ranker.estimate(p, "math").p90
        for p, median, sigma in prompts
        for _ in range(4)
    ]
    assert 0.8 <= sum(covered) / len(covered) <= 0.99


def test_its_order_shortens_the_next_step() -> None:
    """Longest estimate first, against the order the prompts came in and against knowing the lengths."""
    ranker, prompts, rng = learned(2, 1)
    order = longest_first([ranker.estimate(p, "math").p50 for p, _, _ in prompts])
    ours = blind = known = 0.0
    for _ in range(10):
        actual = [median * rng.lognormvariate(0, sigma) for _, median, sigma in prompts]
        ours += makespan([actual[n] for n in order], 24)
        blind += makespan(actual, 24)
        known += makespan(sorted(actual, reverse=True), 24)
    assert known <= ours < 0.9 * blind
    assert (blind - ours) / (blind - known) > 0.7, "most of the gain of perfect knowledge"


def test_the_same_history_says_the_same() -> None:
    (a, prompts, _), (b, _, _) = learned(3, 1), learned(3, 1)
    assert [a.estimate(p, "math") for p, _, _ in prompts] == [b.estimate(p, "math") for p, _, _ in prompts]


@pytest.mark.parametrize("tokens", [-1, float("nan"), float("inf")])
def test_nonsense_is_refused(tokens: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        LengthRanker().finished("p", "d", tokens)
