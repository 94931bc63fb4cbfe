"""The learner against plain transformers code, and changes that must not affect a step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollart.errors import TrainerError, UsageError
from rollart.model import Group, GroupId, TrainSample
from rollart.strategies.token_budget import BatchTruncation
from rollart.train.learner import Learner
from tests.engine.models import DEVICE
from tests.train.trainkit import VOCAB, batch, config, sample

PG: dict[str, Any] = {"kind": "pg"}


def mixed() -> list[TrainSample]:
    """Different lengths, both domains, restricted and free tokens, one sample without loss."""
    shapes = [[(3, 2), (2, 1)], [(9, 4)], [(2, 1), (2, 1), (2, 3)], [(5, 0)], [(1, 6), (4, 2)]]
    return [sample(str(i), turns=turns, domain="ab"[i % 2], restricted=i in (0, 2)) for i, turns in enumerate(shapes)]


def on_policy(learner: Learner, samples: list[TrainSample]) -> list[TrainSample]:
    values = learner.logprobs(batch(samples))
    ends = np.cumsum([len(s.token_ids) for s in samples])
    return [
        dataclasses.replace(s, logprobs=tuple(values[end - len(s.token_ids) : end].tolist()))
        for s, end in zip(samples, ends, strict=True)
    ]


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in learner.policy.model.parameters()])


def by_hand(learner: Learner, one: TrainSample) -> list[float]:
    """log softmax over the legal set at the temperature, one token at a time."""
    with torch.no_grad():
        logits = learner.policy.model(input_ids=torch.tensor([one.token_ids], device=DEVICE)).logits[0].cpu()
    logits /= learner.config.temperature
    out = []
    for i, token in enumerate(one.token_ids):
        if not one.loss_mask[i]:
            out.append(0.0)
            continue
        legal = one.allowed[i] if one.allowed else None
        row = logits[i - 1] if legal is None else logits[i - 1][list(legal)]
        out.append((logits[i - 1][token] - torch.logsumexp(row, 0)).item())
    return out


@pytest.mark.parametrize(("temperature", "layers"), [(1.0, 1), (0.5, 2)])
def test_logprobs_are_those_of_the_plain_model(temperature: float, layers: int) -> None:
    learner = Learner(config(temperature=temperature, layers=layers))
    samples = mixed()
    expected = [x for s in samples for x in by_hand(learner, s)]
    assert learner.logprobs(batch(samples)) == pytest.approx(expected, abs=2e-6)


def test_a_model_that_is_built_differently_takes_the_general_way() -> None:
    """Eager attention without a mask is not causal, so the shortcut must be detected as wrong and not be used."""
    short = Learner(config())
    eager = short.config.model.model_copy(update={"attention": "eager"})
    general = Learner(short.config.model_copy(update={"model": eager}))
    assert short.policy.scorer.trims_last_layer
    assert not general.policy.scorer.trims_last_layer
    made = batch(mixed())
    assert short.logprobs(made) == pytest.approx(general.logprobs(made), abs=2e-6)
    reports = [learner.train(made, 0).metrics for learner in (short, general)]
    assert reports[0]["grad_norm"] == pytest.approx(reports[1]["grad_norm"], rel=1e-4)


def test_the_loss_is_the_mean_over_loss_tokens_only() -> None:
    domains = {d: {"advantage": {"baseline": "none", "normalize": "none", "level": "token"}} for d in "ab"}
    learner = Learner(config(loss=PG, domains=domains, lr=1e-30))
    samples = mixed()
    total = count = 0.0
    for s in samples:
        rewards = np.array([r for r, m in zip(s.rewards, s.loss_mask, strict=True) if m])
        to_go = np.cumsum(rewards[::-1])[::-1]
        logprobs = [x for x, m in zip(by_hand(learner, s), s.loss_mask, strict=True) if m]
        total += float(-(to_go * np.array(logprobs)).sum())
        count += len(logprobs)
    report = learner.train(batch(samples), 0)
    assert report.metrics["loss"] == pytest.approx(total / count, rel=1e-5)
    assert report.trained_tokens == count


@pytest.mark.parametrize("kind", ["pg", "ppo", "decoupled", "tis"])
def test_a_step_does_not_depend_on_how_samples_share_forward_passes(kind: str) -> None:
    results = []
    for limit in (1, 30, 10_000):
        learner = Learner(config(max_tokens_per_microbatch=limit, loss={"kind": kind, "entropy": 0.01}, minibatches=2))
        report = learner.train(batch(mixed()), 0)
        results.append((report.metrics["loss"], report.metrics["grad_norm"], report.metrics["entropy"]))
    assert results[0] == pytest.approx(results[1], rel=1e-4)
    assert results[0] == pytest.approx(results[2], rel=1e-4)


def test_nothing_at_masked_positions_or_after_the_last_action_changes_a_step() -> None:
    samples = mixed()
    dirty = []
    for s in samples:
        n, mask = len(s.token_ids), (*s.loss_mask, False, False)

        def junk(values: tuple[Any, ...], bad: Any, mask: tuple[bool, ...] = mask) -> tuple[Any, ...]:
            return tuple(v if m else bad for v, m in zip((*values, bad, bad), mask, strict=True))

        dirty.append(
            dataclasses.replace(
                s,
                token_ids=(*s.token_ids, 7, 8),
                loss_mask=mask,
                logprobs=junk(s.logprobs, -55.0),
                versions=junk(s.versions, 12),
                turn=junk(s.turn, 3),
                rewards=junk(s.rewards, 1e9),
                allowed=junk(s.allowed or (None,) * n, None),
            )
        )
    clean, other = Learner(config(epochs=2)), Learner(config(epochs=2))
    a, b = clean.train(batch(samples), 0), other.train(batch(dirty), 0)
    assert torch.equal(weights(clean), weights(other))
    timeless = [{k: v for k, v in r.metrics.items() if k not in ("cpu_seconds", "peak_gb")} for r in (a, b)]
    assert timeless[0] == timeless[1]


def test_on_policy_ppo_is_the_policy_gradient() -> None:
    results = []
    for kind in ("pg", "ppo", "decoupled", "tis"):
        learner = Learner(config(loss={"kind": kind}, lr=1e-2))
        report = learner.train(batch(on_policy(learner, mixed())), 0)
        assert report.metrics["behaviour_gap"] < 1e-6
        assert report.metrics["ratio"] == pytest.approx(1.0, abs=1e-6)
        results.append(report.metrics["grad_norm"])
    assert results == pytest.approx([results[0]] * 4, rel=1e-4)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_decoupled_step_clips_around_the_policy_at_its_start(minibatches: int) -> None:
    """Without weights it is PPO on samples of that very policy, in all epochs."""
    steps = {"epochs": 3, "minibatches": minibatches, "lr": 1e-2}
    decoupled = Learner(config(loss={"kind": "decoupled", "floor": 1.0, "cap": 1.0}, **steps))
    ppo = Learner(config(loss={"kind": "ppo"}, **steps))
    reports = decoupled.train(batch(mixed()), 0), ppo.train(batch(on_policy(ppo, mixed())), 0)
    assert reports[0].metrics["clip_fraction"] == pytest.approx(reports[1].metrics["clip_fraction"])
    assert reports[0].metrics["clip_fraction"] > 0
    assert torch.allclose(weights(decoupled), weights(ppo), atol=1e-5)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stale", [0, 2, 5])
def test_what_staleness_changed_is_apart_from_what_the_engine_computes_otherwise(stream: bool, stale: int) -> None:
    """The policy has moved by 0.5 per token since `stale` of five samples; an engine that is 0.125 off shows in the
    others, however many there are."""
    alone = {"advantage": {"level": "turn", "baseline": "none"}}
    learner = Learner(config(stream=stream, domains={"a": alone, "b": alone}))
    made = []
    for n, one in enumerate(on_policy(learner, mixed())):
        away, version = (0.5, 3) if n < stale else (0.125, 4)
        versions = tuple(version for _ in one.versions)
        made.append(dataclasses.replace(one, logprobs=tuple(v - away for v in one.logprobs), versions=versions))
    metrics = learner.train(batch(made), 4).metrics
    assert metrics.get("mismatch_gap") == (None if stale == 5 else pytest.approx(0.125, rel=1e-4))
    assert metrics.get("stale_gap") == (None if stale == 0 else pytest.approx(0.5, rel=1e-4))
    assert 0.125 <= metrics["behaviour_gap"] * 1.0001 <= 0.501
    assert not [name for name in metrics if name.startswith("_")]


def test_the_same_seed_gives_the_same_weights_and_another_seed_other_shuffles() -> None:
    learners = [Learner(config(seed=s, epochs=2, minibatches=2)) for s in (0, 0, 1)]
    for learner in learners:
        learner.train(batch(mixed()), 0)
    first, again, other = map(weights, learners)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_step_raises_the_probability_of_what_paid() -> None:
    learner = Learner(config(lr=1e-2, epochs=2, minibatches=2))
    samples = [sample(str(i), turns=[(2, 1)], rewards=[float(i % 2)]) for i in range(8)]
    before = learner.logprobs(batch(samples))
    for version in range(3):
        learner.train(batch(on_policy(learner, samples)), version)
    change = (learner.logprobs(batch(samples)) - before).reshape(8, 3)[:, 2]
    assert change[1::2].mean() > 0.05 > change[::2].mean()


def test_the_entropy_bonus_flattens_the_policy_over_the_legal_set() -> None:
    plain, flat = (Learner(config(loss={"kind": "pg", "entropy": c}, lr=1e-2)) for c in (0.0, 1.0))
    samples = [sample(str(i), turns=[(2, 3)], restricted=True) for i in range(4)]
    entropy = []
    for learner in (plain, flat):
        for version in range(4):
            report = learner.train(batch(samples), version)
        entropy.append(report.metrics["entropy"])
    assert entropy[1] > entropy[0]
    assert entropy[1] <= np.log(max(len(a) for s in samples for a in s.allowed if a))


def test_imitation_lowers_cross_entropy_and_keeps_the_policy_optimizer_fresh() -> None:
    learner = Learner(config(imitation={"lr": 1e-2, "batch": 3}))
    samples = mixed()
    first = learner.imitate(batch(samples), 1).metrics["loss"]
    report = learner.imitate(batch(samples), 8)
    assert report.metrics["updates"] == 8
    assert learner.imitate(batch(samples), 1).metrics["loss"] < first
    assert set(learner.optimizers) == {"imitation"}
    learner.train(batch(samples), 0)
    assert set(learner.optimizers) == {"policy"}


def test_metrics_tell_staleness_rewards_and_padding() -> None:
    learner = Learner(config())
    samples = [sample("x", version=2, rewards=[1, 1]), sample("y", version=4, domain="b", rewards=[0, 4])]
    report = learner.train(batch(samples), 5)
    metrics = report.metrics
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (2.0, 3.0)
    assert (metrics["reward/a"], metrics["reward/b"]) == (2.0, 4.0)
    assert metrics["padding_share"] == 0.0
    assert report.trained_tokens == 6
    assert set(metrics) >= {"loss", "entropy", "clip_fraction", "approx_kl", "grad_norm", "ratio", "lr", "updates"}


def test_domain_balance_keeps_a_talkative_domain_from_drowning_the_other() -> None:
    domains = {d: {"advantage": {"baseline": "none", "normalize": "none"}} for d in "ab"}
    samples = [sample("x", turns=[(2, 40)], rewards=[0.0]), sample("y", turns=[(2, 1)], domain="b", rewards=[1.0])]
    losses = []
    for balance in ("tokens", "domains"):
        learner = Learner(config(loss={"kind": "pg"}, domain_balance=balance, domains=domains))
        losses.append(learner.train(batch(samples), 0).metrics["loss"])
    assert losses[1] == pytest.approx(losses[0] * 41 / 2, rel=1e-4)


def test_warm_up_raises_the_learning_rate_linearly() -> None:
    learner = Learner(config(lr=1e-3, warmup=4, minibatches=2))
    rates = [learner.train(batch(mixed()), v).metrics["lr"] for v in range(3)]
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3])


def test_samples_without_loss_are_refused_before_anything_changes() -> None:
    learner = Learner(config())
    before = weights(learner)
    silent = batch([sample("x", turns=[(4, 0)])])
    with pytest.raises(ValueError, match="none of the 1 samples has a token with loss"):
        learner.train(silent, 0)
    with pytest.raises(ValueError, match="none of the 1 samples has a token with loss"):
        learner.imitate(silent, 1)
    assert torch.equal(weights(learner), before)
    assert learner.logprobs(silent).tolist() == [0.0] * 4


def test_a_gradient_that_is_not_finite_is_an_error_and_no_update() -> None:
    learner = Learner(config())
    with torch.no_grad():
        learner.policy.model.model.norm.weight[0] = float("inf")
    before = weights(learner)
    with pytest.raises(TrainerError, match="gradient is not finite at update 1"):
        learner.train(batch(mixed()), 0)
    assert torch.equal(weights(learner), before)


def test_a_model_that_cannot_be_made_is_a_usage_error(tmp_path: Any) -> None:
    for model, message in (
        ({"path": str(tmp_path)}, "has no config.json"),
        ({"init": {"model_type": "nonsense"}}, "does not describe a model"),
        ({"init": {"vocab_size": VOCAB, "hidden_size": 30, "num_hidden_layers": -1, "nonsense": []}}, "model"),
    ):
        with pytest.raises(UsageError, match=message):
            Learner(config(model=model))
    with pytest.raises(UsageError, match="not a torch device"):
        Learner(config(device="abacus"))


def test_imitation_stops_at_the_wanted_loss() -> None:
    samples = mixed()
    full = Learner(config(imitation={"lr": 1e-2, "batch": 3})).imitate(batch(samples), 40)
    enough = Learner(config(imitation={"lr": 1e-2, "batch": 3, "stop_loss": 2.0})).imitate(batch(samples), 40)
    assert full.metrics["updates"] == 40
    assert 5 <= enough.metrics["updates"] < 40
    never = Learner(config(imitation={"lr": 1e-2, "batch": 3, "stop_loss": 1e-9})).imitate(batch(samples), 40)
    assert never.metrics["updates"] == 40


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [("linear", [1e-3, 7.75e-4, 5.5e-4, 1e-4, 1e-4]), ("cosine", [1e-3, 8.681981e-4, 5.5e-4, 1e-4, 1e-4])],
)
def test_the_learning_rate_falls_by_version(schedule: str, wanted: list[float]) -> None:
    learner = Learner(config(lr=1e-3, lr_schedule=schedule, steps=8))
    samples = on_policy(learner, mixed())
    rates = [learner.train(batch(samples), version).metrics["lr"] for version in (0, 2, 4, 8, 30)]
    assert rates == pytest.approx(wanted)


def test_warm_up_and_cosine_multiply() -> None:
    learner = Learner(config(lr=1e-3, lr_schedule="cosine", steps=8, warmup=2))
    samples = on_policy(learner, mixed())
    rates = [learner.train(batch(samples), version).metrics["lr"] for version in (0, 4)]
    assert rates == pytest.approx([0.5e-3, 5.5e-4])


def test_it_trains_a_batch_that_was_cut_to_a_budget(tmp_path: Path) -> None:
    samples = [sample(str(i), turns=[(2, 2), (3, 1 + i % 3)]) for i in range(6)]
    groups = [Group(GroupId(f"c{i}"), "a", (s,)) for i, s in enumerate(samples)]
    cut = BatchTruncation(25)(groups, 1)
    assert sum(len(s.token_ids) for s in cut) in (24, 25)
    report = Learner(config(tmp_path)).train(batch(cut), 0)
    assert report.trained_tokens == sum(sum(s.loss_mask) for s in cut) < sum(sum(s.loss_mask) for s in samples)


def test_a_samples_weight_is_a_factor_of_its_tokens_in_the_loss() -> None:
    """pg without baseline: the loss of two weighted samples is the weighted sum of their single losses."""
    domains = {"a": {"advantage": {"baseline": "none", "normalize": "none"}}}
    samples = [sample(name, turns=((3, 3),), domain="a", rewards=[1.0 + i]) for i, name in enumerate("xy")]

    def loss(x: float, y: float) -> float:
        made = Learner(config(domains=domains, loss=PG))
        weighted = [dataclasses.replace(s, weight=w) for s, w in zip(samples, (x, y), strict=True)]
        return made.train(batch(weighted), 0).metrics["loss"]

    both, x, y = loss(1.0, 1.0), loss(2.0, 1.0) - loss(1.0, 1.0), loss(1.0, 2.0) - loss(1.0, 1.0)
    assert x + y == pytest.approx(both, rel=1e-5)
    assert loss(1.5, 0.5) == pytest.approx(1.5 * x + 0.5 * y, rel=1e-5)
    assert abs(x - y) > 1e-3


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_weight_that_is_not_positive_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="sample s: its weight is not a positive number"):
        batch([dataclasses.replace(sample("s"), weight=weight)])
