"""The critic: generalized advantage estimation, the value loss and its gradient, and what it leaves alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.settings.training import AdvantageSpec, CreditSpec
from rollart.train.advantages import batch_advantages, value_targets
from rollart.train.critic import explained_variance, value_loss
from rollart.train.learner import Learner
from tests.train.test_advantages import sample_lists
from tests.train.trainkit import batch, config, sample

DOUBLE = {
    "init": {
        "vocab_size": 24,
        "hidden_size": 16,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 512,
    },
    "dtype": "float64",
}
SAMPLES = [
    sample(str(i), turns=[(2 + i % 3, 2), (3, i % 4), (1, 1)], restricted=i % 3 == 1, domain="ab"[i % 2])
    for i in range(8)
]
DOMAINS: dict[str, Any] = {
    "a": {"advantage": {"gamma": 0.9, "gae_lambda": 0.8}},
    "b": {"advantage": {"level": "turn", "gamma": 0.7, "gae_lambda": 0.5, "normalize": "none"}},
}


def ppo(**changes: Any) -> Learner:
    return Learner(config(**{"algorithm": "ppo", "model": DOUBLE, "domains": DOMAINS, "grad_clip": 0.0, **changes}))


def weights(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def scrambled(learner: Learner) -> Learner:
    """With a critic that differs from the policy everywhere, and has values other than 0."""
    assert learner.critic is not None
    learner.critic.start(learner.policy)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in learner.critic.parameters:
            parameter.add_(0.2 * torch.randn_like(parameter))
    return learner


def units(level: str, turns: list[int]) -> list[list[int]]:
    """The loss tokens of one sample, by credit unit."""
    keys = {"token": list(range(len(turns))), "turn": turns, "trajectory": [0] * len(turns)}[level]
    return [[i for i, key in enumerate(keys) if key == one] for one in dict.fromkeys(keys)]


def estimated(config: AdvantageSpec, rewards: list[float], values: list[float], turns: list[int]) -> list[float]:
    """Â of each loss token of one sample as the plain double sum Σ_j (γλ)^(j−k) δ_j over units."""
    groups = units(config.level, turns)
    paid = [sum(rewards[i] for i in one) for one in groups]
    value = [*(values[one[0]] for one in groups), 0.0]
    delta = [r + config.gamma * value[k + 1] - value[k] for k, r in enumerate(paid)]
    out = [0.0] * len(rewards)
    for k, one in enumerate(groups):
        total = sum((config.gamma * config.gae_lambda) ** (j - k) * delta[j] for j in range(k, len(delta)))
        for i in one:
            out[i] = total
    return out


@settings(max_examples=40, deadline=None)
@given(
    sample_lists(),
    st.sampled_from(["token", "turn", "trajectory"]),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 10**6),
)
def test_estimates_are_the_double_sum_of_each_sample_alone(
    samples: list[Any], level: Any, gamma: float, lam: float, seed: int
) -> None:
    setup = AdvantageSpec(level=level, gamma=gamma, gae_lambda=lam, baseline="critic", normalize="none")
    domains = {name: CreditSpec(advantage=setup) for name in "ab"}
    made = batch(samples)
    values = np.random.default_rng(seed).normal(size=len(made.loss))
    expected, starts = [], []
    for s, one in enumerate(samples):
        acts = [i for i, m in enumerate(one.loss_mask) if m]
        turns, mine = [one.turn[i] for i in acts], values[made.loss.first[s] : made.loss.first[s + 1]].tolist()
        expected += estimated(setup, [one.rewards[i] for i in acts], mine, turns)
        starts += [mine[unit[0]] for unit in units(level, turns) for _ in unit]
    assert batch_advantages(made, domains, values) == pytest.approx(expected, abs=1e-9)
    assert value_targets(made, domains, values) == pytest.approx(np.add(expected, starts), abs=1e-9)
    if gamma == lam == 1.0:
        plain = {n: CreditSpec(advantage=setup.model_copy(update={"baseline": "none"})) for n in "ab"}
        assert value_targets(made, domains, values) == pytest.approx(batch_advantages(made, plain), abs=1e-9)


def test_observations_of_a_trajectory_are_skipped() -> None:
    """Two turns of one action each are two actions in a row: V of the second follows that of the first."""
    domains = {
        "a": CreditSpec(advantage=AdvantageSpec(level="token", baseline="critic", gae_lambda=0.0, normalize="none"))
    }
    made = batch([sample("s", turns=[(3, 1), (9, 1)], rewards=[1.0, 5.0])])
    assert batch_advantages(made, domains, np.array([10.0, 20.0])).tolist() == [1 + 20 - 10, 5 - 20]


def test_the_value_loss_is_the_greater_of_both_squares() -> None:
    rng = np.random.default_rng(0)
    now, before, target = (torch.from_numpy(rng.normal(size=60)) for _ in range(3))
    now.requires_grad_()
    loss, clipped = value_loss(now, before, target, 0.3)
    (gradient,) = torch.autograd.grad(loss.sum(), now)
    for v, old, goal, one, slope, cut in zip(
        *map(torch.Tensor.tolist, (now, before, target, loss, gradient, clipped)), strict=True
    ):
        near = min(max(v, old - 0.3), old + 0.3)
        squares = (v - goal) ** 2, (near - goal) ** 2
        assert one == pytest.approx(0.5 * max(squares), abs=1e-12)
        assert cut == (squares[1] > squares[0])
        assert slope == pytest.approx(0.0 if cut else v - goal, abs=1e-12)
    assert 0 < clipped.sum() < 60
    plain, none = value_loss(now, before, target, None)
    assert torch.equal(plain, 0.5 * (now - target) ** 2)
    assert not none.any()


def test_a_step_has_the_gradients_of_single_samples() -> None:
    """The whole preset against transformers' own forward passes, one sample and one token at a time."""
    learner = scrambled(ppo(lr=1e-30, loss={"clip_low": 0.9}))
    assert learner.critic is not None
    policy, body, head = learner.policy.model, learner.critic.model.base_model, learner.critic.scorer.head
    values, targets, estimates, logprobs = [], [], {"a": [], "b": []}, []  # type: ignore[var-annotated]
    for one in SAMPLES:
        acts = [i for i, m in enumerate(one.loss_mask) if m]
        ids = torch.tensor([one.token_ids])
        mine = head(body(input_ids=ids).last_hidden_state[0])[:, 0][[i - 1 for i in acts]]
        setup = learner.config.domains[one.domain].advantage
        turns, was = [one.turn[i] for i in acts], mine.tolist()
        found = estimated(setup, [one.rewards[i] for i in acts], was, turns)
        estimates[one.domain] += found
        starts = [was[unit[0]] for unit in units(setup.level, turns) for _ in unit]
        values.append(mine)
        targets += [a + v for a, v in zip(found, starts, strict=True)]
        logits = policy(input_ids=ids).logits[0]
        for i in acts:
            legal = one.allowed[i] if one.allowed else None
            row = logits[i - 1] if legal is None else logits[i - 1][list(legal)]
            logprobs.append((one.domain, logits[i - 1][one.token_ids[i]] - torch.logsumexp(row, 0), one.logprobs[i]))
    value_part = 0.5 * (torch.cat(values) - torch.tensor(targets, dtype=torch.float64)).square().mean()
    wanted = torch.autograd.grad(value_part, learner.critic.parameters)
    a = torch.tensor(estimates["a"], dtype=torch.float64)
    credit = {"a": iter((a - a.mean()) / a.std()), "b": iter(torch.tensor(estimates["b"], dtype=torch.float64))}
    gains = []
    for domain, now, was in logprobs:
        ratio, advantage = (now - was).exp(), next(credit[domain])
        gains.append(torch.min(ratio * advantage, ratio.clamp(0.1, 1.2) * advantage))
    policy_part = -torch.stack(gains).mean()
    wanted_policy = torch.autograd.grad(policy_part, list(policy.parameters()))
    report = learner.train(batch(SAMPLES), 0).metrics
    assert report["value_loss"] == pytest.approx(value_part.item(), abs=1e-9)
    assert report["loss"] == pytest.approx(policy_part.item(), abs=1e-9)
    for parameters, expected in ((learner.critic.parameters, wanted), (policy.parameters(), wanted_policy)):
        for parameter, gradient in zip(parameters, expected, strict=True):
            assert parameter.grad is not None
            assert torch.allclose(parameter.grad, gradient, rtol=1e-9, atol=1e-9)
    assert wanted[0].abs().max() > 1e-6


