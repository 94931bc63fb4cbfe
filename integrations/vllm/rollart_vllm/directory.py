"""A published version on disk, as vLLM reads it: safetensors buckets that are there whole or not at all.

The trainer writes `COMPLETE` last; it holds the version and the sha256 of every file. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

__all__ = ["Version", "another_model", "open_version"]

MARKER = "COMPLETE"

SHAPE = (
    "architectures",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
)
"""Keys of config.json that fix names and shapes: those of the running model and of a new version must agree."""


class Version:
    """The open buckets of one version. `tensors` may be iterated once per load; the files may be unlinked meanwhile."""

    def __init__(self, path: Path, buckets: list[Any]) -> None:
        self.path = path
        self._buckets = buckets

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor, one at a time: no more than one is in memory besides the model."""
        for bucket in self._buckets:
            for name in bucket.keys():  # noqa: SIM118
                yield name, bucket.get_tensor(name)

    def close(self) -> None:
        self._buckets = []


def open_version(path: str, config: Mapping[str, Any], *, verify: bool) -> Version:
    """Check a directory and open its buckets. ValueError, one line, for one that is torn, damaged or another model's.
    `verify` reads every bucket once more for its sha256."""
    directory = Path(path)
    try:
        marker = json.loads((directory / MARKER).read_text() or "{}")
        found = json.loads((directory / "config.json").read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{path} is not a whole version: it has no {Path(error.filename).name}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if problem := another_model(found, config):
        raise ValueError(f"{path} is {problem}")
    names = _buckets(directory)
    sums = dict(marker.get("files") or {}) if verify else {}
    opened = []
    for name in names:
        if name in sums and _digest(directory / name) != sums[name]:
            raise ValueError(f"{path}/{name} is damaged: its sha256 is not the one that was published")
        try:
            opened.append(safe_open(directory / name, framework="pt", device="cpu"))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}/{name} cannot be read: {error}") from None
    return Version(directory, opened)


def another_model(found: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """In what a version's config.json differs from the running model's, in words; empty if it does not."""
    for key in SHAPE:
        if key in found and key in config and found[key] != config[key]:
            return f"another model: {key} is {found[key]!r}, the engine's {config[key]!r}"
    return ""


def _buckets(directory: Path) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return ["model.safetensors"]


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
