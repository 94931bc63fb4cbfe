"""Credit units, returns, baselines: limits, centring, and that masked tokens never matter."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.model import TrainSample
from rollart.settings.training import AdvantageSpec, CreditSpec
from rollart.train.advantages import advantages, batch_advantages, credit_units, returns_to_go
from rollart.train.batch import TrainingBatch
from tests.train.trainkit import batch, sample

LEVELS = ["token", "turn", "trajectory"]
turn_lists = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=5)


@st.composite
def sample_lists(draw: st.DrawFn) -> list[TrainSample]:
    count = draw(st.integers(1, 8))
    out = [
        sample(
            str(i),
            turns=draw(turn_lists),
            domain=draw(st.sampled_from("ab")),
            group=f"g{draw(st.integers(0, 2))}",
        )
        for i in range(count)
    ]
    return out if any(any(s.loss_mask) for s in out) else [*out, sample("one")]


def both(config: AdvantageSpec) -> dict[str, CreditSpec]:
    return {"a": CreditSpec(advantage=config), "b": CreditSpec(advantage=config)}


def test_a_unit_is_a_token_a_turn_or_the_trajectory() -> None:
    owner = np.array([0, 0, 0, 0, 2, 2])
    turn = np.array([0, 0, 2, 3, 0, 0])
    assert credit_units("token", owner, turn).tolist() == [0, 1, 2, 3, 0, 1]
    assert credit_units("turn", owner, turn).tolist() == [0, 0, 1, 2, 0, 0]
    assert credit_units("trajectory", owner, turn).tolist() == [0, 0, 0, 0, 0, 0]


def test_returns_to_go_at_the_limits_of_gamma() -> None:
    rewards = np.array([[1.0, 2.0, 4.0]])
    assert returns_to_go(rewards, 0.0).tolist() == [[1, 2, 4]]
    assert returns_to_go(rewards, 1.0).tolist() == [[7, 6, 4]]
    assert returns_to_go(rewards, 0.5).tolist() == [[3, 4, 4]]


def test_turn_level_by_hand() -> None:
    made = batch(
        [
            sample("x", turns=[(2, 2), (1, 1)], rewards=[1, 3]),
            sample("y", turns=[(2, 1), (1, 2)], rewards=[3, 5]),
        ]
    )
    config = AdvantageSpec(level="turn", gamma=0.5, baseline="domain", normalize="none")
    # returns: x = 2.5, 3; y = 5.5, 5; each is the other's baseline
    assert batch_advantages(made, both(config)).tolist() == [-3.0, -3.0, -2.0, 3.0, 2.0, 2.0]


def scored(scores: list[list[float]]) -> TrainingBatch:
    """One sampled token per sample; `scores` by group."""
    paid = [(f"g{g}", i, reward) for g, group in enumerate(scores) for i, reward in enumerate(group)]
    return batch([sample(f"{g}.{i}", turns=[(1, 1)], group=g, rewards=[r]) for g, i, r in paid])


def test_grpo_divides_by_the_groups_own_sample_deviation() -> None:
    config = AdvantageSpec(level="trajectory", baseline="group", normalize="group")
    out = batch_advantages(scored([[0.0, 1.0, 1.0, 0.0], [5.0, 7.0]]), both(config))
    wide, narrow = 0.5 / np.std([0, 1, 1, 0], ddof=1), 1 / np.std([5, 7], ddof=1)
    assert out.tolist() == pytest.approx([-wide, wide, wide, -wide, -narrow, narrow])


def test_the_one_group_that_teaches_is_not_blown_up_by_those_that_do_not() -> None:
    """16 groups of 16, one of which is solved half the time: GRPO's advantages are of size 1 there."""
    made = scored([[0.0, 1.0] * 8, *([[1.0] * 16] * 15)])
    size = {
        normalize: np.abs(batch_advantages(made, both(AdvantageSpec(normalize=normalize)))[:16]).tolist()  # type: ignore[arg-type]
        for normalize in ("group", "batch", "none")
    }
    assert size["group"] == pytest.approx([0.97] * 16, abs=0.01)
    assert size["batch"] == pytest.approx([4.0] * 16, abs=0.01)
    assert size["none"] == pytest.approx([0.5] * 16)


def test_a_group_without_spread_has_no_advantage() -> None:
    config = AdvantageSpec(level="trajectory", baseline="group", normalize="group")
    assert np.abs(batch_advantages(scored([[0.1 + 0.2] * 3]), both(config))).max() < 1e-12


@pytest.mark.parametrize("level", ["turn", "token"])
@pytest.mark.parametrize("baseline", ["group", "domain"])
@pytest.mark.parametrize("normalize", ["none", "batch"])
def test_a_unit_that_one_sample_alone_reaches_keeps_its_advantage(level: str, baseline: str, normalize: str) -> None:
    """Episodes of 2, 2, 3 and 4 turns of a token each; the last one wins with its fourth."""
    made = batch(
        [
            sample(str(i), turns=[(1, 1)] * n, group="g", rewards=[0.0] * (n - 1) + [1.0 if n == 4 else 0.0])
            for i, n in enumerate([2, 2, 3, 4])
        ]
    )
    config = AdvantageSpec(level=level, baseline=baseline, normalize=normalize)  # type: ignore[arg-type]
    out = batch_advantages(made, both(config))
    winner, others = out[-4:], out[:-4]
    assert winner.min() > 0
    assert winner[3] == winner[2] == winner[0]
    assert others.max() < 0


