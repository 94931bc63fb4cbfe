"""Checks whether a reward can run as a function: it can if its value depends only on its item. Sources are read, never
run.

Workers of a function are transient, and any of them may get any item. A reward that counts, remembers earlier items,
reads back its own output, or holds an environment would therefore return other values than in one process.
`inspect_source` looks for such state in the reward and in its callees in the packed files:

  is state            globals and closure variables that are written, module-level containers and objects that are
                      changed and read, counters, mutable defaults, attributes of the reward's object set in a call,
                      files that are written and read back, environments as parameters, `needs=("environment",)`
  is no state         reading globals, `lru_cache`, a memo (`CACHE[key] = value` where CACHE[key] is also read),
                      loading once (`if _MODEL is None: _MODEL = ...`), `load()` and `__init__`, constants into
                      os.environ, objects made in the call
  is unsure           names that are written but not read, attributes set anew in each call, writes into objects of
                      other modules, databases: refused too, unless declared `@reward(stateless=True)`

Randomness without a seed is a warning if the reward is declared deterministic.

Finds state that outlives a call in a module's source: its names, their values, and the functions that access them.
Pure.

Works on syntax trees: nothing is imported or run. `serverless.analysis.stateless` classifies the findings.
"""

from __future__ import annotations

import ast
import enum
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serverless.signatures import definition

if TYPE_CHECKING:
    from serverless.analysis.sources import SourceDefinition


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


@dataclass(frozen=True, slots=True)
class StateFinding:
    """A finding. `sure`: the code has no stateless interpretation."""

    file: str
    line: int
    text: str
    sure: bool = True

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


@dataclass(frozen=True, slots=True)
class Stateless:
    """The reward can run as a function. `warnings` are about repeatability."""

    warnings: tuple[StateFinding, ...] = ()


@dataclass(frozen=True, slots=True)
class Stateful:
    reasons: tuple[StateFinding, ...]

    @property
    def sure(self) -> bool:
        return any(r.sure for r in self.reasons)

    @property
    def remedy(self) -> str:
        beside = "or run it beside the environment (serverless.inline)"
        if self.sure:
            return f"compute the score from the item alone, {beside}"
        return f"declare @reward(stateless=True) if each call gives the same wherever it runs, {beside}"


_ENVIRONMENTS = frozenset({"env", "envs", "environment", "environments", "simulator", "gym_env", "vec_env"})
_ENVIRONMENT_TYPE = re.compile(r"\b(?:\w*Env|\w*Environment|\w*StateMachine)\b")
_ONCE = ("__init__", "__new__", "__post_init__", "load")


def inspect_source(
    found: SourceDefinition,
    others: Iterable[tuple[pathlib.Path, ast.Module]] = (),
    *,
    deterministic: bool = True,
    stateless: bool = False,
    needs: Sequence[str] = (),
) -> Stateless | Stateful:
    """Check the reward at `found`; `others` are the further files that are packed with it.

    `stateless` is the declaration of that name: it overrides uncertain findings.
    """
    target = definition(found.body, found.name)
    modules = [SourceModule(found.path, found.body, closed=_factory(found, target))]
    modules += [SourceModule(path, tree.body) for path, tree in others]
    functions = _reachable(modules, target)
    for function in list(functions):
        functions += wrappers(function.node, function.module, found.body if function.module is modules[0] else ())
    reasons = [
        StateFinding(found.path.name, getattr(target, "lineno", 1), f"it needs {need!r}, which functions do not have")
        for need in needs
    ]
    uses = [touch for function in functions for touch in state_accesses(function)]
    reasons += [*_parameters(functions), *_find_state(uses), *_indirect(functions)]
    reasons += [*_files(functions), *_databases(functions)]
    if reasons and not (stateless and not any(r.sure for r in reasons)):
        return Stateful(tuple(sorted(set(reasons), key=lambda r: (not r.sure, r.file, r.line))))
    return Stateless(tuple(_random(functions, uses)) if deterministic else ())


def _factory(found: SourceDefinition, target: ast.AST | None) -> Def | None:
    """The factory that returned the reward (a closure), None if there is none."""
    for node in found.body:
        if isinstance(node, ast.FunctionDef) and node is not target and target in list(ast.walk(node)):
            return node
    return None


