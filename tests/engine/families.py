"""Small random models of each family that the embedded engine computes, made and saved by transformers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollart.engine.jobs import FinishedJob
from rollart.engine.weights import WeightStaging, read_tensors
from tests.engine.models import job, runner

VOCAB = 61

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "partial_rotary_factor": 0.5,
}
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

LINEAR = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-moe": (
        "qwen3_moe",
        EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen3-moe-steps": ("qwen3_moe", EXPERTS | {"head_dim": 32, "num_hidden_layers": 4, "decoder_sparse_step": 2}),
    "qwen3.5": ("qwen3_5_text", LINEAR),
    "qwen3.5-linear-last": (
        "qwen3_5_text",
        LINEAR
        | {"num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "linear_attention"]}
        | {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 2,
        },
    ),
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 6, "head_dim": 16}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "phi3": ("phi3", {"head_dim": 16, "sliding_window": 9}),
    "phi4": (
        "phi3",
        {
            "hidden_size": 64,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 64,
            "tie_word_embeddings": True,
        },
    ),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 5, "rope_parameters": GEMMA_ROPES}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "olmo2": ("olmo2", {}),
}
"""By name, the `model_type` and what differs from `COMMON`."""


def config(name: str, **others: Any) -> Any:
    """transformers' configuration of a model of `MODELS`, with other values."""
    from transformers import AutoConfig

    kind, changes = MODELS[name]
    return AutoConfig.for_model(kind, **COMMON | changes | others)


def make(name: str, directory: Path, *, seed: int = 0, scale: float = 0.25, **others: Any) -> Any:
    """A random model in eval mode, saved to the directory in several files. The weights of its norms vary, as those of
    trained models do. `others`: values of its configuration."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(name, **others), attn_implementation="eager").float().eval()
    centred = name.startswith(("gemma", "qwen3.5"))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            vector = parameter.dim() == 1 and not (centred and "linear_attn" not in key)
            mean = -2.0 if key.endswith("A_log") else 1.0 if vector else 0.0  # memories of several tokens
            torch.nn.init.normal_(parameter, mean, scale)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size="40KB")
    return model


def expected(model: Any, ids: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] of every next token."""
    with torch.no_grad():
        logp: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    return logp


def check_random_requests(
    versions: Sequence[Path],
    models: Sequence[Any],
    *,
    seed: str,
    vocab: int = VOCAB,
    adapters: Sequence[str | None] = (None,),
) -> None:
    """Random adds, aborts, sessions and updates between `versions`: each token has the log-probability that the model
    of its version gives it. With `adapters` every request draws one of them, and `models` are those of the versions by
    its name."""
    r, rng = runner(versions[0], slots=5, step_tokens=24), random.Random(seed)
    staging = WeightStaging(r.network, str(versions[0]))
    history: dict[str, list[int]] = {session: [] for session in "abcdefg"}
    busy: dict[str, str] = {}
    ended: list[FinishedJob] = []
    for step in range(100):
        session = rng.choice([*history])
        if session not in busy and rng.random() < 0.6:
            prompt = [*history[session][:40], *(rng.randrange(vocab) for _ in range(rng.randint(1, 12)))]
            budget, temperature = rng.randint(1, 10), rng.choice((0.0, 1.0))
            busy[session] = f"{step}"
            adapter = rng.choice(adapters) if len(adapters) > 1 else None
            one = job(f"{step}", prompt, session=session, max_tokens=budget, temperature=temperature, seed=step)
            r.add(replace(one, request=replace(one.request, adapter=adapter)))
        over = r.abort([rng.choice([*busy.values()])]) if busy and rng.random() < 0.05 else []
        if rng.random() < 0.07:
            number = step % len(versions)
            if len(adapters) > 1:
                staged = asyncio.run(staging.stage({"path": str(versions[number])}))
                r.load(staged.tensors, number, staged.stamp, staged.adapters)
            else:
                r.load(read_tensors(versions[number]), number)
        for one in (*over, *r.step()):
            request = one.job.request
            history[request.session] = [*request.token_ids, *one.completion.token_ids]
            del busy[request.session]
            ended.append(one)
    tokens = 0
    for one in ended:
        ids, drawn = one.job.request.token_ids, one.completion
        for span in drawn.spans:
            model = models[span.version]
            model = model if one.job.request.adapter is None else model[one.job.request.adapter]
            logp = expected(model, (*ids, *drawn.token_ids))[len(ids) - 1 : -1]
            for i in range(span.start, span.end):
                assert drawn.logprobs[i] == pytest.approx(float(logp[i, drawn.token_ids[i]]), abs=5e-5)
                tokens += 1
    assert tokens > 100
