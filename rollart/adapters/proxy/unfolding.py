"""An answer's text while its tokens are drawn: as much of it as nothing to come can change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollart.adapters.proxy.chat import ChatFormat
from rollart.adapters.proxy.tools import begun
from rollart.model import Piece

__all__ = ["Delta", "Unfolding"]

BROKEN = "\ufffd"
"""What a text ends with whose last character is not whole yet."""

LONGEST = 64
"""Tokens that one character may take; what is no text after as many is told at the end."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The next part of an answer's text, and the tokens that it is the text of."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tokens: tuple[str, ...]
    """Texts of the ids."""


class Unfolding:
    """One answer; `push` its tokens. Invariant: `text[: given]` is how the answer's content begins, whatever comes, and
    it is the text of the first `shown` tokens.

    Held back are characters that are not whole, what may be the beginning of a stop text or of a tool call, and the
    token that ends the answer; the end tells the rest."""

    def __init__(self, form: ChatFormat, *, stops: Sequence[str], tools: bool) -> None:
        self._form, self._stops, self._tools = form, [s for s in stops if s], tools
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._edges: list[tuple[int, int]] = []
        """(characters, tokens) at each end of a token that ends whole text and was not given out."""
        self._window = (0, 0)
        """The tokens that were decoded last, with which the next ones are decoded: some texts depend on what is
        before."""
        self._over = False
        self.text = ""
        self.given = self.shown = 0

    def push(self, piece: Piece) -> Delta | None:
        """What may be given out now."""
        for token, logprob in zip(piece.token_ids, piece.logprobs, strict=True):
            if not self._over:
                self._read(token, logprob)
        limit = self._certain()
        ready = [edge for edge in self._edges if edge[0] <= limit]
        if not ready or ready[-1][0] == self.given:
            return None
        self._edges = self._edges[len(ready) :]
        begin, at = self.given, slice(self.shown, ready[-1][1])
        self.given, self.shown = ready[-1]
        ids = tuple(self._ids[at])
        return Delta(self.text[begin : self.given], ids, tuple(self._logprobs[at]), tuple(map(self._form.token, ids)))

    def _read(self, token: int, logprob: float) -> None:
        if token in self._form.stops:
            self._over = True
            return
        self._ids.append(token)
        self._logprobs.append(logprob)
        begin, end = self._window
        before, now = self._form.text(self._ids[begin:end]), self._form.text(self._ids[begin:])
        if now.endswith(BROKEN) and len(self._ids) - end < LONGEST:
            return
        if now.endswith(BROKEN) or not now.startswith(before):
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
            limit = min(limit, len(self.text) - begun(self.text[self.given :], stop))
        return self._form.certain(self.text[:limit]) if self._tools else limit