def test_micro_batches_do_not_change_the_critics_step() -> None:
    results = []
    for limit in (1, 10_000):
        learner = scrambled(ppo(max_tokens_per_microbatch=limit, minibatches=2, critic={"epochs": 2}))
        assert learner.critic is not None
        report = learner.train(batch(SAMPLES), 0).metrics
        results.append((weights(learner.critic.model), report["value_loss"], report["value_clip_fraction"]))
    assert torch.allclose(results[0][0], results[1][0], rtol=1e-9, atol=1e-12)
    assert results[0][1:] == pytest.approx(results[1][1:], abs=1e-9)


def test_a_critic_begins_with_the_policy_and_values_of_zero_and_never_moves_the_policy() -> None:
    """So the first step is that of whitened returns, bit for bit."""
    plain = {"level": "token", "baseline": "none", "normalize": "whiten"}
    ours = ppo(domains={n: {"advantage": {"gae_lambda": 1.0}} for n in "ab"}, epochs=2)
    other = ppo(algorithm=None, loss={"kind": "ppo"}, domains={n: {"advantage": plain} for n in "ab"}, epochs=2)
    for learner in (ours, other):
        learner.imitate(batch(SAMPLES), 3)
    assert ours.critic is not None
    ours.critic.start(ours.policy)
    assert torch.equal(
        ours.critic.model.base_model.embed_tokens.weight, ours.policy.model.base_model.embed_tokens.weight
    )
    report = ours.train(batch(SAMPLES), 0).metrics
    assert (report["value_mean"], report["explained_variance"]) == (0.0, 0.0)
    other.train(batch(SAMPLES), 0)
    assert torch.equal(weights(ours.policy.model), weights(other.policy.model))


