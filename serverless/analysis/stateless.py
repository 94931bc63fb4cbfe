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

The check works on syntax trees. It collects the functions that a call may run (`_reachable`), then their accesses to
names that outlive the call (`_accesses`), and classifies the accesses by name.
"""

from __future__ import annotations

import ast
import enum
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from serverless.analysis.sources import SourceDefinition, SourceFiles
from serverless.signatures import definition
from serverless.spec import FunctionSpec

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Callable = _Function | ast.Lambda


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


def inspect_source(found: SourceDefinition, sources: SourceFiles, spec: FunctionSpec) -> Stateless | Stateful:
    """Check the reward at `found`; `sources` are the files that are packed with it. The declaration `stateless` of the
    spec overrides uncertain findings."""
    target = definition(found.body, found.name)
    factories = (node for node in found.body if isinstance(node, ast.FunctionDef) and node is not target)
    factory = next((node for node in factories if target in list(ast.walk(node))), None)
    modules = [SourceModule(found.path, found.body, closed=factory)]
    modules += [SourceModule(path, tree.body) for path, tree in sources.modules() if path != found.path]
    functions = _reachable(modules, target)
    for function in list(functions):
        functions += _wrappers(function, found.body if function.module is modules[0] else ())
    accesses = [access for function in functions for access in _accesses(function)]
    reasons = [
        StateFinding(found.path.name, getattr(target, "lineno", 1), f"it needs {need!r}, which functions do not have")
        for need in spec.needs
    ]
    reasons += [*_environment_parameters(functions), *_state(accesses), *_indirect_writes(functions)]
    reasons += [*_files(functions), *_databases(functions)]
    if reasons and not (spec.stateless and not any(r.sure for r in reasons)):
        return Stateful(tuple(sorted(set(reasons), key=lambda r: (not r.sure, r.file, r.line))))
    return Stateless(tuple(_unseeded_randomness(functions, accesses)) if spec.deterministic else ())


# Modules, and the functions that a call may run


class BindingKind(enum.Enum):
    """The kind of value that a persistent name is bound to."""

    CONTAINER = enum.auto()
    ITERATOR = enum.auto()
    OBJECT = enum.auto()
    CONSTANT = enum.auto()
    CODE = enum.auto()
    IMPORT = enum.auto()


_MADE_BY = (
    (r"list|dict|set|defaultdict|Counter|deque|OrderedDict|bytearray|WeakValueDictionary", BindingKind.CONTAINER),
    (r"iter|count|cycle", BindingKind.ITERATOR),
    (r"frozenset|tuple|compile|MappingProxyType|int|float|str|bool|getenv", BindingKind.CONSTANT),
    (r"getLogger|Path|TypeVar|namedtuple|Lock|RLock", BindingKind.CONSTANT),
)
"""Kinds of the values of well-known calls, by the last part of the called name."""


class SourceModule:
    """The persistent names, functions and classes of a file. `closed` is the factory whose inner function is the
    reward: its locals live as long as the reward."""

    def __init__(self, path: pathlib.Path, body: Sequence[ast.stmt], *, closed: _Callable | None = None) -> None:
        self.path = path
        self.closed = closed
        self.names: dict[str, BindingKind] = {}
        self.values: dict[str, ast.expr] = {}
        self.functions: dict[str, _Function] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self._read(body)
        if closed is not None and not isinstance(closed, ast.Lambda):
            self.names.update({a.arg: BindingKind.OBJECT for a in closed.args.args})
            self._read(closed.body)
        made = {v.func.id for v in self.values.values() if isinstance(v, ast.Call) and isinstance(v.func, ast.Name)}
        self.persistent_classes = made & self.classes.keys()
        """Classes with a persistent instance."""

    def _read(self, body: Sequence[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, _Function):
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
                self.names[target.id] = _binding_kind(value)
                self.values[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                self._bind(one, value)

    def methods(self, name: str) -> dict[str, _Function]:
        return {n.name: n for n in self.classes[name].body if isinstance(n, _Function)}

    def attributes(self, name: str) -> dict[str, BindingKind]:
        """The attributes of a class's objects after construction and loading."""
        assigned = [s for s in self.classes[name].body if isinstance(s, ast.Assign)]
        found = {t.id: _binding_kind(s.value) for s in assigned for t in s.targets if isinstance(t, ast.Name)}
        for method in self.methods(name).values():
            if method.name in ("__init__", "load", "__post_init__"):
                assigned = [n for n in ast.walk(method) if isinstance(n, ast.Assign)]
                attributes = ((s, t) for s in assigned for t in s.targets if isinstance(t, ast.Attribute))
                found.update({t.attr: _binding_kind(s.value) for s, t in attributes})
        return found


