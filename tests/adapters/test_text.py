"""Texts that must be one token, in the kinds of tokenizers that models have."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from rollart.adapters.text import HubTokenizer

VOCABULARY = {"<unk>": 0, "▁": 1, "5": 2, "▁up": 3, "u": 4, "p": 5, "up": 6, "<0x0A>": 7, "-": 8}
MERGES = [("u", "p"), ("▁", "up")]


def sentence_piece(directory: Path, how: str) -> HubTokenizer:
    """As the files of Llama 2, Mistral and Phi 3 have it (`normalizer`), or as transformers 5 writes it."""
    made = Tokenizer(models.BPE(VOCABULARY, MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if how == "normalizer":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # type: ignore[assignment]
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)  # type: ignore[assignment]
    made.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>"])
    made.save(str(directory / "tokenizer.json"))
    return HubTokenizer(directory)


@pytest.mark.parametrize("how", ["normalizer", "metaspace"])
def test_the_space_before_a_text_is_no_part_of_an_action(tmp_path: Path, how: str) -> None:
    tokenizer = sentence_piece(tmp_path, how)
    assert tokenizer.encode("5") == (VOCABULARY["▁"], VOCABULARY["5"])
    for text, token in (("5", "5"), ("\n", "<0x0A>"), ("up", "▁up")):
        assert tokenizer.token_id(text) == VOCABULARY[token]
        assert tokenizer.decode([VOCABULARY[token]]) == text
    for text in ("55", "-up", "up5", " 5", "x"):
        with pytest.raises(ValueError, match="tokens of this vocabulary, a legal action must be exactly one"):
            tokenizer.token_id(text)
