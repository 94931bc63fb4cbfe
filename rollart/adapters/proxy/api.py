"""The HTTP APIs that the proxy serves: request bodies as pydantic models, and responses whole or as events.

OpenAI's are `/v1/chat/completions`, `/v1/completions` and `/v1/responses`; Anthropic's are `/v1/messages` and
`/v1/messages/count_tokens`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from rollart.adapters.proxy.messages import (
    ArgumentsDelta,
    BadRequest,
    CompletionRequest,
    Message,
    OutputDelta,
    OutputEvent,
    PolicyResponse,
    PromptInput,
    ResponseHeader,
    TextDelta,
    ToolCall,
    ToolCallStart,
    read_json,
)

MAX_INTEGER = 2**63 - 1
"""Largest integer in a request: the limit of the engines' wire format."""

CHUNK_CHARACTERS = 48
"""Maximum characters of an event after the generation. The response is captured whole before these events are sent, so
splitting serves clients that expect several events, not latency."""


class ApiResponse(ABC):
    """One response of an endpoint: whole (`body`), or as server-sent events: `begin`, `add` for every delta that is
    generated, `finish`."""

    path: ClassVar[str]
    """Requests are POSTed here."""
    request: ClassVar[type[SamplingBody]]
    error_event_name: ClassVar[str] = ""

    def __init__(self, ask: CompletionRequest, head: ResponseHeader) -> None:
        self._ask, self._head = ask, head
        self._unsent: OutputDelta | None = None
        """The latest delta, if its tokens were not sent yet."""

    @abstractmethod
    def body(self, answer: PolicyResponse) -> dict[str, Any]:
        """The body of a response that is not streamed."""

    def begin(self, answer: PolicyResponse | None = None) -> Iterator[bytes]:
        """The first events. `answer`: the response, if it was generated before anything was sent."""
        yield from ()

    def add(self, delta: OutputDelta) -> Iterator[bytes]:
        self._unsent = delta
        for event in delta.events:
            yield from self.event(event)

    def finish(self, answer: PolicyResponse) -> Iterator[bytes]:
        """The part of the response that was not streamed during the generation, and the end of the stream."""
        yield from self.add(replace(answer.rest, events=tuple(_split(answer.rest.events))))
        yield from self.end(answer)

    @abstractmethod
    def event(self, event: OutputEvent) -> Iterator[bytes]: ...

    @abstractmethod
    def end(self, answer: PolicyResponse) -> Iterator[bytes]: ...

    @staticmethod
    def error_body(message: str, status: int, *, field: str | None = None, code: str | None = None) -> dict[str, Any]:
        """The body of an error, by default in OpenAI's format."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": message, "type": kind, "param": field, "code": code}}

    @classmethod
    def error_event(cls, message: str) -> bytes:
        """The event for an error after the stream has begun."""
        return encode_event(cls.error_body(message, 503), cls.error_event_name)


def encode_event(data: Mapping[str, object] | str, name: str = "") -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def _split(events: Iterable[OutputEvent]) -> Iterator[OutputEvent]:
    """The same events, with texts and arguments split into pieces."""
    for event in events:
        if isinstance(event, TextDelta | ArgumentsDelta):
            for start in range(0, len(event.text), CHUNK_CHARACTERS):
                yield replace(event, text=event.text[start : start + CHUNK_CHARACTERS])
        else:
            yield event


class RequestBody(BaseModel):
    """A JSON object in a request, as far as the proxy reads it. A null counts as a missing field, and unknown fields
    are ignored. The ValueErrors of validators continue a sentence that begins with the name of the field."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in body.items() if value is not None}

    @classmethod
    def read(cls, body: Mapping[str, Any], context: Any = None) -> Self:
        """BadRequest for the first invalid field."""
        try:
            return cls.model_validate(body, context=context)
        except ValidationError as error:
            # Fields of the endpoint itself precede those that it shares with others.
            first = min(error.errors(), key=lambda e: e["loc"][0] not in cls.__annotations__)
            field = str(first["loc"][0])
            text = ": field required" if first["type"] == "missing" else str(first["ctx"]["error"])
            raise BadRequest(f"{field}{'' if text.startswith(':') else ' '}{text}", field=field) from None


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_INTEGER:
        raise ValueError(f"is {value!r} (rule: a number, at least 0)")
    return float(value)


