"""Worked steps for reasoning-gym's `spell_backward`: number the letters, then read them counting down.

    prompt      <spell> t w a s :
    derivation  1 t 2 w 3 a 4 s = 4 s 3 a 2 w 1 t <eos>

The numbered letters are the scratchpad; the answer is the letters after the last `=`. Counting down reduces the answer
to look-ups: without it the same policy hardly improves (0.16 to 0.20 in 11,520 samples).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EOS = "<eos>"
ANSWER_MARK = "="
LONGEST_WORD = 10
"""Longest word of the dataset's list."""

_DOMAIN = "<spell>"
_QUESTION = ":"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class SpellSteps:
    """The quickstart's `WorkedFormat`. Words are shown in lower case (the dataset scores without regard to case)."""

    def accepts(self, entry: Mapping[str, Any]) -> bool:
        return set(_word(entry)) <= set(_LETTERS)

    def prompt(self, entry: Mapping[str, Any]) -> str:
        return " ".join([_DOMAIN, *_word(entry), _QUESTION])

    def derivation(self, entry: Mapping[str, Any]) -> tuple[str, ...]:
        word = _word(entry)
        numbered = [(str(i), letter) for i, letter in enumerate(word, start=1)]
        forward = [token for pair in numbered for token in pair]
        backward = [token for pair in reversed(numbered) for token in pair]
        return (*forward, ANSWER_MARK, *backward, EOS)

    def answer(self, action: str) -> str:
        _, mark, tail = action.rpartition(ANSWER_MARK)
        return "".join(token for token in tail.removesuffix(EOS).split() if not token.isdigit()) if mark else ""


def spell_words() -> tuple[str, ...]:
    """Every word of the domain's prompts and answers, for a word-level tokenizer; the stop token is the tokenizer's."""
    return (_DOMAIN, _QUESTION, ANSWER_MARK, *(str(i) for i in range(1, LONGEST_WORD + 1)), *_LETTERS)


def _word(entry: Mapping[str, Any]) -> str:
    return str(entry["metadata"]["word"]).lower()
