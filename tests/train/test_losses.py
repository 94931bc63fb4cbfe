"""The policy losses: gradients at ratio 1, clipping, caps, and the weights of the token mean."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.settings.training import LossSpec
from rollart.train.losses import kl_estimate, loss_weights, policy_loss, token_weights
from tests.train.trainkit import batch, sample

KINDS = ["pg", "ppo", "decoupled", "tis", "topr"]


def gradient(kind: str, now: list[float], behaviour: list[float], advantage: list[float], **rest: float) -> list[float]:
    logprobs = torch.tensor(now, requires_grad=True)
    config = LossSpec(kind=kind, **rest)  # type: ignore[arg-type]
    old = torch.tensor(behaviour)
    proximal = old if kind == "decoupled" else None
    out = policy_loss(config, logprobs=logprobs, behaviour=old, advantage=torch.tensor(advantage), proximal=proximal)
    out.loss.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return list(logprobs.grad.tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_at_ratio_one_every_loss_has_the_policy_gradient(kind: str) -> None:
    logprobs, advantage = [-1.0, -0.2, -3.0], [1.0, -2.0, 0.5]
    assert gradient(kind, logprobs, logprobs, advantage) == pytest.approx([-a for a in advantage])


def test_ppo_stops_pushing_outside_the_clip_range() -> None:
    behaviour = [-1.0] * 4
    now = [-1.0 + math.log(1.5), -1.0 + math.log(0.5)] * 2
    out = gradient("ppo", now, behaviour, [1.0, 1.0, -1.0, -1.0], clip_low=0.2, clip_high=0.2)
    assert out == pytest.approx([0.0, -0.5, 1.5, 0.0])


def test_clip_bounds_are_separate() -> None:
    now, behaviour = [math.log(1.25), math.log(0.7)], [0.0, 0.0]
    assert gradient("ppo", now, behaviour, [1.0, -1.0], clip_low=0.4, clip_high=0.3) == pytest.approx([-1.25, 0.7])
    assert gradient("ppo", now, behaviour, [1.0, -1.0], clip_low=0.2, clip_high=0.2) == [0.0, 0.0]


def test_the_decoupled_weight_is_capped_and_clips_around_the_proximal_policy() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    config = LossSpec(kind="decoupled", cap=2.0)
    out = policy_loss(
        config,
        logprobs=logprobs,
        behaviour=torch.tensor([-9.0]),
        advantage=torch.tensor([1.0]),
        proximal=torch.tensor([-1.0]),
    )
    assert out.loss.item() == pytest.approx(-2.0)
    assert out.ratio.item() == 1.0


def test_tis_truncates_the_importance_weight() -> None:
    out = gradient("tis", [-1.0, -1.0], [-1.0 - math.log(8), -1.0 - math.log(1.5)], [1.0, 1.0], cap=2.0)
    assert out == pytest.approx([-2.0, -1.5])


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.lists(st.tuples(st.floats(-1e30, 0), st.floats(-1e30, 0), st.floats(-50, 50)), min_size=1, max_size=6),
)
def test_no_log_probability_makes_a_loss_or_gradient_infinite(
    kind: str, rows: list[tuple[float, float, float]]
) -> None:
    now, old, advantage = (list(x) for x in zip(*rows, strict=True))
    assert all(math.isfinite(g) for g in gradient(kind, now, old, advantage))


def test_the_kl_estimate_is_zero_at_equality_and_never_negative() -> None:
    a, b = torch.randn(100), torch.randn(100)
    assert (kl_estimate(a, a) == 0).all()
    assert (kl_estimate(a, b) >= 0).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.floats(0.1, 5), min_size=4, max_size=4))
def test_weights_sum_to_one_and_balance_divides_by_domain_counts(domain: list[int], weight: list[float]) -> None:
    at, omega = np.array(domain), np.array(weight)
    for balance in (False, True):
        assert token_weights(at, omega, balance=balance).sum() == pytest.approx(1.0)
    balanced = token_weights(at, omega, balance=True)
    present = sorted(set(domain))
    for d in present:
        assert balanced[at == d].sum() == pytest.approx(omega[d] / omega[present].sum())


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 6), st.booleans()), min_size=1, max_size=8),
    st.sampled_from(["token", "sample", "constant"]),
    st.booleans(),
    st.booleans(),
)
def test_every_counted_sample_has_its_share_of_the_loss(
    drawn: list[tuple[str, int, bool]], aggregation: str, balance: bool, mask: bool
) -> None:
    """Samples that are left out have no weight. Others have, of their domain's share, one for each (sample), or for
    each token (token, constant); a sample as long as `length` weighs the same by `constant` as by `sample`."""
    made = batch(
        [
            dataclasses.replace(sample(str(i), domain=d, turns=[(2, n)], rewards=[0.0]), truncated=cut)
            for i, (d, n, cut) in enumerate(drawn)
        ]
    )
    omega = np.array([1.0, 3.0])[: len(made.domains)]
    config = LossSpec(aggregation=aggregation, length=6 if aggregation == "constant" else None, mask_truncated=mask)  # type: ignore[arg-type]
    weights = loss_weights(config, made, np.arange(len(made)), omega, balance=balance)
    size = np.diff(made.loss.first)
    by_sample = np.bincount(made.loss.sample, weights, minlength=len(made))
    counted = np.array([n > 0 and not (mask and cut) for _, n, cut in drawn])
    assert (by_sample[~counted] == 0).all()
    if not counted.any():
        return
    units = np.where(counted, size if aggregation == "token" else 1, 0).astype(float)
    of_domain = np.bincount(made.domain, units, minlength=len(omega))
    share = units * (omega / np.maximum(of_domain, 1.0) if balance else omega)[made.domain]
    share /= share.sum()
    assert by_sample == pytest.approx(share * size / 6 if aggregation == "constant" else share)


def test_without_balance_equal_weights_are_the_token_mean() -> None:
    assert token_weights(np.array([0, 0, 0, 1]), np.ones(2), balance=False).tolist() == [0.25] * 4