def _fraction(value: Any) -> float:
    found = _number(value)
    if not 0 < found <= 1:
        raise ValueError(f"is {found:g} (rule: above 0, at most 1)")
    return found


def rule(permits: Callable[[Any], bool], text: str) -> PlainValidator:
    """The validator of a value that must follow a rule; `text` names it."""

    def check(value: Any) -> Any:
        if not permits(value):
            raise ValueError(f"is {value!r} (rule: {text})")
        return value

    return PlainValidator(check)


def _stop_texts(value: Any) -> tuple[str, ...]:
    """A string or a list of strings; empty strings are dropped."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, Sequence) or not all(isinstance(text, str) for text in found):
        raise ValueError("must be a text or a list of texts")
    return tuple(text for text in found if text)


def objects(value: Any) -> list[Mapping[str, Any]]:
    """A list of JSON objects."""
    found = value or []
    if not isinstance(found, list) or not all(isinstance(item, Mapping) for item in found):
        raise ValueError("must be a list of objects")
    return found


def plain_text(content: Any) -> str:
    """A message's content: a string, or parts that are all text. The policy accepts nothing else."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("must be a text or a list of parts")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind in ("text", "input_text", "output_text", "refusal"):
            texts.append(str(part.get("refusal" if kind == "refusal" else "text") or ""))
        else:
            raise ValueError(f"has a part of type {kind!r} (rule: text; the policy reads nothing else)")
    return "".join(texts)


def tool_call(name: Any, arguments: Any, id: Any) -> ToolCall:
    """A call of an earlier response. `arguments` is a JSON object or the text of one."""
    if not isinstance(name, str) or not name:
        raise ValueError("names no function")
    found = read_json(arguments or "{}") if isinstance(arguments, str) else arguments
    if isinstance(found, Mapping):
        return ToolCall(name, found, str(id or ""))
    if isinstance(arguments, str) and isinstance(id, str) and id:  # possibly a call that the policy left truncated
        return ToolCall(name, {}, id, arguments, whole=False)
    raise ValueError("must be a JSON object")


def only(served: Any) -> AfterValidator:
    """The validator of an option with one supported value."""

    def check(value: Any) -> Any:
        if value != served:
            raise ValueError(f"is {value!r}, only {served!r} is served")
        return value

    return AfterValidator(check)


Number = Annotated[float, PlainValidator(_number)]
Fraction = Annotated[float, PlainValidator(_fraction)]
Count = Annotated[
    int, rule(lambda value: type(value) is int and 1 <= value <= MAX_INTEGER, "a whole number, at least 1")
]
Seed = Annotated[
    int, rule(lambda value: type(value) is int and 0 <= value <= MAX_INTEGER, "a whole number, at least 0")
]
Flag = Annotated[bool, PlainValidator(bool)]
Text = Annotated[str, PlainValidator(lambda value: str(value or ""))]
Content = Annotated[str, PlainValidator(plain_text)]
StopTexts = Annotated[tuple[str, ...], PlainValidator(_stop_texts)]


class SamplingBody(RequestBody):
    """The options that every endpoint has under the same names."""

    model: Text = ""
    temperature: Number = 1.0
    top_p: Fraction = 1.0
    stream: Flag = False

    def completion(self) -> CompletionRequest:
        """BadRequest for a conversation without messages."""
        raise NotImplementedError

    def sampled(self, prompt: PromptInput, **options: Any) -> CompletionRequest:
        return CompletionRequest(
            prompt, self.model, temperature=self.temperature, top_p=self.top_p, stream=self.stream, **options
        )


def conversation(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, field: str) -> PromptInput:
    """BadRequest if there are no messages."""
    if not messages:
        raise BadRequest(f"{field} is empty: there is nothing to answer", field=field)
    return PromptInput(tuple(messages), tuple(tools))


PreviousConversation = Callable[[str], Sequence[Message] | None]
"""Maps a response's id to its conversation, the response included, without system messages."""


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
        usage = isinstance(self.stream_options, Mapping) and bool(self.stream_options.get("include_usage"))
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


def _chat_calls(value: Any) -> Iterator[ToolCall]:
    try:
        for item in objects(value):
            function = item.get("function")
            if not isinstance(function, Mapping):
                raise BadRequest("tool_calls has one without a function", field="messages")
            yield tool_call(function.get("name"), function.get("arguments"), item.get("id"))
    except ValueError as error:
        raise BadRequest(f"tool_calls {error}", field="tool_calls") from None


