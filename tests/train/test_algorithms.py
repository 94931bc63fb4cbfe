"""The algorithms of `training.algorithm`: loss and gradient on random tensors equal those of an unbatched reference,
written from the papers, however the batch is cut.

References work on one sample at a time: π (with gradient), μ and π_ref are the log-probabilities of its tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollart.model import TrainSample
from rollart.settings.algorithms import PRESETS
from rollart.settings.training import TrainerConfig
from rollart.train.advantages import batch_advantages
from rollart.train.losses import LossFactors, PolicyObjective, loss_weights, penalised_rewards, preference_pairs
from tests.train.trainkit import batch, config, sample

ON_SAMPLES = [name for name in PRESETS if name != "sft"]
"""Algorithms of the policy's own samples; the other one's references are in test_supervised.py."""

LONGEST = 10
GROUPS, SIZE = 3, 4


@dataclasses.dataclass(frozen=True)
class Case:
    """Samples of groups of four, with log-probabilities under the policy, the reference and the start of the step, and
    a critic's values."""

    samples: list[TrainSample]
    now: Tensor
    reference: np.ndarray
    start: Tensor
    values: np.ndarray

    @classmethod
    def drawn(cls, seed: int, spread: float = 0.5) -> Case:
        rng = random.Random(seed)
        samples = []
        for g, m in itertools.product(range(GROUPS), range(SIZE)):
            one = sample(
                f"{g}.{m}", turns=[(2, rng.randint(1, LONGEST))], group=f"g{g}", rewards=[rng.choice([0.0, 0.3, 1.0])]
            )
            drawn = tuple(-rng.uniform(0.1, 3) if m else 0.0 for m in one.loss_mask)
            samples.append(dataclasses.replace(one, logprobs=drawn, truncated=rng.random() < 0.3))
        made = batch(samples)
        moved = lambda: made.logprobs + np.array([rng.gauss(0, spread) for _ in made.tokens])  # noqa: E731
        at = made.loss.position
        now, reference, start = torch.from_numpy(moved()[at]).requires_grad_(), moved(), torch.from_numpy(moved()[at])
        return cls(samples, now, reference, start, np.array([rng.gauss(0, 1) for _ in at]))


def preset(name: str | None, **loss: Any) -> TrainerConfig:
    needed: dict[str, Any] = {"length": LONGEST} if name in ("dr_grpo", "topr", "kimi") else {}
    needed |= {"reference": "/teacher"} if name == "opd" else {}
    return config(algorithm=name, domains={"a": {"max_length": LONGEST}}, loss=needed | loss)


def product_loss(
    setup: TrainerConfig, case: Case, parts: Sequence[Sequence[int]] | None = None
) -> tuple[float, Tensor]:
    """Loss and gradient by π of the trainer's functions, summed over micro-batches of the samples `parts`."""
    made = batch(case.samples)
    factors = LossFactors(setup.loss.kl, setup.loss.entropy)
    paid = penalised_rewards(made, case.reference if setup.loss.kl else None, setup.loss, factors)
    objective = PolicyObjective(
        setup.loss,
        made,
        batch_advantages(paid, setup.domains, case.values),
        0,
        device=torch.device("cpu"),
        dtype=torch.float64,
        factors=factors,
        reference=torch.from_numpy(case.reference[made.loss.position]) if setup.loss.kl else None,
        proximal=case.start,
    )
    used = np.arange(len(made))
    if setup.loss.kind == "dpo":
        pairs = preference_pairs(setup.loss, made)
        objective.weigh_pairs(pairs, case.now.detach())
        used = pairs.ravel()
    weights = loss_weights(setup.loss, made, used, np.ones(1), balance=False)
    total = torch.zeros((), dtype=torch.float64)
    for part in parts or [range(len(made))]:
        pick = torch.cat([torch.arange(made.loss.first[s], made.loss.first[s + 1]) for s in part])
        loss, _ = objective(case.now[pick], torch.zeros(len(pick), dtype=torch.float64), pick)
        total = total + (loss * torch.from_numpy(weights)[pick]).sum()
    (gradient,) = torch.autograd.grad(total, case.now)
    return total.item(), gradient


