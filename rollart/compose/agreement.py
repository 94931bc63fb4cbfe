"""The trainer's log-probabilities of a fixed probe, written beside each version. Engines compare theirs after they load
it.

An update can go wrong without an error: an output head that keeps its packed copy, stale KV, a missing share of one
rank. Log-probabilities of a few tokens depend on every layer and reveal it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rollart.adapters.engines.vllm import PROBE_FILE
from rollart.adapters.trainers.http import HttpTrainer
from rollart.model import GroupId, TrainSample, TrajectoryId, WeightsRef
from rollart.spec.resolve import Resolved

__all__ = ["agreement_sample", "write_agreement", "probe_logprobs"]

PROBE_TOKENS = 48
"""Length of the probe: enough for positions to matter, negligible beside a training step."""

PROBE_VOCABULARY = 30
"""Distinct token ids in the probe: few enough for any vocabulary that is worth training."""


def agreement_sample(resolved: Resolved) -> TrainSample | None:
    """The probe; None where engines are not compared. The trainer scores at the run's temperature and vLLM scores
    prompts at 1, so the temperature must be 1."""
    run, engines = resolved.run, resolved.cluster.engines
    if engines.kind != "vllm" or engines.vllm.probe == 0 or run.domains[0].temperature != 1.0:
        return None
    n = min(PROBE_TOKENS, run.model.context - 1)
    acts = (False, *(True,) * (n - 1))
    return TrainSample(
        id=TrajectoryId("agreement"),
        group=GroupId("agreement"),
        domain=run.domains[0].name,
        v0=0,
        token_ids=tuple(1 + 7 * i % PROBE_VOCABULARY for i in range(n)),
        loss_mask=acts,
        logprobs=(0.0,) * n,
        versions=tuple(0 if a else -1 for a in acts),
        turn=tuple(0 if a else -1 for a in acts),
        rewards=(0.0,) * n,
        score=0.0,
        success=None,
    )


async def probe_logprobs(trainer: HttpTrainer, sample: TrainSample) -> tuple[float, ...]:
    """Log-probabilities of the probe under the trainer's current weights."""
    (found,) = await trainer.logprobs([sample])
    return found


def write_agreement(weights: WeightsRef, sample: TrainSample, found: Sequence[float]) -> None:
    """Write the probe's log-probabilities beside the version that the trainer had when it computed them."""
    text = json.dumps({"token_ids": sample.token_ids, "logprobs": found[1:]})
    temporary = Path(weights.path) / f".{PROBE_FILE}"
    temporary.write_text(text)
    temporary.replace(Path(weights.path) / PROBE_FILE)  # engines never see a partial file
