"""The types shared by the proxy's APIs: a conversation, a completion request, and the response to it.

Each API has one module that translates between its request and response bodies and these types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollart.model import Completion, FinishReason


class BadRequest(Exception):
    """A request that can never be served. `field` is the invalid field of the body, `code` OpenAI's error code."""

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        status: int = 400,
        retry_after: int | None = None,
    ) -> None:
        """`retry_after`: seconds after which a retry may succeed despite the rule above."""
        super().__init__(message)
        self.field, self.code, self.status, self.retry_after = field, code, status, retry_after


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call. `arguments` is a JSON object. `id` is assigned by the proxy and ignored in comparisons."""

    name: str
    arguments: Mapping[str, Any]
    id: str = field(default="", compare=False)
    written: str = field(default="", compare=False)
    """The arguments as the policy wrote them."""
    whole: bool = field(default=True, compare=False)
    """False for a truncated call: `written` may be invalid JSON, and `arguments` holds only its complete values."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of content."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Start of the response's tool call number `index`; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """A piece of a call's arguments, as the policy wrote them."""

    index: int
    text: str


OutputEvent = TextDelta | ToolCallStart | ArgumentsDelta | ToolCall
"""A `ToolCall` is the end of the call. Between its start and its end there are only its own `ArgumentsDelta`s."""

OutputPart = str | ToolCall


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, in the terms of chat templates. Some harnesses strip white space around an
    assistant's text, so comparisons (`key`) ignore it."""

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""

    @property
    def key(self) -> str:
        """Equal for messages of equal content."""
        content = self.content.strip() if self.role == "assistant" else self.content
        calls = [(c.name, c.arguments) for c in self.calls]
        return json.dumps([self.role, content, calls, self.name], sort_keys=True)

    def for_template(self) -> dict[str, Any]:
        """The message as `apply_chat_template` expects it: the arguments of calls are objects."""
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
    """The input to continue: messages with the available tools, or plain text, or token ids."""

    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    text: str | None = None
    token_ids: tuple[int, ...] | None = None

    @property
    def chat(self) -> bool:
        return self.text is None and self.token_ids is None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request for one completion. `unenforced` names requested options that are not enforced on the output; at most
    the chat template sees them."""

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
    """The fields of a response that are known before generation. `number` is the request's number within the session,
    `created` is in Unix seconds."""

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
class OutputDelta:
    """The next output events, and the tokens that became final with them."""

    events: tuple[OutputEvent, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    tokens: tuple[str, ...] = ()
    """The texts of `token_ids`."""


@dataclass(frozen=True, slots=True)
class PolicyResponse:
    """The policy's response: the message and its tokens.

    `tokens` are the texts of the sampled ids; `turn` is the turn's number within the session. `parts` is the output
    sent to the harness. It equals `message`, except for truncated calls, which `message` keeps as content. `rest` is
    the output that was not streamed during generation.
    """

    head: ResponseHeader
    message: Message
    completion: Completion
    tokens: tuple[str, ...]
    turn: int
    parts: tuple[OutputPart, ...]
    rest: OutputDelta = OutputDelta()

    @property
    def finish(self) -> str:
        """OpenAI's finish reason."""
        if self.calls and (all(c.whole for c in self.calls) or self.completion.finish is not FinishReason.LENGTH):
            return "tool_calls"
        return "length" if self.completion.finish is FinishReason.LENGTH else "stop"

    @property
    def cached(self) -> int:
        """Cached prompt tokens. Capped at the prompt's length: a generation resumed on a second engine may count
        cache reads twice."""
        return min(self.completion.cached_tokens, len(self.head.prompt_ids))

    @property
    def content(self) -> str:
        return "".join(p for p in self.parts if isinstance(p, str))

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(p for p in self.parts if isinstance(p, ToolCall))


def read_json(text: str) -> Any:
    """Parse strict JSON. None for invalid JSON and for Python's extensions to it: NaN, infinities, lone surrogates, and
    nesting too deep to read or write. Policies generate all of these."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return value