def scores(case: Case) -> list[list[float]]:
    """Rewards by group."""
    return [[s.score for s in case.samples[g * SIZE : (g + 1) * SIZE]] for g in range(GROUPS)]


def group_scaled(groups: list[list[float]]) -> list[float]:
    """(r − mean)/std of the group, n − 1."""
    out = []
    for group in groups:
        spread = np.std(group, ddof=1)
        out += [(r - np.mean(group)) / spread if spread > 0 else 0.0 for r in group]
    return out


def centred(groups: list[list[float]]) -> list[float]:
    return [r - np.mean(group) for group in groups for r in group]


def others(groups: list[list[float]]) -> list[float]:
    """RLOO: r_i less the mean of the other k − 1."""
    return [r - (sum(group) - r) / (len(group) - 1) for group in groups for r in group]


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


Sample = tuple[Tensor, Tensor, float]
"""π, μ [n] and the advantage."""


def grpo(samples: list[Sample]) -> Tensor:
    """arXiv:2402.03300, eq. 3, without its KL: the mean over samples of the mean over tokens."""
    return -sum((clipped((p - m).exp(), a, 0.2, 0.2).mean() for p, m, a in samples), torch.zeros(())) / len(samples)


def dr_grpo(samples: list[Sample]) -> Tensor:
    """arXiv:2503.20783, listing 1: the sum over tokens by a constant, the mean over samples."""
    return -sum(clipped((p - m).exp(), a, 0.2, 0.2).sum() / LONGEST for p, m, a in samples) / len(samples)


def dapo(samples: list[Sample]) -> Tensor:
    """arXiv:2503.14476, eq. 8: the mean over all tokens, clip-higher."""
    tokens = sum(len(p) for p, _, _ in samples)
    return -sum(clipped((p - m).exp(), a, 0.2, 0.28).sum() for p, m, a in samples) / tokens


def gspo(samples: list[Sample]) -> Tensor:
    """arXiv:2507.18071, eq. 5 and 7: one ratio of a sample, (π(y)/μ(y))^(1/|y|)."""
    return -sum(clipped(((p - m).sum() / len(p)).exp(), a, 3e-4, 4e-4) for p, m, a in samples) / len(samples)


def cispo(samples: list[Sample]) -> Tensor:
    """arXiv:2506.13585, §3.1, with ε_low off as in its experiments: the clipped weight has no gradient."""
    tokens = sum(len(p) for p, _, _ in samples)
    return -sum(((p - m).exp().clamp(max=5.0).detach() * a * p).sum() for p, m, a in samples) / tokens


def rloo(samples: list[Sample]) -> Tensor:
    """REINFORCE of whole samples (arXiv:2402.14740) with the clipped ratio of the sample, as in TRL."""
    return -sum(clipped((p - m).sum().exp(), a, 0.2, 0.2) for p, m, a in samples) / len(samples)


def topr(samples: list[Sample]) -> Tensor:
    """arXiv:2503.14286: weight 1 for positive samples, π(y)/μ(y) truncated at 1 for negative ones."""
    total = torch.zeros(())
    for p, m, a in samples:
        weight = (p - m).sum().exp().clamp(max=1.0).detach() if a < 0 else 1.0
        total = total - weight * a * p.sum()
    return total / len(samples) / LONGEST


def kimi(samples: list[Sample]) -> Tensor:
    """arXiv:2501.12599, §2.3.2: ∇ = ∇log π(y) (r − r̄) − τ/2 ∇(log π(y)/μ(y))², τ = 1."""
    total = sum(-a * p.sum() + 0.5 * (p - m).sum().square() for p, m, a in samples)
    return total / len(samples) / LONGEST


