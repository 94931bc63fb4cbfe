"""A reward model: a small network over byte n-grams, its weights packed with the function as safetensors.

score = sigmoid(w2 . relu(mean(embed[hashes]) @ w1 + b1) + b2), with shapes embed [buckets, d], w1 [d, h], b1 [h],
w2 [h], b2 []. The hash is FNV-1a over byte trigrams of the conversation, so a file of weights means the same anywhere.
"""

from __future__ import annotations

import pathlib

import numpy as np
from safetensors.numpy import load_file

from serverless.declare import reward
from serverless.types import Item, Scored

WEIGHTS = "reward_model.safetensors"
"""The artefact's file name."""


@reward(memory_mb=512, timeout_s=10, preload=("numpy", "safetensors.numpy"))
class RewardModel:
    """Loaded once per worker; needs the artefact `reward_model.safetensors`, which the spec names."""

    def load(self, artefacts: pathlib.Path) -> None:
        weights = load_file(artefacts / WEIGHTS)
        self.embed, self.w1, self.b1, self.w2, self.b2 = (weights[k] for k in ("embed", "w1", "b1", "w2", "b2"))

    def __call__(self, sample: Item) -> Scored:
        text = "\n".join(f"{m['role']}: {m['content']}" for m in sample.messages)
        features = self.embed[trigrams(text, len(self.embed))].mean(axis=0)
        hidden = np.maximum(features @ self.w1 + self.b1, 0.0)
        logit = float(hidden @ self.w2 + self.b2)
        return Scored(1.0 / (1.0 + np.exp(-logit)), {"logit": logit})


def trigrams(text: str, buckets: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The bucket of every byte trigram of a text, int64 [max(1, bytes - 2)]."""
    data = np.frombuffer(text.encode().ljust(3, b"\0"), dtype=np.uint8).astype(np.uint64)
    hashed = np.full(len(data) - 2, 14695981039346656037, dtype=np.uint64)
    for offset in range(3):
        hashed = (hashed ^ data[offset : len(data) - 2 + offset]) * np.uint64(1099511628211)
    return (hashed % np.uint64(buckets)).astype(np.int64)