def _binding_kind(value: ast.expr) -> BindingKind:
    if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return BindingKind.CONTAINER
    if isinstance(value, ast.GeneratorExp):
        return BindingKind.ITERATOR
    if isinstance(value, ast.Call):
        made_by = _last_name(value.func)
        return next((kind for names, kind in _MADE_BY if re.fullmatch(names, made_by)), BindingKind.OBJECT)
    return BindingKind.CONSTANT if isinstance(value, ast.Constant | ast.Tuple | ast.JoinedStr) else BindingKind.OBJECT


def _last_name(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


class SourceFunction:
    """A function that a call may run. `owner` is its class, if it is a method of a persistent object; `root` is True
    for the reward itself; `parents` maps each node to its parent."""

    def __init__(self, node: _Callable, module: SourceModule, *, owner: str = "", root: bool = False) -> None:
        self.node = node
        self.module = module
        self.owner = owner
        self.root = root
        nodes = list(ast.walk(node))
        self.parents = {child: parent for parent in nodes for child in ast.iter_child_nodes(parent)}
        declared = ast.Global | ast.Nonlocal if module.closed else ast.Global
        self.outer = {name for s in nodes if isinstance(s, declared) for name in s.names}
        bound = {a.arg for a in nodes if isinstance(a, ast.arg)}
        bound |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        bound |= {n.name for n in nodes if isinstance(n, ast.FunctionDef) and n is not node}
        self.locals = bound - self.outer
        arguments = node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        self.parameters = positional + arguments.kwonlyargs
        optional = positional[len(positional) - len(arguments.defaults) :] + arguments.kwonlyargs
        defaults = zip(optional, [*arguments.defaults, *arguments.kw_defaults], strict=True)
        self.shared_defaults = {
            p.arg for p, value in defaults if value and _binding_kind(value) is BindingKind.CONTAINER
        }
        """Parameters with a container as default: it is made once and persists."""

    def nodes(self) -> Iterator[ast.AST]:
        """The nodes that run in a call, without decorators, defaults and annotations, which run once."""
        for part in [self.node.body] if isinstance(self.node, ast.Lambda) else self.node.body:
            yield from ast.walk(part)

    def calls(self) -> Iterator[tuple[ast.Call, str]]:
        """The calls in a function, its decorators and its defaults, with the text of what is called."""
        for node in ast.walk(self.node):
            if isinstance(node, ast.Call):
                yield node, ast.unparse(node.func)

    def finding(self, node: ast.AST, text: str, *, sure: bool = True) -> StateFinding:
        line = getattr(node, "lineno", getattr(self.node, "lineno", 0))
        return StateFinding(self.module.path.name, line, text, sure)


_ONCE = ("__init__", "__new__", "__post_init__", "load")
"""Methods that run once per worker."""


def _reachable(modules: Sequence[SourceModule], target: ast.AST | None) -> list[SourceFunction]:
    """The reward and its transitive callees in the packed files, found by name."""
    first = modules[0]
    pending: list[SourceFunction] = []
    if isinstance(target, ast.ClassDef):
        first.persistent_classes.add(target.name)
        call = first.methods(target.name).get("__call__") if target.name in first.classes else None
        pending += [SourceFunction(call, first, owner=target.name, root=True)] if call is not None else []
    elif isinstance(target, _Callable):
        pending.append(SourceFunction(target, first, root=True))
    found: dict[ast.AST, SourceFunction] = {}
    named: set[str] = set()
    while pending:
        function = pending.pop()
        if function.node in found:
            continue
        found[function.node] = function
        named |= _identifiers(function.nodes())
        for module in modules:
            # A name bound to an object of a packed class includes the class.
            values = [value for name, value in module.values.items() if name in named]
            named |= {n for value in values for n in _identifiers(ast.walk(value)) if n in module.classes}
            callees = [module.functions[n] for n in named & module.functions.keys()]
            pending += [SourceFunction(node, module) for node in callees if node not in found]
            own = {function.owner} if function.module is module else set()
            for name in (named & module.classes.keys()) | (module.persistent_classes & own):
                owner = name if name in module.persistent_classes else ""
                pending += [
                    SourceFunction(method, module, owner=owner)
                    for method in module.methods(name).values()
                    if method.name not in _ONCE and (method.name in named or method.name.startswith("__"))
                ]
        pending = [f for f in pending if f.node not in found]
    return list(found.values())


def _wrappers(function: SourceFunction, body: Sequence[ast.stmt]) -> Iterator[SourceFunction]:
    """The wrapper functions of a function's decorators in this file: inner functions that call a parameter of the outer
    one."""
    module = function.module
    for decorator in [] if isinstance(function.node, ast.Lambda) else function.node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        made = module.functions.get(called.id) if isinstance(called, ast.Name) else None
        if made is None:
            continue
        closed = SourceModule(module.path, body, closed=made)
        given = {a.arg for a in ast.walk(made) if isinstance(a, ast.arg)}
        for inner in ast.walk(made):
            if isinstance(inner, _Function) and inner is not made:
                wrapper = SourceFunction(inner, closed)
                own = {a.arg for a in ast.walk(inner.args) if isinstance(a, ast.arg)}
                if {getattr(n.func, "id", "") for n in wrapper.nodes() if isinstance(n, ast.Call)} & (given - own):
                    yield wrapper


# Accesses to names that outlive a call


class AccessKind(enum.Enum):
    """The kind of access to a persistent name."""

    READ = enum.auto()
    REBIND = enum.auto()
    ITEM = enum.auto()
    """`X[k] = v`"""
    ATTRIBUTE = enum.auto()
    AUGMENT = enum.auto()
    """`X += 1`, `X[k] += 1`"""
    METHOD = enum.auto()
    """`X.append(...)` and similar calls."""
    NEXT = enum.auto()


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

    @property
    def binding(self) -> BindingKind:
        module = self.function.module
        if self.name.startswith("self."):
            return module.attributes(self.function.owner).get(self.name.removeprefix("self."), BindingKind.OBJECT)
        return module.names.get(self.name, BindingKind.CONTAINER)

    def finding(self, text: str, *, sure: bool = True) -> StateFinding:
        return self.function.finding(self.node, text, sure=sure)


_CONTAINER_CHANGES = r"add|append|appendleft|clear|discard|extend|insert|pop|popitem|remove|setdefault|subtract|update"
_MUTATORS = re.compile(rf"{_CONTAINER_CHANGES}|extendleft|popleft|put|put_nowait|reverse|rotate|send|sort")
"""Methods that change their object."""
_FIRST_ARGUMENT = re.compile(r"heappush|heappop|heapify|heapreplace|insort|insort_left|shuffle|next")
"""Functions that change their first argument."""


def _accesses(function: SourceFunction) -> Iterator[StateAccess]:
    """All accesses to persistent names in a function, in the order of the syntax tree."""
    for node in function.nodes():
        if isinstance(node, ast.Call):
            method, changed = _last_name(node.func), []
            if isinstance(node.func, ast.Attribute) and _MUTATORS.fullmatch(method):
                changed.append((node.func.value, AccessKind.METHOD))
            if node.args and _FIRST_ARGUMENT.fullmatch(method):
                changed.append((node.args[0], AccessKind.NEXT if method == "next" else AccessKind.METHOD))
            for target, kind in changed:
                if name := _persistent_name(target, function):
                    yield StateAccess(name, kind, node, function, method=method)
        for target in _targets(node):
            if name := _persistent_name(target, function):
                key = target.slice if isinstance(target, ast.Subscript) else None
                kind = _write_kind(node, target, name)
                yield StateAccess(name, kind, target, function, value=getattr(node, "value", None), key=key)
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = _persistent_name(node, function, exact=True)
            if name and not _is_target(node, function):
                yield StateAccess(name, AccessKind.READ, node, function)


def _targets(node: ast.AST) -> list[ast.expr]:
    """The expressions that a statement binds, changes or deletes."""
    if isinstance(node, ast.Assign | ast.Delete):
        found = node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For | ast.NamedExpr):
        found = [node.target]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        found = [node.optional_vars]
    else:
        return []
    return [t for one in found for t in (one.elts if isinstance(one, ast.Tuple | ast.List) else [one])]


