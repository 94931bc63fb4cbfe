"""An answer while its tokens are drawn: as much of it as nothing to come can change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollart.adapters.proxy.calling import ToolCallParser, merge_events, partial_match_length
from rollart.adapters.proxy.chat import ChatFormat
from rollart.adapters.proxy.messages import OutputEvent, OutputPart, TextDelta
from rollart.model import CompletionChunk

__all__ = ["OutputDelta", "IncrementalDecoder"]

REPLACEMENT_CHARACTER = "\ufffd"
"""What a text ends with whose last character is not whole yet."""

MAX_CHARACTER_TOKENS = 64
"""Tokens that one character may take; what is no text after as many is told at the end."""


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What is said next, and the tokens that are settled with it."""

    said: tuple[OutputEvent, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tokens: tuple[str, ...]
    """Texts of the ids."""

    @property
    def text(self) -> str:
        return "".join(one.text for one in self.said if isinstance(one, TextDelta))


class IncrementalDecoder:
    """One answer; `push` its tokens, then `finish` it. Invariant: `text[: given]` is how the answer's text begins,
    whatever comes, and what was said is what it says.

    Held back are characters that are not whole, what may be the beginning of a stop text or of a tool call, and the
    token that ends the answer; the end tells the rest."""

    def __init__(self, form: ChatFormat, *, stops: Sequence[str], tools: bool) -> None:
        self._form, self._stops = form, [s for s in stops if s]
        self._reader = ToolCallParser(form.spelling if tools else "none")
        self._said: list[OutputEvent] = []
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._edges: list[tuple[int, int]] = []
        """(characters, tokens) at each end of a token that ends whole text and was not shown."""
        self._window = (0, 0)
        """The tokens that were decoded last, with which the next ones are decoded: some texts depend on what is
        before."""
        self._over = False
        self.text = ""
        self.given = self.shown = 0

    def push(self, piece: CompletionChunk) -> OutputDelta | None:
        """What may be given out now."""
        for token, logprob in zip(piece.token_ids, piece.logprobs, strict=True):
            if not self._over:
                self._read(token, logprob)
        limit = self._certain()
        ready = max((characters for characters, _ in self._edges if characters <= limit), default=0)
        if ready <= self.given:
            return None
        said = tuple(self._reader.feed(self.text[self.given : ready]))
        self.given = ready
        if not said:
            return None
        self._said += said
        settled = [tokens for characters, tokens in self._edges if characters <= self._reader.settled]
        self._edges = self._edges[len(settled) :]
        at = slice(self.shown, max(settled, default=self.shown))
        self.shown = at.stop
        ids = tuple(self._ids[at])
        return OutputDelta(said, ids, tuple(self._logprobs[at]), tuple(map(self._form.token, ids)))

    def finish(self, text: str) -> tuple[tuple[OutputPart, ...], tuple[OutputEvent, ...]]:
        """All parts of the answer whose text this is, and what was not said yet. Some decoders write a text otherwise
        once more follows: what was said stays."""
        rest = (*self._reader.feed(text[self.given :]), *self._reader.end())
        return merge_events((*self._said, *rest)), rest

    def _read(self, token: int, logprob: float) -> None:
        if token in self._form.stops:
            self._over = True
            return
        self._ids.append(token)
        self._logprobs.append(logprob)
        begin, end = self._window
        before, now = self._form.text(self._ids[begin:end]), self._form.text(self._ids[begin:])
        if now.endswith(REPLACEMENT_CHARACTER) and len(self._ids) - end < MAX_CHARACTER_TOKENS:
            return
        if now.endswith(REPLACEMENT_CHARACTER) or not now.startswith(before):
            self._over = True
            return
        self.text += now[len(before) :]
        self._window = end, len(self._ids)
        self._edges.append((len(self.text), len(self._ids)))

    def _certain(self) -> int:
        """Characters that are content whatever follows."""
        found = [at for at in (self.text.find(stop, self.given) for stop in self._stops) if at >= 0]
        if found:
            self._over = True
        limit = min(found, default=len(self.text))
        for stop in self._stops:
            limit = min(limit, len(self.text) - partial_match_length(self.text[self.given :], stop))
        return limit
