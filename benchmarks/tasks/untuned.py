"""What `cliff_walking.yaml` and `number_sorting.yaml` name: words for two tasks whose settings are the quickstart's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollart.quickstart.policy_config import small_qwen3
from rollart.quickstart.tokenizer import EOS_ID, PAD_ID, vocabulary, write_word_tokenizer

EOS = "<eos>"
MOST = 100
"""Numbers to sort are below this: each is a token."""

ACTIONS = ("up", "right", "down", "left")


def words() -> dict[str, int]:
    """The quickstart's special tokens, the cliff's, and the numbers'."""
    first = [word for word, index in vocabulary().items() if index <= 2]
    cells = [f"at:{row},{column}" for row in range(4) for column in range(12)]
    numbers = [str(n) for n in range(MOST)]
    every = dict.fromkeys([*first, "<cliff>", "move?", *ACTIONS, *cells, "<sort>", "ascending", "descending", *numbers])
    return {word: index for index, word in enumerate(every)}


def write_tokenizer(directory: Path) -> Path:
    return write_word_tokenizer(words(), directory)


def policy_config() -> dict[str, object]:
    return small_qwen3(vocabulary=len(words()), pad=PAD_ID, eos=EOS_ID)


def place(observation: Any) -> str:
    """The walker's cell in words."""
    row, column = divmod(int(observation), 12)
    return f"<cliff> at:{row},{column} move?"


class SortedNumbers:
    """Numbers and a direction; the answer is the numbers in that order. The worked answer has no steps."""

    def accepts(self, entry: Mapping[str, Any]) -> bool:
        return all(0 <= float(n) < MOST and float(n).is_integer() for n in entry["metadata"]["original_numbers"])

    def prompt(self, entry: Mapping[str, Any]) -> str:
        return " ".join(["<sort>", entry["metadata"]["direction"], *_whole(entry["metadata"]["original_numbers"])])

    def derivation(self, entry: Mapping[str, Any]) -> tuple[str, ...]:
        return (*_whole(entry["metadata"]["sorted_numbers"]), EOS)

    def answer(self, action: str) -> str:
        said = action.removesuffix(EOS).split()
        return str([f"{float(word)}" for word in said if word.isdigit()])


def _whole(numbers: list[str]) -> list[str]:
    return [str(int(float(n))) for n in numbers]