def _write_kind(node: ast.AST, target: ast.expr, name: str) -> AccessKind:
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
        outer = last.id in function.outer
        if not isinstance(last.ctx, ast.Store | ast.Del):
            outer = outer or (last.id in function.module.names and last.id not in function.locals)
            outer = outer or last.id in function.shared_defaults
        return last.id if outer else ""
    if not exact and isinstance(last, ast.Call) and ast.unparse(last) == "type(self)" and function.owner:
        return "self"
    return ""


def _is_target(node: ast.expr, function: SourceFunction) -> bool:
    """True if a load of a name only leads to a write: `X` in `X[k] = v` or `X.append(v)`."""
    child: ast.AST = node
    parent = function.parents.get(node)
    while isinstance(parent, ast.Attribute | ast.Subscript) and parent.value is child:
        if isinstance(parent.ctx, ast.Store | ast.Del):
            return True
        child, parent = parent, function.parents.get(parent)
    if not isinstance(child, ast.Attribute) or not _MUTATORS.fullmatch(child.attr):
        return False
    # A call whose result is used is also a read: `X.pop()`, `X.setdefault(k, v)`.
    return isinstance(parent, ast.Call) and isinstance(function.parents.get(parent), ast.Expr)


def _mentions(node: ast.AST | None, name: str) -> bool:
    """True if an expression contains `X`, or `self.x`."""
    return node is not None and any(ast.unparse(n) == name for n in ast.walk(node) if isinstance(n, ast.expr))


