from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollart.architecture import Rotary, read_architecture, refuse_longer_context
from rollart.engine.weights import published_version, read_tensors, require_complete
from rollart.errors import UsageError
from rollart.lora import ADAPTER_CONFIG, ADAPTER_MODEL, PREFIX
from tests.engine.models import HYBRID, LLAMA, QWEN, publish, publish_adapter, random_tensors


def write(path: Path, **changes: Any) -> Path:
    (path / "config.json").write_text(json.dumps({**QWEN, **changes}))
    return path


def test_both_layouts_of_rope(tmp_path: Path) -> None:
    new = read_architecture(write(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    old = read_architecture(write(tmp_path, rope_parameters=None, rope_theta=5e5))
    assert new == old
    assert {one.rotary for one in new.attention} == {Rotary(5e5, 16)}


def test_llama3_scaling_and_derived_head_size(llama: Path) -> None:
    a = read_architecture(llama)
    assert a.head_dim == LLAMA["hidden_size"] // LLAMA["num_attention_heads"]
    (attention,) = a.attention
    assert attention.rotary is not None
    assert (attention.rotary.kind, attention.rotary.scaling["factor"]) == ("llama3", 8.0)
    assert a.qk_norm == "none"
    assert not a.tied


def test_generation_config_decides_the_end_ids(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=3)
    assert read_architecture(tmp_path).eos == (3,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    assert read_architecture(tmp_path).eos == (4, 5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope scaling dynamic"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn has no factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.2}}, "partial_rotary_factor is 0.2"),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention"]}, "layer_types and sliding_window"),
        ({"architectures": ["LlamaForCausalLM"], "layer_types": ["sliding_attention"] * 2}, "llama does not have"),
        ({"use_bidirectional_attention": True}, "bidirectional"),
        (
            {**HYBRID, "layer_types": ["linear_attention"] * 4},
            "linear_attention or full_attention for each of 3 layers",
        ),
        ({**HYBRID, "linear_num_value_heads": 3}, "linear_num_value_heads is 3 and linear_num_key_heads 2"),
        ({**HYBRID, "linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0"),
        ({**HYBRID, "hidden_act": "gelu_pytorch_tanh"}, "is not supported in linear attention"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
    ],
)
def test_refuses_what_it_would_compute_wrongly(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_architecture(write(tmp_path, **changes))


def test_a_context_beyond_longropes_original_length_is_refused(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 16}
    ropes = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, **factors}
    a = read_architecture(write(tmp_path, architectures=["Phi3ForCausalLM"], rope_parameters=ropes))
    refuse_longer_context(a, 16)
    with pytest.raises(UsageError, match="a context of 17 is not supported"):
        refuse_longer_context(a, 17)


def test_errors_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read_architecture(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"config\.json does not exist"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        read_architecture(tmp_path)
    with pytest.raises(UsageError, match=r"model\.safetensors is missing"):
        read_tensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UsageError, match="not a readable safetensors file"):
        read_tensors(tmp_path)


def test_a_sharded_checkpoint_is_the_same_tensors(tmp_path: Path, qwen: Path) -> None:
    whole = read_tensors(qwen)
    names = sorted(whole)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: whole[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    again = read_tensors(tmp_path)
    assert sorted(again) == names
    assert all(again[name].equal(whole[name]) for name in names)


def test_the_marker_decides_whether_a_directory_is_whole(tmp_path: Path) -> None:
    publish(tmp_path / "v1", 0, marker=False)
    with pytest.raises(UsageError, match="no COMPLETE marker"):
        require_complete(tmp_path / "v1")
    with pytest.raises(UsageError, match="does not exist"):
        require_complete(tmp_path / "v2")
    (tmp_path / "v1" / "COMPLETE").touch()
    require_complete(tmp_path / "v1")


def test_the_marker_may_name_the_version(tmp_path: Path) -> None:
    assert published_version(tmp_path) == 0
    for text, version in (("", 0), ('{"version": 12, "files": {}}', 12), ("[]", 0)):
        (tmp_path / "COMPLETE").write_text(text)
        assert published_version(tmp_path) == version


def test_a_multimodal_checkpoint_is_read_as_its_text_part(tmp_path: Path, hybrid: Path) -> None:
    text = json.loads((hybrid / "config.json").read_text())
    name = ["Qwen3_5ForConditionalGeneration"]
    whole = {"architectures": name, "model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 1}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert read_architecture(tmp_path) == read_architecture(hybrid)
    tensors = read_tensors(hybrid)
    renamed = {key.replace("model.", "model.language_model.", 1): value for key, value in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    assert read_tensors(tmp_path).keys() == tensors.keys()


def test_end_ids_do_not_make_another_architecture(tmp_path: Path) -> None:
    plain = read_architecture(write(tmp_path))
    assert read_architecture(write(tmp_path, eos_token_id=3)) == plain
    assert read_architecture(write(tmp_path, head_dim=8)) != plain


def test_foreign_tensors_are_refused_before_anything_changes(qwen: Path) -> None:
    from tests.engine.models import runner

    r = runner(qwen)
    tensors = random_tensors(read_architecture(qwen), 5)
    before = [w.clone() for _, w in r.network.weight_targets()]
    missing = {k: v for k, v in tensors.items() if "layers.1.mlp.down" not in k}
    with pytest.raises(UsageError, match="no tensor"):
        r.load(missing, 1)
    with pytest.raises(UsageError, match="has shape"):
        r.load({**tensors, "model.norm.weight": tensors["model.norm.weight"][:3]}, 1)
    assert r.version == 0
    assert all(w.equal(b) for (_, w), b in zip(r.network.weight_targets(), before, strict=True))


def test_an_adapter_is_added_to_the_checkpoint_below_it(qwen: Path, tmp_path: Path) -> None:
    version, below = publish_adapter(tmp_path / "v1", 5, qwen), read_tensors(qwen)
    factors, found = load_file(version / ADAPTER_MODEL), read_tensors(version)
    assert found.keys() == below.keys()
    for name, tensor in below.items():
        stem = f"{PREFIX}{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" not in factors:
            assert torch.equal(found[name], tensor)
            continue
        a, b = (factors[f"{stem}.lora_{which}.weight"].double() for which in "AB")
        assert (found[name] - (tensor.double() + 0.25 * b @ a)).abs().max() < 1e-6
        assert (found[name] - tensor).abs().max() > 0.01


@pytest.mark.parametrize(
    ("tensors", "config", "words"),
    [
        (None, {}, "adapter_model.safetensors cannot be read"),
        ({"q_proj.lora_A": (2, 32), "q_proj.lora_B": (9, 2)}, {}, r"has the shape \(9, 32\), the weight \(64, 32\)"),
        ({"x_proj.lora_A": (2, 32), "x_proj.lora_B": (64, 2)}, {}, "x_proj.weight, which the model lacks"),
        ({"q_proj.lora_A": (2, 32)}, {}, "not in peft's form: KeyError .*lora_B"),
        ({"q_proj.lora_A": (2, 32), "q_proj.lora_B": (64, 2)}, {"r": None}, "not in peft's form: TypeError"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_in_one_line(
    qwen: Path, tmp_path: Path, tensors: dict[str, tuple[int, int]] | None, config: dict[str, Any], words: str
) -> None:
    version = publish_adapter(tmp_path / "v1", 5, qwen)
    (version / ADAPTER_MODEL).unlink()
    if tensors is not None:
        stem = f"{PREFIX}model.layers.0.self_attn."
        save_file({f"{stem}{n}.weight": torch.ones(s) for n, s in tensors.items()}, version / ADAPTER_MODEL)
    (version / ADAPTER_CONFIG).write_text(json.dumps({"r": 2, "lora_alpha": 1, "revision": "x"} | config))
    with pytest.raises(UsageError, match=words) as refused:
        read_tensors(version)
    assert "\n" not in str(refused.value)
