"""Policy losses per token, on tensors, the weights that make a mean of them, and the sums behind a step's metrics.

Notation. π current policy (has the gradient), μ the behaviour policy that sampled (the engine, perhaps some versions
ago), π₀ the proximal policy (the weights at the start of the step), A the advantage, clip(x) = x within
[1 − ε_low, 1 + ε_high], sg stop-gradient.

    pg         −A log π                                                 REINFORCE (Williams 1992)
    ppo        −min(ρ A, clip(ρ) A),  ρ = π/μ                           arXiv:1707.06347, eq. 7; ε_high ≠ ε_low: DAPO
    decoupled  −w min(ρ A, clip(ρ) A),  ρ = π/π₀,  w = c(π₀/μ)          arXiv:2110.00641; as in AReaL, 2505.24298
    tis        −sg[c(π/μ)] A log π                                      truncated importance sampling, arXiv:1802.01561;
                                                                        CISPO, arXiv:2506.13585, §3.1
    topr       tis where A < 0, pg elsewhere                            arXiv:2503.14286
    kimi       −A log π + τ/2 (Σ log π/μ)²/n, Σ over the n tokens       arXiv:2501.12599, §2.3.2
               of the sample
    dpo        −log σ(β (Σ_w log π/π_ref − Σ_l log π/π_ref)),           arXiv:2305.18290, eq. 7; on samples of the
               w and l the best and the worst sample of a group         policy: arXiv:2402.04792, 2410.18252
    nll        −log π of answers that are given, not sampled            supervised fine-tuning (`Learner`)

c(x) = min(max(x, floor), cap) (`correction: truncate`), or x within [floor, cap] and 0 elsewhere (`mask`). With `mask`
the other kinds have the factor 1 within and 0 outside, of π₀/μ (MIS; IcePop).

A ratio is a token's, or of the sample: the geometric mean s = exp(mean of log π/μ) of its tokens (GSPO,
arXiv:2507.18071, eq. 7), or their product. A clipped ratio of the sample has the gradient s m ∇log π_t at token t,
m = 1 for the mean (GSPO-token, eq. 14) and m = n for the product: with one advantage for all tokens the mean over the n
tokens has the value and the gradient of the clipped objective of s.

Dual clip (`dual_clip` c): where A < 0 the loss is min(loss, −c A), arXiv:1912.09729, eq. 5. It is the bound δ of the
ratio for negative advantages of INTELLECT-2, arXiv:2505.07291 (TRL's `delta`): A min(ρ, c) = max(ρ A, c A).

A KL penalty in the loss adds kl × k to a token's loss, k an estimate of KL(π ‖ π_ref) from samples of π (Schulman
2020; k3: GRPO, arXiv:2402.03300, eq. 4). In the reward it subtracts kl × k, with μ in the place of π and without
gradient.

The batch loss is Σ_t w_t ℓ_t over the loss tokens of the mini-batch (`loss_weights`), so masked tokens are in neither
the numerator nor the denominator, and splitting a mini-batch into micro-batches does not change it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollart.settings.training import LossSpec
from rollart.train.batch import FloatArray, IntArray, TrainingBatch
from rollart.train.microbatch import MicroBatch
from rollart.train.ranks import Ranks

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped here: exp(20) is far outside every clip range, and an infinity would poison the gradient."""

GAP_METRICS = ("behaviour_gap", "_fresh", "_fresh_gap", "_weight", "_squared_weight")
"""Statistics whose means `gap_shares` takes; names with `_` are not metrics themselves."""


