"""The weights of a Hugging Face checkpoint directory, and checks that it was published completely.

`rollart.architecture` reads the architecture. Errors: `UsageError`, one line.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from rollart.architecture import weight_files
from rollart.errors import UsageError

MARKER = "COMPLETE"
"""A published directory holds this file once it is complete: the trainer writes it last. It is empty, or JSON with the
`version`."""


def read_tensors(directory: str | Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name, on the CPU, memory-mapped. One file or a sharded index."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for path in weight_files(directory):
        try:
            tensors.update(load_file(path))
        except Exception as error:  # the library raises its own types for truncated and foreign files
            raise UsageError(f"{path}: not a readable safetensors file ({error})") from error
    return tensors


def require_complete(directory: str | Path) -> None:
    """Refuse an incomplete directory."""
    path = Path(directory)
    if not path.is_dir():
        raise UsageError(f"weights directory {path} does not exist")
    if not (path / MARKER).exists():
        raise UsageError(f"weights directory {path} has no {MARKER} marker", remedy="wait until it was published whole")


def published_version(directory: str | Path) -> int:
    """The version in a directory's marker; 0 for a checkpoint that was not published by a trainer."""
    try:
        return int(json.loads((Path(directory) / MARKER).read_text())["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
