"""Tensors in safetensors files: whole, or split by rows over several files. They are read by rows, so that any number
of ranks can read files from any other number, and no rank reads a whole model to keep a part of it.

Files with split tensors have metadata: `rows` = {name: [first row, rows of the whole tensor]} as JSON.

Paths of published versions, and the marker of a complete one.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rollart.train.microbatch import balanced_portions


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Rows of a tensor from `start` on; `of` is the number of rows of the whole tensor."""

    tensor: Tensor
    start: int
    of: int


def save_tensors(path: Path, tensors: Mapping[str, Tensor | TensorRows]) -> None:
    """Write one file, with the umask's mode for new files. Raises `OSError` and `SafetensorError`."""
    rows = {name: [t.start, t.of] for name, t in tensors.items() if isinstance(t, TensorRows)}
    plain = {name: t.tensor if isinstance(t, TensorRows) else t for name, t in tensors.items()}
    # transformers requires `format`, and safetensors cannot read an empty file without metadata.
    metadata = {"format": "pt"} | ({"rows": json.dumps(rows)} if rows else {})
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file({name: t.detach().cpu().contiguous() for name, t in plain.items()}, path, metadata=metadata)
    path.chmod(mode)  # safetensors puts a temporary file of mode 0600 in its place


class TensorFiles:
    """The tensors of some files, by name. Tensors that were read remain valid after `close`."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files: list[Any] = []
        self._locations: dict[str, list[tuple[int, int, Any]]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in files:
            file: Any = safe_open(str(path), framework="pt")
            self._files.append(file)
            rows = json.loads((file.metadata() or {}).get("rows", "{}"))
            for name in file.keys():  # noqa: SIM118 - not a mapping
                self._add(name, file.get_slice(name), rows.get(name))

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) of a tensor in host memory, by default all. `ValueError` if some rows are in no file."""
        shape = self.shapes[name]
        if not shape:
            return self._read_scalar(name)
        stop = shape[0] if stop is None else stop
        parts, at = [], start
        for first, last, piece in sorted(self._locations[name], key=lambda p: p[:2]):
            if first <= at < min(last, stop):
                end = min(last, stop)
                parts.append(piece[at - first : end - first])
                at = end
        if at < stop:
            raise ValueError(f"{name}: rows {at} to {stop} are in no file")
        if not parts:
            first, _, piece = self._locations[name][0]
            parts.append(piece[0:0])
        whole: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole

    def close(self) -> None:
        self._locations.clear()
        self._files.clear()

    def _add(self, name: str, piece: Any, rows: list[int] | None) -> None:
        shape = tuple(piece.get_shape())
        start, of = rows or (0, shape[0] if shape else 0)
        self._locations.setdefault(name, []).append((start, start + (shape[0] if shape else 0), piece))
        self.shapes[name] = (of, *shape[1:]) if shape else ()

    def _read_scalar(self, name: str) -> Tensor:
        """Read a scalar."""
        for file in self._files:
            if name in file.keys():  # noqa: SIM118 - not a mapping
                tensor: Tensor = file.get_tensor(name)
                return tensor
        raise ValueError(f"{name} is in no file")


@dataclass(frozen=True, slots=True)
class FileBucket:
    """Tensors that one rank writes into one file."""

    owner: int
    names: tuple[str, ...]


def file_buckets(sizes: Mapping[str, int], *, ranks: int, limit: int) -> list[FileBucket]:
    """Files for tensors of given sizes in bytes, each of at most `limit` bytes (a larger tensor alone), with nearly
    equal totals per rank. In order of rank; a rank without tensors has no file."""
    names = list(sizes)
    out = []
    for owner, share in enumerate(balanced_portions([sizes[name] for name in names], ranks)):
        current: list[str] = []
        filled = 0
        for name in (names[i] for i in share):
            if current and filled + sizes[name] > limit:
                out.append(FileBucket(owner, tuple(current)))
                current, filled = [], 0
            current.append(name)
            filled += sizes[name]
        if current:
            out.append(FileBucket(owner, tuple(current)))
    return out


def row_range(rows: int, *, rank: int, ranks: int) -> tuple[int, int]:
    """The rows [start, stop) of a parameter on a rank: equal chunks, the last ones shorter or empty, as `torch.chunk`
    and FSDP2 split the first dimension."""
    chunk = -(-rows // ranks)
    return min(rank * chunk, rows), min((rank + 1) * chunk, rows)


MARKER = "COMPLETE"


def version_path(root: Path, version: int) -> Path:
    return root / f"v{version:06d}"