def policy_loss(
    config: LossSpec,
    *,
    logprobs: Tensor,
    behaviour: Tensor,
    advantage: Tensor,
    proximal: Tensor | None = None,
    sample: Tensor | None = None,
) -> TokenLoss:
    """Loss of each token [N] before weighting, without `kimi`'s square (`squared_log_ratio`). `proximal` is given for
    kind `decoupled` and for `correction: mask`; `sample`: the number of each token's sample [N], for ratios of samples,
    which need all tokens of a sample."""
    base = proximal if config.kind == "decoupled" and proximal is not None else behaviour
    clips = config.kind in ("ppo", "decoupled")
    ratio = _ratio(logprobs, base, config.ratio if clips else config.correction_level, sample)
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    if config.kind in ("tis", "topr"):
        ratio = ratio.detach()
        weight, cut = _corrected(config, ratio)
        if config.kind == "topr":
            weight, cut = torch.where(advantage < 0, weight, 1.0), cut & (advantage < 0)
        return TokenLoss(-weight * advantage * logprobs, ratio, cut.to(ratio.dtype))
    if clips:
        gain, bound = ratio * advantage, ratio.clamp(low, high) * advantage
        loss = -torch.minimum(gain, bound)
        clipped = (bound < gain).to(gain.dtype)
        if config.dual_clip is not None:
            most = -config.dual_clip * advantage
            clipped = torch.where((advantage < 0) & (most < loss), 1.0, clipped)
            loss = torch.where(advantage < 0, torch.minimum(loss, most), loss)
    else:
        loss, clipped = -advantage * logprobs, torch.zeros_like(advantage)
    if proximal is not None:
        weight, cut = _corrected(config, _ratio(proximal, behaviour, config.correction_level, sample))
        loss = loss * (weight if config.kind == "decoupled" else (~cut).to(loss.dtype))
    return TokenLoss(loss, ratio.detach(), clipped)


