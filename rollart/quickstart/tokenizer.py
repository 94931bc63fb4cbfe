"""The quickstart's tokenizer: one token per word, for both domains. It is created locally, without a download."""

from __future__ import annotations

import json
from pathlib import Path

from rollart.adapters.envs.frozen_lake import lake_words
from rollart.quickstart.spelling import EOS, spell_words

PAD = "<pad>"
UNKNOWN = "<unk>"
PAD_ID = 0
EOS_ID = 1


def vocabulary() -> dict[str, int]:
    """Token ids by word. The order is part of the published model, so new words are only appended."""
    words = dict.fromkeys((PAD, EOS, UNKNOWN, *lake_words(), *spell_words()))
    return {word: index for index, word in enumerate(words)}


def write_tokenizer(directory: Path) -> Path:
    return write_word_tokenizer(vocabulary(), directory)


def write_word_tokenizer(words: dict[str, int], directory: Path) -> Path:
    """Write `tokenizer.json` and `tokenizer_config.json`, as any Hugging Face loader expects them. `words`: ids by
    word, with those of `PAD`, `EOS` and `UNKNOWN`.

    Encoding splits at white space and adds nothing; decoding joins with single spaces, as the backend does without
    a decoder.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, EOS)])
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "tokenizer.json"
    tokenizer.save(str(path))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return path
