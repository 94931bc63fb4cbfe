"""YAML text with source positions: plain values, and for every path in them its line and column in the file; and
`key=value` of the command line, which sets values at dotted paths.

The dialect is YAML 1.2's core schema where it matters: `no` and `on` are texts, `1e-3` is a number, a date is a text.
Overrides name list items by index or by their `name`: `domains.0.max_turns=5`, `domains.frozen_lake.max_turns=5`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from rollart.errors import SpecError, did_you_mean

KeyPath: TypeAlias = tuple[str | int, ...]
"""A path into a document: keys and indices."""

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
"""Specs that ship with rollart."""

MAX_NODES = 20_000
"""Largest document, aliases expanded: a spec has hundreds of nodes, an alias bomb billions."""

MAX_BYTES = 2_000_000
"""Largest file: the parser takes 2 s for a MB of comments, and `MAX_NODES` values seldom take more than that."""


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """The source of a value: a file's line and column (from 1), or the override that set it."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(slots=True)
class Document:
    """Values, and the source positions of keys and values."""

    name: str
    values: dict[str, Any]
    keys: dict[KeyPath, SourcePosition] = field(default_factory=dict)
    positions: dict[KeyPath, SourcePosition] = field(default_factory=dict)

    def position(self, loc: KeyPath, *, key: bool = False) -> SourcePosition:
        """Position of a value (or of its key), or of the nearest enclosing value that is in the text."""
        if key and loc in self.keys:
            return self.keys[loc]
        for end in range(len(loc), -1, -1):
            if loc[:end] in self.positions:
                return self.positions[loc[:end]]
        return SourcePosition(self.name)

    def set_position(self, loc: KeyPath, position: SourcePosition) -> None:
        """Replace the positions of everything at and below `loc` by `position`."""
        for table in (self.keys, self.positions):
            for known in [k for k in table if k[: len(loc)] == loc]:
                del table[known]
            table[loc] = position


def read_document(path: str | Path) -> Document:
    """Parse a YAML file whose top is a mapping. SpecError if it cannot be read or is not such a file."""
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise SpecError(
                f"the file has {size / 1e6:,.1f} MB (rule: at most {MAX_BYTES / 1e6:g} MB)",
                where=str(path),
                remedy="give the path of a YAML spec, without the data that it names",
            )
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        shipped = CONFIGS / Path(*path.parts[1:]) if path.parts[:1] == ("configs",) else None
        remedy = "give the path of a YAML spec"
        if shipped is not None and shipped.is_file():
            remedy = f"the one that rollart brings is {shipped}"
        raise SpecError(f"{path}: no such file", remedy=remedy) from None
    except IsADirectoryError:
        raise SpecError(f"{path}: is a directory", remedy="give the path of a YAML spec") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_document(text, name=str(path))


def parse_document(text: str, *, name: str) -> Document:
    """Parse YAML text whose top is a mapping; `name` is the file's name in source positions."""
    node = _compose(text, name)
    if node is None:
        raise SpecError("the file is empty (rule: a spec is a mapping of keys to values)", where=f"{name}:1:1")
    document = Document(name, {})
    builder = _DocumentBuilder(document)
    try:
        values = builder.build(node, ())
    except RecursionError:
        raise SpecError("not a spec: nested too deeply", where=name) from None
    if not isinstance(values, dict):
        kind = "a list" if isinstance(values, list) else "a single value"
        raise SpecError(
            f"the file holds {kind} (rule: a spec is a mapping of keys to values)", where=str(builder.at(node))
        )
    document.values = values
    return document


def parse_value(text: str, *, name: str) -> Any:
    """The value of an override: `3` is a number, `[a, b]` a list, an empty text nothing."""
    node = _compose(text, name)
    return None if node is None else _DocumentBuilder(Document(name, {})).build(node, ())


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


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's booleans and floats, and without dates."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rsplit(":", 1)[1] not in ("bool", "float", "timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+.0123456789"),
)


def _compose(text: str, name: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        context = f"{error.context}: " if error.context and error.context != error.problem else ""
        raise SpecError(f"not YAML: {context}{error.problem or 'cannot be parsed'}", where=where) from None
    except yaml.YAMLError as error:
        raise SpecError(f"not YAML: {str(error).splitlines()[0]}", where=name) from None
    except RecursionError:
        raise SpecError("not a spec: nested too deeply", where=name) from None


class _DocumentBuilder:
    """Converts YAML nodes into values and records their source positions."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._open: set[int] = set()
        self._count = 0
        self._scalars = yaml.constructor.SafeConstructor()

    def at(self, node: yaml.Node) -> SourcePosition:
        mark = node.start_mark
        return SourcePosition(self._document.name, mark.line + 1, mark.column + 1)

    def build(self, node: yaml.Node, loc: KeyPath) -> Any:
        self._count += 1
        if self._count > MAX_NODES:
            raise SpecError(f"more than {MAX_NODES} values (rule: aliases may not blow up)", where=str(self.at(node)))
        if id(node) in self._open:
            raise SpecError("an alias contains itself (rule: a spec is a tree)", where=str(self.at(node)))
        self._document.positions[loc] = self.at(node)
        if isinstance(node, yaml.ScalarNode):
            try:
                return self._scalars.construct_object(node)
            except (yaml.YAMLError, ValueError) as error:
                problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
                shown = repr(node.value) if len(node.value) <= 60 else f"{node.value[:57]!r}..."
                raise SpecError(f"value {shown}: {problem}", where=str(self.at(node))) from None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.build(child, (*loc, i)) for i, child in enumerate(node.value)]
            assert isinstance(node, yaml.MappingNode)
            return self._mapping(node, loc)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, loc: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                merged |= self._merge(value_node, loc)
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise SpecError("a key is a list or a mapping (rule: keys are texts)", where=str(self.at(key_node)))
            key = str(key_node.value)
            here = (*loc, key)
            if key in values:
                first = self._document.keys[here]
                raise SpecError(
                    f"key '{key}' is given twice (rule: once; first at line {first.line})", where=str(self.at(key_node))
                )
            self._document.keys[here] = self.at(key_node)
            values[key] = self.build(value_node, here)
        return merged | values

    def _merge(self, node: yaml.Node, loc: KeyPath) -> dict[str, Any]:
        parts: Sequence[yaml.Node] = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, Any] = {}
        for part in reversed(parts):
            value = self.build(part, loc)
            if not isinstance(value, dict):
                raise SpecError("'<<' merges something that is not a mapping", where=str(self.at(part)))
            merged |= value
        return merged


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