PAPERS: dict[str, tuple[Callable[[list[Sample]], Tensor], Callable[[list[list[float]]], list[float]]]] = {
    "grpo": (grpo, group_scaled),
    "dr_grpo": (dr_grpo, centred),
    "dapo": (dapo, group_scaled),
    "gspo": (gspo, group_scaled),
    "cispo": (cispo, group_scaled),
    "rloo": (rloo, others),
    "topr": (topr, centred),
    "kimi": (kimi, centred),
}


def paper_loss(name: str, case: Case) -> tuple[float, Tensor]:
    made = batch(case.samples)
    first, at = made.loss.first, made.loss.position
    behaviour = torch.from_numpy(made.logprobs[at])
    size = np.diff(first)
    if name == "reinforce_pp":
        return reinforce_pp(case, size, behaviour)
    if name == "opd":
        return opd(case, behaviour)
    if name == "ppo":
        return ppo(case, behaviour)
    if name == "online_dpo":
        return online_dpo(case)
    objective, advantage = PAPERS[name]
    groups = scores(case)
    if name == "dapo":  # eq. 13, over the last fifth of the longest
        cache = 0.2 * LONGEST
        punished = iter(-min(1.0, max(0.0, (n - (LONGEST - cache)) / cache)) for n in size)
        groups = [[r + next(punished) for r in group] for group in groups]
    values = advantage(groups)
    split = [slice(first[s], first[s + 1]) for s in range(len(made))]
    loss = objective([(case.now[cut], behaviour[cut], a) for cut, a in zip(split, values, strict=True)])
    (gradient,) = torch.autograd.grad(loss, case.now)
    return loss.item(), gradient


def reinforce_pp(case: Case, size: np.ndarray, behaviour: Tensor) -> tuple[float, Tensor]:
    """arXiv:2501.03262: A_t = r − β Σ_{i≥t} log μ_i/π_ref,i, whitened over all tokens of the batch."""
    made = batch(case.samples)
    values = []
    for s in range(len(made)):
        cut = slice(made.loss.first[s], made.loss.first[s + 1])
        gap = made.logprobs[made.loss.position[cut]] - case.reference[made.loss.position[cut]]
        values += [made.score[s] - 0.01 * gap[t:].sum() for t in range(int(size[s]))]
    value = torch.tensor(values, dtype=torch.float64)
    value = (value - value.mean()) / value.std()
    ratio = (case.now - behaviour).exp()
    loss = -torch.min(ratio * value, ratio.clamp(0.8, 1.2) * value).mean()
    (gradient,) = torch.autograd.grad(loss, case.now)
    return loss.item(), gradient


def ppo(case: Case, behaviour: Tensor) -> tuple[float, Tensor]:
    """arXiv:1707.06347, eq. 7 and 11: Â_t = δ_t + γλ Â_{t+1}, δ_t = r_t + γ V_{t+1} − V_t, γ = 1, λ = 0.95, whitened
    over all tokens; the reward is paid at the last one."""
    made = batch(case.samples)
    values = []
    for s in range(len(made)):
        value = case.values[made.loss.first[s] : made.loss.first[s + 1]].tolist()
        rewards = [0.0] * (len(value) - 1) + [made.score[s]]
        estimate, following = 0.0, 0.0
        mine: list[float] = []
        for reward, v in zip(reversed(rewards), reversed(value), strict=True):
            estimate = reward + following - v + 0.95 * estimate
            following = v
            mine.insert(0, estimate)
        values += mine
    advantage = torch.tensor(values, dtype=torch.float64)
    advantage = (advantage - advantage.mean()) / advantage.std()
    ratio = (case.now - behaviour).exp()
    loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    (gradient,) = torch.autograd.grad(loss, case.now)
    return loss.item(), gradient


def online_dpo(case: Case) -> tuple[float, Tensor]:
    """arXiv:2305.18290, eq. 7, β = 0.1, on the best and the worst sample of each group (arXiv:2410.18252)."""
    made = batch(case.samples)
    reference = torch.from_numpy(case.reference[made.loss.position])
    losses = []
    for g, rewards in enumerate(scores(case)):
        better, worse = (g * SIZE + rewards.index(pick(rewards)) for pick in (max, min))
        if max(rewards) > min(rewards):
            gains = [
                (case.now[cut] - reference[cut]).sum()
                for cut in (slice(made.loss.first[s], made.loss.first[s + 1]) for s in (better, worse))
            ]
            losses.append(-torch.nn.functional.logsigmoid(0.1 * (gains[0] - gains[1])))
    loss = torch.stack(losses).mean()
    (gradient,) = torch.autograd.grad(loss, case.now)
    return loss.item(), gradient