def squared_log_ratio(logprobs: Tensor, behaviour: Tensor, sample: Tensor) -> Tensor:
    """(Σ log π/μ)²/n of the n tokens of each token's sample [N]; the sum over a sample's tokens is the square."""
    difference = (logprobs - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    total, count = _sample_sums(difference, sample)
    return (total.square() / count)[sample]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Per-token loss, and the ratio and clip flags for the metrics (both without gradient). All [N]."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


@dataclass(frozen=True, slots=True)
class LossFactors:
    """The factors of the KL penalty and of the entropy bonus in one step."""

    kl: float
    entropy: float


class PolicyObjective:
    """The loss of a batch's tokens, from the log-probabilities of one micro-batch of whole samples at a time."""

    def __init__(
        self,
        config: LossSpec,
        batch: TrainingBatch,
        advantage: FloatArray,
        version: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        factors: LossFactors,
        reference: Tensor | None = None,
        proximal: Tensor | None = None,
    ) -> None:
        """`version`: the trained one. `reference`: log-probabilities [N] under the reference policy, for a KL penalty;
        `proximal`: those at the start of the step, where the loss has them (None: those of the first pass)."""
        at = batch.loss.position
        self._config, self._reference, self._proximal = config, reference, proximal
        self._factors = factors
        self._behaviour = torch.from_numpy(batch.logprobs[at]).to(device, dtype)
        self._first = torch.zeros_like(self._behaviour) if proximal is None and uses_proximal(config) else None
        self._credit = torch.from_numpy(advantage).to(device, dtype)
        self._fresh = torch.from_numpy(batch.versions[at] == version).to(device, dtype)
        levels = {config.ratio, config.correction_level}
        self._value: Tensor | None = None
        self._sample = None
        if config.kind in ("kimi", "dpo") or levels != {"token"}:
            self._sample = torch.from_numpy(batch.loss.sample).to(device)

    def end_first_pass(self, ranks: Ranks) -> None:
        """Take the log-probabilities of the pass that ended as the proximal policy's in the passes after it."""
        if self._first is not None:
            self._proximal, self._first = ranks.total(self._first), None

    def weigh_pairs(self, pairs: IntArray, logprobs: Tensor) -> None:
        """Set the loss of kind `dpo` for one update of `pairs` [P, 2] of samples, better ones first, from the
        log-probabilities [N] at its start. A sample has the loss of its pair, and twice its gradient: a pair is two
        samples. Samples without a pair have none."""
        assert self._sample is not None, "dpo has samples"
        assert self._reference is not None, "dpo has a reference"
        total, count = _sample_sums(logprobs - self._reference, self._sample)
        better, worse = torch.from_numpy(pairs).to(total.device).unbind(1)
        margin = self._factors.kl * (total[better] - total[worse])
        pull = 2.0 * self._factors.kl * torch.sigmoid(-margin)
        credit = torch.zeros_like(total).index_add(0, better, pull).index_add(0, worse, -pull)
        loss = torch.nn.functional.softplus(-margin)
        value = torch.zeros_like(total).index_add(0, torch.cat((better, worse)), torch.cat((loss, loss)))
        self._credit, self._value = credit[self._sample], (value / count)[self._sample]

    def __call__(self, logprobs: Tensor, entropy: Tensor, pick: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of the loss tokens `pick` [M], with the bonus and the penalty, and the statistics of `terms`."""
        loss, penalty, values = self.terms(logprobs, entropy, pick)
        if self._factors.entropy:
            loss = loss - self._factors.entropy * entropy
        return (loss if penalty is None else loss + penalty), values

    def terms(self, logprobs: Tensor, entropy: Tensor, pick: Tensor) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """The policy loss, the part that does not scale with the advantage (KL penalty and square; None without), and
        the statistics (without gradient) of the loss tokens `pick`; all [M], before weighting. `_fresh` is 1 for tokens
        sampled under the trained version."""
        config, detached, behaviour, proximal = self._config, logprobs.detach(), self._behaviour[pick], None
        sample = None if self._sample is None else self._sample[pick]
        if uses_proximal(config):
            if self._first is not None:
                self._first[pick] = detached
            proximal = detached if self._proximal is None else self._proximal[pick]
        base = proximal if proximal is not None and config.kind == "decoupled" else behaviour
        token = policy_loss(
            config,
            logprobs=logprobs,
            behaviour=behaviour,
            advantage=self._credit[pick],
            proximal=proximal,
            sample=sample,
        )
        gap, fresh, weight = (detached - behaviour).abs(), self._fresh[pick], _ratio(detached, behaviour, "token", None)
        values = {
            "entropy": entropy.detach(),
            "clip_fraction": token.clipped,
            "approx_kl": kl_estimate(detached, base),
            "ratio": token.ratio,
            "behaviour_gap": gap,
            "_fresh": fresh,
            "_fresh_gap": gap * fresh,
            "_weight": weight,
            "_squared_weight": weight.square(),
        }
        penalty = None
        if self._reference is not None:
            reference = self._reference[pick]
            values["reference_kl"] = kl_estimate(reference, detached)
            if config.kl_in == "loss" and config.kind != "dpo":
                penalty = self._factors.kl * kl_penalty(config.kl_estimator, logprobs, reference)
        if config.kind == "kimi":
            assert sample is not None, "kimi has samples"
            square = (0.5 * config.tau) * squared_log_ratio(logprobs, behaviour, sample)
            penalty = square if penalty is None else penalty + square
        if self._value is not None:  # the gradient of the pairs' credit
            return token.loss - token.loss.detach() + self._value[pick], penalty, values
        return token.loss, penalty, values


def preference_pairs(config: LossSpec, batch: TrainingBatch) -> IntArray:
    """The samples with the highest and the lowest reward of each group [P, 2], the first ones among equals; none of a
    group whose rewards are all equal."""
    loss = batch.loss
    paid = np.bincount(loss.sample, batch.rewards[loss.position], minlength=len(batch))
    counted = counted_samples(config, batch, np.arange(len(batch)))
    pairs = []
    for group in np.unique(batch.group[counted]):
        members = counted[batch.group[counted] == group]
        better, worse = members[paid[members].argmax()], members[paid[members].argmin()]
        if paid[better] > paid[worse]:
            pairs.append((better, worse))
    return np.array(pairs, np.int64).reshape(-1, 2)


def uses_proximal(config: LossSpec) -> bool:
    """True if the loss has the policy at the start of the step, π₀. `tis` and `topr` correct with π itself."""
    return config.kind == "decoupled" or (config.correction == "mask" and config.kind not in ("tis", "topr"))


def penalised_rewards(
    batch: TrainingBatch, reference: FloatArray | None, config: LossSpec, factors: LossFactors
) -> TrainingBatch:
    """The batch with rewards times `reward_factor`, less the KL penalty of `kl_in: reward`, by the behaviour policy's
    log-probabilities and the `reference`'s [T]; the batch itself without a penalty in the reward."""
    if reference is None or config.kl_in != "reward":
        return batch
    at = batch.loss.position
    penalty = kl_penalty(config.kl_estimator, torch.from_numpy(batch.logprobs[at]), torch.from_numpy(reference[at]))
    rewards = config.reward_factor * batch.rewards
    rewards[at] -= factors.kl * penalty.numpy()
    return dataclasses.replace(batch, rewards=rewards)


def kl_penalty(estimator: str, logprobs: Tensor, reference: Tensor) -> Tensor:
    """Per-token estimate of KL(policy ‖ reference) from samples of the policy: k1, k2 or k3 (Schulman 2020)."""
    if estimator == "k3":
        return kl_estimate(reference, logprobs)
    difference = (logprobs - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference if estimator == "k1" else 0.5 * difference.square()


def kl_estimate(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Per-token estimate of KL(reference ‖ current) from samples of `reference`: x − 1 − log x with x = π/μ ≥ 0
    (Schulman 2020, "k3")."""
    difference = (logprobs - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp() - 1.0 - difference


def gap_shares(gap: float, fresh: float, fresh_gap: float, weight: float, squared_weight: float) -> dict[str, float]:
    """Splits the mean |log π − log μ| of all tokens, `behaviour_gap`: `mismatch_gap` over tokens of the trained
    version, for which engine and trainer should agree to rounding, and `stale_gap` over tokens of earlier versions.
    Each is omitted if the batch has no such token. `effective_share` is the effective sample size of the tokens under
    importance weights w = π/μ, as a share of their number: E[w]²/E[w²] (Kong 1992). Arguments are means over all
    tokens: `fresh` is the share of fresh tokens, `fresh_gap` the gap with 0 for the others."""
    found = {"behaviour_gap": gap, "effective_share": weight * weight / squared_weight if squared_weight else 1.0}
    if fresh > 0.0:
        found["mismatch_gap"] = fresh_gap / fresh
    if fresh < 1.0:
        found["stale_gap"] = max(0.0, gap - fresh_gap) / (1.0 - fresh)
    return found


def loss_weights(
    config: LossSpec, batch: TrainingBatch, samples: IntArray, weight: FloatArray, *, balance: bool
) -> FloatArray:
    """The weight of each loss token of the mini-batch `samples` [N of the batch], 0 for tokens of other samples and of
    truncated ones that the loss leaves out. `weight` is ω [D], of the domains.

    aggregation token: `token_weights`; sample: those of samples, w_s, as w_t = w_s/n_s with the sample's number of loss
    tokens; constant: w_t = w_s/length."""
    loss = batch.loss
    size = np.diff(loss.first)
    counted = counted_samples(config, batch, samples)
    out = np.zeros(len(loss))
    if not len(counted):
        return out
    tokens = np.concatenate([np.arange(loss.first[s], loss.first[s + 1]) for s in counted])
    if config.aggregation == "token":
        out[tokens] = token_weights(batch.domain[loss.sample[tokens]], weight, balance=balance)
    else:
        per_sample = token_weights(batch.domain[counted], weight, balance=balance)
        out[tokens] = np.repeat(per_sample * token_shares(config, size[counted]), size[counted])
    if batch.weight is not None:
        out[tokens] *= batch.weight[loss.sample[tokens]]
    return out


def counted_samples(config: LossSpec, batch: TrainingBatch, samples: IntArray) -> IntArray:
    """Those of `samples` with loss tokens that the loss does not leave out, in the same order."""
    counts = np.diff(batch.loss.first)[samples] > 0
    if config.mask_truncated and batch.truncated is not None:
        counts &= ~batch.truncated[samples]
    return samples[counts]


def token_shares(config: LossSpec, size: IntArray) -> FloatArray:
    """A token's part of its sample's weight (aggregation sample, constant), of samples of `size` loss tokens [S]."""
    return np.full(len(size), 1.0 / (config.length or 1)) if config.aggregation == "constant" else 1.0 / size


def token_weights(domain: IntArray, weight: FloatArray, *, balance: bool) -> FloatArray:
    """The weight of each loss token (or sample) of a mini-batch, summing to 1 [N].

    `domain` [N] indexes `weight` [D]. Balanced: w_t = ω_d / Σ_{d' present} ω_d' / N_d, a weighted mean of domain means;
    otherwise w_t = ω_d / Σ_t' ω_d(t'), a weighted token mean.
    """
    counts = np.bincount(domain, minlength=len(weight)).astype(np.float64)
    share = weight / np.maximum(counts, 1.0) if balance else weight
    out: FloatArray = share[domain]
    out /= out.sum()
    return out


class TrainingMeter:
    """Sums over all trained tokens, with one transfer from the device at the end. Names with a leading `_` are
    intermediate values, not metrics."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.real = self.padded = self.updates = self.tokens = 0
        self.largest = 0
        """Padded tokens of the largest micro-batch of this rank."""

    def add(self, micro: MicroBatch, statistics: dict[str, Tensor], loss: Tensor | None = None) -> None:
        """Add per-token statistics [M] of a micro-batch, and its share of the loss if known."""
        self.real += micro.real_tokens
        self.padded += micro.padded_tokens
        self.largest = max(self.largest, micro.padded_tokens)
        self.tokens += len(micro.pick)
        for name, value in statistics.items():
            self._sum(name, value.sum())
        if micro.experts is not None:
            self._sum("replayed_share", (micro.experts[micro.at] >= 0).flatten(1).all(1).sum())
        if loss is not None:
            self._sum("loss", loss)

    def update(self, norm: Tensor, loss: Tensor | None = None) -> None:
        self.updates += 1
        self._sum("grad_norm", norm)
        if loss is not None:
            self._sum("loss", loss)

    def merge(self, ranks: Ranks, device: torch.device) -> None:
        """Add the sums of the other ranks. `grad_norm` and the number of updates are equal on all ranks already."""
        if ranks.size == 1:
            return
        names = sorted(self.sums.keys() - {"grad_norm"})
        sums = [float(self.sums[name].item()) for name in names]
        real, padded, tokens, *sums = ranks.totals([self.real, self.padded, self.tokens, *sums], device)
        self.real, self.padded, self.tokens = int(real), int(padded), int(tokens)
        self.sums |= {name: torch.tensor(value, dtype=torch.float64) for name, value in zip(names, sums, strict=True)}

    def mean(self, name: str) -> float:
        """Mean per update for `loss` and `grad_norm`, per visited token for other names."""
        return float(self.sums[name].item()) / max(1, self.updates if name in ("loss", "grad_norm") else self.tokens)

    def metrics(self) -> dict[str, float]:
        means = {name: self.mean(name) for name in self.sums if not name.startswith("_")}
        return means | {
            "updates": float(self.updates),
            "padding_share": 1.0 - self.real / max(1, self.padded),
            "computed_tokens": float(self.real),
        }

    def _sum(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name] + value if name in self.sums else value


def _ratio(logprobs: Tensor, reference: Tensor, level: str, sample: Tensor | None) -> Tensor:
    """The ratio at each token [N], of the token or of its sample, with the gradient of the module's docstring."""
    difference = logprobs - reference
    if level == "token":
        return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    assert sample is not None, "ratios of samples need them"
    total, count = _sample_sums(difference.detach(), sample)
    share, times = (total / count, 1.0) if level == "geometric" else (total, count[sample])
    moving = times * (logprobs - logprobs.detach())
    return (share[sample] + moving).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _sample_sums(value: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over the tokens of each sample, and their number (at least 1), by the sample's number."""
    size = int(sample.max()) + 1 if len(sample) else 0
    zeros = torch.zeros(size, device=value.device, dtype=value.dtype)
    count = zeros.index_add(0, sample, torch.ones_like(value)).clamp(min=1.0)
    return zeros.index_add(0, sample, value), count


def _corrected(config: LossSpec, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """The importance weight, and the flag of tokens whose ratio was out of bounds."""
    cut = (ratio > config.cap) | (ratio < config.floor)
    if config.correction == "mask":
        return torch.where(cut, 0.0, ratio), cut
    return ratio.clamp(config.floor, config.cap), cut
