"""OpenAI's responses: `POST /v1/responses`, with the conversation in `input` or behind `previous_response_id`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
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
    ToolCallEnd,
    ToolCallStart,
    require_messages,
)
from rollart.adapters.proxy.openai_chat import error_body
from rollart.adapters.proxy.sse import encode_event, split_events

__all__ = ["EventWriter", "parse_request", "response_body", "error_body", "error_event"]

PreviousConversation = Callable[[str], Sequence[Message] | None]
"""Maps a response's id to its conversation, the response included, without system messages."""


def parse_request(body: Mapping[str, Any], previous: PreviousConversation) -> CompletionRequest:
    """Parse a request body. BadRequest for options that are not supported."""
    fields.unsupported(body, {"background": False, "conversation": None})
    messages: list[Message] = []
    before = body.get("previous_response_id")
    if before is not None:
        held = previous(str(before))
        if held is None:
            raise BadRequest(f"previous_response_id {before!r} is not of this session", field="previous_response_id")
        messages += held
    messages += _input(body.get("input"))
    instructions = fields.plain_text(body.get("instructions"), "instructions")
    if instructions:
        messages.insert(0, Message("system", instructions))
    choice = body.get("tool_choice")
    tools = () if choice == "none" else tuple(_tool(t) for t in fields.items(body, "tools"))
    unenforced = [] if choice in (None, "auto", "none") else ["tool_choice"]
    form = (body.get("text") or {}).get("format") if isinstance(body.get("text"), Mapping) else None
    if isinstance(form, Mapping) and form.get("type") != "text":
        unenforced.append("text.format")
    return CompletionRequest(
        PromptInput(require_messages(messages, field="input"), tools),
        model=str(body.get("model") or ""),
        max_tokens=fields.whole(body, "max_output_tokens"),
        temperature=fields.number(body, "temperature", 1.0),
        top_p=fields.fraction(body, "top_p", 1.0),
        stream=bool(body.get("stream")),
        unenforced=tuple(unenforced),
    )


def response_body(ask: CompletionRequest, answer: PolicyResponse) -> dict[str, Any]:
    return _response(ask, answer, _items(answer), _status(answer))


class ResponsesEventWriter:
    """Renders one streamed response: `begin`, `add` per delta, `end`."""

    def __init__(self, ask: CompletionRequest, head: ResponseHeader) -> None:
        self._ask, self._head = ask, head
        self._sent = self._items = 0
        self._text: str | None = None
        """Text of the open message; None if no message is open."""

    def begin(self) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._send(kind, response=_response(self._ask, self._head, [], "in_progress"))

    def add(self, delta: OutputDelta) -> Iterator[bytes]:
        for one in delta.events:
            yield from self._event(one)

    def end(self, answer: PolicyResponse) -> Iterator[bytes]:
        for one in split_events(answer.rest) if answer.parts else (TextDelta(""),):
            yield from self._event(one)
        yield from self._close_message(_status(answer))
        done = "response.completed" if _status(answer) == "completed" else "response.incomplete"
        yield self._send(done, response=response_body(self._ask, answer))

    def _event(self, one: OutputEvent) -> Iterator[bytes]:
        if isinstance(one, TextDelta):
            if self._text is None:
                yield from self._open_message()
            self._text = (self._text or "") + one.text
            if one.text:
                yield self._send("response.output_text.delta", **self._part(), delta=one.text, logprobs=[])
        elif isinstance(one, ToolCallStart):
            yield from self._close_message("completed")
            item = _call_item(ToolCall(one.name, {}, self._head.call_id(one.index)), "in_progress")
            self._items += 1
            yield self._send("response.output_item.added", **self._at(), item=item)
        elif isinstance(one, ArgumentsDelta):
            id = f"fc-{self._head.call_id(one.index)}"
            yield self._send("response.function_call_arguments.delta", **self._at(), item_id=id, delta=one.text)
        else:
            yield from self._end_call(one)

    def _end_call(self, one: ToolCallEnd) -> Iterator[bytes]:
        item = _call_item(replace(one.call, id=self._head.call_id(one.index)))
        call = {"arguments": item["arguments"], "name": item["name"]}
        yield self._send("response.function_call_arguments.done", **self._at(), item_id=item["id"], **call)
        yield self._send("response.output_item.done", **self._at(), item=item)

    def _open_message(self) -> Iterator[bytes]:
        """Open a message item."""
        self._items += 1
        item = {**_message_item(self._head, self._items - 1), "status": "in_progress", "content": []}
        yield self._send("response.output_item.added", **self._at(), item=item)
        yield self._send("response.content_part.added", **self._part(), part=_part(""))

    def _close_message(self, status: str) -> Iterator[bytes]:
        if self._text is not None:
            text, self._text = self._text, None
            yield self._send("response.output_text.done", **self._part(), text=text, logprobs=[])
            yield self._send("response.content_part.done", **self._part(), part=_part(text))
            item = {**_message_item(self._head, self._items - 1), "status": status, "content": [_part(text)]}
            yield self._send("response.output_item.done", **self._at(), item=item)

    def _at(self) -> dict[str, Any]:
        return {"output_index": self._items - 1}

    def _part(self) -> dict[str, Any]:
        id = _message_item(self._head, self._items - 1)["id"]
        return {**self._at(), "content_index": 0, "item_id": id}

    def _send(self, kind: str, **fields: Any) -> bytes:
        self._sent += 1
        return encode_event({"type": kind, "sequence_number": self._sent - 1, **fields}, kind)


