"""Low-rank adapters as a published version holds them: apart from the weights below, which all versions share.

    adapter_config.json  adapter_model.safetensors   peft's layout: A `[rank, in]` and B `[out, rank]` of each module
    base/                                            the checkpoint below, in files that are the same in all versions

Several adapters, those of domains, have a directory each, as peft writes them: `NAME/adapter_config.json`,
`NAME/adapter_model.safetensors`. Here '' is the name of an only one.

A reader has the weights of the version once it has added alpha / rank × B @ A to the checkpoint's. The config's
`revision` identifies the checkpoint. Imports nothing of rollart: vLLM's workers import this very file, from
`integrations/vllm`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the controller imports this file, and has no torch
    from torch import Tensor

ADAPTER_CONFIG, ADAPTER_MODEL, BASE = "adapter_config.json", "adapter_model.safetensors", "base"

ADAPTER_KEY = "rollart_adapter"
"""Key of a broadcast's config.json with the adapter_config.json; its tensors are the adapter's then."""

ADAPTERS_KEY = "rollart_adapters"
"""The same for several, by name; the names of their tensors begin with `NAME/`."""

PREFIX = "base_model.model."
"""peft's prefix of the names of modules."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """Factors (A, B) by the name of the weight that they change."""

    revision: str
    """Identifies the checkpoint below."""
    scale: float
    factors: Mapping[str, tuple[Tensor, Tensor]]

    @classmethod
    def parse(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Adapter:
        """From an adapter_config.json and the tensors by peft's names. ValueError if they do not fit together."""
        try:
            names = {key.removeprefix(PREFIX).rpartition(".lora_")[0] for key in tensors}
            factors = {
                f"{name}.weight": (
                    tensors[f"{PREFIX}{name}.lora_A.weight"],
                    tensors[f"{PREFIX}{name}.lora_B.weight"],
                )
                for name in sorted(names)
            }
            return cls(str(config["revision"]), float(config["lora_alpha"]) / int(config["r"]), factors)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the adapter is not in peft's form: {type(error).__name__} {error}") from None

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """ValueError unless every product of factors has the shape of a weight below."""
        for name, (a, b) in self.factors.items():
            if name not in shapes:
                raise ValueError(f"the adapter changes {name}, which the model lacks")
            found, shape = (b.shape[0], a.shape[1]), tuple(shapes[name])
            if found != shape:
                raise ValueError(f"the adapter of {name} has the shape {found}, the weight {shape}")

    def merged(self, name: str, base: Tensor) -> Tensor:
        """The version's weight of that name, from the checkpoint's; on its device."""
        if name not in self.factors:
            return base
        a, b = self.factors[name]
        return merge(base, a.to(base.device), b.to(base.device), self.scale)


def merge(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """base + scale × B @ A, in the wider of their types."""
    dtype = base.dtype if base.element_size() > a.element_size() else a.dtype
    return base.to(dtype) + scale * (b.to(dtype) @ a.to(dtype))


def base_directory(directory: str | Path) -> Path:
    """The directory with the checkpoint's files: below a version with an adapter, any other directory itself."""
    path = Path(directory)
    return path / BASE if adapter_names(path) else path


def adapter_names(directory: str | Path) -> tuple[str, ...]:
    """The names of a version's adapters, sorted; none for a checkpoint without adapters."""
    path = Path(directory)
    if (path / ADAPTER_CONFIG).is_file():
        return ("",)
    # Other checkpoints may have directories of adapters as well, which are none of ours.
    return (
        tuple(sorted(file.parent.name for file in path.glob(f"*/{ADAPTER_CONFIG}"))) if (path / BASE).is_dir() else ()
    )


def adapter_file(name: str, file: str) -> str:
    """The path of an adapter's file below a version."""
    return str(PurePosixPath(name, file))


def read_adapter(directory: str | Path, name: str = "") -> Adapter | None:
    """An adapter of a version; None for a checkpoint without one. ValueError, one line, for a damaged one, and if the
    version has others."""
    path = Path(directory)
    names = adapter_names(path)
    if not names:
        return None
    if name not in names:
        raise ValueError(f"{path} has no adapter {name!r} (it has {', '.join(names)})")
    from safetensors.torch import load_file

    try:
        config = json.loads((path / name / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(path / name / ADAPTER_MODEL)
    except Exception as error:  # the library raises its own types for truncated and foreign files
        raise ValueError(f"{path / name / ADAPTER_MODEL} cannot be read: {str(error).splitlines()[0]}") from None
    return Adapter.parse(config, tensors)


def read_adapters(directory: str | Path) -> dict[str, Adapter]:
    """The adapters of a version with several, by name; none for other directories. Errors as for `read_adapter`."""
    found = {name: read_adapter(directory, name) for name in adapter_names(directory) if name}
    return {name: adapter for name, adapter in found.items() if adapter is not None}


def write_merged(directory: Path, target: Path, name: str = "") -> None:
    """Write the checkpoint of a version with an adapter into `target`, in the files and types of the one below it.
    ValueError for a damaged adapter, `OSError`."""
    from safetensors.torch import load_file, save_file

    adapter = read_adapter(directory, name)
    assert adapter is not None, "the caller has looked"
    for source in sorted((directory / BASE).glob("model*")):
        if source.suffix == ".safetensors":
            tensors = {name: adapter.merged(name, base).to(base.dtype) for name, base in load_file(source).items()}
            save_file(tensors, target / source.name, metadata={"format": "pt"})
        else:
            shutil.copyfile(source, target / source.name)
