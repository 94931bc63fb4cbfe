"""A policy with known answers: a Qwen3 whose weights make the next token a function of the last token alone.

The embedded engine runs it like any checkpoint. Attention and feed-forward write nothing, embeddings are one-hot, and
the output matrix is the transition table. "world" is one token when it is encoded, and five when this policy generates
it, so re-tokenised text gives other ids.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END, CALL = "<|end|>", '<tool_call>\n{"name":"weather","arguments":{"city":"Oslo"}}\n</tool_call>'
SPECIAL = [END, *(f"<|{role}|>" for role in ("system", "user", "tool", "calling", "answer"))]
"""The policy sees only the last token, so the token that opens an answer determines its kind: a call (`<|calling|>`,
if there are tools and no result yet) or text (`<|answer|>`)."""

TEMPLATE = """\
{%- macro opener(at) %}
{{- '<|calling|>' if tools and messages[at].role != 'tool' else '<|answer|>' }}
{%- endmacro %}
{%- if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call><|end|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ opener(loop.index0 - 1) }}{% else %}<|{{ m.role }}|>{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>{% endfor %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ opener(-1) }}{% endif %}"""

WORLD = "world"


def scripted(directory: Path, *, sharp: float = 12.0, endless: bool = False) -> Path:
    """A model directory. The policy answers "world"; with tools, it first asks for the weather in Oslo. At
    temperature 1 it deviates about once in six hundred tokens. `endless`: it repeats "world" for ever."""
    tokenizer = spelling(directory)
    size = tokenizer.get_vocab_size()

    def at(token: str) -> int:
        found = tokenizer.token_to_id(token)
        assert found is not None, token
        return int(found)

    says = {"<|calling|>": CALL, "<|answer|>": "w", CALL: END, END: END}
    says |= dict(zip(WORLD, [*WORLD[1:], END], strict=True))
    if endless:
        says[WORLD[-1]] = WORLD[0]
    head = torch.zeros(size, size)
    for last, following in says.items():
        head[at(following), at(last)] = sharp / size**0.5  # the final norm makes a one-hot vector sqrt(size) long
    shape = {
        "hidden_size": size,
        "intermediate_size": 4,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "vocab_size": size,
        "num_hidden_layers": 1,
    }
    architecture = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **shape,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "eos_token_id": at(END),
    }
    (directory / "config.json").write_text(json.dumps(architecture))
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": torch.eye(size),
        "model.norm.weight": torch.ones(size),
        "lm_head.weight": head,
        layer + "input_layernorm.weight": torch.ones(size),
        layer + "post_attention_layernorm.weight": torch.ones(size),
        layer + "self_attn.q_norm.weight": torch.ones(4),
        layer + "self_attn.k_norm.weight": torch.ones(4),
        **{layer + f"self_attn.{m}_proj.weight": torch.zeros(4, size) for m in "qkv"},
        layer + "self_attn.o_proj.weight": torch.zeros(size, 4),
        **{layer + f"mlp.{m}_proj.weight": torch.zeros(4, size) for m in ("gate", "up")},
        layer + "mlp.down_proj.weight": torch.zeros(size, 4),
    }
    save_file(tensors, directory / "model.safetensors")
    (directory / "COMPLETE").touch()
    return directory


def spelling(directory: Path, *, template: str | None = TEMPLATE) -> Tokenizer:
    """The policy's tokenizer, written as a Hugging Face directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v}))
    return tokenizer


def _tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = [WORLD[: i + 1] for i in range(1, len(WORLD))]
    vocabulary = {token: index for index, token in enumerate([*letters, *merged])}
    merges = [(WORLD[:i], WORLD[i]) for i in range(1, len(WORLD))]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(CALL, special=False, normalized=False)])
    return tokenizer
