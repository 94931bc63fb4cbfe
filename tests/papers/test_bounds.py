"""ROLL Flash's bounds against schedules that were run: never violated, and reached."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.bounds import AsyncStep, makespan, makespan_bound, sample_bound


def violations(rng: random.Random, instances: int, workers: int, samples: int) -> tuple[int, float]:
    """Random K, N, alpha and heavy tails, list-scheduled in a random order. How often the bound on the time per sample
    was passed, and the largest share of it that was reached."""
    passed, most = 0, 0.0
    for _ in range(instances):
        k, n, alpha = rng.randint(1, workers), rng.randint(1, samples), rng.randint(0, 4)
        sigma = rng.choice([0.0, 0.5, 2.0])
        times = [rng.lognormvariate(0, sigma) for _ in range((alpha + 1) * n)]
        bound = sample_bound(sum(times) / len(times), max(times), workers=k, samples=n, alpha=alpha)
        share = makespan(times, k) / len(times) / bound
        passed += share > 1 + 1e-12
        most = max(most, share)
    return passed, most


def test_the_bound_holds() -> None:
    passed, most = violations(random.Random(1), 300, 16, 24)
    assert passed == 0
    assert most > 0.95, "the instances come near it"


@pytest.mark.slow
def test_the_bound_holds_over_ten_thousand_instances() -> None:
    passed, most = violations(random.Random(2), 10_000, 128, 64)
    assert passed == 0
    assert most > 0.95


def test_the_bound_is_tight() -> None:
    """Everything else ends at Q mu / K, and then the longest starts."""
    k, short = 50, 200
    times = [1.0] * (k * short) + [100.0]
    bound = makespan_bound(sum(times) / len(times), 100.0, workers=k, samples=len(times))
    assert makespan(times, k) == short + 100
    assert makespan(times, k) <= bound <= 1.01 * makespan(times, k)


def test_asynchrony_pays_the_tail_once() -> None:
    """The published case: 128 workers, 256 samples, a tail of 20 times the median. Per sample, generation falls with
    alpha as 1 / (alpha + 1), and two steps of lag bring about two thirds of the possible gain."""
    rng = random.Random(3)
    step: dict[int, float] = {}
    for alpha in (0, 1, 2, 4, 8, 64):
        times = [1.0 if rng.random() < 0.9 else 20.0 * rng.random() for _ in range(256 * (alpha + 1))]
        times[-1] = 20.0  # the longest comes last: the worst case
        step[alpha] = makespan(times, 128) / len(times)
    assert sorted(step.values(), reverse=True) == list(step.values())
    assert 0.55 < (step[0] - step[2]) / (step[0] - step[64]) < 0.75


Steps = st.builds(
    lambda workers, samples, mean, tail, train, epochs: AsyncStep(workers, samples, mean, mean * tail, train, epochs),
    st.integers(2, 512),
    st.integers(1, 2048),
    st.floats(0.01, 100),
    st.floats(1, 50),
    st.floats(0.01, 100),
    st.integers(1, 4),
)


@given(Steps, st.floats(0, 64))
def test_beta_star_keeps_both_sides_within_the_bound(step: AsyncStep, alpha: float) -> None:
    share = step.train_share(alpha)
    assert 0 < share < 1
    generate, train = step.sides(alpha, share * step.workers)
    assert generate <= step.async_s(alpha) * (1 + 1e-9)
    assert train == pytest.approx(step.async_s(alpha)), "beta* is where training is as slow as the bound"
    assert step.work_s < step.async_s(alpha) <= step.sync_s() == step.async_s(0)
    assert 1 <= step.speedup(alpha) <= step.max_speedup()


@given(Steps, st.integers(0, 8))
def test_whole_workers_are_the_best_whole_number(step: AsyncStep, alpha: int) -> None:
    n = step.train_workers(alpha)
    best = max(step.sides(alpha, n))
    for other in {1, max(n - 1, 1), min(n + 1, step.workers - 1), step.workers - 1}:
        assert best <= max(step.sides(alpha, other))


def test_the_speedup_goes_to_its_limit() -> None:
    step = AsyncStep(128, 256, generate_s=1.0, longest_s=20.0, train_s=0.5)
    assert step.max_speedup() == pytest.approx(1 + 128 * 20 / (256 * 1.5))
    assert step.speedup(0) == 1
    assert step.speedup(1e9) == pytest.approx(step.max_speedup())
    assert replace(step, longest_s=1.0).max_speedup() < step.max_speedup()


@given(st.integers(2, 12), st.integers(2, 24), st.integers(0, 3), st.integers(0, 10_000))
def test_a_step_that_runs_keeps_the_bound(workers: int, samples: int, alpha: int, seed: int) -> None:
    """Generation on the workers that the plan leaves it, alpha + 1 steps without a stop: per step no longer than its
    side of the bound."""
    rng = random.Random(seed)
    times = [rng.lognormvariate(0, 1) for _ in range((alpha + 1) * samples)]
    step = AsyncStep(workers, samples, sum(times) / len(times), max(times), train_s=rng.uniform(0.1, 2))
    n = step.train_workers(alpha)
    assert makespan(times, workers - n) / (alpha + 1) <= step.sides(alpha, n)[0] * (1 + 1e-12)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="mean <= longest"):
        makespan_bound(2.0, 1.0, workers=1, samples=1)
    with pytest.raises(ValueError, match="at least one worker"):
        makespan_bound(1.0, 1.0, workers=0, samples=1)
    with pytest.raises(ValueError, match="alpha"):
        sample_bound(1.0, 1.0, workers=1, samples=1, alpha=-1)
    with pytest.raises(ValueError, match="at least 2"):
        AsyncStep(1, 4, 1.0, 2.0, 1.0).train_workers(1)
    with pytest.raises(ValueError, match="some must generate"):
        AsyncStep(4, 4, 1.0, 2.0, 1.0).sides(1, 4)
    with pytest.raises(ValueError, match="not negative"):
        AsyncStep(4, 4, 1.0, 2.0, 1.0).async_s(-1)
    assert makespan_bound(0, 0, workers=1, samples=0) == 0
