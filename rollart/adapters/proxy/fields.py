"""Validated access to request bodies: the value of a field, or a BadRequest that names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollart.adapters.proxy.messages import BadRequest, ToolCall, read_json

MOST = 2**63 - 1
"""Largest integer in a request: the limit of the engines' wire format."""


def number(body: Mapping[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
        raise BadRequest(f"{name} is {value!r} (rule: a number, at least 0)", field=name)
    return float(value)


def fraction(body: Mapping[str, Any], name: str, default: float) -> float:
    value = number(body, name, default)
    if not 0 < value <= 1:
        raise BadRequest(f"{name} is {value:g} (rule: above 0, at most 1)", field=name)
    return value


def whole(body: Mapping[str, Any], name: str, *, least: int = 1) -> int | None:
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST):
        raise BadRequest(f"{name} is {value!r} (rule: a whole number, at least {least})", field=name)
    return value


def texts(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A string or a list of strings; empty strings are dropped."""
    value = body.get(name)
    found = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(found, Sequence) or not all(isinstance(t, str) for t in found):
        raise BadRequest(f"{name} must be a text or a list of texts", field=name)
    return tuple(t for t in found if t)


def items(body: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """A list of objects."""
    value = body.get(name) or []
    if not isinstance(value, list) or not all(isinstance(v, Mapping) for v in value):
        raise BadRequest(f"{name} must be a list of objects", field=name)
    return value


def plain_text(content: object, field: str) -> str:
    """A message's content: a string, or parts that are all text. The policy accepts nothing else."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part(p, field) for p in content)
    raise BadRequest(f"{field} must be a text or a list of parts", field=field)


def arguments(value: object, field: str) -> Mapping[str, Any]:
    """A tool call's arguments: a JSON object, or the text of one."""
    if isinstance(value, str):
        try:
            value = read_json(value or "{}")
        except ValueError:
            value = None
    if not isinstance(value, Mapping):
        raise BadRequest(f"{field} must be a JSON object", field=field)
    return value


def call(name: object, given: object, id: object, field: str) -> ToolCall:
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{field} names no function", field=field)
    try:
        return ToolCall(name, arguments(given, field), str(id or ""))
    except BadRequest:
        if isinstance(given, str) and isinstance(id, str) and id:  # possibly a call that the policy left truncated
            return ToolCall(name, {}, id, given, whole=False)
        raise


def unsupported(body: Mapping[str, Any], rules: Mapping[str, object]) -> None:
    """BadRequest for a field with a value other than the only supported one."""
    for name, served in rules.items():
        if body.get(name) not in (None, served):
            raise BadRequest(f"{name} is {body[name]!r}, only {served!r} is served", field=name)


def _part(part: object, field: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind in ("text", "input_text", "output_text", "refusal"):
        return str(part.get("refusal" if kind == "refusal" else "text") or "")
    raise BadRequest(f"{field} has a part of type {kind!r} (rule: text; the policy reads nothing else)", field=field)
