"""OpenAI's APIs: `/v1/chat/completions`, `/v1/completions` and `/v1/responses`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, BeforeValidator, Field, PlainValidator, ValidationInfo

from rollart.adapters.proxy.api import (
    MAX_INTEGER,
    ApiResponse,
    Content,
    Count,
    Flag,
    RequestBody,
    SamplingBody,
    Seed,
    StopTexts,
    Text,
    conversation,
    encode_event,
    objects,
    only,
    plain_text,
    tool_call,
)
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
)

PreviousConversation = Callable[[str], Sequence[Message] | None]
"""Maps a response's id to its conversation, the response included, without system messages."""

DEFAULT_MAX_TOKENS = 16
"""Default of `/v1/completions`."""


def _tool_list(value: Any, info: ValidationInfo) -> list[Mapping[str, Any]]:
    return [] if info.data.get("tool_choice") == "none" else objects(value)


def _function_tools(value: Any, info: ValidationInfo) -> list[Mapping[str, Any]]:
    """Tools of `/v1/responses` in the form of `/v1/chat/completions`."""
    found: list[Mapping[str, Any]] = []
    for tool in _tool_list(value, info):
        if tool.get("type") != "function":
            raise ValueError(f"has one of type {tool.get('type')!r} (rule: function)")
        function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
        found.append({"type": "function", "function": function})
    return found


def _unenforced(choice: Any, form: Any, name: str) -> tuple[str, ...]:
    """Names of the options that are not enforced on the output; `name` is that of the output's format."""
    other_form = isinstance(form, Mapping) and form.get("type") != "text"
    return (*(("tool_choice",) if choice not in (None, "auto", "none") else ()), *((name,) if other_form else ()))


class CompletionsBody(SamplingBody):
    """The options of `/v1/chat/completions` and `/v1/completions`."""

    seed: Seed | None = None
    stop: StopTexts = ()
    stream_options: Any = None
    return_token_ids: Flag = False

    def sampled(self, prompt: PromptInput, **options: Any) -> CompletionRequest:
        streaming = self.stream_options if isinstance(self.stream_options, Mapping) else {}
        usage = bool(streaming.get("include_usage"))
        return super().sampled(
            prompt, seed=self.seed, stop=self.stop, usage=usage, ids=self.return_token_ids, **options
        )


