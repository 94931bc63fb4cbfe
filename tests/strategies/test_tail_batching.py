"""Tail batching: nothing is lost, quotas hold, and the cadence is the published one, whatever finishes when."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.policy.admission import DomainQuota
from rollart.strategies.tail_batching import RoundKind, TailBatching, TailRound


class Driver:
    """Plays a scheduler: carries out launches, ends prompts in random order, and checks every promise on the way."""

    def __init__(
        self, domains: list[DomainQuota], rng: random.Random, *, eta: tuple[float, float], drops: float
    ) -> None:
        self.domains, self.rng, self.drops = {d.domain: d for d in domains}, rng, drops
        self.policy = TailBatching(domains, eta_prompts=eta[0], eta_responses=eta[1])
        self.live: set[str] = set()
        self.trained: Counter[str] = Counter()
        self.given_up: set[str] = set()
        self.rounds: list[RoundKind] = []

    def play(self, prompts: dict[str, list[str]]) -> None:
        """One epoch to its end."""
        left = {d: list(p) for d, p in prompts.items()}
        everything = {p for ps in prompts.values() for p in ps}
        while True:
            demand = self.policy.demand()
            drawn = {d: left[d][:n] for d, n in demand.items()}
            left = {d: left[d][n:] for d, n in demand.items()}
            round_ = self.policy.next_round(drawn)
            if round_ is None:
                break
            self.rounds.append(round_.kind)
            self.run_round(round_)
            waits = {p for q in (*self.policy.waiting.values(), *self.policy.deferred.values()) for p in q}
            unseen = {p for ps in left.values() for p in ps}
            places = [waits, unseen, set(self.trained), self.given_up]
            assert set().union(*places) == everything, "a prompt was lost"
            assert sum(map(len, places)) == len(everything), "a prompt is in two places"
        assert not any(left.values()), "the epoch ended before its prompts"

    def run_round(self, round_: TailRound) -> None:
        self.live = set(round_.responses)
        launched = Counter(p.partition("-")[0] for p in self.live)
        before = Counter(p.partition("-")[0] for p in self.trained)
        dropped_before = len(self.given_up)
        while self.live:
            assert set(self.policy.active) == self.live, "the policy's active prompts are those that run"
            self.end(self.rng.choice(sorted(self.live)))
        assert not self.policy.active
        after = Counter(p.partition("-")[0] for p in self.trained)
        for name, domain in self.domains.items():
            grown, target = after[name] - before[name], min(domain.quota // domain.group_size, launched[name])
            assert grown == target or (grown < target and len(self.given_up) > dropped_before)

    def end(self, prompt: str) -> None:
        self.live.discard(prompt)
        if self.rng.random() < self.drops:
            self.given_up.add(prompt)
            replacement, deferred = self.policy.dropped(prompt)
            assert replacement not in self.live
            self.live |= {replacement} - {None}  # type: ignore[arg-type]
        else:
            deferred = self.policy.completed(prompt)
            self.trained[prompt] += 1
        assert set(deferred) <= self.live
        self.live -= set(deferred)


@st.composite
def drivers(draw: st.DrawFn) -> tuple[Driver, dict[str, list[str]]]:
    domains = []
    for i in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 4))
        domains.append(DomainQuota(f"d{i}", size * draw(st.integers(1, 6)), size))
    eta = (draw(st.sampled_from([1.0, 1.25, 1.5, 2.0])), draw(st.sampled_from([1.0, 1.25, 2.0])))
    rng = random.Random(draw(st.integers(0, 2**32)))
    prompts = {d.domain: [f"{d.domain}-{i}" for i in range(draw(st.integers(0, 30)))] for d in domains}
    return Driver(domains, rng, eta=eta, drops=draw(st.sampled_from([0.0, 0.0, 0.1, 0.3]))), prompts


@settings(max_examples=35, deadline=None)
@given(drivers())
def test_every_prompt_is_trained_exactly_once_an_epoch(case: tuple[Driver, dict[str, list[str]]]) -> None:
    driver, prompts = case
    driver.play(prompts)
    assert set(driver.trained) | driver.given_up == {p for ps in prompts.values() for p in ps}
    assert all(n == 1 for n in driver.trained.values())
    assert not driver.policy.active
    assert not any(driver.policy.deferred.values())


@pytest.mark.parametrize(("eta", "shorts"), [(1.25, 4), (1.5, 2), (2.0, 1)])
def test_the_published_cadence(eta: float, shorts: int) -> None:
    """RollPacker: 4 short rounds to one long one at eta = 1.25, 2 : 1 at 1.5."""
    driver = Driver([DomainQuota("a", 16, 2), DomainQuota("b", 12, 3)], random.Random(1), eta=(eta, 1.25), drops=0.0)
    steps = 5 * (shorts + 1)
    driver.play({"a": [f"a-{i}" for i in range(8 * steps)], "b": [f"b-{i}" for i in range(4 * steps)]})
    assert driver.rounds == ([RoundKind.SHORT] * shorts + [RoundKind.LONG]) * 5


def test_quotas_that_do_not_divide_keep_their_shares_over_rounds() -> None:
    """P0 of 1, 2 and 5 at eta = 1.25: two extra prompts a round, shared 1 : 2 : 5 over time by the debt that is
    carried."""
    prompts = {"a": 1, "b": 2, "c": 5}
    policy = TailBatching([DomainQuota(d, n, 1) for d, n in prompts.items()], eta_responses=1.0)
    extra: Counter[str] = Counter()
    drawn: Counter[str] = Counter()
    for _ in range(200):
        demand = policy.demand()
        fresh = {d: [f"{d}-{drawn[d] + i}" for i in range(n)] for d, n in demand.items()}
        drawn.update(demand)
        round_ = policy.next_round(fresh)
        assert round_ is not None
        if round_.kind is RoundKind.SHORT:
            assert len(round_.responses) == 10
            extra.update({d: sum(p.startswith(d) for p in round_.responses) - n for d, n in prompts.items()})
        while policy.active:
            policy.completed(next(iter(policy.active)))
    total = sum(extra.values())
    assert {d: round(8 * n / total, 1) for d, n in extra.items()} == {"a": 1.0, "b": 2.0, "c": 5.0}


def test_a_short_round_defers_the_slow_and_a_long_one_waits_for_them() -> None:
    policy = TailBatching([DomainQuota("a", 16, 4)])
    assert policy.demand() == {"a": 5}
    first = policy.next_round({"a": ["p0", "p1", "p2", "p3", "p4"]})
    assert first is not None
    assert first.kind is RoundKind.SHORT
    assert sum(first.responses.values()) == 25
    for prompt in ("p0", "p1", "p2"):
        assert policy.completed(prompt) == ()
    assert policy.completed("p4") == ("p3",)
    assert list(policy.deferred["a"]) == ["p3"]
    assert policy.demand() == {"a": 5}


def test_a_round_that_can_spare_a_dropped_prompt_does_not_replace_it() -> None:
    policy = TailBatching([DomainQuota("a", 16, 4)])
    policy.next_round({"a": ["p0", "p1", "p2", "p3", "p4"]})
    assert policy.dropped("p0") == (None, ())
    assert policy.dropped("p1", ["p5"]) == ("p5", ()), "the round needs four"
