"""Credit units, returns, baselines: limits, centring, and that masked tokens never matter."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.model import TrainSample
from rollart.train.advantages import advantages, batch_advantages, credit_units, returns_to_go
from rollart.train.config import AdvantageConfig, DomainConfig
from tests.train.trainkit import batch, sample

LEVELS = ["token", "turn", "trajectory"]
turn_lists = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=5)


@st.composite
def sample_lists(draw: st.DrawFn) -> list[TrainSample]:
    count = draw(st.integers(1, 8))
    out = [
        sample(
            str(i), turns=draw(turn_lists), domain=draw(st.sampled_from("ab")), group=f"g{draw(st.integers(0, 2))}",
        )
        for i in range(count)
    ]  # fmt: skip
    return out if any(any(s.loss_mask) for s in out) else [*out, sample("one")]


def both(config: AdvantageConfig) -> dict[str, DomainConfig]:
    return {"a": DomainConfig(config), "b": DomainConfig(config)}


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
    made = batch([
        sample("x", turns=[(2, 2), (1, 1)], rewards=[1, 3]),
        sample("y", turns=[(2, 1), (1, 2)], rewards=[3, 5]),
    ])  # fmt: skip
    config = AdvantageConfig(level="turn", gamma=0.5, baseline="domain", normalize=False)
    # returns: x = 2.5, 3; y = 5.5, 5; baselines 4, 4
    assert batch_advantages(made, both(config)).tolist() == [-1.5, -1.5, -1.0, 1.5, 1.0, 1.0]


def test_trajectory_level_with_group_std_is_grpo() -> None:
    scores = [0.0, 1.0, 1.0, 0.0, 5.0, 7.0]
    made = batch([
        sample(str(i), turns=[(1, 1)], group="g" if i < 4 else "h", rewards=[r]) for i, r in enumerate(scores)
    ])  # fmt: skip
    config = AdvantageConfig(level="trajectory", baseline="group", group_std=True, normalize=False)
    assert batch_advantages(made, both(config)).tolist() == [-1, 1, 1, -1, -1, 1]


def test_a_group_without_spread_has_no_advantage() -> None:
    made = batch([sample(str(i), turns=[(1, 1)], group="g", rewards=[0.1 + 0.2]) for i in range(3)])
    config = AdvantageConfig(level="trajectory", baseline="group", group_std=True, normalize=True)
    assert not batch_advantages(made, both(config)).any()


def test_an_unknown_domain_is_named() -> None:
    with pytest.raises(ValueError, match=r"domain 'z' is not configured, the trainer knows a, b"):
        batch_advantages(batch([sample("x", domain="z")]), both(AdvantageConfig()))


@settings(max_examples=40, deadline=None)
@given(sample_lists(), st.sampled_from(LEVELS), st.floats(0, 1), st.sampled_from(["domain", "group"]))
def test_advantages_sum_to_zero_per_unit_and_baseline(
    samples: list[TrainSample], level: str, gamma: float, baseline: str
) -> None:
    made = batch(samples)
    config = AdvantageConfig(level=level, gamma=gamma, baseline=baseline, normalize=False)  # type: ignore[arg-type]
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
    assert all(abs(sum(v)) < 1e-9 for v in keys.values())


@settings(max_examples=40, deadline=None)
@given(sample_lists(), st.sampled_from(LEVELS), st.booleans(), st.data())
def test_what_stands_at_masked_positions_never_matters(
    samples: list[TrainSample], level: str, normalize: bool, data: st.DataObject
) -> None:
    domains = both(AdvantageConfig(level=level, gamma=0.7, normalize=normalize))  # type: ignore[arg-type]
    junk = data.draw(st.floats(-1e6, 1e6))
    dirty = [
        dataclasses.replace(
            s, rewards=tuple(r if m else junk for r, m in zip(s.rewards, s.loss_mask, strict=True)),
            turn=tuple(t if m else 99 for t, m in zip(s.turn, s.loss_mask, strict=True)),
        )
        for s in samples
    ]  # fmt: skip
    clean_, dirty_ = batch_advantages(batch(samples), domains), batch_advantages(batch(dirty), domains)
    assert np.array_equal(clean_, dirty_)


@settings(max_examples=30, deadline=None)
@given(sample_lists(), st.sampled_from(LEVELS))
def test_normalised_advantages_have_unit_spread_and_ignore_the_scale_of_rewards(
    samples: list[TrainSample], level: str
) -> None:
    domains = both(AdvantageConfig(level=level, gamma=0.9, normalize=True))  # type: ignore[arg-type]
    scaled = [dataclasses.replace(s, rewards=tuple(8.0 * r for r in s.rewards)) for s in samples]
    assert np.allclose(batch_advantages(batch(samples), domains), batch_advantages(batch(scaled), domains), atol=1e-6)


def test_a_domain_is_blind_to_the_other() -> None:
    config = AdvantageConfig(level="turn", gamma=0.8)
    alone = [sample(str(i)) for i in range(4)]
    mixed = [s for i, one in enumerate(alone) for s in (sample(f"b{i}", domain="b", rewards=[50, 60]), one)]
    made = batch(mixed)
    at = made.domain[made.loss.sample] == made.domains.index("a")
    assert np.array_equal(batch_advantages(made, both(config))[at], batch_advantages(batch(alone), both(config)))


def test_no_baseline_gives_the_return_itself() -> None:
    out = advantages(
        AdvantageConfig(level="token", gamma=1.0, baseline="none", normalize=False), sample=np.array([3, 3]),
        turn=np.array([0, 0]), rewards=np.array([1.0, 2.0]), group=np.zeros(4, np.int64),
    )  # fmt: skip
    assert out.tolist() == [3.0, 2.0]
