"""The parts that the endpoints of all APIs share: request bodies as pydantic models, and responses whole or as events.

`openai` and `anthropic` define their endpoints with it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, PlainValidator, ValidationError, model_validator

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
            raise cls._bad_request(error) from None

    @classmethod
    def _bad_request(cls, error: ValidationError) -> BadRequest:
        """Fields of the endpoint itself precede those that it shares with others."""
        first = min(error.errors(), key=lambda e: e["loc"][0] not in cls.__annotations__)
        field = "tool_calls" if "tool_calls" in first["loc"] else str(first["loc"][0])
        text = ": field required" if first["type"] == "missing" else str(first["ctx"]["error"])
        return BadRequest(f"{field}{'' if text.startswith(':') else ' '}{text}", field=field)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_INTEGER:
        raise ValueError(f"is {value!r} (rule: a number, at least 0)")
    return float(value)


def _fraction(value: Any) -> float:
    found = _number(value)
    if not 0 < found <= 1:
        raise ValueError(f"is {found:g} (rule: above 0, at most 1)")
    return found


def _integer(least: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_INTEGER:
            raise ValueError(f"is {value!r} (rule: a whole number, at least {least})")
        return value

    return check


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
    found = arguments
    if isinstance(arguments, str):
        try:
            found = read_json(arguments or "{}")
        except ValueError:
            found = None
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
Count = Annotated[int, PlainValidator(_integer(1))]
Seed = Annotated[int, PlainValidator(_integer(0))]
Flag = Annotated[bool, PlainValidator(bool)]
Text = Annotated[str, PlainValidator(lambda value: str(value or ""))]
Content = Annotated[str, PlainValidator(plain_text)]
StopTexts = Annotated[tuple[str, ...], PlainValidator(_stop_texts)]
Objects = Annotated[list[Mapping[str, Any]], PlainValidator(objects)]


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
