"""The learner: models, optimizers and counters, with three operations (train, imitate, score).
A step is trained in one call, or streamed: begin, accumulate whenever groups finish, finish.

Deterministic: shuffles are drawn from (seed, operation, number of earlier calls), so a learner that is restored from a
published version continues bit for bit like an uninterrupted one. Not thread-safe: its owner makes one call at a
time.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from rollart.errors import RollartError, TrainerError
from rollart.model import TrainReport
from rollart.settings.training import LossSpec, TeacherSpec, TrainerConfig
from rollart.train.accumulation import GradientAccumulation
from rollart.train.advantages import batch_advantages, group_advantages, punish_overlong, value_targets
from rollart.train.batch import BoolArray, FloatArray, IntArray, TrainingBatch
from rollart.train.critic import Critic, value_loss, value_metrics
from rollart.train.losses import (
    GAP_METRICS,
    LossFactors,
    PolicyObjective,
    TrainingMeter,
    gap_shares,
    loss_weights,
    penalised_rewards,
    preference_pairs,
    uses_proximal,
)
from rollart.train.microbatch import MicroBatch, build_microbatch, rank_microbatches
from rollart.train.muon import MuonWithAdamW, muon_matrices
from rollart.train.policy import (
    ActionTensors,
    ReferencePolicy,
    TrainedPolicy,
    full,
    inject_adapters,
    load_model,
    parameter_dtype,
    sample_adapters,
)
from rollart.train.ranks import Ranks
from rollart.train.teacher import TeacherEndpoint

DECAY_MIN_FRACTION = 0.1
"""Share of the learning rate at the end of its decay."""

KL_GAIN = 0.1
"""K_β of arXiv:1909.08593: a step changes the factor by at most KL_GAIN × MAX_KL_ERROR."""

MAX_KL_ERROR = 0.2
"""Bound of the relative distance from the target, there as well."""

CRITIC_RATE = 3.0
"""Default learning rate of the critic in those of the policy: at 1 its values, which begin at 0, took more than 20
steps to reach returns of 10; at 3 the quickstart's are explained after a few (docs/training.md)."""

STOP_WINDOW = 5
"""Mini-batches whose mean loss can end imitation: the loss of a single one is noise."""

