"""Finds imports of a package that its target does not have: neither packed, nor required, nor in the standard library
or the target's runtime. Files are read, never run.

Only what a call may run counts: the modules that the entry imports through the packed files, and in these the functions
and classes whose names are used. An import may not be needed if it is in a function, under `except ImportError` (or a
wider clause) or `suppress(ImportError)`; one under `if TYPE_CHECKING` does not count.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from serverless.errors import PackageError
from serverless.spec import FunctionSpec

_OURS = ("rollart", "serverless")
"""Packages of this distribution, of which a function's package has only some modules."""

_CATCHING = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})

PROVIDED_MODULES: Mapping[str, frozenset[str]] = {
    "aws_lambda": frozenset(
        {"awslambdaric", "boto3", "botocore", "dateutil", "jmespath", "s3transfer", "simplejson", "six", "urllib3"}
    ),
    "modal": frozenset({"modal"}),
}
"""Modules of a provider's runtime beyond the standard library: Lambda's has the AWS SDK and the runtime client."""

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class UndeclaredImport:
    """`requirement` would declare it, in the version that is installed here if one is. `needed`: the function does not
    load without it."""

    file: str
    line: int
    module: str
    requirement: str
    needed: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: imports {self.module}, which is neither packed nor in its requirements"


def check_declared(spec: FunctionSpec, files: Mapping[str, bytes], provider: str) -> None:
    """Raise `PackageError` if the function does not load at a provider. Its own container image may have any module."""
    found = undeclared(files, spec.requirements, provided=PROVIDED_MODULES[provider]) if spec.image is None else []
    missing = [one for one in found if one.needed]
    if missing:
        wanted = ", ".join(f'"{one}"' for one in sorted({one.requirement for one in missing}))
        first: dict[str, UndeclaredImport] = {}
        for one in missing:
            first.setdefault(one.module, one)
        text = "; ".join(map(str, first.values()))
        raise PackageError(f"function {spec.name}: {text}", remedy=f"declare it: @reward(requirements=[{wanted}])")


def undeclared(
    files: Mapping[str, bytes], requirements: Sequence[str], *, provided: Collection[str] = ()
) -> list[UndeclaredImport]:
    """The undeclared imports of a package's files, in their order."""
    required = {_normalised(re.split(r"[\s<>=!~;\[@]", one, maxsplit=1)[0]) for one in requirements}
    packed = {path.split("/")[1].removesuffix(".py") for path in files if path.startswith(("function/", "artefacts/"))}
    known = packed | {"rollart_handler"} | sys.stdlib_module_names | set(provided)
    found = [
        (path, line, module, needed)
        for path, line, module, needed in imports(files)
        if (top := module.partition(".")[0]) not in known
        and _normalised(top) not in required
        and not (top in _OURS and _is_packed_with_it(module, files))
    ]
    # A requirement that is not installed here may bring modules of any name.
    unknown = any(_version(one) is None for one in required) if found else False
    missing = []
    for path, line, module, needed in found:
        names = _distributions(module.partition(".")[0])
        if required.isdisjoint(map(_normalised, names)) and (names or not unknown):
            version = _version(names[0]) if names else None
            requirement = f"{names[0]}=={version}" if version else (names or [module.partition(".")[0]])[0]
            missing.append(UndeclaredImport(path.removeprefix("function/"), line, module, requirement, needed))
    return missing


def imports(files: Mapping[str, bytes]) -> Iterator[tuple[str, int, str, bool]]:
    """Imports of absolute modules that a call may make: the file, the line, the module, and True if the function does
    not load without it."""
    manifest = json.loads(files["rollart_manifest.json"])
    entry, used = f"function/{manifest['file']}", {str(manifest["attribute"])}
    trees = {path: ast.parse(data) for path, data in files.items() if path.startswith("function/") and _python(path)}
    reached = {entry}
    before = (0, 0)
    while before != (before := (len(used), len(reached))):
        for path in sorted(reached):
            for node, _ in _executed(trees[path], used):
                used |= {getattr(node, "id", ""), getattr(node, "attr", "")}
                if isinstance(node, ast.Import | ast.ImportFrom):
                    used |= {alias.name.rpartition(".")[2] for alias in node.names}
                    reached |= {one for one in _local(node, path) if one in trees}
    for path in sorted(reached, key=lambda path: (path != entry, path)):
        for node, needed in _executed(trees[path], used):
            if isinstance(node, ast.Import):
                yield from ((path, node.lineno, alias.name, needed) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield path, node.lineno, node.module, needed


def _executed(node: ast.AST, used: Collection[str], needed: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """The nodes below `node` outside definitions whose names are not used; True for those that run at the import and
    may not fail."""
    for field, value in ast.iter_fields(node):
        if isinstance(node, ast.If) and field == "body" and _last_name(node.test) == "TYPE_CHECKING":
            continue
        inside = needed and not (field in ("body", "handlers") and _may_fail_or_wait(node))
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not (isinstance(child, _Definition) and _unused(child, node, used)):
                yield child, inside
                yield from _executed(child, used, inside)


def _unused(definition: _Definition, parent: ast.AST, used: Collection[str]) -> bool:
    """The methods of a class that is used are used."""
    return not isinstance(parent, ast.ClassDef) and definition.name not in used


def _may_fail_or_wait(node: ast.AST) -> bool:
    """True if the body of a statement may fail to import, or does not run at the import."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return True
    if isinstance(node, ast.Try):
        return any(one.type is None or _CATCHING & set(_names(one.type)) for one in node.handlers)
    if isinstance(node, ast.With):
        calls = [one.context_expr for one in node.items if isinstance(one.context_expr, ast.Call)]
        return any(
            _last_name(c.func) == "suppress" and _CATCHING & {n for a in c.args for n in _names(a)} for c in calls
        )
    return False


def _names(node: ast.expr) -> list[str]:
    return [_last_name(one) for one in (node.elts if isinstance(node, ast.Tuple) else [node])]


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _local(node: ast.Import | ast.ImportFrom, path: str) -> Iterator[str]:
    """The packed files that an import may load, packages on the way included."""
    if isinstance(node, ast.Import):
        dotted = [alias.name.split(".") for alias in node.names]
        base: list[str] = ["function"]
    else:
        stem = (node.module or "").split(".") if node.module else []
        dotted = [[*stem, alias.name] for alias in node.names]
        base = path.split("/")[: -node.level] if node.level else ["function"]
    for parts in dotted:
        for count in range(len(parts) + 1):
            module = "/".join([*base, *parts[:count]])
            yield from (f"{module}.py", f"{module}/__init__.py")


def _python(path: str) -> bool:
    return path.endswith(".py")


def _is_packed_with_it(module: str, files: Mapping[str, bytes]) -> bool:
    path = module.replace(".", "/")
    candidates = (f"{path}.py", f"{path}/__init__.py", f"shims/{path}/__init__.py")
    return any(one in files for one in candidates)


def _distributions(module: str) -> list[str]:
    """The installed distributions with a top-level module; most have the module's name."""
    if module in _OURS:
        return [_OURS[0]]
    return [module] if _version(module) is not None else _by_module().get(module, [])


@functools.cache
def _by_module() -> dict[str, list[str]]:
    """Takes half a second with hundreds of distributions."""
    return {module: list(names) for module, names in metadata.packages_distributions().items()}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
