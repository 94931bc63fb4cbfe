"""Chat messages as text that continues, for a policy that reads text. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollart.adapters.envs.lookup import attribute_at

__all__ = ["MessageRenderer", "renderer", "text_of"]

MessageRenderer = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], bool], str]
"""(messages, tools, first) -> text. `messages` are all up to the first answer, later the ones after the last answer."""


def renderer(render: str | MessageRenderer) -> MessageRenderer:
    """`plain`, `chatml`, or the function at `module:function`."""
    if not isinstance(render, str):
        return render
    if render in _KNOWN:
        return _KNOWN[render]
    if ":" not in render:
        raise ValueError(f"render is {render!r} (rule: {', '.join(_KNOWN)} or package.module:function)")
    found: MessageRenderer = attribute_at(render, "render")
    return found


def text_of(content: Any) -> str:
    """A message's content; for a list of parts, their texts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))


def _plain(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], first: bool) -> str:
    lines = [text_of(m.get("content")) for m in messages]
    if first and tools:
        lines.insert(0, _tools(tools))
    return "\n".join(line for line in lines if line)


def _chatml(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], first: bool) -> str:
    """ChatML. The policy's own answer ended with `<|im_end|>`, so the continuation begins with the rest of that
    line."""
    shown = [dict(m) for m in messages]
    if first and tools:
        if not shown or shown[0].get("role") != "system":
            shown.insert(0, {"role": "system", "content": ""})
        shown[0]["content"] = f"{text_of(shown[0].get('content'))}\n\n{_tools(tools)}".strip()
    turns = "".join(f"<|im_start|>{m.get('role')}\n{_body(m)}<|im_end|>\n" for m in shown)
    return f"{'' if first else chr(10)}{turns}<|im_start|>assistant\n"


def _body(message: Mapping[str, Any]) -> str:
    text = text_of(message.get("content"))
    if message.get("role") == "tool":
        return f"<tool_response>\n{text}\n</tool_response>"
    for call in message.get("tool_calls") or ():
        function = {"name": call["name"], "arguments": json.loads(call["arguments"])}
        text = f"{text}\n<tool_call>\n{json.dumps(function)}\n</tool_call>".lstrip()
    return text


def _tools(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(json.dumps({k: t[k] for k in ("name", "description", "parameters") if k in t}) for t in tools)
    form = '<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>'
    return f"# Tools\n\n<tools>\n{listed}\n</tools>\n\nTo call a tool:\n{form}"


_KNOWN: Mapping[str, MessageRenderer] = {"plain": _plain, "chatml": _chatml}
