"""The directory of weight versions: only whole versions exist, and pruning removes whole versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollart.adapters.weights.buckets import FileEntry, Manifest
from rollart.adapters.weights.directory import DirectoryWeightStore
from rollart.architecture import MARKER
from rollart.errors import StorageFailed
from rollart.ports import WeightStore


def make(root: Path, name: str, *, whole: bool = True) -> Path:
    directory = root / name
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"x")
    if whole:
        (directory / MARKER).write_text("{}")
    return directory


def test_only_whole_versions_are_listed_in_numeric_order(tmp_path: Path) -> None:
    store: WeightStore = DirectoryWeightStore(tmp_path)
    for name in ("v000010", "v000002", "v1000000", ".tmp-v000011", "notes", "v3"):
        make(tmp_path, name)
    make(tmp_path, "v000011", whole=False)
    assert store.versions() == [2, 10, 1_000_000]
    assert store.complete(2)
    assert not store.complete(11)
    assert not store.complete(12)
    assert store.path(2) == str(tmp_path / "v000002")
    assert store.path(1_000_000) == str(tmp_path / "v1000000")


def test_a_root_that_is_not_there_yet_has_no_versions(tmp_path: Path) -> None:
    store = DirectoryWeightStore(tmp_path / "later")
    assert store.versions() == []
    store.prune([1])


def test_prune_keeps_the_given_versions_and_unknown_files(tmp_path: Path) -> None:
    for version in range(4):
        make(tmp_path, f"v{version:06d}")
    make(tmp_path, "v000009", whole=False)
    make(tmp_path, ".tmp-v000010")
    make(tmp_path, ".pruned-v000077")
    store = DirectoryWeightStore(tmp_path)
    with (tmp_path / "v000001" / "model.safetensors").open("rb") as reader:
        store.prune([2, 3, 55])
        assert reader.read() == b"x"
    assert store.versions() == [2, 3]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".tmp-v000010", "v000002", "v000003", "v000009"]


def test_a_root_that_cannot_be_listed_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFailed, match=r"cannot list .*file: Not a directory"):
        DirectoryWeightStore(tmp_path / "file").versions()


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/out", "", "."])
def test_a_list_of_buckets_names_no_file_outside_its_version(name: str) -> None:
    listed = json.dumps({"schema": 1, "version": 1, "files": [[name, 4, 4, ["0" * 64]]]}).encode()
    with pytest.raises(StorageFailed, match="is no name of a file of a version"):
        Manifest.decode(listed)
    whole = Manifest(1, (FileEntry("trainer/rank-0", 4, 4, ("0" * 64,)),))
    assert Manifest.decode(whole.encode()) == whole
