"""The quickstart's policy: a very small Qwen3, from random weights."""

from __future__ import annotations

from rollart.quickstart.tokenizer import EOS_ID, PAD_ID, vocabulary


def policy_config() -> dict[str, object]:
    """`config.json` of a Qwen3ForCausalLM of 0.2 M parameters that learns on one CPU core in a minute.

    Two layers: copying the letter that follows a number takes two (find the number, then the letter after it).
    """
    return small_qwen3(vocabulary=len(vocabulary()), pad=PAD_ID, eos=EOS_ID)


def small_qwen3(*, vocabulary: int, pad: int, eos: int) -> dict[str, object]:
    """`config.json` of a small Qwen3ForCausalLM with a vocabulary of this size."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.05,
        "use_cache": True,
        "torch_dtype": "float32",
        "pad_token_id": pad,
        "eos_token_id": eos,
        "bos_token_id": None,
    }