def opd(case: Case, behaviour: Tensor) -> tuple[float, Tensor]:
    """On-policy distillation: the advantage of a token is its own reverse KL to the teacher, log π_T − log μ."""
    made = batch(case.samples)
    value = torch.from_numpy(case.reference[made.loss.position]) - behaviour
    ratio = (case.now - behaviour).exp()
    loss = -torch.min(ratio * value, ratio.clamp(0.8, 1.2) * value).mean()
    (gradient,) = torch.autograd.grad(loss, case.now)
    return loss.item(), gradient


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ON_SAMPLES)
def test_loss_and_gradient_are_those_of_the_paper(name: str, seed: int) -> None:
    case = Case.drawn(seed, spread=0.02 if name == "gspo" else 0.5)  # ratios within and outside of the clip range
    loss, gradient = product_loss(preset(name), case)
    expected, wanted = paper_loss(name, case)
    assert gradient.abs().max() > 1e-4
    assert loss == pytest.approx(expected, abs=1e-9)
    assert torch.allclose(gradient, wanted, rtol=1e-9, atol=1e-12)


SWITCHES: dict[str, dict[str, Any]] = {
    "masked": {"correction": "mask", "floor": 0.7, "cap": 1.4, "aggregation": "sample"},
    "masked samples": {"correction": "mask", "correction_level": "product", "floor": 0.3, "cap": 3.0},
    "decoupled, sample weight": {"kind": "decoupled", "correction_level": "geometric", "cap": 1.1, "floor": 0.9},
    "decoupled, ratio of the sample": {
        "kind": "decoupled",
        "ratio": "geometric",
        "aggregation": "constant",
        "length": 7,
    },
    "without truncated": {"mask_truncated": True, "aggregation": "sample"},
    "dual clip": {"dual_clip": 1.5, "kl": 0.2, "kl_estimator": "k2"},
}


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([*ON_SAMPLES, *SWITCHES]), st.randoms(use_true_random=False))
def test_micro_batches_of_whole_samples_do_not_change_the_loss(seed: int, name: str, rng: random.Random) -> None:
    setup = preset(name) if name in PRESETS else preset(None, **SWITCHES[name])
    case = Case.drawn(seed)
    order = rng.sample(range(len(case.samples)), len(case.samples))
    cuts = sorted(rng.sample(range(1, len(order)), rng.randint(0, 4)))
    parts = [order[a:b] for a, b in itertools.pairwise([0, *cuts, len(order)])]
    whole, split = product_loss(setup, case), product_loss(setup, case, parts)
    assert whole[0] == pytest.approx(split[0], abs=1e-12)
    assert torch.allclose(whole[1], split[1], rtol=1e-10, atol=1e-14)


def test_masked_tokens_and_samples_have_no_gradient() -> None:
    case = Case.drawn(5)
    made = batch(case.samples)
    ratio = (case.start - torch.from_numpy(made.logprobs[made.loss.position])).exp()
    _, gradient = product_loss(preset(None, kind="pg", correction="mask", floor=0.7, cap=1.4), case)
    inside = (ratio >= 0.7) & (ratio <= 1.4)
    assert 0 < inside.sum() < len(inside)
    assert (gradient[~inside] == 0).all()
    plain = product_loss(preset(None, kind="pg"), case)[1]
    assert torch.equal(gradient[inside], plain[inside])  # the others keep their weights
    _, gradient = product_loss(preset(None, kind="pg", correction="mask", correction_level="product", cap=1.5), case)
    for s in range(len(made)):
        cut = slice(made.loss.first[s], made.loss.first[s + 1])
        kept = ratio[cut].prod() <= 1.5
        assert torch.equal(gradient[cut], plain[cut] if kept else torch.zeros_like(plain[cut]))


