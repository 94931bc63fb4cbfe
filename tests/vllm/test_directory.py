"""The plugin's checks of a version directory. The plugin runs in vLLM's environment, but this part needs no vLLM."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

from tests.e2e.harness import ROOT

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 8, "vocab_size": 16}


@pytest.fixture(scope="module")
def plugin() -> ModuleType:
    spec = importlib.util.spec_from_file_location("directory", ROOT / "integrations/vllm/rollart_vllm/directory.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    assert {name: tensor.tolist() for name, tensor in opened.tensors()} == {
        "w0": [[0.0] * 3] * 2,
        "w1": [[1.0] * 3] * 2,
    }


def test_a_version_may_be_removed_while_it_is_open(plugin: ModuleType, version: Path) -> None:
    opened = plugin.open_version(str(version), CONFIG, verify=False)
    for file in version.iterdir():
        file.unlink()
    assert len(dict(opened.tensors())) == 2


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