def _identifiers(nodes: Iterable[ast.AST]) -> set[str]:
    """The identifiers in a piece of code: names and attributes."""
    return {n.id if isinstance(n, ast.Name) else n.attr for n in nodes if isinstance(n, ast.Name | ast.Attribute)}


# The rules


def _state(accesses: Sequence[StateAccess]) -> list[StateFinding]:
    """Names that calls write, unless they hold a memo or something that is loaded once."""
    groups: dict[tuple[SourceModule, str, str], list[StateAccess]] = {}
    for access in accesses:
        owner = access.function.owner if access.name.startswith("self.") else ""
        groups.setdefault((access.function.module, owner, access.name), []).append(access)
    reasons: list[StateFinding] = []
    for group in groups.values():
        writes = [access for access in group if access.access is not AccessKind.READ]
        if writes and not _is_memo(writes, group):
            reasons += [_write(write, group) for write in writes if not _is_harmless(write)]
    return reasons


def _write(write: StateAccess, group: Sequence[StateAccess]) -> StateFinding:
    kind, counts = write.binding, write.access is AccessKind.AUGMENT
    read = any(u.access is AccessKind.READ for u in group)
    if kind is BindingKind.IMPORT:
        return write.finding(f"a call writes into the module {write.name}", sure=counts)
    if write.access is AccessKind.NEXT:
        return write.finding(f"{write.name} is an iterator that calls advance")
    if write.access is AccessKind.REBIND and write.name.startswith("self."):
        return write.finding(f"a call sets {write.name}", sure=not _is_set_first(write, group))
    if write.access is AccessKind.REBIND:
        scope = "closure variable" if write.function.module.closed is not None else "global"
        return write.finding(f"a call writes the {scope} {write.name}")
    if write.access is AccessKind.METHOD:
        text = f"a call changes {write.name} ({write.method})"
        return write.finding(text, sure=read and kind is not BindingKind.OBJECT)
    text = f"a call counts in {write.name}" if counts else f"a call writes into {write.name}"
    return write.finding(text, sure=read or counts)


def _is_harmless(write: StateAccess) -> bool:
    """True for loading at first use, for a constant setting, and for a method of a module or an object that only looks
    like a change."""
    kind = write.binding
    if kind is BindingKind.CODE and write.access is AccessKind.METHOD:
        return True
    if kind is BindingKind.IMPORT:
        if isinstance(write.value, ast.Constant) and write.access is not AccessKind.AUGMENT:
            return True
        if "os.environ" in ast.unparse(write.node):
            return write.method in ("setdefault", "pop")
        return write.access in (AccessKind.METHOD, AccessKind.NEXT)
    if write.access not in (AccessKind.REBIND, AccessKind.ITEM) or write.value is None:
        return False
    if _mentions(write.value, write.name):
        return False
    if write.key is not None and not isinstance(write.key, ast.Constant):
        return False  # a set of items seen before
    locals_used = _identifiers(ast.walk(write.value)) & write.function.locals - {"self", "artefacts"}
    if write.function.root and locals_used:
        return False  # from the item: the reward remembers it
    return _is_guarded(write)


