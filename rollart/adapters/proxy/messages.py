"""What the proxy's APIs have in common: a conversation, a request for the next answer, and the answer.

Every API is translated into these and back by a module of its own; nothing else knows their bodies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollart.model import Completion, FinishReason

__all__ = [
    "PolicyResponse",
    "CompletionRequest",
    "BadRequest",
    "ToolCallStart",
    "ToolCall",
    "ToolCallEnd",
    "ResponseHeader",
    "Message",
    "ArgumentsDelta",
    "OutputPart",
    "PromptInput",
    "OutputEvent",
    "TextDelta",
    "require_messages",
    "read_json",
]


class BadRequest(Exception):
    """A request that can never be served; `field` is the part of the body that is wrong, `code` OpenAI's word."""

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        status: int = 400,
        retry_after: int | None = None,
    ) -> None:
        """`retry_after`: seconds after which it may be served after all."""
        super().__init__(message)
        self.field, self.code, self.status, self.retry_after = field, code, status, retry_after


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call. `arguments` is an object; `id` is the proxy's own and no part of what is compared."""

    name: str
    arguments: Mapping[str, Any]
    id: str = field(default="", compare=False)
    written: str = field(default="", compare=False)
    """The arguments as they were said."""
    whole: bool = field(default=True, compare=False)
    """Otherwise it broke off: `written` may be no JSON, and `arguments` is what is whole of it."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Content."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The answer's call number `index`, whose arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """Of a call's arguments, as they are written."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A call's end; nothing else comes between its beginning and this."""

    index: int
    call: ToolCall


OutputEvent = TextDelta | ToolCallStart | ArgumentsDelta | ToolCallEnd
OutputPart = str | ToolCall


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, as chat templates know it. White space around an assistant's text is dropped by
    some harnesses, so it does not count when messages are compared (`key`)."""

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""

    @property
    def key(self) -> str:
        """Equal for messages that say the same."""
        content = self.content.strip() if self.role == "assistant" else self.content
        calls = [(c.name, c.arguments) for c in self.calls]
        return json.dumps([self.role, content, calls, self.name], sort_keys=True)

    def for_template(self) -> dict[str, Any]:
        """As `apply_chat_template` takes it: arguments of calls are objects."""
        shown: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.calls:
            shown["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
                for c in self.calls
            ]
        if self.call_id:
            shown["tool_call_id"] = self.call_id
        if self.name:
            shown["name"] = self.name
        return shown


@dataclass(frozen=True, slots=True)
class PromptInput:
    """What is to be continued: messages with the tools that may be called, or bare text, or bare token ids."""

    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    text: str | None = None
    token_ids: tuple[int, ...] | None = None

    @property
    def chat(self) -> bool:
        return self.text is None and self.token_ids is None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request for one answer. `unenforced` names wishes that are passed to the template at most."""

    prompt: PromptInput
    model: str = ""
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    logprobs: bool = False
    ids: bool = False
    unenforced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ResponseHeader:
    """What is known of an answer before it is there. `number` counts the session's requests, `created` is in Unix
    seconds."""

    prompt_ids: tuple[int, ...]
    session: str
    number: int
    model: str
    created: int

    def id(self, prefix: str) -> str:
        return f"{prefix}-{self.session}-{self.number}"

    def call_id(self, index: int) -> str:
        return f"{self.id('call')}-{index}"


@dataclass(frozen=True, slots=True)
class PolicyResponse(ResponseHeader):
    """What the policy said: `message` as the harness is given it, and the tokens behind it.

    `tokens` are the texts of the sampled ids; `turn` counts the session's answers. `parts` is what the harness is
    given: what `message` says, but for calls that broke off, which are content there. Of it `rest` was not given out
    while it was drawn; of the tokens, all but the first `shown`.
    """

    message: Message
    completion: Completion
    tokens: tuple[str, ...]
    turn: int
    parts: tuple[OutputPart, ...]
    rest: tuple[OutputEvent, ...] = ()
    shown: int = 0

    @property
    def finish(self) -> str:
        """OpenAI's word."""
        if self.calls and (all(c.whole for c in self.calls) or self.completion.finish is not FinishReason.LENGTH):
            return "tool_calls"
        return "length" if self.completion.finish is FinishReason.LENGTH else "stop"

    @property
    def cached(self) -> int:
        """Of the prompt; an answer that went on elsewhere may have been read from a cache twice."""
        return min(self.completion.cached_tokens, len(self.prompt_ids))

    @property
    def content(self) -> str:
        return "".join(p for p in self.parts if isinstance(p, str))

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(p for p in self.parts if isinstance(p, ToolCall))


def read_json(text: str) -> Any:
    """ValueError for what is no JSON, and for what Python alone takes for it: NaN, infinities, halves of surrogate
    pairs, and more nesting than it can read or write. Policies say all of these."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise ValueError("nested too deep") from None
    return value


def require_messages(messages: Sequence[Message], *, field: str) -> tuple[Message, ...]:
    """Messages that can be answered. BadRequest otherwise."""
    if not messages:
        raise BadRequest(f"{field} is empty: there is nothing to answer", field=field)
    return tuple(messages)
