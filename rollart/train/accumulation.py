"""A step's gradient, group by group, while the rest of the batch is still rolled out (RollPacker §3.4, Algorithm 1).

The batch loss is Σ_t w_t ℓ_t (`losses.py`), and w_t is known only with the whole batch. But it depends on the token's
domain alone, up to a factor that its own sample determines (`losses.token_shares`), so the unweighted gradient
G_d = Σ_{t in d} ∇ℓ_t of each domain d can be summed before, with that factor. At the end

    gradient = Σ_d (c_d / s_d) G_d,    c_d = w of a token or sample of d,    s_d = the deviation of `normalize: batch`

since every policy loss is linear in a positive factor of the advantage. An entropy bonus, a KL penalty and the square
of `kimi` have no such factor: with `normalize: batch` they are summed separately. A baseline or a mean over the
domain's batch is not a factor, and the config refuses it.

Micro-batches do not depend on the rest of the batch: they are formed within a group, with samples in the order of their
ids. The sums are independent of order (`ExactSum`). So groups give the same weights bit for bit, in float32 and
float64, in any order and any portions, one by one or the whole batch at once.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from rollart.errors import TrainerError
from rollart.settings.training import TrainerConfig
from rollart.train.advantages import domain_advantages, domain_credit, normalisation_divisor, punish_overlong
from rollart.train.batch import FloatArray, TrainingBatch, select_samples
from rollart.train.losses import (
    LossFactors,
    PolicyObjective,
    TrainingMeter,
    counted_samples,
    penalised_rewards,
    token_shares,
)
from rollart.train.microbatch import build_microbatch, plan_microbatches
from rollart.train.policy import ActionTensors, ReferencePolicy, TrainedPolicy
from rollart.train.teacher import TeacherEndpoint

COARSE = 1.5 * 2.0**28
"""Adding and subtracting it rounds to multiples of 2⁻²⁴, for |x| < 2²⁷."""

FINE = 1.5 * 2.0**-12
"""The same for 2⁻⁶⁴, for |x| < 2⁻¹³."""

MAX_MAGNITUDE = 2.0**27
"""Bound on Σ |x| of an entry: below it all partial sums are exact, and each x is split correctly."""

MAX_ADDENDS = 2**13
"""Maximum number of addends: 2¹³ remainders of at most 2⁻²⁵ stay below 2⁻¹¹, 53 bits above 2⁻⁶⁴."""


class GradientAccumulation:
    """The gradient of one step so far. Reads the weights, which must not change meanwhile, and modifies no state of the
    learner: dropping it aborts the step. `add` takes whole groups, since a part of a group would have another
    baseline."""

    def __init__(
        self,
        policy: TrainedPolicy,
        config: TrainerConfig,
        parameters: Sequence[nn.Parameter],
        version: int,
        reference: ReferencePolicy | TeacherEndpoint,
        factors: LossFactors,
    ) -> None:
        self.version = version
        self._reference = reference
        self._factors = factors
        self.meter = TrainingMeter()
        targets = {"reference_kl": config.loss.kl_target, "entropy": config.loss.entropy_target}
        self._adapting = [name for name, target in targets.items() if target is not None]
        """Statistics that determine the factors of later steps."""
        self._statistics = ExactSum(len(self._adapting))
        self.seconds = self.cpu_seconds = 0.0
        self.samples = 0
        self._policy = policy
        self._config = config
        self._parameters = list(parameters)
        size = len(self._parameters) + 1
        self._domains = defaultdict[str, _DomainState](lambda: _DomainState(ExactSum(size), ExactSum(size)))
        self._ids: set[str] = set()
        self._lag_sum = 0.0
        self._lag_max = 0.0

    @property
    def tokens(self) -> int:
        return sum(d.tokens for d in self._domains.values())

    def add(self, batch: TrainingBatch) -> None:
        """Forward and backward passes of some whole groups. `ValueError` for samples that cannot be trained on; none is
        added then."""
        started, cpu = time.perf_counter(), time.thread_time()
        if batch.weight is not None:
            raise ValueError(f"sample {batch.ids[0]}: a streamed step has no weights of samples, which are a batch's")
        again = self._ids.intersection(batch.ids)
        if again or len(set(batch.ids)) < len(batch):
            raise ValueError(f"sample {min(again or batch.ids)} is in this step already")
        groups = [self._prepare(group) for group in _groups(batch)]
        for group in groups:
            self._backward(group)
        self._count(batch, groups)
        self.seconds += time.perf_counter() - started
        self.cpu_seconds += time.thread_time() - cpu

    def gradient(self) -> tuple[list[Tensor | None], Tensor]:
        """The gradient of the batch loss for each parameter, and the loss. `ValueError` without loss tokens,
        `TrainerError` if an addend was not finite."""
        if not self.tokens:
            raise ValueError(f"none of the {self.samples} samples has a token with loss")
        domains = [self._domains[name] for name in sorted(self._domains)]
        if not all(d.main.is_exact() and d.bonus.is_exact() for d in domains):
            raise TrainerError(
                "the gradient of a streamed step is not finite, too large, or made of too many micro-batches",
                remedy="restore the last published version; lower the importance cap, or set training.stream to false",
            )
        shares, spreads = self._shares(), self._spreads()
        scaled = [
            (part, factor)
            for name in sorted(self._domains)
            for part, factor in (
                (self._domains[name].main, shares[name] / spreads[name]),
                (self._domains[name].bonus, shares[name]),
            )
        ]
        out = [
            _weighted([(part.total(i), factor) for part, factor in scaled]) for i in range(len(self._parameters) + 1)
        ]
        loss = out.pop()
        assert loss is not None
        gradient = [None if g is None else g.to(p.dtype) for g, p in zip(out, self._parameters, strict=True)]
        return gradient, loss

    def metrics(self) -> dict[str, float]:
        """The batch metrics of `Learner.train`."""
        spreads, tokens = self._spreads(), max(1, self.tokens)
        means = {
            "staleness_mean": self._lag_sum / tokens,
            "staleness_max": self._lag_max,
            "trained_tokens": float(self.tokens),
            "samples": float(self.samples),
            "advantage_abs": sum(d.advantage_abs / spreads[n] for n, d in self._domains.items()) / tokens,
        }
        means |= {f"reward/{n}": d.score / d.samples for n, d in self._domains.items() if d.samples}
        for i, name in enumerate(self._adapting):  # in place of the meter's means, which depend on the order
            total = self._statistics.total(i)
            means[name] = 0.0 if total is None else float(total) / tokens
        return means

    def _prepare(self, group: TrainingBatch) -> _GroupAdvantages:
        name = group.domains[int(group.domain[0])]
        if (group.domain != group.domain[0]).any():
            raise ValueError(f"the group of sample {group.ids[0]} spans domains")
        config = domain_credit(self._config.domains, name)
        if not len(group.loss):
            return _GroupAdvantages(name, group, np.zeros(0), np.zeros(0))
        reference = self._reference.column(group, self.version) if self._factors.kl else None
        paid = penalised_rewards(group, reference, self._config.loss, self._factors)
        paid = punish_overlong(paid, self._config.domains)
        advantage, units = domain_advantages(config.advantage, paid, np.arange(len(group.loss)))
        return _GroupAdvantages(name, group, advantage, units, reference)

    def _backward(self, group: _GroupAdvantages) -> None:
        batch, policy, config = group.batch, self._policy, self._config.loss
        if not len(batch.loss):
            return
        domain = self._domains[group.name]
        entropy_factor = self._factors.entropy
        extra = entropy_factor != 0 or (self._factors.kl != 0 and config.kl_in == "loss") or config.kind == "kimi"
        separate = extra and self._normalizes_by_batch(group.name)
        share = self._token_shares(batch)
        actions = ActionTensors(batch, policy.device)
        objective = PolicyObjective(
            config,
            batch,
            group.advantage,
            self.version,
            device=policy.device,
            dtype=policy.dtype,
            factors=self._factors,
            reference=None if group.reference is None else policy.loss_tokens(batch, group.reference),
        )
        used = batch.used_lengths
        adapter = self._config.domains[group.name].adapter or ""
        for samples in plan_microbatches(used, self._config.max_tokens_per_microbatch):
            micro = build_microbatch(batch, samples, used, policy.device, adapter)
            logprobs, entropy = policy.score(micro, actions, entropy_grad=entropy_factor != 0)
            # The proximal policy is the policy at the start of the step, which has a single update.
            loss, penalty, values = objective.terms(logprobs, entropy, micro.pick)
            if share is not None:
                loss, entropy = loss * share[micro.pick], entropy * share[micro.pick]
                penalty = penalty if penalty is None else penalty * share[micro.pick]
            main, bonus = loss.sum(), -entropy_factor * entropy.sum()
            if penalty is not None:
                bonus = bonus + penalty.sum()
            if extra and not separate:
                main = main + bonus
            domain.main.add([*self._grad(main, keep=separate), main])
            if separate:
                domain.bonus.add([*self._grad(bonus, keep=False), bonus])
            self.meter.add(micro, values)
            self._statistics.add([values[name].sum() for name in self._adapting])

    def _token_shares(self, batch: TrainingBatch) -> Tensor | None:
        """The factor of each loss token [N] that its sample determines; None: 1 for all."""
        config, loss = self._config.loss, batch.loss
        counted = counted_samples(config, batch, np.arange(len(batch)))
        size = np.diff(loss.first)
        if config.aggregation == "token" and size[counted].sum() == len(loss):
            return None
        share = np.zeros(len(batch))
        share[counted] = 1.0 if config.aggregation == "token" else token_shares(config, size[counted])
        return torch.from_numpy(share[loss.sample]).to(self._policy.device, self._policy.dtype)

    def _grad(self, value: Tensor, *, keep: bool) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(value, self._parameters, retain_graph=keep, allow_unused=True)

    def _count(self, batch: TrainingBatch, groups: Sequence[_GroupAdvantages]) -> None:
        self._ids.update(batch.ids)
        self.samples += len(batch)
        if len(batch.loss):
            lag = self.version - batch.versions[batch.loss.position]
            self._lag_sum += float(lag.sum())
            self._lag_max = max(self._lag_max, float(lag.max()))
        for group in groups:
            domain = self._domains[group.name]
            domain.tokens += len(group.batch.loss)
            counted = counted_samples(self._config.loss, group.batch, np.arange(len(group.batch)))
            size = np.diff(group.batch.loss.first)[counted]
            domain.counted += int(size.sum()) if self._config.loss.aggregation == "token" else len(counted)
            domain.samples += len(group.batch)
            domain.score += float(group.batch.score.sum())
            domain.advantage_abs += float(np.abs(group.advantage).sum())
            domain.units.append(group.units)

    def _normalizes_by_batch(self, name: str) -> bool:
        """True if the domain's advantages are divided by a deviation that is known only with the whole batch."""
        return self._config.domains[name].advantage.normalize == "batch"

    def _shares(self) -> dict[str, float]:
        """The weight of one token, or sample, of each domain (`losses.loss_weights`, from the counts alone)."""
        present = {n: d.counted for n, d in sorted(self._domains.items()) if d.counted}
        weight = {n: self._config.domains[n].loss_weight for n in present}
        if self._config.domain_balance == "domains":
            whole = sum(weight.values())
            share = {n: weight[n] / tokens / whole for n, tokens in present.items()}
        else:
            whole = sum(weight[n] * tokens for n, tokens in present.items())
            share = {n: weight[n] / whole for n in present}
        return dict.fromkeys(self._domains, 0.0) | share

    def _spreads(self) -> dict[str, float]:
        """Units are sorted first, since a standard deviation is an order-dependent sum as well."""
        return {
            name: normalisation_divisor(np.sort(np.concatenate(domain.units)))
            if domain.tokens and self._normalizes_by_batch(name)
            else 1.0
            for name, domain in self._domains.items()
        }


