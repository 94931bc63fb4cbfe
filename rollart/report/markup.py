"""HTML and SVG as values: a tree of elements whose texts and attributes are escaped by construction.

Names from specs and ledgers can contain any characters; no function here takes a string as markup. The output is
well-formed both as XML and as HTML.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

VOID = frozenset({"br", "meta"})
"""HTML elements that have no end tag."""

FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
"""Characters that XML 1.0 forbids."""


@dataclass(frozen=True, slots=True)
class MarkupElement:
    """An element. `str()` of it is its markup."""

    name: str
    attributes: tuple[tuple[str, str], ...]
    children: tuple[MarkupElement | str, ...]

    def __str__(self) -> str:
        return "".join(self._pieces())

    def _pieces(self) -> Iterator[str]:
        yield f"<{self.name}"
        for key, value in self.attributes:
            yield f' {key}="{_escaped(value)}"'
        if self.name in VOID:
            yield "/>"
            return
        yield ">"
        for child in self.children:
            if isinstance(child, str):
                yield _escaped(child)
            else:
                yield from child._pieces()
        yield f"</{self.name}>"


Child: TypeAlias = MarkupElement | str | None


def element(tag: str, /, *children: Child, **attributes: str | float | None) -> MarkupElement:
    """`element("text", "a < b", x=1, class_="label")`. In attribute names a trailing `_` is removed, other `_` become
    `-`. None is left out, among attributes and children."""
    given = tuple(
        (key.rstrip("_").replace("_", "-"), value if isinstance(value, str) else number(value))
        for key, value in attributes.items()
        if value is not None
    )
    return MarkupElement(tag, given, tuple(child for child in children if child is not None))


def number(value: float) -> str:
    """A coordinate with at most two decimals, without trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


def _escaped(text: str) -> str:
    text = FORBIDDEN.sub("\ufffd", text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