def _reachable(modules: Sequence[SourceModule], target: ast.AST | None) -> list[SourceFunction]:
    """The reward and its transitive callees in the packed files, found by name."""
    home = modules[0]
    found: dict[int, SourceFunction] = {}
    pending: list[SourceFunction] = []
    if isinstance(target, ast.ClassDef):
        home.persistent_classes.add(target.name)
        call = home.methods(target.name).get("__call__") if target.name in home.classes else None
        pending += [SourceFunction(call, home, owner=target.name, root=True)] if call is not None else []
    elif isinstance(target, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        pending.append(SourceFunction(target, home, root=True))
    named: set[str] = set()
    while pending:
        function = pending.pop()
        if id(function.node) in found:
            continue
        found[id(function.node)] = function
        named |= loads(inside(function.node))
        for module in modules:
            # A name bound to an object of a packed class includes the class.
            named |= {
                n
                for name, value in module.values.items()
                if name in named
                for n in loads(ast.walk(value))
                if n in module.classes
            }
            for node in (module.functions[name] for name in named & module.functions.keys()):
                if id(node) not in found:
                    pending.append(SourceFunction(node, module))
            for name in (named & module.classes.keys()) | module.persistent_classes & (
                {function.owner} if function.module is module else set()
            ):
                pending += _methods(module, name, named)
        pending = [f for f in pending if id(f.node) not in found]
    return list(found.values())


def _methods(module: SourceModule, name: str, named: set[str]) -> list[SourceFunction]:
    owner = name if name in module.persistent_classes else ""
    return [
        SourceFunction(method, module, owner=owner)
        for method in module.methods(name).values()
        if method.name not in _ONCE and (method.name in named or method.name.startswith("__"))
    ]


def _parameters(functions: Sequence[SourceFunction]) -> list[StateFinding]:
    reasons = []
    for function in functions:
        if not function.root:
            continue
        arguments = function.node.args
        for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
            annotation = ast.unparse(argument.annotation) if argument.annotation is not None else ""
            if argument.arg in _ENVIRONMENTS or _ENVIRONMENT_TYPE.search(annotation):
                reasons.append(_reason(function, argument, f"parameter {argument.arg!r} is an environment"))
    return reasons


def _find_state(uses: Sequence[StateAccess]) -> list[StateFinding]:
    groups: dict[tuple[int, str, str], list[StateAccess]] = {}
    for use in uses:
        owner = use.function.owner if use.name.startswith("self.") else ""
        groups.setdefault((id(use.function.module), owner, use.name), []).append(use)
    reasons: list[StateFinding] = []
    for group in groups.values():
        writes = [use for use in group if use.access is not AccessKind.READ]
        if writes and not _is_memo(writes, group):
            reasons += [_write(write, group) for write in writes if not _is_once(write)]
    return reasons


def _write(write: StateAccess, group: Sequence[StateAccess]) -> StateFinding:
    kind = _binding(write)
    read = any(u.access is AccessKind.READ for u in group)
    if kind is BindingKind.IMPORT:
        return _module_write(write)
    if write.access is AccessKind.NEXT:
        return _reason(write.function, write.node, f"{write.name} is an iterator that calls advance")
    if write.access is AccessKind.REBIND and write.name.startswith("self."):
        return _reason(write.function, write.node, f"a call sets {write.name}", sure=not _set_first(write, group))
    if write.access is AccessKind.REBIND:
        scope = "closure variable" if write.function.module.closed is not None else "global"
        return _reason(write.function, write.node, f"a call writes the {scope} {write.name}")
    if write.access is AccessKind.METHOD:
        sure = read and kind is not BindingKind.OBJECT
        return _reason(write.function, write.node, f"a call changes {write.name} ({write.method})", sure=sure)
    counts = write.access is AccessKind.AUGMENT
    text = f"a call counts in {write.name}" if counts else f"a call writes into {write.name}"
    return _reason(write.function, write.node, text, sure=read or counts)


def _module_write(write: StateAccess) -> StateFinding:
    text = f"a call writes into the module {write.name}"
    return _reason(write.function, write.node, text, sure=write.access is AccessKind.AUGMENT)


def _binding(touch: StateAccess) -> BindingKind:
    module = touch.function.module
    if touch.name.startswith("self."):
        kinds = module.attributes(touch.function.owner)
        return kinds.get(touch.name.removeprefix("self."), BindingKind.OBJECT)
    return module.names.get(touch.name, BindingKind.CONTAINER)


def _is_once(write: StateAccess) -> bool:
    """True for loading at first use, for a constant setting, and for a method of a module or an object that only looks
    like a change."""
    kind = _binding(write)
    if kind is BindingKind.CODE and write.access is AccessKind.METHOD:
        return True
    if kind is BindingKind.IMPORT:
        constant = isinstance(write.value, ast.Constant) and write.access is not AccessKind.AUGMENT
        setting = root_is_environ(write.node) and write.method in ("setdefault", "pop")
        return (
            constant
            or setting
            or (write.access in (AccessKind.METHOD, AccessKind.NEXT) and not root_is_environ(write.node))
        )
    if (
        write.access not in (AccessKind.REBIND, AccessKind.ITEM)
        or write.value is None
        or mentions(write.value, write.name)
    ):
        return False
    if write.key is not None and not isinstance(write.key, ast.Constant):
        return False  # a set of items seen before
    if write.function.root and loads(ast.walk(write.value)) & write.function.locals - {"self", "artefacts"}:
        return False  # from the item: the reward remembers it
    return _guarded(write)


def root_is_environ(node: ast.AST) -> bool:
    return "os.environ" in ast.unparse(node)


def _guarded(write: StateAccess) -> bool:
    """True under `if X is None`, `if not X`, `if k not in X`, or after `if X is not None: return X`."""
    for node in ancestors(write.node, write.function):
        if isinstance(node, ast.If) and mentions(node.test, write.name):
            return True
        if isinstance(node, ast.Try) and any(mentions(s, write.name) for s in node.body):
            return True
    returns = [n for n in ast.walk(write.function.node) if isinstance(n, ast.If) and mentions(n.test, write.name)]
    return any(any(isinstance(s, ast.Return) for s in n.body) for n in returns)


def _is_memo(writes: Sequence[StateAccess], group: Sequence[StateAccess]) -> bool:
    """True for a memo: `X[key] = value` with a key from the item, a value not derived from X, and a read of X[...]. X
    may be cleared or trimmed, but its size and contents are not used otherwise."""
    trims = [w for w in writes if w.access is AccessKind.METHOD and w.method in ("clear", "pop", "popitem")]
    stores = [w for w in writes if w.access is AccessKind.ITEM and w.value is not None]
    if not stores or len(trims) + len(stores) != len(writes):
        return False
    for store in stores:
        if isinstance(store.key, ast.Constant) or mentions(store.value, store.name):
            return False
    fetched = False
    for use in (u for u in group if u.access is AccessKind.READ):
        parent = use.function.parents.get(use.node)
        if isinstance(parent, ast.Subscript) and parent.value is use.node:
            fetched = True
        elif isinstance(parent, ast.Attribute):
            if parent.attr not in ("get", "clear", "pop", "popitem", "move_to_end"):
                return False
            fetched = fetched or parent.attr == "get"
        elif not isinstance(parent, ast.Compare):
            sized = isinstance(parent, ast.Call) and ast.unparse(parent.func) == "len" and bool(trims)
            if not sized:
                return False
    return fetched


def _set_first(write: StateAccess, group: Sequence[StateAccess]) -> bool:
    """True if the reward itself sets an attribute before any read, so that each call may be independent."""
    parent = write.function.parents.get(write.node)
    straight = parent is not None and write.function.parents.get(parent) is write.function.node
    reads = [u.node.lineno for u in group if u.access is AccessKind.READ and u.function is write.function]  # type: ignore[attr-defined]
    line = getattr(write.node, "lineno", 0)
    value_reads = write.value is not None and mentions(write.value, write.name)
    return write.function.root and straight and not value_reads and all(r >= line for r in reads)


_SQL = re.compile(r"\s*(?:insert\s+(?:or\s+\w+\s+)?into|update\s+\w+\s+set|replace\s+into)\b", re.IGNORECASE)
_SHELVES = frozenset({"shelve.open", "dbm.open", "diskcache.Cache", "Cache", "shelve.DbfilenameShelf"})


def _files(functions: Sequence[SourceFunction]) -> list[StateFinding]:
    """Files of a fixed name that are written and read, unless one function writes the file first and reads it
    afterwards."""
    written: dict[str, list[tuple[SourceFunction, ast.Call, bool]]] = {}
    read: dict[str, list[tuple[SourceFunction, ast.Call]]] = {}
    for function in functions:
        for node in inside(function.node):
            if isinstance(node, ast.Call):
                path, mode = opened(node)
                if not path or ((root := path.partition(".")[0]) in function.locals and root != "self"):
                    continue
                if mode in ("w", "a"):
                    written.setdefault(path, []).append((function, node, mode == "w"))
                if mode in ("r", "a+"):
                    read.setdefault(path, []).append((function, node))
    reasons = []
    for path in sorted(written.keys() & read.keys()):
        for function, node, anew in written[path]:
            scratch = anew and all(f is function and r.lineno > node.lineno for f, r in read[path])
            if not scratch:
                reasons.append(_reason(function, node, f"a call writes the file {path}, which calls read"))
    return reasons


_CACHES = re.compile(r"^(?:functools\.)?(?:lru_cache|cache)\b")
_CHANGES = frozenset(
    {
        "append",
        "extend",
        "insert",
        "remove",
        "pop",
        "clear",
        "add",
        "discard",
        "update",
        "setdefault",
        "popitem",
        "appendleft",
        "subtract",
    }
)


def _indirect(functions: Sequence[SourceFunction]) -> list[StateFinding]:
    """State that is written indirectly: by `setattr`, through `globals()`, in an object that a cache returns."""
    cached = {
        f.node.name
        for f in functions
        if not isinstance(f.node, ast.Lambda) and any(_CACHES.match(ast.unparse(d)) for d in f.node.decorator_list)
    }
    reasons = []
    for function in functions:
        for node in inside(function.node):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "object.__setattr__"):
                of_self = bool(node.args) and ast.unparse(node.args[0]) == "self" and function.owner
                if of_self and getattr(function.node, "name", "") not in ("__init__", "load"):
                    reasons.append(_reason(function, node, "a call sets an attribute of self by setattr", sure=False))
            changed = _changed(node)
            if isinstance(changed, ast.Call):
                made = ast.unparse(changed.func)
                if made == "globals":
                    reasons.append(_reason(function, node, "a call writes into globals()"))
                elif made in cached:
                    reasons.append(_reason(function, node, f"a call changes what the cached {made}() returns"))
    return reasons


