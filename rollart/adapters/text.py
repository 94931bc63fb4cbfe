"""The `Tokenizer` port over a Hugging Face `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from rollart.errors import SpecError, one_line

CACHED_TEXTS, CACHED_CHARACTERS = 65_536, 512
"""Short observations repeat (small worlds, fixed phrases): at about 200 bytes each this cache stays near 13 MB. Long
ones seldom repeat, and caching as many of them, with their ids, would fill the controller's memory."""


class HubTokenizer:
    """Loads `tokenizer.json` from a model directory. No special tokens are added: the text is the prompt."""

    def __init__(self, directory: str | Path) -> None:
        from tokenizers import Tokenizer as Backend

        self.directory = Path(directory)
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            raise SpecError(
                f"no tokenizer.json in {directory}", remedy="model.path must be a Hugging Face model directory"
            )
        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # tokenizers raises no narrower type
            raise SpecError(f"{path} is no tokenizer: {one_line(error)}") from None
        self._unknown: str | None = getattr(self._backend.model, "unk_token", None)
        self._short = lru_cache(maxsize=CACHED_TEXTS)(self._encode)
        self.token = lru_cache(maxsize=CACHED_TEXTS)(self._token)
        self.token_id = lru_cache(maxsize=CACHED_TEXTS)(self._token_id)

    @property
    def vocabulary_size(self) -> int:
        return int(self._backend.get_vocab_size())

    def encode(self, text: str) -> tuple[int, ...]:
        return self._short(text) if len(text) <= CACHED_CHARACTERS else self._encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def _token(self, token_id: int) -> str:
        return str(self._backend.id_to_token(token_id))

    def _token_id(self, text: str) -> int:
        ids = self._encode(text)
        if len(ids) == 2 and self.decode(ids[1:]) == text:
            ids = ids[1:]  # SentencePiece puts a space before a text, and digits do not join it: "▁", "5"
        if len(ids) != 1:
            raise ValueError(f"{text!r} is {len(ids)} tokens of this vocabulary, a legal action must be exactly one")
        if self._unknown is not None and text != self._unknown == self._token(ids[0]):
            raise ValueError(f"{text!r} is not in this vocabulary, which reads it as {self._unknown}")
        return ids[0]
