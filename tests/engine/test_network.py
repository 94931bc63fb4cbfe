from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rollart.architecture import read_architecture
from rollart.engine.network import BlockedLinear, Network
from rollart.engine.weights import read_tensors
from tests.engine.models import finish, greedy, job, reference, runner


@pytest.mark.parametrize("family", ["qwen", "llama"])
def test_logprobs_are_those_of_a_plain_forward(family: str, request: pytest.FixtureRequest) -> None:
    """A mixed batch: prompts of many lengths prefilled together, decoded together, compared token by token."""
    directory: Path = request.getfixturevalue(family)
    r, rng = runner(directory, slots=7), random.Random(0)
    for i in range(12):
        prompt = [rng.randrange(61) for _ in range(rng.choice((1, 2, 3, 7, 8, 9, 20)))]
        r.add(job(f"{i}", prompt, max_tokens=6, temperature=float(i % 2), seed=i))
    for f in finish(r).values():
        prompt_ids, c = f.job.request.token_ids, f.completion
        logp = reference(directory, (*prompt_ids, *c.token_ids))
        for i, (token, value) in enumerate(zip(c.token_ids, c.logprobs, strict=True)):
            assert value == pytest.approx(float(logp[len(prompt_ids) - 1 + i, token]), abs=2e-5)


def test_greedy_is_the_plain_argmax(qwen: Path) -> None:
    r = runner(qwen)
    r.add(job("a", [5, 6, 7], max_tokens=12))
    assert finish(r)["a"].completion.token_ids == greedy(qwen, [5, 6, 7], 12)


def test_the_blocked_order_multiplies_the_same() -> None:
    torch.manual_seed(0)
    matrix = BlockedLinear(torch.randn(300, 256), torch.randn(300))
    x = torch.randn(5, 256)
    plain = matrix(x)
    matrix.pack()
    assert torch.allclose(matrix(x), plain, rtol=1e-4, atol=1e-4)
    part = matrix.rows(10, 20)
    assert torch.allclose(part(x), plain[:, 10:20], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "llama3"])
def test_agrees_with_transformers(tmp_path: Path, kind: str, tied: bool) -> None:
    """Slow: imports transformers. Its own forward in fp32, on checkpoints that it wrote itself, one sharded."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    common: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": tied,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    torch.manual_seed(0)
    if kind == "qwen3":
        model: Any = Qwen3ForCausalLM(Qwen3Config(**common, head_dim=32))
    elif kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**common, attention_bias=True))
    else:
        scaling = {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
        model = LlamaForCausalLM(LlamaConfig(**common, rope_parameters=scaling))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.25)
    model.float().eval().save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert read_architecture(tmp_path).tied is tied
    assert ("lm_head.weight" in read_tensors(tmp_path)) is not tied
    r, rng = runner(tmp_path), random.Random(1)
    for i in range(12):
        prompt = [rng.randrange(61) for _ in range(rng.randint(1, 40))]
        r.add(job(f"{i}", prompt, max_tokens=10, temperature=float(i % 2), seed=i))
    for f in finish(r).values():
        ids, c = f.job.request.token_ids, f.completion
        with torch.no_grad():
            logp = model(torch.tensor([[*ids, *c.token_ids]])).logits[0].log_softmax(-1)[len(ids) - 1 : -1]
        want = logp.gather(1, torch.tensor(c.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(c.logprobs), want, atol=3e-5, rtol=1e-5)
        if f.job.request.sampling.temperature == 0.0:
            assert torch.tensor(c.token_ids).equal(logp.argmax(-1))


def test_weights_for_a_gpu_are_converted_before_they_are_loaded(qwen: Path) -> None:
    """The checkpoint is in float32; a step then waits for a copy of only half the bytes."""
    tensors = read_tensors(qwen)
    meta = Network(read_architecture(qwen), context=8, device=torch.device("meta"), dtype=torch.bfloat16)
    staged = meta.staged(tensors)
    assert {(t.dtype, t.device.type) for t in staged.values()} == {(torch.bfloat16, "cpu")}
    meta.check(staged)
    here = Network(read_architecture(qwen), context=8, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert all(here.staged(tensors)[name] is tensor for name, tensor in tensors.items()), (
        "no copy beside the mapped file"
    )