def _changed(node: ast.AST) -> ast.expr | None:
    """The object that a statement or call changes in place."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
        return node.func.value
    return None


def _databases(functions: Sequence[SourceFunction]) -> list[StateFinding]:
    reasons = []
    for function in functions:
        for node in ast.walk(function.node):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in _SHELVES:
                text = f"a call opens {ast.unparse(node)[:60]}, which may outlive it"
                reasons.append(_reason(function, node, text, sure=False))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _SQL.match(node.value):
                reasons.append(_reason(function, node, "a call writes into a database", sure=False))
    return reasons


_DRAWS = re.compile(
    r"^(?:random\.(?:random|randint|randrange|choice|choices|sample|shuffle|uniform|gauss|betavariate)"
    r"|(?:np|numpy)\.random\.(?:rand|randn|randint|random|choice|shuffle|permutation|normal|uniform)"
    r"|torch\.(?:rand|randn|randint|randperm|bernoulli|multinomial)|uuid\.uuid4|uuid4|os\.urandom|secrets\.\w+)$"
)
_GENERATORS = re.compile(r"^(?:random\.Random|Random|(?:np|numpy)\.random\.(?:default_rng|RandomState)|default_rng)$")
_SEEDS = re.compile(r"^(?:random\.seed|(?:np|numpy)\.random\.seed|torch\.manual_seed|seed_everything|set_seed)$")


def _random(functions: Sequence[SourceFunction], uses: Sequence[StateAccess]) -> list[StateFinding]:
    """Random draws that are not seeded in the call."""
    warnings: list[StateFinding] = []
    calls = [
        (f, node, ast.unparse(node.func)) for f in functions for node in ast.walk(f.node) if isinstance(node, ast.Call)
    ]
    seeded = any(_SEEDS.match(name) for _, _, name in calls)
    for function, node, name in calls:
        if _DRAWS.match(name) and not seeded:
            text = f"{name}() is not seeded by the item, but the reward is declared deterministic"
            warnings.append(_reason(function, node, text, sure=False))
        if _GENERATORS.match(name) and not node.args and not node.keywords:
            warnings.append(_reason(function, node, f"{name}() without a seed", sure=False))
    for use in uses:
        value = use.function.module.values.get(use.name)
        if isinstance(value, ast.Call) and _GENERATORS.match(ast.unparse(value.func)):
            text = f"{use.name} remembers how often it was drawn from: seed one per item"
            warnings.append(_reason(use.function, use.node, text, sure=False))
    return sorted(set(warnings), key=lambda r: (r.file, r.line))


def _reason(function: SourceFunction, node: ast.AST, text: str, *, sure: bool = True) -> StateFinding:
    line = getattr(node, "lineno", getattr(function.node, "lineno", 0))
    return StateFinding(function.module.path.name, line, text, sure)
