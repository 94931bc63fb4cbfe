"""Finds the files of a function's source by static analysis: user code is not run.

A source is a file, a module or a package directory. Modules that it imports, relatively or by name, from files beside
it or from its own package are included. A directory is included whole, with its data files. All other imports are
requirements.
"""

from __future__ import annotations

import ast
import fnmatch
import importlib.util
import pathlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from serverless.errors import PackageError, SpecInvalid

_SKIPPED = ("__pycache__", ".git", ".DS_Store", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".env", ".env.*")
"""Patterns of names that are never packed. Files of environment variables hold secrets."""

_OURS = frozenset({"rollart", "serverless", "rollart_handler", "rollart_function"})
"""Top-level names that a package already holds."""


@dataclass(frozen=True, slots=True)
class SourceDefinition:
    """The definition of an attribute, with imports followed. `name` is its name there."""

    path: pathlib.Path
    body: tuple[ast.stmt, ...]
    name: str


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """The files of a source. `files` maps archive paths (below `function/`) to files; `module` is the dotted name of
    the entry; `package` is True if it belongs to a package. `attribute` is the name after ':' in the source."""

    entry: pathlib.Path
    files: Mapping[str, pathlib.Path]
    module: str
    package: bool
    attribute: str

    @property
    def file(self) -> str:
        """The entry's archive path."""
        return next(name for name, path in self.files.items() if path == self.entry)

    def modules(self) -> Iterator[tuple[pathlib.Path, ast.Module]]:
        """Python files with their syntax trees, the entry first."""
        yield self.entry, tree(self.entry)
        for path in self.files.values():
            if path.suffix == ".py" and path != self.entry:
                yield path, tree(path)

    def find(self, attribute: str) -> SourceDefinition:
        """Follow `from .x import attribute` through the packed files to the definition."""
        path, name = self.entry, attribute
        for _ in range(8):
            link = _imported(tuple(tree(path).body), name)
            if link is None:
                break
            node, original = link
            known = set(self.files.values())
            targets = _targets(node, path, self.entry)
            step = next((t for t in targets if t in known and _binds(t, original)), None)
            if step is None:
                break
            path, name = step, original
        return SourceDefinition(path, tuple(tree(path).body), name)


def collect(source: str, root: pathlib.Path, *, function: str = "") -> SourceFiles:
    """Collect all files of a source. Relative paths are resolved against `root`. Raises `PackageError` for files that
    are missing or cannot be packed."""
    path, attribute = _locate(source, root)
    if path.is_dir():
        return _directory(path, attribute)
    if not path.is_file():
        raise PackageError(
            f"source of function {function}: {path}: No such file or directory", remedy="check the path in the spec"
        )
    top = _top(path)
    found = _closure(path)
    if top is not None and len(found) > 1:
        files = {p.relative_to(top.parent).as_posix(): p for p in sorted(found)}
        _refuse_reserved(top.name)
        module = ".".join(path.relative_to(top.parent).with_suffix("").parts).removesuffix(".__init__")
        return SourceFiles(path, files, module, package=True, attribute=attribute)
    files = {p.relative_to(path.parent).as_posix(): p for p in (path, *sorted(found - {path}))}
    return SourceFiles(path, files, path.stem, package=False, attribute=attribute)


def files_below(directory: pathlib.Path) -> dict[str, pathlib.Path]:
    """The files to pack of a directory, by their paths with its name."""
    return {
        file.relative_to(directory.parent).as_posix(): file
        for file in sorted(directory.rglob("*"))
        if file.is_file() and not any(map(is_skipped, file.relative_to(directory).parts))
    }