def _chat_messages(value: Any) -> list[Message]:
    found = []
    for given in objects(value):
        role = given.get("role")
        if role not in ("system", "developer", "user", "assistant", "tool"):
            raise ValueError(f"has the role {role!r}")
        role, calls = "system" if role == "developer" else role, tuple(_chat_calls(given.get("tool_calls")))
        call_id, name = (str(given.get(key) or "") for key in ("tool_call_id", "name"))
        found.append(Message(role, plain_text(given.get("content")), calls, call_id, name))
    return found


class ChatBody(CompletionsBody):
    """The body of `/v1/chat/completions`."""

    n: Annotated[Any, only(1)] = 1
    tool_choice: Any = None
    tools: Annotated[Sequence[Mapping[str, Any]], PlainValidator(_tool_list)] = ()
    response_format: Any = None
    messages: Annotated[Sequence[Message], PlainValidator(_chat_messages)] = ()
    max_tokens: Count | None = Field(None, validation_alias=AliasChoices("max_completion_tokens", "max_tokens"))
    logprobs: Flag = False

    def completion(self) -> CompletionRequest:
        return self.sampled(
            conversation(self.messages, self.tools, field="messages"),
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
    max_tokens: Count = 16
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

    _sent = _items = 0
    _text: str | None = None
    """Text of the open message; None if no message is open."""

    @classmethod
    def error_event(cls, message: str) -> bytes:
        error = {"type": "error", "code": "server_error", "message": message, "param": None, "sequence_number": 0}
        return encode_event(error, "error")

    def body(self, answer: PolicyResponse) -> dict[str, Any]:
        parts = answer.parts or ("",)
        statuses = ["completed"] * (len(parts) - 1) + [_status(answer)]
        items = [
            _call_item(part) if isinstance(part, ToolCall) else self._message_item(index, status, part)
            for index, (part, status) in enumerate(zip(parts, statuses, strict=True))
        ]
        return self._response(items, _status(answer), answer)

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
            item = _call_item(event)
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

    def _message_id(self, index: int) -> str:
        return f"{self._head.id('msg')}-{index}" if index else self._head.id("msg")

    def _message_item(self, index: int, status: str, text: str | None = None) -> dict[str, Any]:
        item = {"id": self._message_id(index), "type": "message", "role": "assistant", "status": status}
        return {**item, "content": [] if text is None else [_text_part(text)]}

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


STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Anthropic's stop reason by OpenAI's finish reason."""

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
"""Anthropic's error type by HTTP status; other statuses are "api_error"."""


def _anthropic_messages(value: Any) -> list[Message]:
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


def _anthropic_tools(value: Any, info: ValidationInfo) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for tool in _tool_list(value, info):
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
    messages: Annotated[Sequence[Message], PlainValidator(_anthropic_messages)] = ()
    tools: Annotated[Sequence[Mapping[str, Any]], PlainValidator(_anthropic_tools)] = ()

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

    _blocks = 0
    _open = ""
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
        return {**self._fields(), "content": blocks, "stop_reason": stop_reason, "usage": _message_usage(answer)}

    def begin(self, answer: PolicyResponse | None = None) -> Iterator[bytes]:
        usage = _token_counts(len(self._head.prompt_ids), cached=0, sampled=0)
        message = {**self._fields(), "content": [], "stop_reason": None, "usage": usage}
        yield _message_event("message_start", message=message)

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
        yield _message_event("message_delta", delta=delta, usage=_message_usage(answer))
        yield _message_event("message_stop")

    def _open_block(self, block: Mapping[str, Any]) -> Iterator[bytes]:
        yield from self._close_block()
        self._open = block["type"]
        self._blocks += 1
        yield _message_event("content_block_start", index=self._blocks - 1, content_block=block)

    def _close_block(self) -> Iterator[bytes]:
        if self._open:
            self._open = ""
            yield _message_event("content_block_stop", index=self._blocks - 1)

    def _delta(self, **delta: str) -> bytes:
        return _message_event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _fields(self) -> dict[str, Any]:
        id, model = self._head.id("msg"), self._head.model
        return {"id": id, "type": "message", "role": "assistant", "model": model, "stop_sequence": None}


def _message_event(kind: str, **fields: Any) -> bytes:
    return encode_event({"type": kind, **fields}, kind)


def _message_usage(answer: PolicyResponse) -> dict[str, int]:
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
