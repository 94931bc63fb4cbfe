"""The reference policy of a KL penalty: the run's first version, which never changes.

Every sample has a separate forward pass. Its log-probabilities therefore do not depend on the rest of the batch, and
are bit for bit the same when computed on arrival or in the training step.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from rollart.errors import TrainerError
from rollart.learning import TrainerConfig
from rollart.train.batch import FloatArray, TrainingBatch, select_samples
from rollart.train.microbatch import build_microbatch
from rollart.train.policy import ActionTensors, TrainedPolicy, load_model
from rollart.train.versions import MARKER, version_path


class ReferencePolicy:
    """Owns the reference model, which is loaded on first use, after version 0 is published. Thread-safe; calls run one
    at a time."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._policy: TrainedPolicy | None = None
        self._lock = threading.Lock()

    def logprobs(self, batch: TrainingBatch) -> FloatArray:
        """Log-probability of every token [T], 0.0 for tokens without loss. `TrainerError` if version 0 does not
        exist."""
        out = np.zeros(len(batch.tokens), np.float64)
        with self._lock, torch.no_grad():
            policy = self._loaded()
            for s in np.flatnonzero(batch.used_lengths > 0):
                one = select_samples(batch, np.array([s], np.int64))
                micro = build_microbatch(one, np.zeros(1, np.int64), one.used_lengths, policy.device)
                scored, _ = policy.score(micro, ActionTensors(one, policy.device), entropy_grad=False)
                at = one.loss.position[micro.pick.cpu().numpy()] + batch.offsets[s]
                out[at] = scored.double().cpu().numpy()
        return out

    def tensor(self, batch: TrainingBatch, policy: TrainedPolicy) -> Tensor:
        """The same for the loss tokens alone [N], on the policy's device; taken from the batch if it contains them."""
        column = self.logprobs(batch) if batch.reference is None else batch.reference
        return torch.from_numpy(column[batch.loss.position]).to(policy.device, policy.dtype)

    def _loaded(self) -> TrainedPolicy:
        if self._policy is None:
            path = version_path(Path(self._config.weights_root), 0)
            if not (path / MARKER).is_file():
                raise TrainerError(
                    f"the reference policy is version 0, which is not at {path}",
                    remedy="a run that has pruned it cannot take up a KL penalty: start a new one",
                )
            setup = self._config.model.model_copy(update={"path": str(path), "init": None})
            self._policy = TrainedPolicy(load_model(setup, self._config.device), temperature=self._config.temperature)
            if self._config.parallel.dtype == "bfloat16":
                _halve(self._policy.model)
        return self._policy


def _halve(model: nn.Module) -> None:
    """Use the policy's compute type, so that equal models give equal log-probabilities. Parameters only: rounded rotary
    frequencies would be useless."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
