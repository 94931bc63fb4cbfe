"""Parsing of engines' HTTP responses: a generation as server-sent events (`stream: true`), and errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from rollart.errors import EngineError, HandoffFailed, WrongAnswer
from rollart.model import Completion, CompletionChunk, FinishReason, VersionSpan

RETRYABLE = {408, 409, 425, 429}
"""Client errors that may not recur on another engine or a later call. Server errors are retryable as well."""


class CompletionAssembler:
    """Assembles a completion and emits its tokens as they arrive. `add` the data of every event, then `completion`.

    vLLM reports the versions that drew the tokens only with the last ones. Until then, tokens are labelled with the
    version that `version_source` returns at that moment (None: unknown). `first` is used for a server whose version is
    not a number."""

    def __init__(
        self,
        url: str,
        first: int,
        on_chunk: Callable[[CompletionChunk], None] | None,
        version_source: Callable[[], int | None],
    ) -> None:
        self._url, self._first, self._on_chunk, self._version_source = url, first, on_chunk, version_source
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[VersionSpan] | None = None
        self._finish: FinishReason | None = None
        self._usage: Mapping[str, Any] = {}

    def add(self, data: bytes) -> None:
        """EngineError for an error event; WrongAnswer for an invalid event."""
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
            if "error" in event:
                code = event["error"].get("code") if isinstance(event["error"], Mapping) else None
                raise error_from_response(
                    self._url, " while it generated", code if isinstance(code, int) else 500, data
                )
            self._usage = event.get("usage") or self._usage
            for choice in event["choices"]:
                self._add(choice)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise WrongAnswer(f"{self._url}: event not understood: {error!r}") from error

    def completion(self) -> Completion:
        """EngineError if the events ended before the completion did."""
        if self._finish is None:
            raise EngineError(f"{self._url}: the answer broke off", retryable=True, remedy="is the engine alive?")
        spans = self._spans
        if spans is None:
            version = self._version_source()
            spans = [VersionSpan(self._first if version is None else version, 0, len(self._ids))] if self._ids else []
        return Completion(
            tuple(self._ids),
            tuple(self._logprobs),
            tuple(spans),
            self._finish,
            self._usage.get("prompt_tokens", 0),
            (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        )

    def _add(self, choice: Mapping[str, Any]) -> None:
        ids = tuple(choice.get("token_ids") or ())
        logprobs = tuple(float(c["logprob"]) for c in (choice.get("logprobs") or {}).get("content") or ())
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} tokens with {len(logprobs)} log-probabilities")
        self._ids += ids
        self._logprobs += logprobs
        if choice.get("finish_reason") is not None:
            self._finish = FinishReason(choice["finish_reason"])
        if choice.get("weight_versions") is not None:
            versions = choice["weight_versions"]
            self._spans = [
                VersionSpan(parse_version(s["version"], self._first), s["start"], s["end"], s.get("stamp"))
                for s in versions
            ]
        if ids and self._on_chunk is not None and self._finish is None:
            named = choice.get("weight_version")
            version = self._version_source() if named is None else parse_version(named, self._first)
            self._on_chunk(CompletionChunk(ids, logprobs, version, choice.get("weight_stamp")))


def parse_version(value: object, first: int) -> int:
    """vLLM's versions are strings; before the first update the string is not a number, and `first` is returned."""
    return int(str(value)) if str(value).isdigit() else first


def error_from_response(url: str, path: str, status: int, raw: bytes) -> EngineError:
    """The error of a failed response, with the server's own message and `retryable` flag if its JSON has them."""
    retryable, kind = status >= 500 or status in RETRYABLE, None
    try:
        error = json.loads(raw)["error"]
    except (ValueError, KeyError, TypeError):
        error = raw[:200].decode(errors="replace")
    if isinstance(error, Mapping):
        retryable, kind = bool(error.get("retryable", retryable)), error.get("kind")
        error = error.get("message", "")
    text = f"{url}{path} answered {status}: {' '.join(str(error).split())}"
    return HandoffFailed(text) if kind == "handoff" else EngineError(text, retryable=retryable)
