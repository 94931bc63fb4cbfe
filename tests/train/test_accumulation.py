"""A streamed step against the monolithic one: bit for bit the same in any order and any portions of its groups."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.errors import TrainerError
from rollart.model import TrainSample
from rollart.train.accumulation import ExactSum
from rollart.train.batch import TrainingBatch, select_samples
from rollart.train.config import parse_config
from rollart.train.learner import Learner
from tests.train.trainkit import batch, config, sample

VOCAB = 24
LOSSES: tuple[dict[str, Any], ...] = (
    {"kind": "pg"},
    {"kind": "ppo"},
    {"kind": "decoupled"},
    {"kind": "tis"},
    {"kind": "ppo", "ratio": "geometric", "aggregation": "sample", "dual_clip": 3.0, "mask_truncated": True},
    {"kind": "decoupled", "correction": "mask", "correction_level": "product", "cap": 20.0, "mask_truncated": True},
    {"kind": "topr", "correction_level": "product", "aggregation": "constant", "length": 7},
    {"kind": "kimi", "tau": 0.1, "aggregation": "constant", "length": 7},
)
ADVANTAGES: tuple[dict[str, Any], ...] = (
    {"baseline": "group", "level": "trajectory", "normalize": "batch"},
    {"baseline": "group", "level": "turn", "normalize": "group", "gamma": 0.8},
    {"baseline": "none", "level": "token", "normalize": "batch", "gamma": 0.9},
    {"baseline": "leave_one_out", "normalize": "none", "overlong": 0.5},
)


def learner(*, dtype: str = "float64", stream: bool = True, a: int = 0, b: int = 0, **more: Any) -> Learner:
    setup = config(
        domains={
            "a": {"advantage": ADVANTAGES[a], "max_length": 12},
            "b": {"advantage": ADVANTAGES[b], "max_length": 12, "loss_weight": 3.0},
        },
        loss={"kind": "ppo", "entropy": 0.01} | more.pop("loss", {}),
        stream=stream,
        lr=1e-2,
        **more,
    )
    return Learner(setup.model_copy(update={"model": setup.model.model_copy(update={"dtype": dtype})}))


def groups(seed: int, count: int) -> list[list[TrainSample]]:
    """Groups of one to four samples in both domains, of any length, restricted and free, some without loss."""
    rng = random.Random(seed)
    out = []
    for g in range(count):
        turns = lambda: [(rng.randint(1, 9), rng.randint(0, 5)) for _ in range(rng.randint(1, 3))]  # noqa: E731
        out.append(
            [
                dataclasses.replace(
                    sample(
                        f"g{g}.{m}",
                        turns=turns(),
                        group=f"g{g}",
                        domain="ab"[g % 2],
                        seed=seed,
                        restricted=bool(rng.getrandbits(1)),
                        logprob=-rng.uniform(1, 5),
                        version=rng.randint(0, 2),
                    ),
                    truncated=rng.random() < 0.3,
                )
                for m in range(rng.randint(1, 4))
            ]
        )
    out[0][0] = sample("g0.0", group="g0", domain="a", seed=seed)  # at least one has loss
    return out


def flat(parts: Sequence[Sequence[TrainSample]]) -> list[TrainSample]:
    return [s for part in parts for s in part]


def state(of: Learner) -> dict[str, torch.Tensor]:
    """The complete input of the next step: weights, the optimizer's moments, counters."""
    out = dict(of.policy.model.state_dict())
    for name, optimizer in of.optimizers.items():
        for i, moments in enumerate(optimizer.state.values()):
            out |= {f"{name}/{i}/{key}": torch.as_tensor(value) for key, value in moments.items()}
    out["counters"] = torch.tensor(dataclasses.astuple(of.counters))
    return {key: value.clone() for key, value in out.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 6),
    loss=st.sampled_from(LOSSES),
    dtype=st.sampled_from(["float64", "float32"]),
    advantage=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    balance=st.sampled_from(["tokens", "domains"]),
    shuffle=st.randoms(use_true_random=False),
    limit=st.sampled_from([1, 30, 2048]),
)
def test_any_order_and_any_portions_give_the_bits_of_the_whole_batch(
    seed: int,
    count: int,
    loss: dict[str, Any],
    dtype: str,
    advantage: tuple[int, int],
    balance: str,
    shuffle: random.Random,
    limit: int,
) -> None:
    made = groups(seed, count)
    a, b = advantage
    options: dict[str, Any] = {
        "dtype": dtype,
        "loss": loss,
        "a": a,
        "b": b,
        "domain_balance": balance,
        "max_tokens_per_microbatch": limit,
    }
    whole, streamed = learner(**options), learner(**options)
    for version in (2, 3):
        one = whole.train(batch(flat(made)), version)
        order = [shuffle.sample(group, len(group)) for group in shuffle.sample(made, len(made))]
        streamed.begin(version)
        while order:
            portion = [order.pop() for _ in range(shuffle.randint(1, len(order)))]
            streamed.accumulate(batch(shuffle.sample(flat(portion), len(flat(portion)))))
        other = streamed.finish()
        assert same(state(whole), state(streamed))
        assert one.trained_tokens == other.trained_tokens
        for exact in ("loss", "grad_norm", "lr", "updates", "trained_tokens", "samples", "staleness_max"):
            assert one.metrics[exact] == other.metrics[exact]
        for name in ("entropy", "ratio", "approx_kl", "advantage_abs", "staleness_mean", "behaviour_gap"):
            assert one.metrics[name] == pytest.approx(other.metrics[name], rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("loss", range(len(LOSSES)))
@pytest.mark.parametrize("advantage", range(len(ADVANTAGES)))
@pytest.mark.parametrize("balance", ["tokens", "domains"])
def test_it_is_the_step_that_is_made_without_streaming(loss: int, advantage: int, balance: str) -> None:
    """Different code and micro-batches: the results differ by rounding, also in float64, since Qwen3's norms always
    compute in float32. A weight left out or doubled would show at 1e-2."""
    made = batch(flat(groups(7, 5)))
    options: dict[str, Any] = {"loss": LOSSES[loss], "a": advantage, "b": 0, "domain_balance": balance}
    plain, streamed = learner(stream=False, **options), learner(**options)
    one, other = plain.train(made, 2), streamed.train(made, 2)
    expected, got = (torch.cat([gradient(p) for p in x.policy.model.parameters()]) for x in (plain, streamed))
    assert float((expected - got).norm() / expected.norm()) < 1e-6
    shared = one.metrics.keys() - {"cpu_seconds", "padding_share"}
    assert other.metrics.keys() - shared == {"cpu_seconds", "padding_share", "exposed_seconds"}
    for name in shared:
        assert other.metrics[name] == pytest.approx(one.metrics[name], rel=1e-6, abs=1e-9), name


def gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.flatten()


def test_a_step_that_is_not_finished_leaves_no_trace() -> None:
    made = groups(3, 4)
    touched, clean = learner(), learner()
    for step in (touched, clean):
        step.train(batch(flat(groups(5, 2))), 0)
    before = state(touched)
    touched.begin(1)
    touched.accumulate(batch(flat(made[:3])))
    assert touched.accumulating
    assert same(state(touched), before)
    touched.abort()
    assert not touched.accumulating
    touched.begin(1)
    touched.accumulate(batch(made[0]))
    touched.begin(1)  # starts again and drops the accumulated gradient
    touched.accumulate(batch(flat(made)))
    touched.finish()
    clean.train(batch(flat(made)), 1)
    assert same(state(touched), state(clean))


def test_samples_that_are_refused_are_not_added_and_the_step_goes_on() -> None:
    made = groups(11, 3)
    streamed, whole = learner(), learner()
    streamed.begin(0)
    streamed.accumulate(batch(flat(made[:2])))
    stray = dataclasses.replace(made[2][0], domain="z")
    for bad, message in (
        ([*made[2][1:], stray], "domain 'z' is not configured, the trainer knows a, b|spans domains"),
        (made[0], "sample g0.0 is in this step already|sample g0.. is in this step already"),
        ([made[2][0], made[2][0]], "is in this step already"),
        ([sample("x", group="m", domain="a"), sample("y", group="m", domain="b")], "group of sample x spans domains"),
    ):
        with pytest.raises(ValueError, match=message):
            streamed.accumulate(batch(bad))
    streamed.accumulate(batch(made[2]))
    streamed.finish()
    whole.train(batch(flat(made)), 0)
    assert same(state(streamed), state(whole))


def test_what_is_out_of_order_is_said_in_one_line() -> None:
    streamed, plain = learner(), learner(stream=False)
    with pytest.raises(TrainerError, match="no step was begun"):
        streamed.accumulate(batch(groups(0, 1)[0]))
    with pytest.raises(TrainerError, match="no step was begun"):
        streamed.finish()
    with pytest.raises(ValueError, match="not configured to stream"):
        plain.begin(0)
    before = state(streamed)
    streamed.begin(0)
    streamed.accumulate(batch([sample("mute", turns=[(4, 0)])]))
    with pytest.raises(ValueError, match="none of the 1 samples has a token with loss"):
        streamed.finish()
    assert same(state(streamed), before)
    assert not streamed.accumulating


def test_a_gradient_that_is_not_finite_is_an_error_and_no_update() -> None:
    streamed = learner(dtype="float32")
    with torch.no_grad():
        streamed.policy.model.model.norm.weight[0] = float("inf")
    before = state(streamed)
    streamed.begin(0)
    streamed.accumulate(batch(flat(groups(1, 2))))
    with pytest.raises(TrainerError, match="gradient of a streamed step is not finite"):
        streamed.finish()
    after = state(streamed)
    assert all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 2}, "stream makes one update of one pass, got epochs 2 and minibatches 1"),
        ({"minibatches": 3}, "stream makes one update of one pass, got epochs 1 and minibatches 3"),
        ({"domains": {"q": {"advantage": {"baseline": "domain"}}}}, "domain 'q' has the advantage baseline 'domain'"),
        (
            {"loss": {"kind": "dpo", "kl": 0.1}},
            "loss.kind 'dpo' weighs a pair by the log-probabilities of both samples",
        ),
        ({"domains": {"q": {"advantage": {"normalize": "whiten"}}}}, "domain 'q' has advantage.normalize 'whiten'"),
    ],
)
def test_what_cannot_be_streamed_is_refused_at_the_start(changes: dict[str, Any], message: str) -> None:
    raw: dict[str, Any] = {"model": {"init": {}}, "weights_root": "/nonexistent", "domains": {}}
    assert not parse_config(raw | changes).stream
    with pytest.raises(ValueError, match=message):
        parse_config(raw | {"stream": True} | changes)


