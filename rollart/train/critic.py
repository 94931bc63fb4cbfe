"""The critic of `advantage.baseline: critic`: a value V(s_t) for every loss token t, of the tokens before it.

A decoder of the policy's architecture with weights of its own and one output in place of the vocabulary's. A value
head on the policy's own backbone would save the memory, but the value loss would then move the policy, and its scale
would have to be weighed against the surrogate's; verl, OpenRLHF and TRL keep a second model too.

Generalized advantage estimation (arXiv:1506.02438) is in `advantages.py`. The value loss of a token, with its value V̂
before the step and its target R = Â + V̂ (arXiv:2005.12729 has the clip; TRL's and verl's implementations are the same):

    ½ max((V − R)², (V̂ + min(max(V − V̂, −c), c) − R)²),   c = `value_clip`, or ½ (V − R)² without
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollart.settings.training import TrainerConfig
from rollart.train.batch import FloatArray
from rollart.train.microbatch import MicroBatch
from rollart.train.policy import TrainedModel, load_model, local_rows, parameter_dtype
from rollart.train.ranks import Ranks


class Critic(TrainedModel):
    """Owns the weights of the critic. Until `start` they are of no use, and no part of a version."""

    def __init__(self, config: TrainerConfig, ranks: Ranks) -> None:
        lean = ranks.mesh is not None
        model: Any = load_model(config.model, "cpu" if lean else config.device, as_stored=lean)
        head = model.get_output_embeddings()
        model.set_output_embeddings(nn.Linear(head.in_features, 1).to(head.weight))
        model.config.final_logit_softcapping = None
        dtype = parameter_dtype(config.model) if lean else None
        super().__init__(model, parallel=config.parallel, ranks=ranks, dtype=dtype)
        self.parameters = list(model.parameters())
        self.started = False

    def start(self, policy: TrainedModel) -> None:
        """Begin with the policy's current weights (after a warm start), and with all values 0: the first advantages are
        plain returns."""
        policy.reshard()
        self.reshard()
        source, head = dict(policy.model.named_parameters()), set(self.scorer.head.parameters())
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                own = local_rows(parameter)
                own.zero_() if parameter in head else own.copy_(local_rows(source[name]))
        self.started = True

    def values(self, micro: MicroBatch) -> Tensor:
        """The value [M] of each loss token of a micro-batch, in the order of `micro.pick`."""
        out: Tensor = self.scorer(micro.ids, micro.at)
        return out.squeeze(1).to(self.dtype)


def value_loss(values: Tensor, before: Tensor, targets: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """The value loss of each token, and the flag of those whose gradient the clip has removed; all [N]."""
    loss = (values - targets).square()
    if clip is None:
        return 0.5 * loss, torch.zeros_like(loss)
    bound = (before + (values - before).clamp(-clip, clip) - targets).square()
    return 0.5 * torch.maximum(loss, bound), (bound > loss).to(loss.dtype).detach()


def explained_variance(values: FloatArray, targets: FloatArray) -> float:
    """1 − Var(R − V)/Var(R): 1 for a perfect critic, 0 for a constant, below 0 for one that is worse; 0 for equal
    targets."""
    spread = float(targets.var())
    return 1.0 - float((targets - values).var()) / spread if spread > 0.0 else 0.0


def value_metrics(values: FloatArray, targets: FloatArray) -> dict[str, float]:
    """Metrics of the critic before a step, over the loss tokens [N] with a target (not NaN)."""
    used = ~np.isnan(targets)
    values, targets = values[used], targets[used]
    return {
        "explained_variance": explained_variance(values, targets),
        "return_mean": float(targets.mean()),
        "value_mean": float(values.mean()),
    }
