"""A published version on disk: safetensors buckets, complete or no version at all.

The trainer writes `COMPLETE` last, with the version and the sha256 of every file. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, device

from rollart_vllm.lora import ADAPTER_MODEL, Adapter, base_directory, read_adapter

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
"""Keys of config.json that determine names and shapes. A new version must agree with the running model in them."""


class Version:
    """The open buckets of one version, and the adapter that is merged into them. `tensors` may be iterated once per
    load; the files may be unlinked meanwhile."""

    def __init__(self, buckets: list[Any], adapter: Adapter | None) -> None:
        """ValueError if the adapter does not fit the buckets."""
        self.buckets, self.adapter = buckets, adapter
        if adapter is not None:
            adapter.check({name: bucket.get_slice(name).get_shape() for bucket in buckets for name in bucket.keys()})  # noqa: SIM118

    def tensors(self, where: device) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, one at a time, so that only one is in memory besides the model. Those that an adapter
        changes are merged on the device `where`."""
        for bucket in self.buckets:
            for name in bucket.keys():  # noqa: SIM118
                tensor = bucket.get_tensor(name)
                changed = self.adapter is not None and name in self.adapter.factors
                yield name, self.adapter.merged(name, tensor.to(where)) if changed else tensor

    def close(self) -> None:
        self.buckets = []


def open_version(path: str, config: Mapping[str, Any], *, verify: bool) -> Version:
    """Check a directory and open its buckets. ValueError, one line, for an incomplete or damaged version, or another
    model's. `verify` also reads every bucket for its sha256."""
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
    base = base_directory(directory)
    names = [str((base / name).relative_to(directory)) for name in _buckets(base)]
    sums = dict(marker.get("files") or {}) if verify else {}
    for name in [*names, ADAPTER_MODEL]:
        if name in sums and _digest(directory / name) != sums[name]:
            raise ValueError(f"{path}/{name} is damaged: its sha256 is not the one that was published")
    opened = []
    for name in names:
        try:
            opened.append(safe_open(directory / name, framework="pt", device="cpu"))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}/{name} cannot be read: {error}") from None
    return Version(opened, read_adapter(directory))


def another_model(found: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The difference between a version's config.json and the running model's, as a text; empty if there is none."""
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
