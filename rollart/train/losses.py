"""Policy losses per token, on tensors, the weights that make a mean of them, and the sums behind a step's metrics.

Notation. π current policy (has the gradient), μ the behaviour policy that sampled (the engine, perhaps some versions
ago), π₀ the proximal policy (the weights at the start of the step), A the advantage, clip(x) = x within
[1 − ε_low, 1 + ε_high], sg stop-gradient.

    pg         −A log π                                                 REINFORCE (Williams 1992)
    ppo        −min(ρ A, clip(ρ) A),  ρ = π/μ                           arXiv:1707.06347, eq. 7; ε_high ≠ ε_low: DAPO
    decoupled  −w min(ρ A, clip(ρ) A),  ρ = π/π₀,  w = min(π₀/μ, cap)   arXiv:2110.00641; as in AReaL, 2505.24298
    tis        −sg[min(π/μ, cap)] A log π                               truncated importance sampling, arXiv:1802.01561

A KL penalty adds kl × (x − 1 − log x) with x = π_ref/π to a token's loss, and has a gradient through π: an estimate of
KL(π ‖ π_ref) from samples of π (Schulman 2020, "k3"; GRPO, arXiv:2402.03300, eq. 4).

The batch loss is Σ_t w_t ℓ_t with Σ_t w_t = 1 over the loss tokens of the mini-batch, so masked tokens are in neither
the numerator nor the denominator, and splitting a mini-batch into micro-batches does not change it.
"""

from __future__ import annotations

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

GAP_METRICS = ("behaviour_gap", "_fresh", "_fresh_gap")
"""Statistics whose means `gap_shares` takes; names with `_` are not metrics themselves."""


def policy_loss(
    config: LossSpec, *, logprobs: Tensor, behaviour: Tensor, advantage: Tensor, proximal: Tensor | None = None
) -> TokenLoss:
    """Loss of each token [N] before weighting. `proximal` is given for kind `decoupled` alone."""
    ratio = _ratio(logprobs, behaviour if proximal is None else proximal)
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    if config.kind == "pg":
        return TokenLoss(-advantage * logprobs, ratio.detach(), torch.zeros_like(advantage))
    if config.kind == "tis":
        weight = ratio.detach().clamp(max=config.cap)
        return TokenLoss(-weight * advantage * logprobs, ratio.detach(), (ratio.detach() > config.cap).to(ratio.dtype))
    gain, bound = ratio * advantage, ratio.clamp(low, high) * advantage
    loss = -torch.minimum(gain, bound)
    clipped = (bound < gain).to(gain.dtype)
    if proximal is not None:
        loss = loss * _ratio(proximal, behaviour).clamp(max=config.cap)
    return TokenLoss(loss, ratio.detach(), clipped)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Per-token loss, and the ratio and clip flags for the metrics (both without gradient). All [N]."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


class PolicyObjective:
    """The loss of a batch's tokens, from the log-probabilities of one micro-batch at a time."""

    def __init__(
        self,
        config: LossSpec,
        batch: TrainingBatch,
        advantage: FloatArray,
        version: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        reference: Tensor | None = None,
        proximal: Tensor | None = None,
    ) -> None:
        """`version`: the trained one. `reference`: log-probabilities [N] under the reference policy, for a KL penalty;
        `proximal`: those at the start of the step, for kind `decoupled` (None: the step's own first pass)."""
        at = batch.loss.position
        self._config, self._reference, self._proximal = config, reference, proximal
        self._behaviour = torch.from_numpy(batch.logprobs[at]).to(device, dtype)
        self._credit = torch.from_numpy(advantage).to(device, dtype)
        self._fresh = torch.from_numpy(batch.versions[at] == version).to(device, dtype)

    def __call__(self, logprobs: Tensor, entropy: Tensor, pick: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of the loss tokens `pick` [M], with the bonus and the penalty, and the statistics of `terms`."""
        loss, penalty, values = self.terms(logprobs, entropy, pick)
        if self._config.entropy:
            loss = loss - self._config.entropy * entropy
        return (loss if penalty is None else loss + self._config.kl * penalty), values

    def terms(self, logprobs: Tensor, entropy: Tensor, pick: Tensor) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """The policy loss, the KL estimate (None without a penalty), and the statistics (without gradient) of the loss
        tokens `pick`; all [M], before weighting. `_fresh` is 1 for tokens sampled under the trained version."""
        detached, behaviour, proximal = logprobs.detach(), self._behaviour[pick], None
        if self._config.kind == "decoupled":
            proximal = detached if self._proximal is None else self._proximal[pick]
        token = policy_loss(
            self._config, logprobs=logprobs, behaviour=behaviour, advantage=self._credit[pick], proximal=proximal
        )
        gap, fresh = (detached - behaviour).abs(), self._fresh[pick]
        values = {
            "entropy": entropy.detach(),
            "clip_fraction": token.clipped,
            "approx_kl": kl_estimate(detached, behaviour if proximal is None else proximal),
            "ratio": token.ratio,
            "behaviour_gap": gap,
            "_fresh": fresh,
            "_fresh_gap": gap * fresh,
        }
        if self._reference is None:
            return token.loss, None, values
        penalty = kl_estimate(self._reference[pick], logprobs)
        return token.loss, penalty, values | {"reference_kl": penalty.detach()}


def kl_estimate(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Per-token estimate of KL(reference ‖ current) from samples of `reference`: x − 1 − log x with x = π/μ ≥ 0
    (Schulman 2020, "k3")."""
    difference = (logprobs - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp() - 1.0 - difference


def gap_shares(gap: float, fresh: float, fresh_gap: float) -> dict[str, float]:
    """Splits the mean |log π − log μ| of all tokens, `behaviour_gap`: `mismatch_gap` over tokens of the trained
    version, for which engine and trainer should agree to rounding, and `stale_gap` over tokens of earlier versions.
    Each is omitted if the batch has no such token. Arguments are means over all tokens: `fresh` is the share of fresh
    tokens, `fresh_gap` the gap with 0 for the others."""
    found = {"behaviour_gap": gap}
    if fresh > 0.0:
        found["mismatch_gap"] = fresh_gap / fresh
    if fresh < 1.0:
        found["stale_gap"] = max(0.0, gap - fresh_gap) / (1.0 - fresh)
    return found


def token_weights(domain: IntArray, weight: FloatArray, *, balance: bool) -> FloatArray:
    """The weight of each loss token of a mini-batch, summing to 1 [N].

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
        return means | {"updates": float(self.updates), "padding_share": 1.0 - self.real / max(1, self.padded)}

    def _sum(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name] + value if name in self.sums else value


def _ratio(logprobs: Tensor, reference: Tensor) -> Tensor:
    return (logprobs - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
