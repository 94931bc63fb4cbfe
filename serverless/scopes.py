"""Finds state that outlives a call in a module's source: its names, their values, and the functions that access them.
Pure.

Works on syntax trees: nothing is imported or run. `serverless.stateless` classifies the findings.
"""

from __future__ import annotations

import ast
import enum
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

__all__ = [
    "SourceFunction",
    "BindingKind",
    "SourceModule",
    "StateAccess",
    "AccessKind",
    "ancestors",
    "inside",
    "loads",
    "mentions",
    "opened",
    "state_accesses",
    "wrappers",
]

Def = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class BindingKind(enum.Enum):
    """The kind of value that a persistent name is bound to."""

    CONTAINER = "container"
    ITERATOR = "iterator"
    OBJECT = "object"
    CONSTANT = "constant"
    CODE = "code"
    IMPORT = "import"


class AccessKind(enum.Enum):
    """The kind of access to a persistent name."""

    READ = "read"
    REBIND = "rebind"
    ITEM = "item"
    """`X[k] = v`"""
    ATTRIBUTE = "attribute"
    AUGMENT = "augment"
    """`X += 1`, `X[k] += 1`"""
    METHOD = "method"
    """`X.append(...)` and similar calls."""
    NEXT = "next"


@dataclass(frozen=True, slots=True)
class StateAccess:
    """One access to a persistent name (`X`, or `self.x` of a persistent object) in a function."""

    name: str
    access: AccessKind
    node: ast.AST
    function: SourceFunction
    method: str = ""
    value: ast.expr | None = None
    key: ast.expr | None = None


@dataclass(eq=False, slots=True)
class SourceFunction:
    """A function that a call may run. `owner` is its class, if it is a method of a persistent object; `root` is True
    for the reward itself; `parents` maps each node to its parent."""

    node: Def
    module: SourceModule
    owner: str = ""
    root: bool = False
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    locals: frozenset[str] = frozenset()
    outer: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        nodes = list(ast.walk(self.node))
        for parent in nodes:
            for child in ast.iter_child_nodes(parent):
                self.parents[child] = parent
        outer = {name for s in nodes if isinstance(s, ast.Global) for name in s.names}
        given = {a.arg for a in nodes if isinstance(a, ast.arg)}
        stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        bound = {n.name for n in nodes if isinstance(n, ast.FunctionDef) and n is not self.node}
        if self.module.closed:
            outer |= {name for s in nodes if isinstance(s, ast.Nonlocal) for name in s.names}
        self.outer = frozenset(outer)
        self.locals = frozenset((given | stored | bound) - outer)


_CONTAINERS = frozenset(
    {"list", "dict", "set", "defaultdict", "Counter", "deque", "OrderedDict", "bytearray", "WeakValueDictionary"}
)
_ITERATORS = frozenset({"iter", "count", "cycle"})
_CONSTANTS = frozenset(
    {
        "frozenset",
        "tuple",
        "compile",
        "MappingProxyType",
        "int",
        "float",
        "str",
        "bool",
        "getenv",
        "getLogger",
        "Path",
        "TypeVar",
        "namedtuple",
        "Lock",
        "RLock",
    }
)

_MUTATORS = frozenset(
    {
        "add",
        "append",
        "appendleft",
        "clear",
        "discard",
        "extend",
        "extendleft",
        "insert",
        "pop",
        "popitem",
        "popleft",
        "put",
        "put_nowait",
        "remove",
        "rotate",
        "setdefault",
        "sort",
        "reverse",
        "subtract",
        "update",
        "send",
    }
)
_FIRST_ARGUMENT = frozenset({"heappush", "heappop", "heapify", "heapreplace", "insort", "insort_left", "shuffle"})