Objective: TypeAlias = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(log-probabilities, entropies, indices of the loss tokens), all [M] -> per-token loss [M] and per-token statistics
[M]."""


@dataclass(slots=True)
class LearnerCounters:
    """State of a version besides tensors: numbers of calls, which determine shuffles, of updates, for the
    warm-up, and the adapted factors of the loss."""

    train_calls: int = 0
    imitate_calls: int = 0
    updates: int = 0
    kl: float = 0.0
    """The adapted factor of the KL penalty; 0 before the first step, and without `loss.kl_target`."""
    entropy: float = 0.0
    """The adapted factor of the entropy bonus; as above, with `loss.entropy_target`."""
    last_entropy: float = 0.0
    """Entropy of the last step, with `loss.entropy_target`; 0 before it."""


class Learner:
    """Owns the weights, a critic's as well, which only `train`, `finish` and `imitate` change. An accumulated gradient
    is dropped without a trace by `abort` and by the next `begin`.

    Imitation has a separate optimizer, kept between `imitate` calls and dropped at the first `train`: the moments of
    one objective are meaningless for the other.
    """

    def __init__(self, config: TrainerConfig, ranks: Ranks | None = None) -> None:
        torch.set_num_threads(config.threads)
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is refused
            torch.use_deterministic_algorithms(True)
        self.config = config
        self.ranks = ranks or Ranks()
        # Sharding converts and moves one block at a time: neither the device nor the host has to hold a whole model.
        lean = self.ranks.mesh is not None and config.lora is None
        model = load_model(config.model, config.device if self.ranks.mesh is None else "cpu", as_stored=lean)
        if config.lora is not None:
            inject_adapters(model, config.lora, config.seed, config.adapters)
        dtype = parameter_dtype(config.model) if lean else None
        self.policy = TrainedPolicy(
            model, temperature=config.temperature, parallel=config.parallel, ranks=self.ranks, dtype=dtype
        )
        self.counters = LearnerCounters()
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self._parameters = [p for p in self.policy.model.parameters() if p.requires_grad]
        self.critic = Critic(config, self.ranks) if config.critic is not None else None
        self.reference = (
            TeacherEndpoint(config.loss.reference, self.policy.vocab_size, config.tokenizer, ranks=self.ranks)
            if isinstance(config.loss.reference, TeacherSpec)
            else ReferencePolicy(config, self.policy.vocab_size)
        )
        self.base_digests: Mapping[str, str] | None = None
        """Of the files of the published checkpoint below the adapters, by name; None until it is published."""
        self._open: GradientAccumulation | None = None

    def train(self, batch: TrainingBatch, version: int) -> TrainReport:
        """All epochs and mini-batches of one step. `ValueError` for samples that cannot be trained on (weights
        unchanged), `TrainerError` if the loss diverges.

        In the metrics, `behaviour_gap` is the mean |log π − log μ| at the first mini-batch, before any update;
        `mismatch_gap` and `stale_gap` are its parts (see `gap_shares`). `replayed_share` is the share of trained tokens
        that were drawn from known experts in all layers; missing if samples have none.
        """
        if self.config.stream:
            self.begin(version)
            self.accumulate(batch)
            return self.finish()
        if self.config.loss.kind == "nll":
            return self._train_given(batch, version)
        started, cpu = time.perf_counter(), time.thread_time()
        used, alive = _samples_with_loss(batch)
        loss, factors = self.config.loss, self._factors()
        reference = self._reference_logprobs(batch, version) if loss.kl else None
        paid = penalised_rewards(batch, reference, loss, factors)
        values = None if self.critic is None else self._values(self.critic, batch, used)
        advantage = batch_advantages(paid, self.config.domains, values)
        # Where the first update takes the whole batch, its pass has the log-probabilities at the start of the step.
        scores = uses_proximal(loss) and self.config.minibatches > 1
        objective = PolicyObjective(
            loss,
            batch,
            advantage,
            version,
            device=self.policy.device,
            dtype=self.policy.dtype,
            factors=factors,
            proximal=self._score(batch, used) if scores else None,
            reference=None if reference is None else self.policy.loss_tokens(batch, reference),
        )
        job = _LearnerJob(
            batch=batch,
            used=used,
            actions=ActionTensors(batch, self.policy.device),
            weight=np.array([self.config.domains[d].loss_weight for d in batch.domains]),
            objective=objective,
            entropy_grad=factors.entropy != 0,
            aggregation=loss,
        )
        gaps: dict[str, float] = {}
        rng = np.random.default_rng([self.config.seed, 0, self.counters.train_calls])
        self.optimizers.pop("imitation", None)
        optimizer = self.optimizer("policy")
        pairs = preference_pairs(loss, punish_overlong(batch, self.config.domains)) if loss.kind == "dpo" else None
        # By version, as the learning rate. A policy that waits for the critic has a pass for the metrics alone.
        waits = self.config.critic is not None and version < self.config.critic.warmup_steps
        for part in _minibatches(alive, 1 if waits else self.config.epochs, self.config.minibatches, rng, pairs):
            self._set_rate(optimizer, self.config.lr, version, warmup=self.config.warmup)
            if pairs is not None:
                chosen = pairs[np.isin(pairs[:, 0], part)]
                objective.weigh_pairs(
                    chosen, self._score(batch, np.where(np.isin(np.arange(len(batch)), part), used, 0))
                )
            self._update(optimizer, job, part, apply=not waits)
            objective.end_first_pass(self.ranks)
            self.counters.updates += not waits
            gaps = gaps or gap_shares(*(self._mean(job.meter, name) for name in GAP_METRICS))
        learned = {} if values is None else self._train_critic(job, paid, values, version)
        self.counters.train_calls += 1
        job.meter.merge(self.ranks, self.policy.device)
        metrics = job.meter.metrics() | _batch_metrics(batch, version, advantage) | learned
        metrics |= self._adapt_factors(factors, metrics) | {
            "behaviour_gap": 0.0,
            **gaps,
            "lr": optimizer.param_groups[0]["lr"],
            "cpu_seconds": time.thread_time() - cpu,
        }
        if self.policy.device.type == "cuda":  # of this rank, for the calibration of the plan's memory
            metrics["peak_gb"] = torch.cuda.max_memory_allocated(self.policy.device) / 1e9
            metrics["largest_microbatch"] = float(job.meter.largest)
        return TrainReport(len(batch.loss), time.perf_counter() - started, metrics)

    @property
    def accumulating(self) -> bool:
        """True if a step was begun and neither finished nor dropped."""
        return self._open is not None

    def begin(self, version: int) -> None:
        """Start a streamed step from `version`. `ValueError` if the config does not stream."""
        if not self.config.stream:
            raise ValueError("the trainer was not configured to stream: set stream in its config (training.stream)")
        self._open = GradientAccumulation(
            self.policy, self.config, self._parameters, version, self.reference, self._factors()
        )

    def accumulate(self, batch: TrainingBatch) -> int:
        """Add the gradient of some whole groups; the number of loss tokens so far. `ValueError` for samples that cannot
        be trained on: none of them is added and the step continues. Any other error drops the step."""
        step = self._open_step()
        try:
            step.add(batch)
        except ValueError:
            raise
        except BaseException:
            self._open = None
            raise
        return step.tokens

    def finish(self) -> TrainReport:
        """One update with the accumulated gradient, bit for bit equal to `train` on the same samples in any order.
        Errors as for `train`; the step ends in every case."""
        step, self._open = self._open_step(), None
        factors = self._factors()
        started, cpu = time.perf_counter(), time.thread_time()
        gradient, loss = step.gradient()
        self.optimizers.pop("imitation", None)
        optimizer = self.optimizer("policy")
        self._set_rate(optimizer, self.config.lr, step.version, warmup=self.config.warmup)
        for parameter, own in zip(self._parameters, gradient, strict=True):
            parameter.grad = own
        step.meter.update(self._step(optimizer, self._parameters), loss)
        self.counters.updates += 1
        self.counters.train_calls += 1
        metrics = step.meter.metrics() | step.metrics()
        if step.tokens:
            metrics |= gap_shares(*(step.meter.mean(name) for name in GAP_METRICS))
        metrics |= self._adapt_factors(factors, metrics) | {
            "lr": optimizer.param_groups[0]["lr"],
            "cpu_seconds": step.cpu_seconds + time.thread_time() - cpu,
            "exposed_seconds": time.perf_counter() - started,
        }
        return TrainReport(step.tokens, step.seconds + time.perf_counter() - started, metrics)

    def abort(self) -> None:
        """Drop the begun step; weights, optimizer and counters are unaffected."""
        self._open = None

    def imitate(self, batch: TrainingBatch, batches: int) -> TrainReport:
        """Cross-entropy on the masked tokens: `batches` mini-batches, with samples reshuffled when they run out.

        With `imitation.stop_loss` it ends when the mean loss of the last `STOP_WINDOW` mini-batches is below that
        value.
        """
        started, cpu = time.perf_counter(), time.thread_time()
        job, alive = self._likelihood(batch, LossSpec())
        rng = np.random.default_rng([self.config.seed, 1, self.counters.imitate_calls])
        optimizer = self.optimizer("imitation")
        stop, recent = self.config.imitation.stop_loss, deque[float](maxlen=STOP_WINDOW)
        for part in _cycled_minibatches(alive, self.config.imitation.batch, batches, rng):
            recent.append(float(self._update(optimizer, job, part)))
            if stop is not None and len(recent) == STOP_WINDOW and sum(recent) / STOP_WINDOW < stop:
                break
        self.counters.imitate_calls += 1
        job.meter.merge(self.ranks, self.policy.device)
        metrics = job.meter.metrics() | {"cpu_seconds": time.thread_time() - cpu}
        return TrainReport(job.meter.tokens, time.perf_counter() - started, metrics)

    def _train_given(self, batch: TrainingBatch, version: int) -> TrainReport:
        """A step on answers that no policy sampled: negative log-likelihood, with the policy's optimizer and learning
        rate."""
        started, cpu = time.perf_counter(), time.thread_time()
        job, alive = self._likelihood(batch, self.config.loss)
        rng = np.random.default_rng([self.config.seed, 0, self.counters.train_calls])
        self.optimizers.pop("imitation", None)
        optimizer = self.optimizer("policy")
        for part in _minibatches(alive, self.config.epochs, self.config.minibatches, rng):
            self._set_rate(optimizer, self.config.lr, version, warmup=self.config.warmup)
            self._update(optimizer, job, part)
            self.counters.updates += 1
        self.counters.train_calls += 1
        job.meter.merge(self.ranks, self.policy.device)
        metrics = job.meter.metrics() | {
            "trained_tokens": float(len(batch.loss)),
            "samples": float(len(batch)),
            "lr": optimizer.param_groups[0]["lr"],
            "cpu_seconds": time.thread_time() - cpu,
        }
        return TrainReport(len(batch.loss), time.perf_counter() - started, metrics)

    def _likelihood(self, batch: TrainingBatch, aggregation: LossSpec) -> tuple[_LearnerJob, IntArray]:
        """Cross-entropy on the masked tokens, and the samples that have some."""
        used, alive = _samples_with_loss(batch)
        job = _LearnerJob(
            batch=batch,
            used=used,
            actions=ActionTensors(batch, self.policy.device),
            weight=np.ones(len(batch.domains)),
            objective=lambda logprobs, entropy, pick: (-logprobs, {"entropy": entropy.detach()}),
            entropy_grad=False,
            aggregation=aggregation,
        )
        return job, alive

    def logprobs(self, batch: TrainingBatch) -> FloatArray:
        """Log-probability of every token [T] under the current weights, 0.0 for tokens without loss."""
        out = np.zeros(len(batch.tokens), np.float64)
        used = batch.used_lengths
        if (used > 0).any():
            out[batch.loss.position] = self._score(batch, used).double().cpu().numpy()
        return out

    def advantages(self, batch: TrainingBatch) -> FloatArray:
        """Advantage of every token [T] of whole groups before `normalize`, bit for bit as in the step that trains them.
        Reads no mutable state."""
        return group_advantages(batch, self.config.domains, by_id=self.config.stream)

    def optimizer(self, name: str) -> torch.optim.Optimizer:
        """The optimizer named "policy", "critic" or "imitation", created on first use."""
        if name not in self.optimizers:
            config = self.config
            muon = name == "policy" and config.optimizer == "muon"
            matrices = muon_matrices(self.policy.model, self._parameters) if muon else []
            apart = set(matrices)
            parameters = self.critic.parameters if name == "critic" and self.critic else self._parameters
            others = [p for p in parameters if p not in apart]
            groups = [
                {"params": [p for p in others if p.ndim > 1], "weight_decay": config.weight_decay},
                {"params": [p for p in others if p.ndim <= 1], "weight_decay": 0.0},
            ]
            lr = config.lr if name == "policy" else config.imitation.lr
            betas, eps = config.betas, config.eps
            self.optimizers[name] = (
                MuonWithAdamW(matrices, groups, lr=lr, weight_decay=config.weight_decay, betas=betas, eps=eps)
                if muon
                else torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
            )
        return self.optimizers[name]

    def _factors(self) -> LossFactors:
        """The factors of the next step. Above `entropy_target` there is no bonus (Skywork-OR1, arXiv:2505.22312,
        eq. 5)."""
        loss, seen = self.config.loss, self.counters
        entropy = loss.entropy
        if loss.entropy_target is not None and seen.last_entropy:
            entropy = seen.entropy if seen.last_entropy <= loss.entropy_target else 0.0
        return LossFactors(kl=seen.kl or loss.kl if loss.kl_target else loss.kl, entropy=entropy)

    def _adapt_factors(self, factors: LossFactors, metrics: Mapping[str, float]) -> dict[str, float]:
        """Move the factors that have a target by this step's means; their metrics. KL: the proportional controller of
        arXiv:1909.08593, §2.2; entropy: a step up or down."""
        loss, seen, used = self.config.loss, self.counters, {}
        if loss.kl_target is not None:
            used["kl_factor"] = factors.kl
            error = min(MAX_KL_ERROR, max(-MAX_KL_ERROR, metrics["reference_kl"] / loss.kl_target - 1.0))
            seen.kl = factors.kl * (1.0 + KL_GAIN * error)
        if loss.entropy_target is not None:
            used["entropy_factor"] = factors.entropy
            before = seen.entropy if seen.last_entropy else loss.entropy
            seen.last_entropy = max(metrics["entropy"], sys.float_info.min)  # 0 would be "before the first step"
            step = loss.entropy_step if seen.last_entropy <= loss.entropy_target else -loss.entropy_step
            seen.entropy = max(0.0, before + step)
        return used

    def _reference_logprobs(self, batch: TrainingBatch, version: int) -> FloatArray:
        """Log-probabilities [T] of the loss tokens under the reference policy. If a rank cannot load it, all ranks
        raise its error: they would otherwise wait for that rank in the forward pass."""
        problem, logprobs = None, None
        try:
            logprobs = self.reference.column(batch, version)
        except RollartError as error:
            problem = error if isinstance(error, TrainerError) else TrainerError(error.message, remedy=error.remedy)
        self.ranks.torch.agree(problem)
        assert logprobs is not None, "else all ranks agreed that there is none"
        return logprobs

    def _update(
        self, optimizer: torch.optim.Optimizer, job: _LearnerJob, part: IntArray, *, apply: bool = True
    ) -> Tensor:
        """One optimizer update on the samples `part`, with the gradient accumulated over micro-batches (`apply` false:
        the gradient alone); the loss before the update."""
        policy, scale = self.policy, self._token_weights(job, part)
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=policy.device, dtype=policy.dtype)
        for micro in self._microbatches(job.batch, part, job.used):
            logprobs, entropy = policy.score(micro, job.actions, entropy_grad=job.entropy_grad)
            per_token, values = job.objective(logprobs, entropy, micro.pick)
            weighted = (per_token * scale[micro.pick]).sum()
            weighted.backward()  # type: ignore[no-untyped-call]
            job.meter.add(micro, values, weighted.detach())
            total = total + weighted.detach()
        job.meter.update(self._step(optimizer, self._parameters, apply=apply))
        return self.ranks.total(total)

    def _values(self, critic: Critic, batch: TrainingBatch, used: IntArray) -> FloatArray:
        """The critic's values of the loss tokens [N] before the step, without gradient; 0 in domains with another
        baseline."""
        if not critic.started:
            critic.start(self.policy)
        judged = np.where(self._has_critic(batch), used, 0)
        out = torch.zeros(len(batch.loss), device=critic.device, dtype=critic.dtype)
        with torch.no_grad():
            for samples in self._portions(judged) if judged.any() else ():
                micro = build_microbatch(batch, samples, judged, critic.device)
                out[micro.pick] = critic.values(micro)
        return self.ranks.total(out).double().cpu().numpy()

    def _has_critic(self, batch: TrainingBatch) -> BoolArray:
        """True for samples [S] of domains whose baseline is the critic."""
        judged = {name for name, domain in self.config.domains.items() if domain.advantage.baseline == "critic"}
        return np.array([name in judged for name in batch.domains])[batch.domain]

    def _train_critic(
        self, job: _LearnerJob, paid: TrainingBatch, values: FloatArray, version: int
    ) -> dict[str, float]:
        """All epochs and mini-batches of the critic's step, on the domains that have it as a baseline; its metrics."""
        setup, critic, batch = self.config.critic, self.critic, job.batch
        assert setup is not None, "the caller has a critic"
        assert critic is not None, "the caller has a critic"
        learns = np.flatnonzero(self._has_critic(batch) & (job.used > 0))
        if not len(learns):
            return {}
        found = value_targets(paid, self.config.domains, values)
        before, targets = (torch.from_numpy(one).to(critic.device, critic.dtype) for one in (values, found))
        meter, optimizer = TrainingMeter(), self.optimizer("critic")
        self._set_rate(optimizer, setup.lr or CRITIC_RATE * self.config.lr, version, warmup=0)
        rng = np.random.default_rng([self.config.seed, 2, self.counters.train_calls])
        for part in _minibatches(learns, setup.epochs or self.config.epochs, self.config.minibatches, rng):
            scale = self._token_weights(job, part).to(critic.dtype)
            optimizer.zero_grad(set_to_none=True)
            for samples in self._portions(job.used[part]):
                micro = build_microbatch(batch, part[samples], job.used, critic.device)
                per_token, clipped = value_loss(
                    critic.values(micro), before[micro.pick], targets[micro.pick], setup.value_clip
                )
                weighted = (per_token * scale[micro.pick]).sum()
                weighted.backward()  # type: ignore[no-untyped-call]
                meter.add(micro, {"value_clip_fraction": clipped}, weighted.detach())
            meter.update(self._step(optimizer, critic.parameters))
        meter.merge(self.ranks, critic.device)
        return {
            "value_loss": meter.mean("loss"),
            "value_grad_norm": meter.mean("grad_norm"),
            "value_clip_fraction": meter.mean("value_clip_fraction"),
            **value_metrics(values, found),
        }

    def _token_weights(self, job: _LearnerJob, part: IntArray) -> Tensor:
        """The weight [N] of each loss token in an update on the samples `part`."""
        balance = self.config.domain_balance == "domains"
        shares = loss_weights(job.aggregation, job.batch, part, job.weight, balance=balance)
        return torch.from_numpy(shares).to(self.policy.device, self.policy.dtype)

    def _step(
        self, optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], *, apply: bool = True
    ) -> Tensor:
        """Clip the gradient and apply it (`apply`); its norm before clipping. `TrainerError`, without an update, if it
        is not finite."""
        limit = self.config.grad_clip or float("inf")
        norm = full(torch.nn.utils.clip_grad_norm_(parameters, limit, foreach=True))
        if not torch.isfinite(norm):
            raise TrainerError(
                f"the gradient is not finite at update {self.counters.updates + 1}",
                remedy="restore the last published version; lower the learning rate or the importance cap",
            )
        if apply:
            optimizer.step()
        return norm

    def _open_step(self) -> GradientAccumulation:
        if self._open is None:
            raise TrainerError("no step was begun", remedy="begin it again and accumulate all of its groups")
        return self._open

    def _set_rate(self, optimizer: torch.optim.Optimizer, lr: float, version: int, *, warmup: int) -> None:
        scale = min(1.0, (self.counters.updates + 1) / warmup) if warmup else 1.0
        if self.config.lr_schedule != "constant" and self.config.steps:
            # By version, not by calls: a step that is trained again after a crash has the same learning rate.
            fallen = min(1.0, version / self.config.steps)
            if self.config.lr_schedule == "cosine":
                fallen = (1.0 - math.cos(math.pi * fallen)) / 2.0
            scale *= 1.0 - (1.0 - DECAY_MIN_FRACTION) * fallen
        for group in optimizer.param_groups:
            group["lr"] = lr * scale

    def _score(self, batch: TrainingBatch, used: IntArray) -> Tensor:
        """Log-probabilities of all loss tokens [N], without gradient."""
        policy = self.policy
        actions = ActionTensors(batch, policy.device)
        out = torch.zeros(len(batch.loss), device=policy.device, dtype=policy.dtype)
        with torch.no_grad():
            for micro in self._microbatches(batch, np.arange(len(batch)), used):
                out[micro.pick] = policy.score(micro, actions, entropy_grad=False)[0]
        return self.ranks.total(out)

    def _microbatches(self, batch: TrainingBatch, part: IntArray, used: IntArray) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the samples `part`, those of one adapter after those of another."""
        own = np.array(sample_adapters(batch, self.config))[part]
        for adapter in self.config.adapters or ("",):
            lengths = np.where(own == adapter, used[part], 0)
            # All ranks agree on this: a step without samples of an adapter has no passes of it.
            for samples in self._portions(lengths) if lengths.any() else ():
                yield build_microbatch(batch, part[samples], used, self.policy.device, adapter)

    def _portions(self, used: IntArray) -> list[IntArray]:
        """Micro-batches of this rank."""
        most = self.config.max_tokens_per_microbatch
        return rank_microbatches(used, most, rank=self.ranks.rank, ranks=self.ranks.size)

    def _mean(self, meter: TrainingMeter, name: str) -> float:
        """Mean per token, over all ranks."""
        if self.ranks.size == 1:
            return meter.mean(name)
        total, tokens = self.ranks.totals([float(meter.sums[name].item()), meter.tokens], self.policy.device)
        return total / max(1.0, tokens)


@dataclass(slots=True)
class _LearnerJob:
    """Inputs of one call: the samples, their sampled actions, and the objective."""

    batch: TrainingBatch
    used: IntArray
    actions: ActionTensors
    weight: FloatArray
    objective: Objective
    entropy_grad: bool
    aggregation: LossSpec
    meter: TrainingMeter = field(default_factory=TrainingMeter)


def _samples_with_loss(batch: TrainingBatch) -> tuple[IntArray, IntArray]:
    used = batch.used_lengths
    alive = np.flatnonzero(used > 0)
    if not len(alive):
        raise ValueError(f"none of the {len(batch)} samples has a token with loss")
    return used, alive


def _minibatches(
    alive: IntArray, epochs: int, parts: int, rng: np.random.Generator, pairs: IntArray | None = None
) -> Iterator[IntArray]:
    """Whole samples, each in exactly one mini-batch per epoch; sizes differ by at most one. With `pairs` [P, 2] only
    their samples, both in one mini-batch; without any pair all samples at once."""
    for _ in range(epochs):
        if pairs is None:
            for part in np.array_split(rng.permutation(alive), min(parts, len(alive))):
                yield np.asarray(part, np.int64)
        elif not len(pairs):
            yield alive
        else:
            for chosen in np.array_split(rng.permutation(pairs), min(parts, len(pairs))):
                yield chosen.ravel()


def _cycled_minibatches(alive: IntArray, size: int, batches: int, rng: np.random.Generator) -> Iterator[IntArray]:
    """`batches` mini-batches of `size` samples (or of all, if there are fewer), each without repeats."""
    size = min(size, len(alive))
    queue = rng.permutation(alive)
    for _ in range(batches):
        if len(queue) < size:
            fresh = rng.permutation(alive)
            queue = np.concatenate((queue, fresh[~np.isin(fresh, queue)], fresh[np.isin(fresh, queue)]))
        yield queue[:size]
        queue = queue[size:]


def _batch_metrics(batch: TrainingBatch, version: int, advantage: FloatArray) -> dict[str, float]:
    staleness = version - batch.versions[batch.loss.position]
    metrics = {
        "staleness_mean": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
        "trained_tokens": float(len(batch.loss)),
        "samples": float(len(batch)),
        "advantage_abs": float(np.abs(advantage).mean()),
    }
    for index, name in enumerate(batch.domains):
        mine = batch.domain == index
        if mine.any():
            metrics[f"reward/{name}"] = float(batch.score[mine].mean())
    return metrics
