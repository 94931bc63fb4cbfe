"""Tool calls in what a model says: the two spellings that open models are trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rollart.adapters.proxy.calling import Reader
from rollart.adapters.proxy.messages import Call

__all__ = ["PARSERS", "Parser", "parser_for"]

Parser = Callable[[str], tuple[str, tuple[Call, ...]]]
"""Text in, content and calls out. What cannot be read as a call stays content: nothing that was said is lost."""


def hermes(text: str) -> tuple[str, tuple[Call, ...]]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them (Hermes, Qwen)."""
    return _read("hermes", text)


def bare_json(text: str) -> tuple[str, tuple[Call, ...]]:
    """The whole answer is `{"name": …, "parameters": {…}}` (Llama 3)."""
    return _read("json", text)


def none(text: str) -> tuple[str, tuple[Call, ...]]:
    """Everything is content."""
    return text, ()


PARSERS: Mapping[str, Parser] = {"hermes": hermes, "json": bare_json, "none": none}


def parser_for(template: str) -> str:
    """The spelling that a chat template itself uses for earlier calls."""
    if "<tool_call>" in template:
        return "hermes"
    return "json" if '"parameters"' in template else "none"


def _read(spelling: str, text: str) -> tuple[str, tuple[Call, ...]]:
    reader = Reader(spelling)
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
