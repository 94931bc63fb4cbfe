"""`key=value` on the command line: dotted paths into a document, values in YAML.

List items are named by index or by their `name`: `domains.0.max_turns=5`, `domains.frozen_lake.max_turns=5`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollart.errors import SpecError
from rollart.spec.document import Document, KeyPath, SourcePosition, parse_value
from rollart.spec.suggest import did_you_mean

__all__ = ["apply_overrides"]


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Set values in the document, the last override of a path wins. SpecError names the override."""
    for whole in overrides:
        path, separator, value = whole.partition("=")
        text = whole if len(whole) <= 200 else f"{whole[:197]}..."
        if not separator or not path.strip(".") or path != path.strip():
            raise SpecError(
                f"override '{text}' is not key=value (rule: a dotted path, '=', a YAML value)",
                remedy="write it like batch.trajectories=64",
            )
        _set(document, path.split("."), parse_value(value, name=f"override '{text}'"), text)


def _set(document: Document, parts: Sequence[str], value: Any, text: str) -> None:
    position = SourcePosition(f"override '{text}'")
    at: Any = document.values
    loc: KeyPath = ()
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        key = _step(at, part, ".".join(parts[:i]), position)
        loc = (*loc, key)
        if last:
            at[key] = value
        elif isinstance(at, dict) and at.get(part) is None:
            at[part] = {}
            document.set_position(loc, position)
        at = at[key]
    document.set_position(loc, position)


def _step(at: Any, part: str, path: str, position: SourcePosition) -> str | int:
    """The key or index that `part` selects in the container `at`."""
    if isinstance(at, dict):
        if not part:
            raise SpecError("a part of the path is empty (rule: key.key=value)", where=str(position))
        return part
    if isinstance(at, list):
        names = [item.get("name") for item in at if isinstance(item, dict)]
        if part in names:
            return next(i for i, item in enumerate(at) if isinstance(item, dict) and item.get("name") == part)
        if part.isdecimal() and int(part) < len(at):
            return int(part)
        known = [str(name) for name in names if name]
        raise SpecError(
            f"'{path}' has no item '{part}' (rule: an index below {len(at)} or a name{did_you_mean(part, known)})",
            where=str(position),
        )
    raise SpecError(f"'{path}' is a single value {at!r}: it has no '{part}'", where=str(position))