EventWriter = ResponsesEventWriter
"""The API's event writer, by the name that all API modules share."""


def error_event(message: str, status: int) -> bytes:
    """The event for an error after the stream has begun."""
    return encode_event(
        {"type": "error", "code": "server_error", "message": message, "param": None, "sequence_number": 0}, "error"
    )


def _status(answer: PolicyResponse) -> str:
    return "incomplete" if answer.finish == "length" else "completed"


def _message_item(head: ResponseHeader, index: int) -> dict[str, Any]:
    id = f"{head.id('msg')}-{index}" if index else head.id("msg")
    return {"id": id, "type": "message", "role": "assistant"}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _response(
    ask: CompletionRequest, head: ResponseHeader, output: list[dict[str, Any]], status: str
) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "id": head.id("resp"),
        "object": "response",
        "created_at": head.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "max_output_tokens": ask.max_tokens,
        "model": head.model,
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "temperature": ask.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": ask.top_p,
        "metadata": {},
    }
    if isinstance(head, PolicyResponse):
        prompt, sampled = len(head.prompt_ids), len(head.completion.token_ids)
        whole["usage"] = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": head.cached, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        }
    return whole


def _items(answer: PolicyResponse) -> list[dict[str, Any]]:
    """The response's output items."""
    found, parts = [], answer.parts or ("",)
    for index, part in enumerate(parts):
        if isinstance(part, ToolCall):
            found.append(_call_item(part))
        else:
            status = _status(answer) if index == len(parts) - 1 else "completed"
            found.append({**_message_item(answer, index), "status": status, "content": [_part(part)]})
    return found


def _call_item(call: ToolCall, status: str = "") -> dict[str, Any]:
    status = status or ("completed" if call.whole else "incomplete")
    item = {"id": f"fc-{call.id}", "type": "function_call", "call_id": call.id, "name": call.name}
    return {**item, "status": status, "arguments": call.written}


def _input(given: object) -> list[Message]:
    """Input items as messages; the calls of one response are merged into one message again."""
    if isinstance(given, str):
        return [Message("user", given)]
    messages: list[Message] = []
    for item in fields.items({"input": given}, "input"):
        kind = item.get("type") or "message"
        if kind == "message":
            role = str(item.get("role"))
            text = fields.plain_text(item.get("content"), "input")
            if role == "assistant" and messages and messages[-1].role == role and messages[-1].calls:
                text, calls = messages[-1].content + text, messages.pop().calls  # of the same response
                messages.append(Message(role, text, calls))
            else:
                messages.append(Message("system" if role == "developer" else role, text))
        elif kind == "function_call":
            call = fields.call(item.get("name"), item.get("arguments"), item.get("call_id"), "input")
            _add_call(messages, call)
        elif kind == "function_call_output":
            shown = fields.plain_text(item.get("output"), "input")
            messages.append(Message("tool", shown, call_id=str(item.get("call_id") or "")))
        elif kind != "reasoning":
            raise BadRequest(f"input has an item of type {kind!r}", field="input")
    return messages


def _add_call(messages: list[Message], call: ToolCall) -> None:
    if messages and messages[-1].role == "assistant":
        last = messages.pop()
        messages.append(Message("assistant", last.content, (*last.calls, call)))
    else:
        messages.append(Message("assistant", "", (call,)))


def _tool(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("type") != "function":
        raise BadRequest(f"tools has one of type {given.get('type')!r} (rule: function)", field="tools")
    function = {name: given[name] for name in ("name", "description", "parameters") if given.get(name) is not None}
    return {"type": "function", "function": function}
