"""OpenAI's responses: `POST /v1/responses`, with the conversation in `input` or behind `previous_response_id`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rollart.adapters.proxy import fields
from rollart.adapters.proxy.messages import Answer, Ask, BadRequest, Call, Head, Message, Prompt, conversation
from rollart.adapters.proxy.openai_chat import error
from rollart.adapters.proxy.sse import event, pieces
from rollart.adapters.proxy.unfolding import Delta

__all__ = ["Events", "ask", "body", "error", "failed"]

Previous = Callable[[str], Sequence[Message] | None]
"""The conversation behind a response's id, its answer included, without system messages."""


def ask(body: Mapping[str, Any], previous: Previous) -> Ask:
    """BadRequest for what cannot be served."""
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
    return Ask(
        Prompt(conversation(messages, field="input"), tools),
        model=str(body.get("model") or ""),
        max_tokens=fields.whole(body, "max_output_tokens"),
        temperature=fields.number(body, "temperature", 1.0),
        top_p=fields.fraction(body, "top_p", 1.0),
        stream=bool(body.get("stream")),
        unenforced=tuple(unenforced),
    )


def body(ask: Ask, answer: Answer) -> dict[str, Any]:
    return _response(ask, answer, [whole for _, whole in _items(answer)], _status(answer))


class Events:
    """One streamed answer: `begin`, its text, `end`."""

    def __init__(self, ask: Ask, head: Head) -> None:
        self._ask, self._head = ask, head
        self._sent = 0
        self._open = False

    def begin(self) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._send(kind, response=_response(self._ask, self._head, [], "in_progress"))

    def text(self, delta: Delta) -> Iterator[bytes]:
        yield from self._opened()
        yield self._delta(delta.text)

    def end(self, answer: Answer) -> Iterator[bytes]:
        for index, (empty, whole) in enumerate(_items(answer)):
            if whole["type"] == "function_call":
                yield from self._called(index, empty, whole)
            else:
                yield from self._opened()
                for piece in pieces(answer.rest):
                    yield self._delta(piece)
                part = whole["content"][0]
                yield self._send("response.output_text.done", **self._at(), text=part["text"], logprobs=[])
                yield self._send("response.content_part.done", **self._at(), part=part)
            yield self._send("response.output_item.done", output_index=index, item=whole)
        done = "response.completed" if _status(answer) == "completed" else "response.incomplete"
        yield self._send(done, response=body(self._ask, answer))

    def _opened(self) -> Iterator[bytes]:
        """The message, which comes before calls, if it was not begun."""
        if not self._open:
            self._open = True
            item = {**_message_item(self._head), "status": "in_progress", "content": []}
            yield self._send("response.output_item.added", output_index=0, item=item)
            yield self._send("response.content_part.added", **self._at(), part=_part(""))

    def _called(self, index: int, empty: Mapping[str, Any], whole: Mapping[str, Any]) -> Iterator[bytes]:
        at = {"output_index": index, "item_id": whole["id"]}
        yield self._send("response.output_item.added", output_index=index, item=empty)
        for piece in pieces(whole["arguments"]):
            yield self._send("response.function_call_arguments.delta", **at, delta=piece)
        yield self._send(
            "response.function_call_arguments.done", **at, arguments=whole["arguments"], name=whole["name"]
        )

    def _delta(self, text: str) -> bytes:
        return self._send("response.output_text.delta", **self._at(), delta=text, logprobs=[])

    def _at(self) -> dict[str, Any]:
        return {"output_index": 0, "content_index": 0, "item_id": self._head.id("msg")}

    def _send(self, kind: str, **fields: Any) -> bytes:
        self._sent += 1
        return event({"type": kind, "sequence_number": self._sent - 1, **fields}, kind)


def failed(message: str, status: int) -> bytes:
    """The error of an answer whose stream has begun."""
    return event({"type": "error", "code": "server_error", "message": message, "param": None,
                  "sequence_number": 0}, "error")  # fmt: skip


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish == "length" else "completed"


def _message_item(head: Head) -> dict[str, Any]:
    return {"id": head.id("msg"), "type": "message", "role": "assistant"}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _response(ask: Ask, head: Head, output: list[dict[str, Any]], status: str) -> dict[str, Any]:
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
    if isinstance(head, Answer):
        shown, said = len(head.prompt_ids), len(head.completion.token_ids)
        whole["usage"] = {
            "input_tokens": shown,
            "input_tokens_details": {"cached_tokens": head.cached, "cache_write_tokens": 0},
            "output_tokens": said,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": shown + said,
        }
    return whole


def _items(answer: Answer) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Output items, each as it begins and as it ends."""
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    if answer.message.content or not answer.message.calls:
        item = {**_message_item(answer), "status": _status(answer), "content": [_part(answer.message.content)]}
        found.append(({}, item))
    for call in answer.message.calls:
        item = {"id": f"fc-{call.id}", "type": "function_call", "call_id": call.id, "name": call.name}
        written = json.dumps(call.arguments, ensure_ascii=False)
        found.append(
            ({**item, "status": "in_progress", "arguments": ""}, {**item, "status": "completed", "arguments": written})
        )
    return found


def _input(given: object) -> list[Message]:
    """Items as messages; calls that belong to one answer are put together again."""
    if isinstance(given, str):
        return [Message("user", given)]
    messages: list[Message] = []
    for item in fields.items({"input": given}, "input"):
        kind = item.get("type") or "message"
        if kind == "message":
            role = str(item.get("role"))
            text = fields.plain_text(item.get("content"), "input")
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


def _add_call(messages: list[Message], call: Call) -> None:
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