def test_a_sample_alone_in_its_group_has_no_advantage() -> None:
    made = batch([sample("x", turns=[(1, 1), (1, 1)], rewards=[1, 3])])
    for level in LEVELS:
        config = AdvantageSpec(level=level, baseline="group", normalize="none")  # type: ignore[arg-type]
        assert not batch_advantages(made, both(config)).any()


@settings(max_examples=40, deadline=None)
@given(sample_lists(), st.sampled_from(["domain", "group"]), st.data())
def test_the_baseline_of_a_unit_depends_on_nothing_that_its_own_sample_does(
    samples: list[TrainSample], baseline: str, data: st.DataObject
) -> None:
    """This keeps the gradient unbiased: with higher rewards, a sample's advantages rise by the same amount."""
    config = AdvantageSpec(level="token", gamma=0.0, baseline=baseline, normalize="none")  # type: ignore[arg-type]
    one = data.draw(st.integers(0, len(samples) - 1))
    paid = dataclasses.replace(samples[one], rewards=tuple(r + 3.0 for r in samples[one].rewards))
    made = batch(samples)
    changed = batch([paid if i == one else s for i, s in enumerate(samples)])
    rise = (batch_advantages(changed, both(config)) - batch_advantages(made, both(config)))[made.loss.sample == one]
    alone = not any(
        any(s.loss_mask) and s.domain == paid.domain and (baseline == "domain" or s.group == paid.group)
        for i, s in enumerate(samples)
        if i != one
    )
    assert np.allclose(rise, 0.0 if alone else 3.0)


def test_an_unknown_domain_is_named() -> None:
    with pytest.raises(ValueError, match=r"domain 'z' is not configured, the trainer knows a, b"):
        batch_advantages(batch([sample("x", domain="z")]), both(AdvantageSpec()))


@settings(max_examples=40, deadline=None)
@given(sample_lists(), st.sampled_from(LEVELS), st.floats(0, 1), st.sampled_from(["domain", "group"]))
def test_advantages_sum_to_zero_per_unit_and_baseline(
    samples: list[TrainSample], level: str, gamma: float, baseline: str
) -> None:
    made = batch(samples)
    config = AdvantageSpec(level=level, gamma=gamma, baseline=baseline, normalize="none")  # type: ignore[arg-type]
    out = batch_advantages(made, both(config))
    owner = made.loss.sample
    unit = credit_units(level, owner, made.turn[made.loss.position])
    first = np.ones(len(unit), bool)
    first[1:] = (owner[1:] != owner[:-1]) | (unit[1:] != unit[:-1])
    keys: dict[tuple[int, int, int], list[float]] = {}
    for i in np.flatnonzero(first):
        s = owner[i]
        key = (int(made.domain[s]), int(made.group[s]) if baseline == "group" else -1, int(unit[i]))
        keys.setdefault(key, []).append(out[i])
    assert all(abs(sum(v)) < 1e-9 for v in keys.values() if len(v) > 1)


@settings(max_examples=40, deadline=None)
@given(sample_lists(), st.sampled_from(LEVELS), st.sampled_from(["group", "batch", "none"]), st.data())
def test_what_stands_at_masked_positions_never_matters(
    samples: list[TrainSample], level: str, normalize: str, data: st.DataObject
) -> None:
    domains = both(AdvantageSpec(level=level, gamma=0.7, normalize=normalize))  # type: ignore[arg-type]
    junk = data.draw(st.floats(-1e6, 1e6))
    dirty = [
        dataclasses.replace(
            s,
            rewards=tuple(r if m else junk for r, m in zip(s.rewards, s.loss_mask, strict=True)),
            turn=tuple(t if m else 99 for t, m in zip(s.turn, s.loss_mask, strict=True)),
        )
        for s in samples
    ]
    clean_, dirty_ = batch_advantages(batch(samples), domains), batch_advantages(batch(dirty), domains)
    assert np.array_equal(clean_, dirty_)


@settings(max_examples=30, deadline=None)
@given(sample_lists(), st.sampled_from(LEVELS))
def test_normalised_advantages_have_unit_spread_and_ignore_the_scale_of_rewards(
    samples: list[TrainSample], level: str
) -> None:
    domains = both(AdvantageSpec(level=level, gamma=0.9, normalize="batch"))  # type: ignore[arg-type]
    scaled = [dataclasses.replace(s, rewards=tuple(8.0 * r for r in s.rewards)) for s in samples]
    assert np.allclose(batch_advantages(batch(samples), domains), batch_advantages(batch(scaled), domains), atol=1e-6)


def test_a_domain_is_blind_to_the_other() -> None:
    config = AdvantageSpec(level="turn", gamma=0.8)
    alone = [sample(str(i)) for i in range(4)]
    mixed = [s for i, one in enumerate(alone) for s in (sample(f"b{i}", domain="b", rewards=[50, 60]), one)]
    made = batch(mixed)
    at = made.domain[made.loss.sample] == made.domains.index("a")
    assert np.array_equal(batch_advantages(made, both(config))[at], batch_advantages(batch(alone), both(config)))


def test_no_baseline_gives_the_return_itself() -> None:
    out = advantages(
        AdvantageSpec(level="token", gamma=1.0, baseline="none", normalize="none"),
        sample=np.array([3, 3]),
        turn=np.array([0, 0]),
        rewards=np.array([1.0, 2.0]),
        group=np.zeros(4, np.int64),
    )
    assert out.tolist() == [3.0, 2.0]