def test_a_group_alone_is_what_it_is_when_it_is_sent_alone() -> None:
    made = groups(21, 3)
    whole, alone = batch(flat(made)), batch(made[1])
    start = len(made[0])
    picked = select_samples(whole, np.arange(start, start + len(made[1])))
    for f in dataclasses.fields(TrainingBatch):
        one, other = getattr(picked, f.name), getattr(alone, f.name)
        if f.name in ("tokens", "mask", "logprobs", "versions", "turn", "rewards", "offsets", "score"):
            assert np.array_equal(one, other), f.name
    assert picked.ids == alone.ids
    assert np.array_equal(picked.loss.position, alone.loss.position)
    assert np.array_equal(picked.loss.slot, alone.loss.slot)
    assert np.array_equal(picked.sets.valid.sum(1)[picked.legal], alone.sets.valid.sum(1)[alone.legal])
    assert picked.sets.ids.shape[1] == alone.sets.ids.shape[1]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-1e5, 1e5, allow_subnormal=True), min_size=1, max_size=40),
    st.randoms(use_true_random=False),
)
def test_the_sum_has_no_order_and_loses_next_to_nothing(values: list[float], shuffle: random.Random) -> None:
    from fractions import Fraction

    sums = [ExactSum(2), ExactSum(2)]
    for part, order in zip(sums, (values, shuffle.sample(values, len(values))), strict=True):
        for value in order:
            part.add([torch.tensor([value, -value], dtype=torch.float64), None])
    first, second = (s.total(0) for s in sums)
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)
    assert first[0] == -first[1]
    assert sums[0].total(1) is None
    assert sums[0].is_exact()
    exact = sum(map(Fraction, values))
    # One rounding of the total, and 2^-65 of each addend.
    assert abs(Fraction(float(first[0])) - exact) <= abs(exact) * Fraction(2) ** -52 + len(values) * Fraction(2) ** -65


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 2.0**27])
def test_a_sum_that_would_not_be_exact_says_so(bad: float) -> None:
    held = ExactSum(1)
    held.add([torch.tensor([1.0, bad])])
    assert not held.is_exact()