def test_decoupled_weights_of_the_sample_are_truncated_on_both_sides() -> None:
    case = Case.drawn(6)
    made = batch(case.samples)
    behaviour = torch.from_numpy(made.logprobs[made.loss.position])
    options = {"kind": "decoupled", "correction_level": "product", "floor": 0.8, "cap": 1.25}
    _, gradient = product_loss(preset(None, **options), case)
    plain = product_loss(preset(None, kind="decoupled", floor=1.0, cap=1.0), case)[1]
    for s in range(len(made)):
        cut = slice(made.loss.first[s], made.loss.first[s + 1])
        weight = (case.start[cut] - behaviour[cut]).sum().exp().clamp(0.8, 1.25)
        assert torch.allclose(gradient[cut], weight * plain[cut])


def test_dual_clip_bounds_negative_advantages() -> None:
    case = Case.drawn(7, spread=1.0)
    made = batch(case.samples)
    ratio = (case.now - torch.from_numpy(made.logprobs[made.loss.position])).exp()
    value = torch.from_numpy(batch_advantages(made, preset(None).domains))
    surrogate = torch.min(ratio * value, ratio.clamp(0.8, 1.2) * value)
    expected = -torch.where(value < 0, torch.max(surrogate, 1.5 * value), surrogate).mean()  # arXiv:1912.09729, eq. 5
    loss, gradient = product_loss(preset(None, kind="ppo", dual_clip=1.5), case)
    assert loss == pytest.approx(expected.item(), abs=1e-12)
    assert torch.allclose(gradient, torch.autograd.grad(expected, case.now)[0], atol=1e-15)
    assert ((value < 0) & (ratio > 1.5)).any()


def test_truncated_samples_are_in_the_baseline_and_not_in_the_loss() -> None:
    case = Case.drawn(8)
    made = batch(case.samples)
    assert made.truncated is not None
    for aggregation in ("token", "sample"):
        setup = preset(None, kind="pg", aggregation=aggregation, mask_truncated=True)
        _, gradient = product_loss(setup, case)
        value = torch.from_numpy(batch_advantages(made, setup.domains))
        kept = ~torch.from_numpy(made.truncated)
        size = torch.from_numpy(np.diff(made.loss.first))
        owner = torch.from_numpy(made.loss.sample)
        weight = 1 / size[kept].sum() if aggregation == "token" else 1 / size[owner] / kept.sum()
        assert torch.allclose(gradient, torch.where(kept[owner], -value * weight, 0.0))


@pytest.mark.parametrize(("estimator", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)])
def test_a_kl_penalty_in_the_reward_is_that_of_each_token(estimator: str, value: float) -> None:
    made = batch([sample("s", turns=[(2, 3)], rewards=[1.0])])
    reference = made.logprobs - 0.5
    setup = preset(None, kl=0.1, kl_in="reward", kl_estimator=estimator)
    paid = penalised_rewards(made, reference, setup.loss, LossFactors(0.1, 0.0))
    assert paid.rewards[made.loss.position].tolist() == pytest.approx([-0.1 * value, -0.1 * value, 1 - 0.1 * value])
    assert paid.rewards[:2].tolist() == [0.0, 0.0]


def test_the_k2_loss_has_the_gradient_of_k1_in_the_reward() -> None:
    """∇ d²/2 = d ∇log π, the policy gradient of the reward −d."""
    case = Case.drawn(9)
    made = batch(case.samples)
    still = dataclasses.replace(
        case, samples=[dataclasses.replace(s, rewards=(0.0,) * len(s.rewards)) for s in case.samples]
    )
    _, gradient = product_loss(preset(None, kind="pg", kl=0.3, kl_estimator="k2"), still)
    gap = case.now.detach() - torch.from_numpy(case.reference[made.loss.position])
    assert torch.allclose(gradient, 0.3 * gap / len(gap))
