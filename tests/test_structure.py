"""The shape of the code: no import circle, folders that a reader can take in, one meaning per class name, and tests
that use public names."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.sources import PRODUCT, ROOT, nodes, tree

MOST_FILES = 22
"""Most Python files in a folder of the product."""

PACKAGES = ("rollart.", "serverless.", "placement.")


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


def private(name: str) -> bool:
    """`_replace` is a public method of named tuples."""
    return name != "_replace" and re.match(r"_[^_]", name) is not None


def defined_names(path: Path) -> Iterator[str]:
    """Functions, classes, variables and attributes of `self` that the file defines."""
    for node in nodes(path):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def names_of_others(path: Path) -> Iterator[tuple[int, str]]:
    """Names, with their lines, that the file imports, reads from an object other than `self`, or patches."""
    for node in nodes(path):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name):
                yield node.lineno, name
            case ast.ImportFrom(module=str(module), names=aliases) if module.startswith(PACKAGES):
                yield from ((node.lineno, alias.name) for alias in aliases)
            case ast.Call(func=ast.Attribute(attr="setattr" | "object") | ast.Name(id="setattr" | "getattr")):
                texts = [str(a.value) for a in node.args[:2] if isinstance(a, ast.Constant)]
                yield from ((node.lineno, text.rpartition(".")[2]) for text in texts)


def test_tests_use_public_names() -> None:
    of_product = {name for path in PRODUCT for name in defined_names(path) if private(name)}
    used = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        names = [(line, name) for line, name in names_of_others(path) if name in of_product]
        own = set(defined_names(path)) if names else set()
        used += [f"{path.relative_to(ROOT)}:{line} {name}" for line, name in names if name not in own]
    assert used == []
