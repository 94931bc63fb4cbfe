"""The shape of the code: no import circle, folders that a reader can take in, and one meaning per class name."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.sources import PRODUCT, ROOT, nodes, tree

MOST_FILES = 22
"""Most Python files in a folder of the product."""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(names: Mapping[str, Path]) -> dict[str, set[str]]:
    """The modules of the product that each one imports: anywhere in it, for types alone too."""
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        found[name] = set()
        for node in nodes(path):
            match node:
                case ast.ImportFrom(module=str(module), names=aliases):
                    every = {f"{module}.{a.name}" if f"{module}.{a.name}" in names else module for a in aliases}
                case ast.Import(names=aliases):
                    every = {a.name for a in aliases}
                case _:
                    continue
            found[name] |= every & names.keys() - {name}
    return found


def circles(graph: Mapping[str, set[str]]) -> Iterator[set[str]]:
    """Modules that import each other, directly or through others (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []

    def visit(name: str) -> Iterator[set[str]]:
        index[name] = low[name] = len(index)
        path.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                yield from visit(other)
            if other in path:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            found = set(path[path.index(name) :])
            del path[path.index(name) :]
            if len(found) > 1:
                yield found

    for name in sorted(graph):
        if name not in index:
            yield from visit(name)


def test_circles_are_found() -> None:
    assert list(circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}})) == [{"b", "c"}]


def test_no_modules_import_each_other() -> None:
    assert list(circles(imports({module_name(path): path for path in PRODUCT}))) == []


def test_no_folder_is_crowded() -> None:
    counts = Counter(path.parent for path in PRODUCT)
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_a_public_class_name_stands_once() -> None:
    defined = defaultdict(list)
    for path in PRODUCT:
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined[node.name].append(module_name(path))
    assert {name: modules for name, modules in defined.items() if len(modules) > 1} == {}


def test_files_that_contributors_are_sent_to_exist() -> None:
    named = re.findall(r"`((?:\w+/)+\w+\.(?:py|yaml|toml))`", (ROOT / "CONTRIBUTING.md").read_text())
    missing = [p for p in named if not (ROOT / p).exists() and not (ROOT / "rollart" / p).exists()]
    assert named
    assert [path for path in missing if "NAME" not in path] == []