def is_skipped(name: str) -> bool:
    """True for a file or directory that is never packed."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _SKIPPED)


def tree(path: pathlib.Path) -> ast.Module:
    """Parse a file. Raises `SpecInvalid` if it is not Python."""
    try:
        return ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        raise SpecInvalid(f"{path}:{error.lineno}: not Python: {error.msg}") from None
    except ValueError as error:
        raise SpecInvalid(f"{path}: not Python: {error}") from None


def _locate(source: str, root: pathlib.Path) -> tuple[pathlib.Path, str]:
    """The source file or directory and the attribute after ':' ('' if none)."""
    head, _, attribute = source.partition(":")
    if head.endswith(".py") or "/" in head or (root / head).is_dir():
        return root / head, attribute
    try:
        found = importlib.util.find_spec(head)
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        raise PackageError(f"no module {head!r} to pack", remedy="give the path of a .py file, or install the module")
    origin = pathlib.Path(found.origin)
    return (origin.parent if origin.name == "__init__.py" else origin), attribute


def _directory(path: pathlib.Path, attribute: str) -> SourceFiles:
    path = path.resolve()
    entry = path / "__init__.py"
    if not entry.is_file():
        raise PackageError(f"{path} is a directory without __init__.py", remedy="add one that names the reward")
    _refuse_reserved(path.name)
    return SourceFiles(entry, files_below(path), path.name, package=True, attribute=attribute)


def _refuse_reserved(name: str) -> None:
    if name in _OURS or name in sys.stdlib_module_names or not name.isidentifier():
        raise PackageError(f"a package cannot be called {name!r} in a function", remedy="rename the directory")


def _top(path: pathlib.Path) -> pathlib.Path | None:
    """The outermost package directory that holds a file, None for a file in no package."""
    top = None
    directory = path.parent
    while (directory / "__init__.py").is_file():
        top, directory = directory, directory.parent
    return top


def _closure(entry: pathlib.Path) -> set[pathlib.Path]:
    """The entry and its imports from its own package, or from files beside it, with the packages in between."""
    found: set[pathlib.Path] = set()
    pending = [entry]
    while pending:
        path = pending.pop()
        if path in found:
            continue
        found.add(path)
        if path.suffix != ".py":
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                pending += _targets(node, path, entry)
        top = _top(path)
        if top is not None and (path != entry or pending):
            pending += [d / "__init__.py" for d in path.parents if d.is_relative_to(top)]
    return found


def _targets(node: ast.Import | ast.ImportFrom, path: pathlib.Path, entry: pathlib.Path) -> list[pathlib.Path]:
    """The local files of an import in `path`: below the entry's package, or beside the entry."""
    if isinstance(node, ast.ImportFrom) and node.level:
        own = _top(path)
        if own is None or node.level > len(path.relative_to(own).parts):
            raise PackageError(
                f"{path}:{node.lineno}: a file outside a package cannot import relatively",
                remedy="add __init__.py to its directory, or import the file beside it by name",
            )
        return _of_dotted(path.parents[node.level - 1], node.module or "", [a.name for a in node.names])
    top = _top(entry)
    home = top.parent if top is not None else entry.parent
    if isinstance(node, ast.ImportFrom):
        names = [(node.module or "", [a.name for a in node.names])]
    else:
        names = [(a.name, []) for a in node.names]
    out: list[pathlib.Path] = []
    for dotted, members in names:
        first = dotted.partition(".")[0]
        foreign = first in _OURS or first in sys.stdlib_module_names or (top is not None and first != top.name)
        if not foreign:
            out += _of_dotted(home, dotted, members)
    return out


def _of_dotted(base: pathlib.Path, dotted: str, members: list[str]) -> list[pathlib.Path]:
    """Files below `base` for `import a.b` or `from a.b import members`, as far as they exist."""
    parts = [part for part in dotted.split(".") if part]
    inside = base.joinpath(*parts)
    places = [base.joinpath(*parts[:n]) for n in range(1, len(parts) + 1)] + [inside / member for member in members]
    found = [[p for p in (place / "__init__.py", place.with_suffix(".py")) if p.is_file()][:1] for place in places]
    out = [path for one in found for path in one]
    return out if dotted or out else [p for p in [inside / "__init__.py"] if p.is_file()]


def _imported(body: tuple[ast.stmt, ...], name: str) -> tuple[ast.ImportFrom, str] | None:
    """The `from ... import` that binds this name in a module, unless a later statement redefines it."""
    link: tuple[ast.ImportFrom, str] | None = None
    for statement in body:
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    link = (statement, alias.name)
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and statement.name == name:
            link = None
    return link


def _binds(path: pathlib.Path, name: str) -> bool:
    """True if a module binds `name` at its top level."""
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
            return True
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return True
    return False
