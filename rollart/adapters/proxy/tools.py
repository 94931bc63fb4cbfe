"""Tool calls in what a model says: the two spellings that open models are trained on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from rollart.adapters.proxy.messages import Call, read_json

__all__ = ["CERTAIN", "PARSERS", "Parser", "begun", "parser_for"]

Parser = Callable[[str], tuple[str, tuple[Call, ...]]]
"""Text in, content and calls out. What cannot be read as a call stays content: nothing that was said is lost."""

MARK = "<tool_call>"

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


def hermes(text: str) -> tuple[str, tuple[Call, ...]]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them (Hermes, Qwen)."""
    calls: list[Call] = []
    rest: list[str] = []
    end = 0
    for found in _HERMES.finditer(text):
        call = _call(found.group(1))
        if call is not None:
            rest.append(text[end : found.start()])
            calls.append(call)
            end = found.end()
    rest.append(text[end:])
    if not calls:
        return text, ()
    content = "".join(rest).rstrip()
    return (content if rest[0].strip() else content.lstrip()), tuple(calls)


def bare_json(text: str) -> tuple[str, tuple[Call, ...]]:
    """The whole answer is `{"name": …, "parameters": {…}}` (Llama 3)."""
    call = _call(text.strip())
    return (text, ()) if call is None else ("", (call,))


def none(text: str) -> tuple[str, tuple[Call, ...]]:
    """Everything is content."""
    return text, ()


def begun(text: str, word: str) -> int:
    """How many of the last characters are a beginning of `word`, and not all of it."""
    return next((n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0)


def _before_calls(text: str) -> int:
    """White space at the end may stand before a call, where it is no content."""
    at = text.find(MARK)
    if at < 0:
        at = len(text) - begun(text, MARK)
    return len(text[:at].rstrip())


def _no_json(text: str) -> int:
    return 0 if text.lstrip()[:1] in ("", "{") else len(text)


CERTAIN: Mapping[str, Callable[[str], int]] = {"hermes": _before_calls, "json": _no_json, "none": len}
"""By parser: how many of the first characters of an answer are its content, whatever it goes on with."""

PARSERS: Mapping[str, Parser] = {"hermes": hermes, "json": bare_json, "none": none}


def parser_for(template: str) -> str:
    """The spelling that a chat template itself uses for earlier calls."""
    if "<tool_call>" in template:
        return "hermes"
    return "json" if '"parameters"' in template else "none"


def _call(text: str) -> Call | None:
    try:
        value = read_json(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    return Call(value["name"], arguments) if isinstance(arguments, dict) else None
