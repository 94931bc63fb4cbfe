"""Tiny checkpoints, and a reference forward pass: no cache, no batch, no fused weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rollart.architecture import Architecture, read_architecture
from rollart.engine.jobs import EngineJob, FinishedJob
from rollart.engine.network import Network
from rollart.engine.runner import Runner
from rollart.engine.weights import read_stacked, read_tensors
from rollart.lora import ADAPTER_CONFIG, ADAPTER_MODEL, PREFIX
from rollart.model import GenerateRequest, Sampling

VOCAB = 61

DEVICE = torch.device(os.environ.get("ROLLART_TEST_DEVICE", "cpu"))
"""Where the tests' engines and trainers compute; `make gpu-test` sets it to `cuda`."""

QWEN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
MOE: dict[str, Any] = {
    **QWEN,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 3,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
HYBRID: dict[str, Any] = {
    **QWEN,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
"""The configuration of a text-only Qwen 3.5, whose last layer has linear attention."""
LLAMA: dict[str, Any] = {
    **QWEN,
    "architectures": ["LlamaForCausalLM"],
    "head_dim": None,
    "tie_word_embeddings": False,
    "num_hidden_layers": 1,
    "rope_parameters": None,
    "rope_theta": 500.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


def random_tensors(architecture: Architecture, seed: int) -> dict[str, Tensor]:
    """Weights large enough that greedy continuations vary."""
    generator = torch.Generator().manual_seed(seed)
    network = Network(architecture, context=1, device=torch.device("cpu"), dtype=torch.float32)
    return {
        name: torch.rand(shape, generator=generator) + 0.5
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * 0.4
        for name, shape in network.shapes()
    }


def publish(directory: Path, seed: int, config: Mapping[str, Any] = QWEN, *, marker: bool = True) -> Path:
    """A checkpoint directory with random weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(read_architecture(directory), seed), directory / "model.safetensors")
    if marker:
        (directory / "COMPLETE").touch()
    return directory


def publish_adapter(directory: Path, seed: int, base: Path) -> Path:
    """A version with a random adapter of two modules of each layer, and a checkpoint of `publish` below it."""
    return publish_adapters(directory, {"": seed}, base)


def publish_adapters(
    directory: Path, seeds: Mapping[str, int], base: Path, modules: Sequence[str] = ("q_proj", "down_proj")
) -> Path:
    """A version with random adapters, by name, of some modules of each layer, and a checkpoint of `publish` below
    them."""
    (directory / "base").mkdir(parents=True)
    for file in (*base.glob("*.json"), *base.glob("*.safetensors")):
        (directory / "base" / file.name).hardlink_to(file)
    (directory / "config.json").hardlink_to(base / "config.json")
    weights = read_tensors(base)
    for adapter, seed in seeds.items():
        generator = torch.Generator().manual_seed(seed)
        factors = {}
        for name in [name for name in weights if name.removesuffix(".weight").endswith(tuple(modules))]:
            out, inner = weights[name].shape
            stem = f"{PREFIX}{name.removesuffix('.weight')}"
            factors[f"{stem}.lora_A.weight"] = torch.randn(2, inner, generator=generator)
            factors[f"{stem}.lora_B.weight"] = torch.randn(out, 2, generator=generator)
        (directory / adapter).mkdir(exist_ok=True)
        save_file(factors, directory / adapter / ADAPTER_MODEL)
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 0.5, "revision": base.name}
        config |= {"target_modules": list(modules), "base_model_name_or_path": None, "inference_mode": True}
        (directory / adapter / ADAPTER_CONFIG).write_text(json.dumps(config))
    (directory / "COMPLETE").touch()
    return directory


def runner(
    directory: Path,
    *,
    slots: int = 8,
    context: int = 64,
    version: int = 0,
    step_tokens: int = 2048,
    dtype: torch.dtype = torch.float32,
    deterministic: bool = False,
) -> Runner:
    architecture = read_architecture(directory)
    network = Network(architecture, context=context, device=DEVICE, dtype=dtype)
    weights = read_stacked(network, directory)
    network.load(weights.tensors, weights.adapters)
    return Runner(
        network,
        slots=slots,
        context=context,
        version=version,
        step_tokens=step_tokens,
        deterministic=deterministic,
    )


def job(
    name: str,
    prompt: Sequence[int],
    *,
    session: str = "",
    salt: str | None = None,
    max_tokens: int = 8,
    temperature: float = 0.0,
    adapter: str | None = None,
    **sampling: Any,
) -> EngineJob:
    """A request, greedy by default."""
    s = Sampling(max_tokens=max_tokens, temperature=temperature, **sampling)
    return EngineJob(GenerateRequest(name, session, tuple(prompt), s, cache_salt=salt, adapter=adapter))


def finish(runner: Runner) -> dict[str, FinishedJob]:
    """Step until no request is left; returns the finished requests by id."""
    over: dict[str, FinishedJob] = {}
    while runner.busy:
        over |= {f.job.request.request_id: f for f in runner.step()}
    return over


def run_one(runner: Runner, job: EngineJob) -> FinishedJob:
    runner.add(job)
    return finish(runner)[job.request.request_id]


def reference(directory: Path, token_ids: Sequence[int]) -> Tensor:
    """Log-probabilities `[tokens, vocab]` of every next token, computed directly from the checkpoint."""
    a, w = read_architecture(directory), read_tensors(directory)
    n, first = len(token_ids), a.attention[0]
    assert first is not None
    rotary = first.rotary
    assert rotary is not None
    inv = 1.0 / rotary.theta ** (torch.arange(0, a.head_dim, 2).double() / a.head_dim)
    if s := rotary.scaling:
        wave = 2 * torch.pi / inv
        low, high = (
            s["original_max_position_embeddings"] / s["low_freq_factor"],
            (s["original_max_position_embeddings"] / s["high_freq_factor"]),
        )
        t = (s["original_max_position_embeddings"] / wave - s["low_freq_factor"]) / (
            s["high_freq_factor"] - s["low_freq_factor"]
        )
        inv = torch.stack(
            [
                i / s["factor"] if v > low else i if v < high else ((1 - m) / s["factor"] + m) * i
                for i, v, m in zip(inv, wave, t, strict=True)
            ]
        )
    angle = torch.outer(torch.arange(n).double(), inv)
    turn = torch.polar(torch.ones_like(angle), angle)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + a.norm_eps).rsqrt() * w[name].double()

    def rotate(x: Tensor) -> Tensor:
        half = torch.complex(x[..., : a.head_dim // 2], x[..., a.head_dim // 2 :]) * turn[:, None]
        return torch.cat((half.real, half.imag), -1)

    x = w["model.embed_tokens.weight"].double()[list(token_ids)]
    for i in range(a.layers):
        p = f"model.layers.{i}."
        h = norm(x, p + "input_layernorm.weight")
        q, k, v = ((h @ w[f"{p}self_attn.{m}_proj.weight"].double().T).view(n, -1, a.head_dim) for m in "qkv")
        if a.qk_norm == "head":
            q, k = norm(q, p + "self_attn.q_norm.weight"), norm(k, p + "self_attn.k_norm.weight")
        q, k = rotate(q), rotate(k).repeat_interleave(a.group, 1)
        score = torch.einsum("ihd,jhd->hij", q, k) / a.head_dim**0.5
        score = score.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf")).softmax(-1)
        mixed = torch.einsum("hij,jhd->ihd", score, v.repeat_interleave(a.group, 1)).reshape(n, -1)
        x = x + mixed @ w[p + "self_attn.o_proj.weight"].double().T
        h = norm(x, p + "post_attention_layernorm.weight")
        gate, up = (h @ w[f"{p}mlp.{m}_proj.weight"].double().T for m in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].double().T
    head = w["model.embed_tokens.weight"] if a.tied else w["lm_head.weight"]
    return (norm(x, "model.norm.weight") @ head.double().T).log_softmax(-1)


def greedy(directory: Path, prompt: Sequence[int], tokens: int) -> tuple[int, ...]:
    """The reference's greedy continuation."""
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(reference(directory, ids)[-1].argmax()))
    return tuple(ids[len(prompt) :])
