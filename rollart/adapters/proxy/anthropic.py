"""Anthropic's messages: `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
"""Anthropic's error type by HTTP status; other statuses are "api_error"."""


def parse_request(body: Mapping[str, Any]) -> CompletionRequest:
    """Parse a request body. BadRequest for options that are not supported."""
    choice = body.get("tool_choice")
    wish = choice.get("type") if isinstance(choice, Mapping) else None
    limit = fields.whole(body, "max_tokens")
    if limit is None:
        raise BadRequest("max_tokens: field required", field="max_tokens")
    return CompletionRequest(
        prompt_of(body),
        model=str(body.get("model") or ""),
        max_tokens=limit,
        temperature=fields.number(body, "temperature", 1.0),
        top_p=fields.fraction(body, "top_p", 1.0),
        stop=fields.texts(body, "stop_sequences"),
        stream=bool(body.get("stream")),
        unenforced=("tool_choice",) if wish in ("any", "tool") else (),
    )


def prompt_of(body: Mapping[str, Any]) -> PromptInput:
    """The conversation in the chat template's terms: system text first, each tool result as a separate message."""
    choice = body.get("tool_choice")
    silent = isinstance(choice, Mapping) and choice.get("type") == "none"
    system = fields.plain_text(body.get("system"), "system")
    messages = [Message("system", system)] if system else []
    for given in fields.items(body, "messages"):
        messages += _messages(given)
    tools = () if silent else tuple(_tool(t) for t in fields.items(body, "tools"))
    return PromptInput(require_messages(messages, field="messages"), tools)


def response_body(ask: CompletionRequest, answer: PolicyResponse) -> dict[str, Any]:
    blocks = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "tool_use", "id": part.id, "name": part.name, "input": dict(part.arguments)}
        for part in answer.parts
    ]
    return {**_head(answer), "content": blocks, "stop_reason": STOP_REASONS[answer.finish], "usage": _usage(answer)}


class AnthropicEventWriter:
    """Renders one streamed response: `begin`, `add` per delta, `end`. Cached prompt tokens are known, and reported,
    only at the end."""

    def __init__(self, ask: CompletionRequest, head: ResponseHeader) -> None:
        self._head = head
        self._blocks = 0
        self._open = ""
        """The type of the open content block; '' if none is open."""

    def begin(self) -> Iterator[bytes]:
        counts = {
            "input_tokens": len(self._head.prompt_ids),
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0,
            "output_tokens": 0,
        }
        message = {**_head(self._head), "content": [], "stop_reason": None, "usage": counts}
        yield _send("message_start", message=message)

    def add(self, delta: OutputDelta) -> Iterator[bytes]:
        for one in delta.events:
            yield from self._event(one)

    def end(self, answer: PolicyResponse) -> Iterator[bytes]:
        for one in split_events(answer.rest):
            yield from self._event(one)
        yield from self._close_block()
        yield _send(
            "message_delta",
            delta={"stop_reason": STOP_REASONS[answer.finish], "stop_sequence": None},
            usage=_usage(answer),
        )
        yield _send("message_stop")

    def _event(self, one: OutputEvent) -> Iterator[bytes]:
        if isinstance(one, TextDelta):
            if self._open != "text":
                yield from self._open_block({"type": "text", "text": ""})
            yield self._delta(type="text_delta", text=one.text)
        elif isinstance(one, ToolCallStart):
            id = self._head.call_id(one.index)
            yield from self._open_block({"type": "tool_use", "id": id, "name": one.name, "input": {}})
        elif isinstance(one, ArgumentsDelta):
            yield self._delta(type="input_json_delta", partial_json=one.text)
        else:
            yield from self._close_block()

    def _open_block(self, block: Mapping[str, Any]) -> Iterator[bytes]:
        yield from self._close_block()
        self._open = block["type"]
        self._blocks += 1
        yield _send("content_block_start", index=self._blocks - 1, content_block=block)

    def _close_block(self) -> Iterator[bytes]:
        if self._open:
            self._open = ""
            yield _send("content_block_stop", index=self._blocks - 1)

    def _delta(self, **delta: str) -> bytes:
        return _send("content_block_delta", index=self._blocks - 1, delta=delta)


EventWriter = AnthropicEventWriter
"""The API's event writer, by the name that all API modules share."""


def error_body(message: str, status: int, *, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"type": "error", "error": {"type": ERROR_TYPES.get(status, "api_error"), "message": message}}


def error_event(message: str, status: int) -> bytes:
    """The event for an error after the stream has begun."""
    return encode_event(error_body(message, status), "error")


def _send(kind: str, **fields: Any) -> bytes:
    return encode_event({"type": kind, **fields}, kind)


def _head(head: ResponseHeader) -> dict[str, Any]:
    return {"id": head.id("msg"), "type": "message", "role": "assistant", "model": head.model, "stop_sequence": None}


def _usage(answer: PolicyResponse) -> dict[str, int]:
    """Token counts as the API defines them: `input_tokens` excludes cached tokens."""
    return {
        "input_tokens": len(answer.prompt_ids) - answer.cached,
        "cache_read_input_tokens": answer.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(answer.completion.token_ids),
    }


def _messages(given: Mapping[str, Any]) -> list[Message]:
    role, content = given.get("role"), given.get("content")
    if role not in ("user", "assistant", "system"):
        raise BadRequest(f"messages has the role {role!r}", field="messages")
    if not isinstance(content, list):
        return [Message(role, fields.plain_text(content, "messages"))]
    texts: list[str] = []
    calls: list[ToolCall] = []
    results: list[Message] = []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use":
            calls.append(fields.call(block.get("name"), block.get("input") or {}, block.get("id"), "messages"))
        elif kind == "tool_result":
            shown = fields.plain_text(block.get("content"), "messages")
            results.append(Message("tool", shown, call_id=str(block.get("tool_use_id") or "")))
        else:
            texts.append(fields.plain_text([block], "messages"))
    spoken = [Message(role, "".join(texts), tuple(calls))] if texts or calls or not results else []
    return [*results, *spoken]


def _tool(given: Mapping[str, Any]) -> dict[str, Any]:
    if "input_schema" not in given:
        raise BadRequest(
            f"tools: {given.get('type') or given.get('name')} is run by a server (rule: tools of the "
            "caller's, with an input_schema)",
            field="tools",
        )
    function = {
        "name": given.get("name"),
        "description": given.get("description") or "",
        "parameters": given["input_schema"],
    }
    return {"type": "function", "function": function}
