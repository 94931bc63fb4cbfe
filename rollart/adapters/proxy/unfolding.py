"""Incremental decoding of a response: emits text as soon as no later token can change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollart.adapters.proxy.calling import ToolCallParser, merge_events, partial_match_length
from rollart.adapters.proxy.chat import ChatFormat
from rollart.adapters.proxy.messages import OutputEvent, OutputPart, TextDelta
from rollart.model import CompletionChunk

__all__ = ["OutputDelta", "IncrementalDecoder"]

REPLACEMENT_CHARACTER = "\ufffd"
"""The last character of a decoded text whose final character is still incomplete."""

MAX_CHARACTER_TOKENS = 64
"""Maximum tokens of one character. Tokens that still decode to no text after that many are emitted at the end."""


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """The next output events, and the tokens that became final with them."""

    events: tuple[OutputEvent, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tokens: tuple[str, ...]
    """The texts of `token_ids`."""

    @property
    def text(self) -> str:
        return "".join(one.text for one in self.events if isinstance(one, TextDelta))


class IncrementalDecoder:
    """Decodes one response: `push` its tokens, then `finish` it. Invariant: whatever tokens follow, `text[: emitted]`
    is a prefix of the response's text, and the emitted events represent exactly that prefix.

    Incomplete characters, a possible start of a stop text or tool call, and the final stop token are held back;
    `finish` emits the rest."""

    def __init__(self, form: ChatFormat, *, stops: Sequence[str], tools: bool) -> None:
        self._form, self._stops = form, [s for s in stops if s]
        self._reader = ToolCallParser(form.spelling if tools else "none")
        self._events: list[OutputEvent] = []
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._edges: list[tuple[int, int]] = []
        """(characters, tokens) at each boundary between tokens that is also a boundary between characters and was not
        emitted yet."""
        self._window = (0, 0)
        """The range of tokens decoded last. The next tokens are decoded together with them, since a token's text may
        depend on its predecessors."""
        self._ended = False
        self.text = ""
        self.emitted = self.shown = 0

    def push(self, piece: CompletionChunk) -> OutputDelta | None:
        """The output that can be emitted now; None if there is none."""
        for token, logprob in zip(piece.token_ids, piece.logprobs, strict=True):
            if not self._ended:
                self._read(token, logprob)
        limit = self._certain()
        ready = max((characters for characters, _ in self._edges if characters <= limit), default=0)
        if ready <= self.emitted:
            return None
        events = tuple(self._reader.feed(self.text[self.emitted : ready]))
        self.emitted = ready
        if not events:
            return None
        self._events += events
        settled = [tokens for characters, tokens in self._edges if characters <= self._reader.settled]
        self._edges = self._edges[len(settled) :]
        at = slice(self.shown, max(settled, default=self.shown))
        self.shown = at.stop
        ids = tuple(self._ids[at])
        return OutputDelta(events, ids, tuple(self._logprobs[at]), tuple(map(self._form.token, ids)))

    def finish(self, text: str) -> tuple[tuple[OutputPart, ...], tuple[OutputEvent, ...]]:
        """All parts of the response with this final text, and the events not emitted yet. Some decoders change earlier
        text as more tokens follow; emitted text stays as it is."""
        rest = (*self._reader.feed(text[self.emitted :]), *self._reader.end())
        return merge_events((*self._events, *rest)), rest

    def _read(self, token: int, logprob: float) -> None:
        if token in self._form.stops:
            self._ended = True
            return
        self._ids.append(token)
        self._logprobs.append(logprob)
        begin, end = self._window
        before, now = self._form.text(self._ids[begin:end]), self._form.text(self._ids[begin:])
        if now.endswith(REPLACEMENT_CHARACTER) and len(self._ids) - end < MAX_CHARACTER_TOKENS:
            return
        if now.endswith(REPLACEMENT_CHARACTER) or not now.startswith(before):
            self._ended = True
            return
        self.text += now[len(before) :]
        self._window = end, len(self._ids)
        self._edges.append((len(self.text), len(self._ids)))

    def _certain(self) -> int:
        """Number of leading characters that are content whatever follows."""
        found = [at for at in (self.text.find(stop, self.emitted) for stop in self._stops) if at >= 0]
        if found:
            self._ended = True
        limit = min(found, default=len(self.text))
        for stop in self._stops:
            limit = min(limit, len(self.text) - partial_match_length(self.text[self.emitted :], stop))
        return limit
