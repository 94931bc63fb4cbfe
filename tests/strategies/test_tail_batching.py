"""Tail batching: nothing is lost, quotas hold, and the cadence is the published one, whatever finishes when."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.strategies.tail_batching import Response, RoundEffect, RoundKind, TailBatching, TailDomain, TailRound


class Driver:
    """Plays a scheduler: carries out launches, ends responses in random order, and checks every promise on the way."""

    def __init__(
        self, domains: list[TailDomain], rng: random.Random, *, eta: tuple[float, float], faults: float
    ) -> None:
        self.domains, self.rng, self.eta, self.faults = {d.domain: d for d in domains}, rng, eta, faults
        self.policy = self.make()
        self.live: set[Response] = set()
        self.gone: list[Response] = []
        self.trained: Counter[str] = Counter()
        self.given_up: set[str] = set()
        self.rounds: list[RoundKind] = []

    def make(self) -> TailBatching:
        return TailBatching(list(self.domains.values()), eta_prompts=self.eta[0], eta_responses=self.eta[1])

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
            waits = {p for q in (*self.policy.waiting().values(), *self.policy.deferred().values()) for p in q}
            unseen = {p for ps in left.values() for p in ps}
            places = [waits, unseen, set(self.trained), self.given_up]
            assert set().union(*places) == everything, "a prompt was lost"
            assert sum(map(len, places)) == len(everything), "a prompt is in two places"
        assert not any(left.values()), "the epoch ended before its prompts"

    def run_round(self, round_: TailRound) -> None:
        self.live = set(round_.launch)
        assert len(self.live) == len(round_.launch)
        before = Counter(p.partition("-")[0] for p in self.trained)
        dropped_before = len(self.given_up)
        over = False
        while not over:
            assert set(self.policy.live()) == self.live, "the policy's live responses are those that run"
            assert self.live, "a round with nothing under way cannot end"
            if self.rng.random() < 0.02:
                self.resume()
            over = self.apply(self.event())
        assert not self.live
        after = Counter(p.partition("-")[0] for p in self.trained)
        for name, target in round_.target.items():
            grown = after[name] - before[name]
            assert grown == target or (grown < target and len(self.given_up) > dropped_before)

    def event(self) -> RoundEffect:
        response = self.rng.choice(sorted(self.live))
        if self.gone and self.rng.random() < 0.1:
            late = self.policy.finished(self.rng.choice(self.gone))
            assert late == RoundEffect(late=True), "a cancelled response that ends anyway changes nothing"
        if self.rng.random() < self.faults:
            if self.rng.random() < 0.2:
                self.given_up.add(response.prompt)
                return self.policy.dropped(response.prompt)
            self.live.discard(response)
            return self.policy.failed(response, defer=self.rng.random() < 0.5)
        self.live.discard(response)
        return self.policy.finished(response)

    def apply(self, effect: RoundEffect) -> bool:
        assert set(effect.abort) <= self.live
        assert not set(effect.launch) & self.live
        self.live -= set(effect.abort)
        self.gone += effect.abort
        self.live |= set(effect.launch)
        if effect.completed is not None:
            done = effect.completed
            assert len(done.responses) == self.domains[done.domain].responses == len(set(done.responses))
            assert {r.prompt for r in done.responses} == {done.prompt}
            self.trained[done.prompt] += 1
        return effect.round_over

    def resume(self) -> None:
        """The controller dies: only the saved JSON remains, and live responses are launched again."""
        saved = json.loads(json.dumps(self.policy.state()))
        self.policy = self.make()
        self.policy.restore(saved)
        assert self.policy.state() == saved


@st.composite
def drivers(draw: st.DrawFn) -> tuple[Driver, dict[str, list[str]]]:
    domains = [
        TailDomain(f"d{i}", draw(st.integers(1, 6)), draw(st.integers(1, 4))) for i in range(draw(st.integers(1, 3)))
    ]
    eta = (draw(st.sampled_from([1.0, 1.25, 1.5, 2.0])), draw(st.sampled_from([1.0, 1.25, 2.0])))
    rng = random.Random(draw(st.integers(0, 2**32)))
    prompts = {d.domain: [f"{d.domain}-{i}" for i in range(draw(st.integers(0, 30)))] for d in domains}
    return Driver(domains, rng, eta=eta, faults=draw(st.sampled_from([0.0, 0.0, 0.1, 0.3]))), prompts


@settings(max_examples=35, deadline=None)
@given(drivers())
def test_every_prompt_is_trained_exactly_once_an_epoch(case: tuple[Driver, dict[str, list[str]]]) -> None:
    driver, prompts = case
    driver.play(prompts)
    assert set(driver.trained) | driver.given_up == {p for ps in prompts.values() for p in ps}
    assert all(n == 1 for n in driver.trained.values())
    assert not driver.policy.live()
    assert not any(driver.policy.deferred().values())


@pytest.mark.parametrize(("eta", "shorts"), [(1.25, 4), (1.5, 2), (2.0, 1)])
def test_the_published_cadence(eta: float, shorts: int) -> None:
    """RollPacker: 4 short rounds to one long one at eta = 1.25, 2 : 1 at 1.5."""
    driver = Driver([TailDomain("a", 8, 2), TailDomain("b", 4, 3)], random.Random(1), eta=(eta, 1.25), faults=0.0)
    steps = 5 * (shorts + 1)
    driver.play({"a": [f"a-{i}" for i in range(8 * steps)], "b": [f"b-{i}" for i in range(4 * steps)]})
    assert driver.rounds == ([RoundKind.SHORT] * shorts + [RoundKind.LONG]) * 5


@pytest.mark.parametrize("resumed", [False, True])
def test_quotas_that_do_not_divide_keep_their_shares_over_rounds(resumed: bool) -> None:
    """P0 of 1, 2 and 5 at eta = 1.25: two extra prompts a round, shared 1 : 2 : 5 over time by the debt that is
    carried, also over resumes."""
    domains = [TailDomain("a", 1, 1), TailDomain("b", 2, 1), TailDomain("c", 5, 1)]
    policy = TailBatching(domains, eta_responses=1.0)
    extra: Counter[str] = Counter()
    drawn: Counter[str] = Counter()
    for _ in range(200):
        demand = policy.demand()
        fresh = {d: [f"{d}-{drawn[d] + i}" for i in range(n)] for d, n in demand.items()}
        drawn.update(demand)
        round_ = policy.next_round(fresh)
        assert round_ is not None
        assert round_.target == {"a": 1, "b": 2, "c": 5}
        if round_.kind is RoundKind.SHORT:
            assert len(round_.launch) == 10
            extra.update(
                {d.domain: sum(r.prompt.startswith(d.domain) for r in round_.launch) - d.prompts for d in domains}
            )
        while policy.live():
            policy.finished(policy.live()[0])
        if resumed:
            saved = policy.state()
            policy = TailBatching(domains, eta_responses=1.0)
            policy.restore(saved)
    total = sum(extra.values())
    assert {d: round(8 * n / total, 1) for d, n in extra.items()} == {"a": 1.0, "b": 2.0, "c": 5.0}


def test_a_short_round_aborts_the_slow_and_a_long_one_waits_for_them() -> None:
    policy = TailBatching([TailDomain("a", 4, 4)])
    assert policy.demand() == {"a": 5}
    first = policy.next_round({"a": ["p0", "p1", "p2", "p3", "p4"]})
    assert first is not None
    assert first.kind is RoundKind.SHORT
    assert len(first.launch) == 25
    for prompt in ("p0", "p1", "p2"):
        for index in range(3):
            assert policy.finished(Response(prompt, 1, index)) == RoundEffect()
        effect = policy.finished(Response(prompt, 1, 4))
        assert effect.abort == (Response(prompt, 1, 3),), "the first four count, the fifth is aborted"
        assert effect.completed is not None
        assert [r.index for r in effect.completed.responses] == [0, 1, 2, 4]
    effect = RoundEffect()
    for index in range(4):
        effect = policy.finished(Response("p4", 1, index))
    assert effect.round_over
    assert effect.deferred == ("p3",)
    assert set(effect.abort) == {Response("p4", 1, 4), *(Response("p3", 1, i) for i in range(5))}
    assert policy.deferred() == {"a": ("p3",)}
    assert policy.finished(Response("p3", 1, 0)).late


def test_redundant_responses_absorb_a_failure_before_one_is_launched_again() -> None:
    policy = TailBatching([TailDomain("a", 4, 4)])
    policy.next_round({"a": ["p0", "p1", "p2", "p3", "p4"]})
    assert policy.failed(Response("p0", 1, 0)) == RoundEffect()
    assert policy.failed(Response("p0", 1, 1)).launch == (Response("p0", 1, 5),)
    assert policy.failed(Response("p1", 1, 0), defer=True).deferred == ("p1",)
    assert policy.failed(Response("p2", 1, 0), defer=True).deferred == (), "the round needs the other four"


def test_bad_use_is_said() -> None:
    policy = TailBatching([TailDomain("a", 1, 1)])
    with pytest.raises(ValueError, match="unknown domain b"):
        policy.next_round({"b": ["x"]})
    assert policy.next_round({"a": ["x"]}) is not None
    with pytest.raises(ValueError, match="round 1 is not over"):
        policy.next_round({})
    policy.finished(Response("x", 1, 0))
    with pytest.raises(ValueError, match="prompt y is under way already"):
        policy.next_round({"a": ["y", "y"]})
    with pytest.raises(ValueError, match="eta must be at least 1"):
        TailBatching([TailDomain("a", 1, 1)], eta_prompts=0.9)
    with pytest.raises(ValueError, match="resume with the spec"):
        TailBatching([TailDomain("b", 1, 1)]).restore(policy.state())
