"""OpenAI's completions: `POST /v1/completions`; the prompt is a text or token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollart.adapters.proxy import fields
from rollart.adapters.proxy.chat import OutputDelta
from rollart.adapters.proxy.messages import (
    BadRequest,
    CompletionRequest,
    PolicyResponse,
    PromptInput,
    ResponseHeader,
    TextDelta,
)
from rollart.adapters.proxy.openai_chat import error_body, error_event, usage
from rollart.adapters.proxy.sse import encode_event, split_events

__all__ = ["EventWriter", "parse_request", "response_body", "error_body", "error_event"]

MAX_TOKENS = 16
"""The API's default."""


def parse_request(body: Mapping[str, Any]) -> CompletionRequest:
    """Parse a request body. BadRequest for options that are not supported."""
    fields.unsupported(body, {"n": 1, "best_of": 1, "echo": False, "suffix": ""})
    options = body.get("stream_options") or {}
    logprobs = body.get("logprobs")
    return CompletionRequest(
        _prompt(body.get("prompt")),
        model=str(body.get("model") or ""),
        max_tokens=fields.whole(body, "max_tokens") or MAX_TOKENS,
        temperature=fields.number(body, "temperature", 1.0),
        top_p=fields.fraction(body, "top_p", 1.0),
        seed=fields.whole(body, "seed", least=0),
        stop=fields.texts(body, "stop"),
        stream=bool(body.get("stream")),
        usage=bool(options.get("include_usage")) if isinstance(options, Mapping) else False,
        logprobs=logprobs is not None and logprobs is not False,
        ids=bool(body.get("return_token_ids")),
    )


def response_body(ask: CompletionRequest, answer: PolicyResponse) -> dict[str, Any]:
    choice = _choice(answer.message.content, answer.finish)
    if ask.logprobs:
        choice["logprobs"] = _logprobs(answer.tokens, answer.completion.logprobs)
    if ask.ids:
        choice["token_ids"] = list(answer.completion.token_ids)
        choice["prompt_token_ids"] = list(answer.prompt_ids)
    return {**_head(answer), "choices": [choice], "usage": usage(answer)}


class CompletionEventWriter:
    """Renders one streamed response: `begin`, `add` per delta, `end`."""

    def __init__(self, ask: CompletionRequest, head: ResponseHeader) -> None:
        self._ask, self._head = ask, head

    def begin(self) -> Iterator[bytes]:
        return iter(())

    def add(self, delta: OutputDelta) -> Iterator[bytes]:
        yield self._chunk(delta.text, None, self._drawn(delta.tokens, delta.logprobs, delta.token_ids))

    def end(self, answer: PolicyResponse) -> Iterator[bytes]:
        n, c = answer.shown, answer.completion
        drawn = self._drawn(answer.tokens[n:], c.logprobs[n:], c.token_ids[n:])
        for one in split_events(answer.rest):
            if isinstance(one, TextDelta):
                yield self._chunk(one.text, None, drawn)
                drawn = {}
        yield self._chunk("", answer.finish, drawn)
        if self._ask.usage:
            yield encode_event({**_head(self._head), "choices": [], "usage": usage(answer)})
        yield encode_event("[DONE]")

    def _chunk(self, text: str, finish: str | None, drawn: Mapping[str, Any]) -> bytes:
        return encode_event({**_head(self._head), "choices": [{**_choice(text, finish), **drawn}]})

    def _drawn(self, tokens: Sequence[str], logprobs: Sequence[float], ids: Sequence[int]) -> dict[str, Any]:
        found: dict[str, Any] = {"logprobs": _logprobs(tokens, logprobs)} if self._ask.logprobs else {}
        return found | ({"token_ids": list(ids)} if self._ask.ids else {})


EventWriter = CompletionEventWriter
"""The API's event writer, by the name that all API modules share."""


def _head(head: ResponseHeader) -> dict[str, Any]:
    return {"id": head.id("cmpl"), "object": "text_completion", "created": head.created, "model": head.model}


def _choice(text: str, finish: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}


def _logprobs(tokens: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
    return {
        "tokens": list(tokens),
        "token_logprobs": list(logprobs),
        "top_logprobs": None,
        "text_offset": [],
    }


def _prompt(given: object) -> PromptInput:
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, str) and given:
        return PromptInput(text=given)
    if isinstance(given, list) and given and all(type(i) is int and 0 <= i <= fields.MOST for i in given):
        return PromptInput(token_ids=tuple(given))
    raise BadRequest("prompt must be one text or one list of token ids", field="prompt")