def test_it_learns_the_returns_at_its_own_rate_and_in_its_own_passes() -> None:
    learner = scrambled(ppo(critic={"lr": 1e-2, "epochs": 8, "value_clip": None}, lr=1e-30))
    assert learner.critic is not None
    before = weights(learner.policy.model)
    reports = [learner.train(batch(SAMPLES), version).metrics for version in range(4)]
    assert reports[-1]["explained_variance"] > 0.5 > reports[0]["explained_variance"]
    assert reports[-1]["value_loss"] < 0.5 * reports[0]["value_loss"]
    assert torch.equal(weights(learner.policy.model), before)
    still = scrambled(ppo(critic={"lr": 1e-30}))
    assert still.critic is not None
    critic = weights(still.critic.model)
    still.train(batch(SAMPLES), 0)
    assert torch.equal(weights(still.critic.model), critic)
    assert not torch.equal(weights(still.policy.model), before)


def test_the_policy_waits_for_the_first_steps_of_the_critic() -> None:
    learner = ppo(critic={"warmup_steps": 2}, epochs=2, warmup=4)
    assert learner.critic is not None
    before = weights(learner.policy.model)
    for version in range(2):
        critic = weights(learner.critic.model)
        report = learner.train(batch(SAMPLES), version).metrics
        assert report["grad_norm"] > 0
        assert torch.equal(weights(learner.policy.model), before)
        assert not torch.equal(weights(learner.critic.model), critic)
    assert learner.counters.updates == 0
    learner.train(batch(SAMPLES), 2)
    assert learner.counters.updates == 2
    assert not torch.equal(weights(learner.policy.model), before)


def test_only_the_domains_that_have_it_as_baseline_train_it() -> None:
    domains = {"a": {}, "b": {"advantage": {"baseline": "none", "normalize": "none"}}}
    learner = scrambled(ppo(domains=domains))
    assert learner.critic is not None
    before = weights(learner.critic.model)
    others = batch([s for s in SAMPLES if s.domain == "b"])
    assert "value_loss" not in learner.train(others, 0).metrics
    assert torch.equal(weights(learner.critic.model), before)
    both, mine = (
        scrambled(ppo(domains=domains)).train(batch(chosen), 0).metrics
        for chosen in (SAMPLES, [s for s in SAMPLES if s.domain == "a"])
    )
    same = ("value_loss", "value_grad_norm", "explained_variance", "return_mean", "value_mean")
    assert {n: both[n] for n in same} == pytest.approx({n: mine[n] for n in same})
    assert both["loss"] != pytest.approx(mine["loss"])


def test_truncated_samples_are_left_out_of_the_value_loss_as_well() -> None:
    cut = [dataclasses.replace(s, truncated=i == 0) for i, s in enumerate(SAMPLES)]
    domains = {"a": {}, "b": {}}
    whole = scrambled(ppo(domains=domains, loss={"mask_truncated": True})).train(batch(cut), 0).metrics
    rest = scrambled(ppo(domains=domains)).train(batch(cut[1:]), 0).metrics
    assert whole["value_loss"] == pytest.approx(rest["value_loss"])


def test_explained_variance_is_one_for_what_is_known_and_below_zero_for_worse_than_a_constant() -> None:
    returns = np.array([0.0, 1.0, 2.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.full(3, 9.0), returns) == 0.0
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, np.zeros(3)) == 0.0
