"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rollart.adapters.proxy import fields
from rollart.adapters.proxy.chat import OutputDelta
from rollart.adapters.proxy.messages import (
    ArgumentsDelta,
    BadRequest,
    CompletionRequest,
    Message,
    OutputEvent,
    PolicyResponse,
    PromptInput,
    ResponseHeader,
    TextDelta,
    ToolCall,
    ToolCallStart,
    require_messages,
)
from rollart.adapters.proxy.sse import encode_event, split_events


def parse_request(body: Mapping[str, Any]) -> CompletionRequest:
    """Parse a request body. BadRequest for options that are not supported."""
    fields.unsupported(body, {"n": 1})
    choice = body.get("tool_choice")
    tools = () if choice == "none" else tuple(fields.items(body, "tools"))
    unenforced = [] if choice in (None, "auto", "none") else ["tool_choice"]
    form = body.get("response_format")
    if isinstance(form, Mapping) and form.get("type") != "text":
        unenforced.append("response_format")
    options = body.get("stream_options") or {}
    return CompletionRequest(
        PromptInput(require_messages([_message(m) for m in fields.items(body, "messages")], field="messages"), tools),
        model=str(body.get("model") or ""),
        max_tokens=fields.whole(body, "max_completion_tokens") or fields.whole(body, "max_tokens"),
        temperature=fields.number(body, "temperature", 1.0),
        top_p=fields.fraction(body, "top_p", 1.0),
        seed=fields.whole(body, "seed", least=0),
        stop=fields.texts(body, "stop"),
        stream=bool(body.get("stream")),
        usage=bool(options.get("include_usage")) if isinstance(options, Mapping) else False,
        logprobs=bool(body.get("logprobs")),
        ids=bool(body.get("return_token_ids")),
        unenforced=tuple(unenforced),
    )


def response_body(ask: CompletionRequest, answer: PolicyResponse) -> dict[str, Any]:
    """The body of a response that is not streamed. `return_token_ids` adds the ids in vLLM's format."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.calls:
        message |= {"content": answer.content or None, "tool_calls": [_call(c) for c in answer.calls]}
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "finish_reason": answer.finish,
        "logprobs": _logprobs(answer.tokens, answer.completion.logprobs) if ask.logprobs else None,
    }
    whole: dict[str, Any] = {**_head(answer, "chat.completion"), "choices": [choice], "usage": usage(answer)}
    if ask.ids:
        choice["token_ids"] = list(answer.completion.token_ids)
        whole["prompt_token_ids"] = list(answer.prompt_ids)
    return whole


class ChatEventWriter:
    """Renders one streamed response: `begin`, `add` per delta, `end`. Log-probabilities and ids are sent with the
    text of their tokens. Empty content is never sent: in a response with calls it would read as missing content."""

    def __init__(self, ask: CompletionRequest, head: ResponseHeader) -> None:
        self._ask, self._head = ask, head

    def begin(self) -> Iterator[bytes]:
        yield self._chunk({"role": "assistant"}, shown=self._ask.ids)

    def add(self, delta: OutputDelta) -> Iterator[bytes]:
        yield from self._all(delta.events, self._drawn(delta.tokens, delta.logprobs, delta.token_ids))

    def end(self, answer: PolicyResponse) -> Iterator[bytes]:
        n, c = answer.shown, answer.completion
        drawn = self._drawn(answer.tokens[n:], c.logprobs[n:], c.token_ids[n:])
        rest = list(self._all(split_events(answer.rest) if answer.parts else [TextDelta("")], drawn))
        yield from rest
        yield self._chunk({}, answer.finish, choice={} if rest else drawn)
        if self._ask.usage:
            head = _head(self._head, "chat.completion.chunk")
            yield encode_event({**head, "choices": [], "usage": usage(answer)})
        yield encode_event("[DONE]")

    def _all(self, events: Iterable[OutputEvent], drawn: Mapping[str, Any]) -> Iterator[bytes]:
        for delta in filter(None, map(self._delta, events)):
            yield self._chunk(delta, choice=drawn)
            drawn = {}

    def _delta(self, one: OutputEvent) -> dict[str, Any] | None:
        if isinstance(one, TextDelta):
            return {"content": one.text}
        if isinstance(one, ToolCallStart):
            function = {"name": one.name, "arguments": ""}
            call = {"index": one.index, "id": self._head.call_id(one.index), "type": "function", "function": function}
            return {"tool_calls": [call]}
        if isinstance(one, ArgumentsDelta):
            return {"tool_calls": [{"index": one.index, "function": {"arguments": one.text}}]}
        return None

    def _chunk(
        self,
        delta: Mapping[str, Any],
        finish: str | None = None,
        *,
        choice: Mapping[str, Any] | None = None,
        shown: bool = False,
    ) -> bytes:
        one = {"index": 0, "delta": delta, "finish_reason": finish, **(choice or {})}
        more = {"prompt_token_ids": list(self._head.prompt_ids)} if shown else {}
        return encode_event({**_head(self._head, "chat.completion.chunk"), **more, "choices": [one]})

    def _drawn(self, tokens: Sequence[str], logprobs: Sequence[float], ids: Sequence[int]) -> dict[str, Any]:
        if not ids:
            return {}
        found: dict[str, Any] = {"logprobs": _logprobs(tokens, logprobs)} if self._ask.logprobs else {}
        return found | ({"token_ids": list(ids)} if self._ask.ids else {})


EventWriter = ChatEventWriter
"""The API's event writer, by the name that all API modules share."""


def error_body(message: str, status: int, *, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def error_event(message: str, status: int) -> bytes:
    """The event for an error after the stream has begun."""
    return encode_event(error_body(message, status))


def usage(answer: PolicyResponse) -> dict[str, Any]:
    prompt, sampled = len(answer.prompt_ids), len(answer.completion.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": answer.cached},
    }


def _head(head: ResponseHeader, kind: str) -> dict[str, Any]:
    return {"id": head.id("chatcmpl"), "object": kind, "created": head.created, "model": head.model}


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.written},
    }


def _logprobs(tokens: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
    return {
        "content": [
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, logprob in zip(tokens, logprobs, strict=True)
        ],
        "refusal": None,
    }


def _message(given: Mapping[str, Any]) -> Message:
    role = given.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise BadRequest(f"messages has the role {role!r}", field="messages")
    calls = []
    for item in fields.items(given, "tool_calls"):
        function = item.get("function")
        if not isinstance(function, Mapping):
            raise BadRequest("tool_calls has one without a function", field="messages")
        calls.append(fields.call(function.get("name"), function.get("arguments"), item.get("id"), "tool_calls"))
    return Message(
        "system" if role == "developer" else str(role),
        fields.plain_text(given.get("content"), "messages"),
        tuple(calls),
        str(given.get("tool_call_id") or ""),
        str(given.get("name") or ""),
    )