class ExactSum:
    """Σ of equally shaped lists of tensors whose result does not depend on the order of its addends, to the last bit.
    24 bytes per entry. Any addend may lack a tensor (None).

    Floating-point addition is not associative, so gradients added in the order in which groups finish would give
    different weights in every run. Here each addend x is split, without error, at two fixed positions (the idea of
    Demmel and Nguyen, "Parallel Reproducible Summation", 2015, with bins that are known in advance):

        x = c + f + r,   c a multiple of 2⁻²⁴,   f a multiple of 2⁻⁶⁴,   |r| ≤ 2⁻⁶⁵

    c and f are each summed as float64. All partial sums are multiples of the same power of two and short enough for 53
    bits, so every addition is exact and their order has no effect. Only r is lost: 2.7e-20 per addend.
    """

    def __init__(self, size: int) -> None:
        self._parts: list[tuple[Tensor, Tensor, Tensor] | None] = [None] * size
        self._count = 0

    def add(self, values: Sequence[Tensor | None]) -> None:
        self._count += 1
        for i, value in enumerate(values):
            if value is None:
                continue
            x = value.detach().double()
            part = self._parts[i]
            if part is None:
                part = self._parts[i] = (torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x))
            coarse = (x + COARSE) - COARSE
            rest = x - coarse
            part[0].add_(coarse)
            part[1].add_((rest + FINE) - FINE)
            part[2].add_(x.abs())

    def is_exact(self) -> bool:
        """True if the sum is exact: every addend was finite, and their number and size were within the bounds."""
        peaks = [part[2].max() for part in self._parts if part is not None]
        # A comparison with NaN is false.
        return self._count <= MAX_ADDENDS and (not peaks or bool((torch.stack(peaks) < MAX_MAGNITUDE).all()))

    def total(self, index: int) -> Tensor | None:
        """The sum in float64; None if no addend had this tensor."""
        part = self._parts[index]
        return None if part is None else part[0] + part[1]


