"""What the trainer says of a fixed probe, written beside each version: engines are held to it once they have loaded it.

An update may go wrong without an error: a head that keeps its packed copy, KV that stays, a share of one rank. Log-
probabilities of a few tokens that every layer takes part in show it.
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
"""Of the probe: enough for positions to matter, and nothing beside a step."""

PROBE_VOCABULARY = 30
"""Token ids that it is made of: any vocabulary that is worth training has them."""


def agreement_sample(resolved: Resolved) -> TrainSample | None:
    """The probe; None where engines are not held to it. The trainer's log-probabilities are at the temperature of the
    run and vLLM's of a prompt at 1."""
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
    """Of the weights that the trainer has now."""
    (found,) = await trainer.logprobs([sample])
    return found


def write_agreement(weights: WeightsRef, sample: TrainSample, found: Sequence[float]) -> None:
    """Beside the version that the trainer had when it said so."""
    text = json.dumps({"token_ids": sample.token_ids, "logprobs": found[1:]})
    beside = Path(weights.path) / f".{PROBE_FILE}"
    beside.write_text(text)
    beside.replace(Path(weights.path) / PROBE_FILE)  # engines never see half of it