class SourceModule:
    """The persistent names, functions and classes of a file. `closed` is the factory whose inner function is the
    reward: its locals live as long as the reward."""

    def __init__(self, path: pathlib.Path, body: Sequence[ast.stmt], *, closed: Def | None = None) -> None:
        self.path = path
        self.closed = closed
        self.names: dict[str, BindingKind] = {}
        self.values: dict[str, ast.expr] = {}
        self.functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.persistent_classes: set[str] = set()
        """Classes with a persistent instance."""
        self._read(body)
        if closed is not None and not isinstance(closed, ast.Lambda):
            self.names.update({a.arg: BindingKind.OBJECT for a in closed.args.args})
            self._read(closed.body)
        for value in self.values.values():
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in self.classes:
                self.persistent_classes.add(value.func.id)

    def _read(self, body: Sequence[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions[node.name] = node
                self.names[node.name] = BindingKind.CODE
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
                self.names[node.name] = BindingKind.CODE
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    self.names.setdefault((alias.asname or alias.name).partition(".")[0], BindingKind.IMPORT)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self._bind(target, node.value)
            else:
                for name in ("body", "orelse", "finalbody"):
                    self._read([s for s in getattr(node, name, []) if isinstance(s, ast.stmt)])
                for handler in getattr(node, "handlers", []):
                    self._read(handler.body)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            if self.names.get(target.id) is not BindingKind.CONTAINER:
                self.names[target.id] = binding_kind(value)
                self.values[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                self._bind(one, value)

    def methods(self, name: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
        body = self.classes[name].body
        return {n.name: n for n in body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}

    def attributes(self, name: str) -> dict[str, BindingKind]:
        """The attributes of a class's objects after construction and loading."""
        found: dict[str, BindingKind] = {}
        for statement in self.classes[name].body:
            if isinstance(statement, ast.Assign):
                kind = binding_kind(statement.value)
                found.update({t.id: kind for t in statement.targets if isinstance(t, ast.Name)})
        for method in self.methods(name).values():
            if method.name in ("__init__", "load", "__post_init__"):
                for node in ast.walk(method):
                    if isinstance(node, ast.Assign):
                        found.update(
                            {t.attr: binding_kind(node.value) for t in node.targets if isinstance(t, ast.Attribute)}
                        )
        return found


def binding_kind(value: ast.expr) -> BindingKind:
    if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return BindingKind.CONTAINER
    if isinstance(value, ast.GeneratorExp):
        return BindingKind.ITERATOR
    if isinstance(value, ast.Call):
        function = value.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        for names, kind in (
            (_CONTAINERS, BindingKind.CONTAINER),
            (_ITERATORS, BindingKind.ITERATOR),
            (_CONSTANTS, BindingKind.CONSTANT),
        ):
            if name in names:
                return kind
        return BindingKind.OBJECT
    return BindingKind.CONSTANT if isinstance(value, ast.Constant | ast.Tuple | ast.JoinedStr) else BindingKind.OBJECT


def inside(node: Def) -> Iterator[ast.AST]:
    """The nodes that run in a call, without decorators, defaults and annotations, which run once."""
    for part in [node.body] if isinstance(node, ast.Lambda) else node.body:
        yield from ast.walk(part)


def wrappers(decorated: Def, module: SourceModule, body: Sequence[ast.stmt]) -> Iterator[SourceFunction]:
    """The wrapper functions of decorators in this file: inner functions that call a parameter of the outer one."""
    for decorator in [] if isinstance(decorated, ast.Lambda) else decorated.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        made = module.functions.get(called.id) if isinstance(called, ast.Name) else None
        if made is None:
            continue
        closed = SourceModule(module.path, body, closed=made)
        given = {a.arg for a in ast.walk(made) if isinstance(a, ast.arg)}
        for inner in ast.walk(made):
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner is not made:
                own = {a.arg for a in ast.walk(inner.args) if isinstance(a, ast.arg)}
                calls = {getattr(n.func, "id", "") for n in inside(inner) if isinstance(n, ast.Call)}
                if calls & (given - own):
                    yield SourceFunction(inner, closed)


def state_accesses(function: SourceFunction) -> Iterator[StateAccess]:
    """All accesses to persistent names in a function, in the order of the syntax tree."""
    for node in inside(function.node):
        yield from _writes(node, function)
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = _persistent_name(node, function, exact=True)
            if name and not _is_target(node, function):
                yield StateAccess(name, AccessKind.READ, node, function)


def _writes(node: ast.AST, function: SourceFunction) -> Iterator[StateAccess]:
    if isinstance(
        node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Delete | ast.For | ast.NamedExpr | ast.withitem
    ):
        value = getattr(node, "value", None)
        for target in _stored(node):
            name = _persistent_name(target, function)
            if name:
                key = target.slice if isinstance(target, ast.Subscript) else None
                yield StateAccess(name, _access_kind(node, target, name), target, function, value=value, key=key)
    if isinstance(node, ast.Call):
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr in _MUTATORS:
            name = _persistent_name(called.value, function)
            if name:
                yield StateAccess(name, AccessKind.METHOD, node, function, method=called.attr)
        plain = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if plain in _FIRST_ARGUMENT | {"next"} and node.args:
            name = _persistent_name(node.args[0], function)
            if name:
                yield StateAccess(
                    name, AccessKind.NEXT if plain == "next" else AccessKind.METHOD, node, function, method=plain
                )


def _stored(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign | ast.Delete):
        found = node.targets
    elif isinstance(node, ast.withitem):
        found = [node.optional_vars] if node.optional_vars is not None else []
    else:
        found = [node.target]  # type: ignore[attr-defined]
    out: list[ast.expr] = []
    for one in found:
        out += one.elts if isinstance(one, ast.Tuple | ast.List) else [one]
    return out


def _access_kind(node: ast.AST, target: ast.expr, name: str) -> AccessKind:
    if isinstance(node, ast.AugAssign):
        return AccessKind.AUGMENT
    if isinstance(target, ast.Name) or (name.startswith("self.") and isinstance(target, ast.Attribute)):
        return AccessKind.REBIND
    return AccessKind.ITEM if isinstance(target, ast.Subscript) else AccessKind.ATTRIBUTE


def _persistent_name(node: ast.expr, function: SourceFunction, *, exact: bool = False) -> str:
    """The persistent name that an expression is, or without `exact` is a part of; '' if none."""
    parts = [node]
    while not exact and isinstance(parts[-1], ast.Attribute | ast.Subscript):
        parts.append(parts[-1].value)
    for part in reversed(parts):
        of = part.value.id if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) else ""
        if isinstance(part, ast.Attribute) and of in ("self", "cls") and function.owner and of in function.locals:
            return f"self.{part.attr}"
    last = parts[-1]
    if isinstance(last, ast.Name):
        if isinstance(last.ctx, ast.Store | ast.Del):
            return last.id if last.id in function.outer else ""
        persistent_classes = last.id in function.outer or (
            last.id in function.module.names and last.id not in function.locals
        )
        return last.id if persistent_classes or last.id in _defaults(function) else ""
    if not exact and isinstance(last, ast.Call) and ast.unparse(last) == "type(self)" and function.owner:
        return "self"
    return ""


def _defaults(function: SourceFunction) -> set[str]:
    """Parameters with a container as default: it is made once and persists."""
    arguments = function.node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = list(zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True))
    pairs += [(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None]
    return {a.arg for a, default in pairs if binding_kind(default) is BindingKind.CONTAINER}


def _is_target(node: ast.expr, function: SourceFunction) -> bool:
    """True if a load of a name only leads to a write: `X` in `X[k] = v` or `X.append(v)`."""
    child: ast.AST = node
    parent = function.parents.get(node)
    while isinstance(parent, ast.Attribute | ast.Subscript) and parent.value is child:
        if isinstance(parent.ctx, ast.Store | ast.Del):
            return True
        child, parent = parent, function.parents.get(parent)
    if not isinstance(child, ast.Attribute) or child.attr not in _MUTATORS:
        return False
    # A call whose result is used is also a read: `X.pop()`, `X.setdefault(k, v)`.
    return isinstance(parent, ast.Call) and isinstance(function.parents.get(parent), ast.Expr)


def mentions(node: ast.AST | None, name: str) -> bool:
    """True if an expression contains `X`, or `self.x`."""
    return node is not None and any(ast.unparse(n) == name for n in ast.walk(node) if isinstance(n, ast.expr))


def loads(nodes: Iterable[ast.AST]) -> set[str]:
    """The identifiers in a piece of code: names and attributes."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found


def ancestors(node: ast.AST, function: SourceFunction) -> Iterator[ast.AST]:
    around = function.parents.get(node)
    while around is not None:
        yield around
        around = function.parents.get(around)


_WRITERS = frozenset({"write_text", "write_bytes", "touch"})
_READERS = frozenset({"read_text", "read_bytes", "exists", "is_file"})


def opened(node: ast.Call) -> tuple[str, str]:
    """The path expression and mode ("r", "w" or "a") of a call that opens, reads or writes a file; '' for other
    calls."""
    function = node.func
    if isinstance(function, ast.Attribute) and function.attr in _WRITERS | _READERS:
        return _path(function.value), "w" if function.attr in _WRITERS else "r"
    name = ast.unparse(function)
    if name in ("open", "io.open", "gzip.open") and node.args:
        path, rest = node.args[0], node.args[1:2]
    elif isinstance(function, ast.Attribute) and function.attr == "open" and name != "os.open":
        path, rest = function.value, node.args[:1]
    elif name in ("os.path.exists", "os.path.isfile") and node.args:
        return _path(node.args[0]), "r"
    else:
        return "", ""
    modes = rest + [k.value for k in node.keywords if k.arg == "mode"]
    mode = modes[0].value if modes and isinstance(modes[0], ast.Constant) else "r"
    kind = "a" if "a" in str(mode) or "+" in str(mode) else "w" if set(str(mode)) & {"w", "x"} else "r"
    return _path(path), kind


def _path(node: ast.expr) -> str:
    """The text of a path expression: of `Path(X)`, that of X."""
    if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith("Path"):
        return _path(node.args[0])
    return ast.unparse(node)
