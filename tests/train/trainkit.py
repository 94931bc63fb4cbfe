"""Samples and tiny learners for the trainer's tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollart.adapters.trainers.http import encode_samples
from rollart.architecture import ExpertLayers
from rollart.model import GroupId, TrainSample, TrajectoryId
from rollart.train.batch import TrainingBatch, decode_batch
from rollart.train.checkpoint import take_snapshot, write_version
from rollart.train.config import TrainerConfig, parse_config
from rollart.train.learner import Learner
from tests.engine.models import DEVICE

VOCAB = 24


def config(root: Path | str = "/nonexistent", *, hidden: int = 16, layers: int = 1, **changes: Any) -> TrainerConfig:
    """A trainer config on a model of some thousand parameters."""
    init = {
        "vocab_size": changes.pop("vocab", VOCAB),
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, hidden // 16),
        "num_key_value_heads": max(1, hidden // 16),
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    raw = {
        "model": {"init": init, "seed": 0},
        "weights_root": str(root),
        "domains": {
            "a": {"advantage": {"level": "turn", "gamma": 0.8, "baseline": "domain"}},
            "b": {"advantage": {"level": "turn", "baseline": "domain"}},
        },
        "lr": 1e-3,
        "durable": False,
        "device": DEVICE.type,
    }
    return parse_config(raw | changes)


def sample(
    name: str,
    *,
    turns: Sequence[tuple[int, int]] = ((3, 2), (2, 1)),
    domain: str = "a",
    group: str | None = None,
    seed: int = 0,
    version: int = 0,
    restricted: bool = False,
    vocab: int = VOCAB,
    rewards: Sequence[float] | None = None,
    logprob: float = -1.0,
) -> TrainSample:
    """Alternating observations and actions: `turns` is (observation, action) tokens per turn; `rewards` per turn."""
    rng = random.Random(f"{seed}/{name}")
    tokens: list[int] = []
    mask: list[bool] = []
    turn: list[int] = []
    paid: list[float] = []
    allowed: list[tuple[int, ...] | None] = []
    for index, (shown, said) in enumerate(turns):
        drawn = [rng.randrange(vocab) for _ in range(shown + said)]
        tokens += drawn
        mask += [False] * shown + [True] * said
        turn += [-1] * shown + [index] * said
        paid += [0.0] * (shown + said)
        if said:
            paid[-1] = rng.random() if rewards is None else rewards[index]
        others = {(t + 1) % vocab for t in drawn} | {0, 1}
        allowed += [None] * shown + [tuple(sorted({t} | others)) if restricted else None for t in drawn[shown:]]
    return TrainSample(
        id=TrajectoryId(name),
        group=GroupId(group or name),
        domain=domain,
        v0=version,
        token_ids=tuple(tokens),
        loss_mask=tuple(mask),
        logprobs=tuple(logprob if m else 0.0 for m in mask),
        versions=tuple(version if m else -1 for m in mask),
        turn=tuple(turn),
        rewards=tuple(paid),
        score=sum(paid),
        success=None,
        allowed=tuple(allowed) if restricted else (),
    )


def batch(samples: Sequence[TrainSample], vocab: int = VOCAB, experts: ExpertLayers | None = None) -> TrainingBatch:
    """Samples as the trainer decodes them from the wire."""
    return decode_batch(encode_samples(samples), vocab, experts)


def publish_version(learner: Learner, root: Path, version: int, tokenizer: tuple[Path, ...] = ()) -> Path:
    """Write the learner's state as `version`. All ranks must call it."""
    return write_version(take_snapshot(learner), root, version, tokenizer, ranks=learner.ranks.disk)
