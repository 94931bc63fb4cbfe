"""The README's own-model example with a model of each family: it trains, is exported, and transformers loads it back.

`make families` runs all of them; `SHARE` of them run in `make test-slow`, the others have the mark `matrix`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import ledger
from tests.engine.families import make
from tests.engine.models import job, run_one, runner
from tests.readme.test_readme import blocks, rollart

BYTES, WORDS, GEMMA, QWEN = "GPT2Tokenizer", "LlamaTokenizer", "GemmaTokenizer", "Qwen2Tokenizer"
"""Classes of transformers: byte-level BPE; SentencePiece's, with and without a space before a text; Qwen's."""

FAMILIES = {
    "qwen2": QWEN,
    "qwen3-tied": QWEN,
    "qwen3-moe": QWEN,
    "qwen3.5": QWEN,
    "llama3": BYTES,
    "mistral": WORDS,
    "phi3": WORDS,
    "phi4": BYTES,
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "smollm3": BYTES,
    "olmo2": BYTES,
}
"""By model of `tests.engine.families`, the kind of tokenizer that its family has."""

SHARE = ("gemma3", "qwen3-moe")
"""Between them: SentencePiece's and byte-level tokenizers, windows, norms around blocks, experts that are replayed."""

LAYERS = {
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"]},
    "qwen3.5": {"layer_types": ["linear_attention", "full_attention"]},
}
"""With two layers a configuration would have windows, or linear attention, in both."""


def write_tokenizer(kind: str, directory: Path) -> Any:
    """A tokenizer of the kind with the example's words and digits, saved as its users have it. Digits join nothing."""
    import transformers

    pipeline = getattr(transformers, kind)()
    words, digits = ["guess", "higher", "lower", "right"], [*"123456789"]
    tokenizer = pipeline.train_new_from_iterator(
        words * 3, vocab_size=320, initial_alphabet=["▁", *digits], show_progress=False
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(directory)
    return tokenizer


@pytest.mark.slow  # a run in processes of its own, about 12 CPU-seconds
@pytest.mark.parametrize("name", [n if n in SHARE else pytest.param(n, marks=pytest.mark.matrix) for n in FAMILIES])
def test_the_own_model_example_trains_and_exports(name: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for file, body in blocks().items():
        (tmp_path / file).write_text(body)
    own = tmp_path / "my-model"
    tokenizer = write_tokenizer(FAMILIES[name], own)
    special = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    make(name, own, vocab_size=len(tokenizer), num_hidden_layers=2, **special, **LAYERS.get(name, {}))

    done = rollart("launch", "run.yaml", "staleness=2", "training.lr=1e-4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step   3/3" in done.stderr
    assert "infra" not in done.stderr
    run = next((tmp_path / "runs").glob("guess-*"))
    with ledger(run) as database:
        rows = database.execute("SELECT metrics FROM versions WHERE version > 0 ORDER BY version").fetchall()
    metrics = [json.loads(text) for (text,) in rows]
    assert metrics[0]["mismatch_gap"] < 1e-4
    assert all(one.get("mismatch_gap", 0.0) < 1e-4 for one in metrics)
    assert metrics[0].get("replayed_share") == (1.0 if "moe" in name else None)

    done = rollart("export", run.name, "--version", "latest", "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = [{"role": "user", "content": "guess higher 5"}]
    given, exported = (AutoTokenizer.from_pretrained(path) for path in (own, tmp_path / "out"))
    assert type(exported) is type(given)
    assert exported.apply_chat_template(text)["input_ids"] == given.apply_chat_template(text)["input_ids"]
    assert exported.get_vocab() == tokenizer.get_vocab()
    model, base = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (tmp_path / "out", own))
    assert len(model.model.layers) == 2
    ids = tokenizer("guess higher lower right 123456789", add_special_tokens=False)["input_ids"]
    assert len(ids) > 6, "longer than the windows"
    drawn = run_one(runner(run / "weights" / "v000003"), job("a", ids, max_tokens=8)).completion
    whole = torch.tensor([[*ids, *drawn.token_ids]])
    with torch.no_grad():
        theirs, before = (one(whole, use_cache=False).logits[0, len(ids) - 1 : -1] for one in (model, base))
    chosen = theirs.log_softmax(-1).gather(1, torch.tensor(drawn.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(chosen, torch.tensor(drawn.logprobs), atol=5e-5, rtol=0)
    assert not torch.allclose(before, theirs, atol=1e-3), "training changed the model"