class CompletionsResponse(ApiResponse):
    """A response of `/v1/chat/completions` or `/v1/completions`. Log-probabilities and ids are sent with the text of
    their tokens."""

    id_prefix: ClassVar[str]
    stream_object: ClassVar[str]
    empty: ClassVar[Any]
    """The content of the last choice of a stream."""

    def end(self, answer: PolicyResponse) -> Iterator[bytes]:
        yield self._send_choice(self.empty, answer.finish)
        if self._ask.usage:
            yield self._send([], usage=_usage(answer))
        yield encode_event("[DONE]")

    @abstractmethod
    def _choice(self, content: Any, finish: str | None) -> dict[str, Any]:
        """A choice of a stream."""

    @abstractmethod
    def _logprobs(self, tokens: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]: ...

    def _answer_logprobs(self, answer: PolicyResponse) -> dict[str, Any] | None:
        return self._logprobs(answer.tokens, answer.completion.logprobs) if self._ask.logprobs else None

    def _send_choice(self, content: Any, finish: str | None = None) -> bytes:
        return self._send([{**self._choice(content, finish), **self._token_fields()}])

    def _send(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return encode_event({**self._fields(self.stream_object), "choices": choices, **more})

    def _fields(self, kind: str) -> dict[str, Any]:
        head = self._head
        return {"id": head.id(self.id_prefix), "object": kind, "created": head.created, "model": head.model}

    def _token_fields(self) -> dict[str, Any]:
        """The unsent tokens, for the next event."""
        delta, self._unsent = self._unsent, None
        if delta is None:
            return {}
        found = {"logprobs": self._logprobs(delta.tokens, delta.logprobs)} if self._ask.logprobs else {}
        return found | ({"token_ids": list(delta.token_ids)} if self._ask.ids else {})


def _chat_calls(value: Any) -> tuple[ToolCall, ...]:
    calls = []
    for item in objects(value):
        function = item.get("function")
        if not isinstance(function, Mapping):
            raise BadRequest("tool_calls has one without a function", field="messages")
        calls.append(tool_call(function.get("name"), function.get("arguments"), item.get("id")))
    return tuple(calls)


def _chat_role(role: Any) -> str:
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise ValueError(f"has the role {role!r}")
    return "system" if role == "developer" else str(role)


class ChatMessage(RequestBody):
    """A message of `/v1/chat/completions`."""

    role: Annotated[str, PlainValidator(_chat_role)] = Field(None, validate_default=True)
    tool_calls: Annotated[tuple[ToolCall, ...], PlainValidator(_chat_calls)] = ()
    content: Content = ""
    tool_call_id: Text = ""
    name: Text = ""

    def message(self) -> Message:
        return Message(self.role, self.content, self.tool_calls, self.tool_call_id, self.name)


class ChatBody(CompletionsBody):
    """The body of `/v1/chat/completions`."""

    n: Annotated[Any, only(1)] = 1
    tool_choice: Any = None
    tools: Annotated[Sequence[Mapping[str, Any]], PlainValidator(_tool_list)] = ()
    response_format: Any = None
    messages: Annotated[Sequence[ChatMessage], BeforeValidator(objects)] = ()
    max_tokens: Count | None = Field(None, validation_alias=AliasChoices("max_completion_tokens", "max_tokens"))
    logprobs: Flag = False

    def completion(self) -> CompletionRequest:
        return self.sampled(
            conversation([message.message() for message in self.messages], self.tools, field="messages"),
            max_tokens=self.max_tokens,
            logprobs=self.logprobs,
            unenforced=_unenforced(self.tool_choice, self.response_format, "response_format"),
        )


class ChatCompletions(CompletionsResponse):
    """Empty content is never sent with calls: it would read as missing content."""

    path, request = "/v1/chat/completions", ChatBody
    id_prefix, stream_object, empty = "chatcmpl", "chat.completion.chunk", {}

    def body(self, answer: PolicyResponse) -> dict[str, Any]:
        """`return_token_ids` adds the ids in vLLM's format."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
        if answer.calls:
            calls = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.written}}
                for c in answer.calls
            ]
            message |= {"content": answer.content or None, "tool_calls": calls}
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "finish_reason": answer.finish,
            "logprobs": self._answer_logprobs(answer),
        }
        whole = {**self._fields("chat.completion"), "choices": [choice], "usage": _usage(answer)}
        if self._ask.ids:
            choice["token_ids"] = list(answer.completion.token_ids)
            whole["prompt_token_ids"] = list(answer.head.prompt_ids)
        return whole

    def begin(self, answer: PolicyResponse | None = None) -> Iterator[bytes]:
        ids = {"prompt_token_ids": list(self._head.prompt_ids)} if self._ask.ids else {}
        choice = {"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}
        yield encode_event({**self._fields(self.stream_object), **ids, "choices": [choice]})

    def event(self, event: OutputEvent) -> Iterator[bytes]:
        if isinstance(event, TextDelta):
            yield self._send_choice({"content": event.text})
        elif isinstance(event, ToolCallStart):
            id, function = self._head.call_id(event.index), {"name": event.name, "arguments": ""}
            call = {"index": event.index, "id": id, "type": "function", "function": function}
            yield self._send_choice({"tool_calls": [call]})
        elif isinstance(event, ArgumentsDelta):
            call = {"index": event.index, "function": {"arguments": event.text}}
            yield self._send_choice({"tool_calls": [call]})

    def end(self, answer: PolicyResponse) -> Iterator[bytes]:
        if not answer.parts:
            yield self._send_choice({"content": ""})
        yield from super().end(answer)

    def _choice(self, content: Any, finish: str | None) -> dict[str, Any]:
        return {"index": 0, "delta": content, "finish_reason": finish}

    def _token_fields(self) -> dict[str, Any]:
        return super()._token_fields() if self._unsent is not None and self._unsent.token_ids else {}

    def _logprobs(self, tokens: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
        content = [
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


def _completion_prompt(given: Any) -> PromptInput:
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, str) and given:
        return PromptInput(text=given)
    if isinstance(given, list) and given and all(type(i) is int and 0 <= i <= MAX_INTEGER for i in given):
        return PromptInput(token_ids=tuple(given))
    raise ValueError("must be one text or one list of token ids")


class TextBody(CompletionsBody):
    """The body of `/v1/completions`."""

    n: Annotated[Any, only(1)] = 1
    best_of: Annotated[Any, only(1)] = 1
    echo: Annotated[Any, only(False)] = False
    suffix: Annotated[Any, only("")] = ""
    prompt: Annotated[PromptInput, PlainValidator(_completion_prompt)] = Field(None, validate_default=True)
    max_tokens: Count = DEFAULT_MAX_TOKENS
    logprobs: Annotated[bool, PlainValidator(lambda value: value is not False)] = False

    def completion(self) -> CompletionRequest:
        return self.sampled(self.prompt, max_tokens=self.max_tokens, logprobs=self.logprobs)


class TextCompletions(CompletionsResponse):
    """The prompt is a text or token ids; the response is text."""

    path, request = "/v1/completions", TextBody
    id_prefix, stream_object, empty = "cmpl", "text_completion", ""

    def body(self, answer: PolicyResponse) -> dict[str, Any]:
        choice = self._choice(answer.message.content, answer.finish) | {"logprobs": self._answer_logprobs(answer)}
        if self._ask.ids:
            choice["token_ids"] = list(answer.completion.token_ids)
            choice["prompt_token_ids"] = list(answer.head.prompt_ids)
        return {**self._fields(self.stream_object), "choices": [choice], "usage": _usage(answer)}

    def event(self, event: OutputEvent) -> Iterator[bytes]:
        if isinstance(event, TextDelta):
            yield self._send_choice(event.text)

    def _choice(self, content: Any, finish: str | None) -> dict[str, Any]:
        return {"index": 0, "text": content, "finish_reason": finish, "logprobs": None}

    def _logprobs(self, tokens: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
        found = {"tokens": list(tokens), "token_logprobs": list(logprobs)}
        return {**found, "top_logprobs": None, "text_offset": []}


def _usage(answer: PolicyResponse) -> dict[str, Any]:
    prompt, sampled = len(answer.head.prompt_ids), len(answer.completion.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": answer.cached},
    }


def _previous_messages(id: Any, info: ValidationInfo[PreviousConversation]) -> tuple[Message, ...]:
    held = info.context(str(id))
    if held is None:
        raise ValueError(f"{id!r} is not of this session")
    return tuple(held)


def _input_messages(given: Any) -> list[Message]:
    """Input items as messages; the calls of one response are merged into one message again."""
    if isinstance(given, str):
        return [Message("user", given)]
    messages: list[Message] = []
    for item in objects(given):
        kind = item.get("type") or "message"
        if kind == "message":
            role, text = str(item.get("role")), plain_text(item.get("content"))
            if role == "assistant" and messages and messages[-1].role == role and messages[-1].calls:
                last = messages.pop()  # of the same response
                messages.append(Message(role, last.content + text, last.calls))
            else:
                messages.append(Message("system" if role == "developer" else role, text))
        elif kind == "function_call":
            call = tool_call(item.get("name"), item.get("arguments"), item.get("call_id"))
            last = messages.pop() if messages and messages[-1].role == "assistant" else Message("assistant", "")
            messages.append(replace(last, calls=(*last.calls, call)))
        elif kind == "function_call_output":
            output = plain_text(item.get("output"))
            messages.append(Message("tool", output, call_id=str(item.get("call_id") or "")))
        elif kind != "reasoning":
            raise ValueError(f"has an item of type {kind!r}")
    return messages


class ResponsesBody(SamplingBody):
    """The body of `/v1/responses`."""

    background: Annotated[Any, only(False)] = False
    conversation: Annotated[Any, only(None)] = None
    previous_response_id: Annotated[tuple[Message, ...], PlainValidator(_previous_messages)] = ()
    input: Annotated[Sequence[Message], PlainValidator(_input_messages)] = ()
    instructions: Content = ""
    tool_choice: Any = None
    tools: Annotated[Sequence[Mapping[str, Any]], PlainValidator(_function_tools)] = ()
    text: Any = None
    max_output_tokens: Count | None = None

    def completion(self) -> CompletionRequest:
        instructions = [Message("system", self.instructions)] if self.instructions else []
        form = self.text.get("format") if isinstance(self.text, Mapping) else None
        return self.sampled(
            conversation([*instructions, *self.previous_response_id, *self.input], self.tools, field="input"),
            max_tokens=self.max_output_tokens,
            unenforced=_unenforced(self.tool_choice, form, "text.format"),
        )


class Responses(ApiResponse):
    """The conversation is in `input` or behind `previous_response_id`."""

    path, request = "/v1/responses", ResponsesBody

    def __init__(self, ask: CompletionRequest, head: ResponseHeader) -> None:
        super().__init__(ask, head)
        self._sent = self._items = 0
        self._text: str | None = None
        """Text of the open message; None if no message is open."""

    @classmethod
    def error_event(cls, message: str) -> bytes:
        error = {"type": "error", "code": "server_error", "message": message, "param": None, "sequence_number": 0}
        return encode_event(error, "error")

    def body(self, answer: PolicyResponse) -> dict[str, Any]:
        return self._response(self._output_items(answer), _status(answer), answer)

    def begin(self, answer: PolicyResponse | None = None) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._send(kind, response=self._response([], "in_progress", answer))

    def event(self, event: OutputEvent) -> Iterator[bytes]:
        if isinstance(event, TextDelta):
            if self._text is None:
                self._items += 1
                item = self._message_item(self._items - 1, "in_progress")
                yield self._send("response.output_item.added", **self._item_index(), item=item)
                yield self._send("response.content_part.added", **self._part_index(), part=_text_part(""))
            self._text = (self._text or "") + event.text
            if event.text:
                yield self._send("response.output_text.delta", **self._part_index(), delta=event.text, logprobs=[])
        elif isinstance(event, ToolCallStart):
            yield from self._close_message("completed")
            item = _call_item(ToolCall(event.name, {}, self._head.call_id(event.index)), "in_progress")
            self._items += 1
            yield self._send("response.output_item.added", **self._item_index(), item=item)
        elif isinstance(event, ArgumentsDelta):
            call = {**self._item_index(), "item_id": f"fc-{self._head.call_id(event.index)}"}
            yield self._send("response.function_call_arguments.delta", **call, delta=event.text)
        else:
            item = _call_item(event.call)
            call = {**self._item_index(), "item_id": item["id"], "arguments": item["arguments"], "name": item["name"]}
            yield self._send("response.function_call_arguments.done", **call)
            yield self._send("response.output_item.done", **self._item_index(), item=item)

    def end(self, answer: PolicyResponse) -> Iterator[bytes]:
        if not answer.parts:
            yield from self.event(TextDelta(""))
        yield from self._close_message(_status(answer))
        yield self._send(f"response.{_status(answer)}", response=self.body(answer))

    def _close_message(self, status: str) -> Iterator[bytes]:
        if self._text is not None:
            text, self._text = self._text, None
            yield self._send("response.output_text.done", **self._part_index(), text=text, logprobs=[])
            yield self._send("response.content_part.done", **self._part_index(), part=_text_part(text))
            item = self._message_item(self._items - 1, status, text)
            yield self._send("response.output_item.done", **self._item_index(), item=item)

    def _item_index(self) -> dict[str, Any]:
        return {"output_index": self._items - 1}

    def _part_index(self) -> dict[str, Any]:
        return {**self._item_index(), "content_index": 0, "item_id": self._message_id(self._items - 1)}

    def _send(self, kind: str, **fields: Any) -> bytes:
        self._sent += 1
        return encode_event({"type": kind, "sequence_number": self._sent - 1, **fields}, kind)

    def _output_items(self, answer: PolicyResponse) -> list[dict[str, Any]]:
        parts = answer.parts or ("",)
        statuses = ["completed"] * (len(parts) - 1) + [_status(answer)]
        return [
            _call_item(part) if isinstance(part, ToolCall) else self._message_item(index, status, part)
            for index, (part, status) in enumerate(zip(parts, statuses, strict=True))
        ]

    def _message_id(self, index: int) -> str:
        return f"{self._head.id('msg')}-{index}" if index else self._head.id("msg")

    def _message_item(self, index: int, status: str, text: str | None = None) -> dict[str, Any]:
        content = [] if text is None else [_text_part(text)]
        item = {"id": self._message_id(index), "type": "message", "role": "assistant"}
        return {**item, "status": status, "content": content}

    def _response(self, output: list[dict[str, Any]], status: str, answer: PolicyResponse | None) -> dict[str, Any]:
        response = {
            "id": self._head.id("resp"),
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": None,
            "max_output_tokens": self._ask.max_tokens,
            "model": self._head.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "temperature": self._ask.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": self._ask.top_p,
            "metadata": {},
        }
        if answer is not None:
            prompt, sampled = len(answer.head.prompt_ids), len(answer.completion.token_ids)
            response["usage"] = {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": answer.cached, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + sampled,
            }
        return response


def _status(answer: PolicyResponse) -> str:
    return "incomplete" if answer.finish == "length" else "completed"


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(call: ToolCall, status: str = "") -> dict[str, Any]:
    status = status or ("completed" if call.whole else "incomplete")
    item = {"id": f"fc-{call.id}", "type": "function_call", "call_id": call.id, "name": call.name}
    return {**item, "status": status, "arguments": call.written}