def _is_guarded(write: StateAccess) -> bool:
    """True under `if X is None`, `if not X`, `if k not in X`, or after `if X is not None: return X`."""
    around = write.function.parents.get(write.node)
    while around is not None:
        if isinstance(around, ast.If) and _mentions(around.test, write.name):
            return True
        if isinstance(around, ast.Try) and any(_mentions(s, write.name) for s in around.body):
            return True
        around = write.function.parents.get(around)
    tests = [n for n in ast.walk(write.function.node) if isinstance(n, ast.If) and _mentions(n.test, write.name)]
    return any(isinstance(s, ast.Return) for n in tests for s in n.body)


def _is_memo(writes: Sequence[StateAccess], group: Sequence[StateAccess]) -> bool:
    """True for a memo: `X[key] = value` with a key from the item, a value not derived from X, and a read of X[...]. X
    may be cleared or trimmed, but its size and contents are not used otherwise."""
    trims = [w for w in writes if w.access is AccessKind.METHOD and w.method in ("clear", "pop", "popitem")]
    stores = [w for w in writes if w.access is AccessKind.ITEM and w.value is not None]
    if not stores or len(trims) + len(stores) != len(writes):
        return False
    if any(isinstance(store.key, ast.Constant) or _mentions(store.value, store.name) for store in stores):
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


def _is_set_first(write: StateAccess, group: Sequence[StateAccess]) -> bool:
    """True if the reward itself sets an attribute before any read, so that each call may be independent."""
    function = write.function
    parent = function.parents.get(write.node)
    straight = parent is not None and function.parents.get(parent) is function.node
    reads = [u.node for u in group if u.access is AccessKind.READ and u.function is function]
    line = getattr(write.node, "lineno", 0)
    value_reads = write.value is not None and _mentions(write.value, write.name)
    return function.root and straight and not value_reads and all(getattr(r, "lineno", 0) >= line for r in reads)


_ENVIRONMENTS = frozenset({"env", "envs", "environment", "environments", "simulator", "gym_env", "vec_env"})
_ENVIRONMENT_TYPE = re.compile(r"\b(?:\w*Env|\w*Environment|\w*StateMachine)\b")


def _environment_parameters(functions: Sequence[SourceFunction]) -> Iterator[StateFinding]:
    for function in functions:
        for parameter in function.parameters if function.root else ():
            annotation = ast.unparse(parameter.annotation) if parameter.annotation is not None else ""
            if parameter.arg in _ENVIRONMENTS or _ENVIRONMENT_TYPE.search(annotation):
                yield function.finding(parameter, f"parameter {parameter.arg!r} is an environment")


_CACHES = re.compile(r"^(?:functools\.)?(?:lru_cache|cache)\b")


def _indirect_writes(functions: Sequence[SourceFunction]) -> Iterator[StateFinding]:
    """State that is written indirectly: by `setattr`, through `globals()`, in an object that a cache returns."""
    named = [f.node for f in functions if not isinstance(f.node, ast.Lambda)]
    cached = {n.name for n in named if any(_CACHES.match(ast.unparse(d)) for d in n.decorator_list)}
    for function in functions:
        for node in function.nodes():
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "object.__setattr__"):
                of_self = bool(node.args) and ast.unparse(node.args[0]) == "self" and function.owner
                if of_self and getattr(function.node, "name", "") not in ("__init__", "load"):
                    yield function.finding(node, "a call sets an attribute of self by setattr", sure=False)
            changed = _changed_object(node)
            made = ast.unparse(changed.func) if isinstance(changed, ast.Call) else ""
            if made == "globals":
                yield function.finding(node, "a call writes into globals()")
            elif made in cached:
                yield function.finding(node, f"a call changes what the cached {made}() returns")


def _changed_object(node: ast.AST) -> ast.expr | None:
    """The object that a statement or call changes in place."""
    match node:
        case ast.Subscript(value=changed, ctx=ast.Store() | ast.Del()):
            return changed
        case ast.Call(func=ast.Attribute(value=changed, attr=name)) if re.fullmatch(_CONTAINER_CHANGES, name):
            return changed
    return None


def _files(functions: Sequence[SourceFunction]) -> Iterator[StateFinding]:
    """Files of a fixed name that are written and read, unless one function writes the file first and reads it
    afterwards."""
    opened: list[tuple[SourceFunction, ast.Call, str, str]] = []
    for function in functions:
        for node in (n for n in function.nodes() if isinstance(n, ast.Call)):
            path, mode = _opened(node)
            root = path.partition(".")[0]
            if path and (root == "self" or root not in function.locals):
                opened.append((function, node, path, mode))
    for function, node, path, mode in opened:
        reads = [(f, r) for f, r, read, how in opened if (read, how) == (path, "r")]
        scratch = mode == "w" and all(f is function and r.lineno > node.lineno for f, r in reads)
        if mode != "r" and reads and not scratch:
            yield function.finding(node, f"a call writes the file {path}, which calls read")


