"""The plugin's checks of a version directory. The plugin runs in vLLM's environment, but this part needs no vLLM."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

from rollart.engine.weights import read_tensors
from tests.e2e.harness import ROOT
from tests.engine.models import QWEN, publish, publish_adapter

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 8, "vocab_size": 16}


@pytest.fixture(scope="module")
def plugin() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "integrations" / "vllm")
        yield importlib.import_module("rollart_vllm.directory")


CPU = torch.device("cpu")


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """Two buckets with an index, as several ranks write them."""
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for i, name in enumerate(names):
        save_file({f"w{i}": torch.full((2, 3), float(i))}, tmp_path / name)
    index = {"weight_map": {f"w{i}": name for i, name in enumerate(names)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    sums = {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in names}
    (tmp_path / "COMPLETE").write_text(json.dumps({"schema": 1, "version": 3, "files": sums}))
    return tmp_path


def test_buckets_are_read_by_their_index(plugin: ModuleType, version: Path) -> None:
    opened = plugin.open_version(str(version), CONFIG, verify=True)
    assert {name: tensor.tolist() for name, tensor in opened.tensors(CPU)} == {
        "w0": [[0.0] * 3] * 2,
        "w1": [[1.0] * 3] * 2,
    }


def test_a_version_may_be_removed_while_it_is_open(plugin: ModuleType, version: Path) -> None:
    opened = plugin.open_version(str(version), CONFIG, verify=False)
    for file in version.iterdir():
        file.unlink()
    assert len(dict(opened.tensors(CPU))) == 2


def test_an_adapter_is_merged_as_the_embedded_engine_does(plugin: ModuleType, tmp_path: Path) -> None:
    version = publish_adapter(tmp_path / "v1", 1, publish(tmp_path / "below", 0))
    opened = plugin.open_version(str(version), QWEN, verify=True)
    found, want = dict(opened.tensors(CPU)), read_tensors(version)
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
    file = version / "adapter_model.safetensors"
    marker = {"files": {file.name: hashlib.sha256(file.read_bytes()[::-1]).hexdigest()}}
    (version / "COMPLETE").write_text(json.dumps(marker))
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is damaged"):
        plugin.open_version(str(version), QWEN, verify=True)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("COMPLETE", None, "not a whole version: it has no COMPLETE"),
        ("config.json", json.dumps({**CONFIG, "hidden_size": 9}), "another model: hidden_size is 9"),
        ("model-00002-of-00002.safetensors", "x", "is damaged"),
        ("model-00001-of-00002.safetensors", None, "cannot be read"),
        ("config.json", "{", "cannot be read"),
    ],
)
def test_what_is_no_version_is_refused(
    plugin: ModuleType, version: Path, name: str, content: str | None, said: str
) -> None:
    (version / name).unlink()
    if content is not None:
        (version / name).write_text(content)
    with pytest.raises(ValueError, match=said) as refused:
        plugin.open_version(str(version), CONFIG, verify=True)
    assert "\n" not in str(refused.value)


def test_damage_is_seen_only_by_who_looks(plugin: ModuleType, version: Path) -> None:
    """`verify` costs a read of every bucket."""
    file = version / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    plugin.open_version(str(version), CONFIG, verify=False)
    with pytest.raises(ValueError, match="damaged"):
        plugin.open_version(str(version), CONFIG, verify=True)
