"""Parsers for tool calls in a model's text: the two formats that open models are trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rollart.adapters.proxy.calling import ToolCallParser
from rollart.adapters.proxy.messages import ToolCall

__all__ = ["PARSERS", "AnswerParser", "parser_name_for"]

AnswerParser = Callable[[str], tuple[str, tuple[ToolCall, ...]]]
"""Text in, content and calls out. Text that is no valid call stays content, so no text is lost."""


def parse_hermes(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them (Hermes, Qwen)."""
    return _parse_calls("hermes", text)


def parse_bare_json(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """The whole response is `{"name": …, "parameters": {…}}` (Llama 3)."""
    return _parse_calls("json", text)


def parse_none(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Everything is content."""
    return text, ()


PARSERS: Mapping[str, AnswerParser] = {"hermes": parse_hermes, "json": parse_bare_json, "none": parse_none}


def parser_name_for(template: str) -> str:
    """The name of the format in which a chat template renders earlier calls."""
    if "<tool_call>" in template:
        return "hermes"
    return "json" if '"parameters"' in template else "none"


def _parse_calls(spelling: str, text: str) -> tuple[str, tuple[ToolCall, ...]]:
    reader = ToolCallParser(spelling)
    reader.feed(text)
    reader.end()
    if not reader.spans:
        return text, ()
    rest, end = [], 0
    for start, stop, _ in reader.spans:
        rest.append(text[end:start])
        end = stop
    rest.append(text[end:])
    content = "".join(rest).rstrip()
    return (content if rest[0].strip() else content.lstrip()), tuple(call for *_, call in reader.spans)
