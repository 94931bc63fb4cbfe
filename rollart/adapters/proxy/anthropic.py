"""Anthropic's messages: `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, PlainValidator, ValidationInfo

from rollart.adapters.proxy.api import (
    ApiResponse,
    Content,
    Count,
    RequestBody,
    SamplingBody,
    StopTexts,
    conversation,
    encode_event,
    objects,
    plain_text,
    tool_call,
)
from rollart.adapters.proxy.messages import (
    ArgumentsDelta,
    CompletionRequest,
    Message,
    OutputEvent,
    PolicyResponse,
    PromptInput,
    ResponseHeader,
    TextDelta,
    ToolCall,
    ToolCallStart,
)

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
"""Anthropic's error type by HTTP status; other statuses are "api_error"."""


def _messages(value: Any) -> list[Message]:
    """The messages; each tool result in one is a message of its own."""
    found: list[Message] = []
    for given in objects(value):
        role, content = given.get("role"), given.get("content")
        if role not in ("user", "assistant", "system"):
            raise ValueError(f"has the role {role!r}")
        if not isinstance(content, list):
            found.append(Message(role, plain_text(content)))
            continue
        texts: list[str] = []
        calls: list[ToolCall] = []
        before = len(found)
        for block in content:
            kind = block.get("type") if isinstance(block, Mapping) else None
            if kind == "tool_use":
                calls.append(tool_call(block.get("name"), block.get("input") or {}, block.get("id")))
            elif kind == "tool_result":
                result = plain_text(block.get("content"))
                found.append(Message("tool", result, call_id=str(block.get("tool_use_id") or "")))
            else:
                texts.append(plain_text([block]))
        if texts or calls or len(found) == before:
            found.append(Message(role, "".join(texts), tuple(calls)))
    return found


def _tools(value: Any, info: ValidationInfo) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for tool in () if info.data.get("tool_choice") == "none" else objects(value):
        if "input_schema" not in tool:
            raise ValueError(
                f": {tool.get('type') or tool.get('name')} is run by a server (rule: tools of the caller's, with an "
                "input_schema)"
            )
        about = {"name": tool.get("name"), "description": tool.get("description") or ""}
        found.append({"type": "function", "function": {**about, "parameters": tool["input_schema"]}})
    return found


class PromptBody(RequestBody):
    """The body of `/v1/messages/count_tokens`."""

    tool_choice: Annotated[Any, PlainValidator(lambda value: isinstance(value, Mapping) and value.get("type"))] = None
    """The choice's type."""
    system: Content = ""
    messages: Annotated[Sequence[Message], PlainValidator(_messages)] = ()
    tools: Annotated[Sequence[Mapping[str, Any]], PlainValidator(_tools)] = ()

    def prompt(self) -> PromptInput:
        """The conversation in the chat template's terms: system text first."""
        system = [Message("system", self.system)] if self.system else []
        return conversation([*system, *self.messages], self.tools, field="messages")


class MessagesBody(SamplingBody, PromptBody):
    """The body of `/v1/messages`."""

    max_tokens: Count
    stop: StopTexts = Field((), validation_alias="stop_sequences")

    def completion(self) -> CompletionRequest:
        unenforced = ("tool_choice",) if self.tool_choice in ("any", "tool") else ()
        return self.sampled(self.prompt(), max_tokens=self.max_tokens, stop=self.stop, unenforced=unenforced)


class Messages(ApiResponse):
    """Cached prompt tokens are known, and reported, only at the end of a stream."""

    path, request, error_event_name = "/v1/messages", MessagesBody, "error"

    def __init__(self, ask: CompletionRequest, head: ResponseHeader) -> None:
        super().__init__(ask, head)
        self._blocks = 0
        self._open = ""
        """The type of the open content block; '' if none is open."""

    @classmethod
    def error_body(
        cls, message: str, status: int, *, field: str | None = None, code: str | None = None
    ) -> dict[str, Any]:
        return {"type": "error", "error": {"type": ERROR_TYPES.get(status, "api_error"), "message": message}}

    def body(self, answer: PolicyResponse) -> dict[str, Any]:
        blocks = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "tool_use", "id": part.id, "name": part.name, "input": dict(part.arguments)}
            for part in answer.parts
        ]
        stop_reason = STOP_REASONS[answer.finish]
        return {**self._fields(), "content": blocks, "stop_reason": stop_reason, "usage": _usage(answer)}

    def begin(self, answer: PolicyResponse | None = None) -> Iterator[bytes]:
        usage = _token_counts(len(self._head.prompt_ids), cached=0, sampled=0)
        message = {**self._fields(), "content": [], "stop_reason": None, "usage": usage}
        yield _send("message_start", message=message)

    def event(self, event: OutputEvent) -> Iterator[bytes]:
        if isinstance(event, TextDelta):
            if self._open != "text":
                yield from self._open_block({"type": "text", "text": ""})
            yield self._delta(type="text_delta", text=event.text)
        elif isinstance(event, ToolCallStart):
            id = self._head.call_id(event.index)
            yield from self._open_block({"type": "tool_use", "id": id, "name": event.name, "input": {}})
        elif isinstance(event, ArgumentsDelta):
            yield self._delta(type="input_json_delta", partial_json=event.text)
        else:
            yield from self._close_block()

    def end(self, answer: PolicyResponse) -> Iterator[bytes]:
        yield from self._close_block()
        delta = {"stop_reason": STOP_REASONS[answer.finish], "stop_sequence": None}
        yield _send("message_delta", delta=delta, usage=_usage(answer))
        yield _send("message_stop")

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

    def _fields(self) -> dict[str, Any]:
        id, model = self._head.id("msg"), self._head.model
        return {"id": id, "type": "message", "role": "assistant", "model": model, "stop_sequence": None}


def _send(kind: str, **fields: Any) -> bytes:
    return encode_event({"type": kind, **fields}, kind)


def _usage(answer: PolicyResponse) -> dict[str, int]:
    prompt, sampled = len(answer.head.prompt_ids), len(answer.completion.token_ids)
    return _token_counts(prompt - answer.cached, cached=answer.cached, sampled=sampled)


def _token_counts(prompt: int, *, cached: int, sampled: int) -> dict[str, int]:
    """Token counts as the API defines them: `input_tokens` excludes cached tokens."""
    return {
        "input_tokens": prompt,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": sampled,
    }