@dataclass(slots=True)
class _DomainState:
    """One domain's part of the batch. The last entry of both sums is the loss, the others are the gradients of the
    parameters; `units` are the advantages of all credit units, before `normalize: batch`."""

    main: ExactSum
    bonus: ExactSum
    tokens: int = 0
    counted: int = 0
    """Tokens of samples that the loss counts, or these samples (`loss.aggregation`)."""
    samples: int = 0
    score: float = 0.0
    advantage_abs: float = 0.0
    units: list[FloatArray] = field(default_factory=list)


def _groups(batch: TrainingBatch) -> Iterator[TrainingBatch]:
    """Each group as a batch, with samples in the order of their ids."""
    by_id = np.array(sorted(range(len(batch)), key=batch.ids.__getitem__), np.int64)
    for number in np.unique(batch.group):
        yield select_samples(batch, by_id[batch.group[by_id] == number])


def _weighted(parts: Sequence[tuple[Tensor | None, float]]) -> Tensor | None:
    out: Tensor | None = None
    for value, factor in parts:
        if value is not None:
            out = value * factor if out is None else out + value * factor
    return out


@dataclass(frozen=True, slots=True)
class _GroupAdvantages:
    """A single group: its domain, and the advantages of its loss tokens [N] and of its credit units [U]."""

    name: str
    batch: TrainingBatch
    advantage: FloatArray
    units: FloatArray
    reference: FloatArray | None = None
    """Log-probabilities [T] under the reference policy, with a KL penalty."""
