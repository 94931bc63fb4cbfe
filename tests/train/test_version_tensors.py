"""Tensors of several files, read by rows for any number of writers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollart.train.checkpoint import TensorFiles, row_range, save_tensors


def written(root: Path, whole: torch.Tensor, writers: int) -> list[Path]:
    """The files of one tensor by `writers` ranks."""
    paths = []
    for rank in range(writers):
        start, stop = row_range(len(whole), rank=rank, ranks=writers)
        path = root / f"{rank}-of-{writers}.safetensors"
        save_tensors(path, {"w": whole[start:stop]} if stop > start else {}, {"w": (start, len(whole))})
        paths.append(path)
    return paths


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 5))
def test_any_number_of_readers_take_what_any_number_of_writers_wrote(
    tmp_path_factory: pytest.TempPathFactory, rows: int, writers: int, readers: int
) -> None:
    whole = torch.arange(rows * 3, dtype=torch.float64).reshape(rows, 3)
    pieces = TensorFiles(written(tmp_path_factory.mktemp("pieces"), whole, writers))
    assert pieces.shapes == {"w": (rows, 3)}
    shares = [row_range(rows, rank=rank, ranks=readers) for rank in range(readers)]
    parts = [pieces.read("w", *share) for share in shares]
    assert [len(part) for part in parts] == [stop - start for start, stop in shares]
    assert torch.equal(torch.cat(parts), whole)
    del pieces
    assert torch.equal(torch.cat(parts), whole)


def test_whole_tensors_and_numbers_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    save_tensors(path, {"w": torch.ones(2, 2), "step": torch.tensor(7.0), "bias": torch.arange(3)}, {})
    pieces = TensorFiles([path])
    assert "w" in pieces.shapes
    assert pieces.shapes["step"] == ()
    assert pieces.read("step").item() == 7.0
    assert torch.equal(pieces.read("bias", 1, 3), torch.tensor([1, 2]))


def test_rows_that_no_file_has_are_an_error(tmp_path: Path) -> None:
    paths = written(tmp_path, torch.zeros(6, 2), 3)
    with pytest.raises(ValueError, match="w: rows 2 to 6 are in no file"):
        TensorFiles([paths[0], paths[2]]).read("w")
