"""One word, one token: whatever an environment shows or a solver writes comes back as it went in."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.adapters.envs.frozen_lake import ACTIONS, lake_words
from rollart.adapters.text import HubTokenizer
from rollart.quickstart.policy_config import policy_config
from rollart.quickstart.spelling import EOS, SpellSteps, spell_words
from rollart.quickstart.tokenizer import EOS_ID, PAD, PAD_ID, UNKNOWN, vocabulary, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HubTokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return HubTokenizer(directory)


@given(words=st.lists(st.sampled_from([*lake_words(), *spell_words()]), min_size=1, max_size=40))
def test_texts_round_trip(tokenizer: HubTokenizer, words: list[str]) -> None:
    text = " ".join(words)
    ids = tokenizer.encode(text)
    assert [tokenizer.token(i) for i in ids] == words
    assert tokenizer.decode(ids) == text


@given(word=st.text("abcdefghijklmnopqrstuvwxyz", min_size=1, max_size=10))
def test_worked_answers_round_trip_and_end_with_the_stop_token(tokenizer: HubTokenizer, word: str) -> None:
    steps, entry = SpellSteps(), {"metadata": {"word": word}}
    derivation = steps.derivation(entry)
    ids = tokenizer.encode(" ".join(derivation))
    assert len(ids) == len(derivation) == 4 * len(word) + 2
    assert ids[-1] == EOS_ID
    assert EOS_ID not in ids[:-1]
    assert steps.answer(tokenizer.decode(ids)) == word[::-1]
    assert steps.answer(" ".join(derivation)) == word[::-1]


def test_actions_are_single_tokens(tokenizer: HubTokenizer) -> None:
    assert len({tokenizer.token_id(action) for action in ACTIONS}) == 4


def test_special_tokens_are_where_the_model_expects_them(tokenizer: HubTokenizer) -> None:
    words, config = vocabulary(), policy_config()
    assert (words[PAD], words[EOS]) == (PAD_ID, EOS_ID) == (config["pad_token_id"], config["eos_token_id"])
    assert config["vocab_size"] == len(words) == tokenizer.vocabulary_size
    assert tokenizer.encode("never seen") == (words[UNKNOWN],) * 2


def test_an_answer_needs_its_mark() -> None:
    assert SpellSteps().answer("4 s 3 a 2 w 1 t") == ""
    assert SpellSteps().answer("1 t = x = 1 t <eos>") == "t"


@pytest.mark.slow
def test_transformers_loads_what_we_write(tmp_path: Path) -> None:
    """Slow: importing transformers takes seconds."""
    from transformers import AutoConfig, AutoTokenizer

    write_tokenizer(tmp_path)
    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    ids = loaded("<spell> t w a s :")["input_ids"]
    assert loaded.decode(ids) == "<spell> t w a s :"
    assert (loaded.pad_token_id, loaded.eos_token_id) == (PAD_ID, EOS_ID)
    config = policy_config()
    shape = AutoConfig.for_model(str(config.pop("model_type")), **config)
    assert shape.rope_parameters["rope_theta"] == 10000.0