_WRITERS = frozenset({"write_text", "write_bytes", "touch"})
_READERS = frozenset({"read_text", "read_bytes", "exists", "is_file"})


def _opened(node: ast.Call) -> tuple[str, str]:
    """The path expression and mode ("r", "w" or "a") of a call that opens, reads or writes a file; '' for other
    calls."""
    function, name = node.func, ast.unparse(node.func)
    if isinstance(function, ast.Attribute) and function.attr in _WRITERS | _READERS:
        return _path_text(function.value), "w" if function.attr in _WRITERS else "r"
    if name in ("os.path.exists", "os.path.isfile") and node.args:
        return _path_text(node.args[0]), "r"
    if name in ("open", "io.open", "gzip.open") and node.args:
        path, rest = node.args[0], node.args[1:2]
    elif isinstance(function, ast.Attribute) and function.attr == "open" and name != "os.open":
        path, rest = function.value, node.args[:1]
    else:
        return "", ""
    modes = rest + [k.value for k in node.keywords if k.arg == "mode"]
    mode = str(modes[0].value) if modes and isinstance(modes[0], ast.Constant) else "r"
    return _path_text(path), "a" if set(mode) & {"a", "+"} else "w" if set(mode) & {"w", "x"} else "r"


def _path_text(node: ast.expr) -> str:
    """The text of a path expression: of `Path(X)`, that of X."""
    if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith("Path"):
        return _path_text(node.args[0])
    return ast.unparse(node)


_SQL = re.compile(r"\s*(?:insert\s+(?:or\s+\w+\s+)?into|update\s+\w+\s+set|replace\s+into)\b", re.IGNORECASE)
_SHELVES = frozenset({"shelve.open", "dbm.open", "diskcache.Cache", "Cache", "shelve.DbfilenameShelf"})


def _databases(functions: Sequence[SourceFunction]) -> Iterator[StateFinding]:
    for function in functions:
        for call, name in function.calls():
            if name in _SHELVES:
                text = f"a call opens {ast.unparse(call)[:60]}, which may outlive it"
                yield function.finding(call, text, sure=False)
        for node in ast.walk(function.node):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _SQL.match(node.value):
                yield function.finding(node, "a call writes into a database", sure=False)


_DRAWS = re.compile(
    r"^(?:random\.(?:random|randint|randrange|choice|choices|sample|shuffle|uniform|gauss|betavariate)"
    r"|(?:np|numpy)\.random\.(?:rand|randn|randint|random|choice|shuffle|permutation|normal|uniform)"
    r"|torch\.(?:rand|randn|randint|randperm|bernoulli|multinomial)|uuid\.uuid4|uuid4|os\.urandom|secrets\.\w+)$"
)
_GENERATORS = re.compile(r"^(?:random\.Random|Random|(?:np|numpy)\.random\.(?:default_rng|RandomState)|default_rng)$")
_SEEDS = re.compile(r"^(?:random\.seed|(?:np|numpy)\.random\.seed|torch\.manual_seed|seed_everything|set_seed)$")


def _unseeded_randomness(functions: Sequence[SourceFunction], accesses: Sequence[StateAccess]) -> list[StateFinding]:
    """Random draws that are not seeded in the call."""
    warnings: set[StateFinding] = set()
    calls = [(function, call, name) for function in functions for call, name in function.calls()]
    seeded = any(_SEEDS.match(name) for _, _, name in calls)
    for function, call, name in calls:
        if _DRAWS.match(name) and not seeded:
            text = f"{name}() is not seeded by the item, but the reward is declared deterministic"
            warnings.add(function.finding(call, text, sure=False))
        if _GENERATORS.match(name) and not call.args and not call.keywords:
            warnings.add(function.finding(call, f"{name}() without a seed", sure=False))
    for access in accesses:
        value = access.function.module.values.get(access.name)
        if isinstance(value, ast.Call) and _GENERATORS.match(ast.unparse(value.func)):
            text = f"{access.name} remembers how often it was drawn from: seed one per item"
            warnings.add(access.finding(text, sure=False))
    return sorted(warnings, key=lambda r: (r.file, r.line))
