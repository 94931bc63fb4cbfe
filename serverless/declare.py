"""`@reward`: declares that a plain function may be offloaded, and its requirements.

    @reward(memory_mb=512, timeout_s=10, deterministic=True)
    def exact_match(sample: Item) -> float: ...

    @reward(artefacts=("scorer.safetensors",), preload=("numpy",))
    class Scorer:
        def load(self, artefacts: pathlib.Path) -> None: ...
        def __call__(self, sample: Item) -> float: ...

The decorator stores its arguments and returns its target: nothing is wrapped, registered or imported.
The controller reads them from the source text (`declarations`), so user code runs in workers only.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from serverless.errors import SpecInvalid
from serverless.signatures import OPTIONS

__all__ = ["ATTRIBUTE", "RewardOptions", "declarations", "reward"]

F = TypeVar("F", bound=Callable[..., Any])

ATTRIBUTE = OPTIONS
"""The attribute that holds the options of a decorated function."""


@dataclass(frozen=True, slots=True)
class RewardOptions:
    """The arguments of `@reward`, by the names of `FunctionSpec`."""

    settings: dict[str, Any] = field(default_factory=dict)


@overload
def reward(function: F, /) -> F: ...
@overload
def reward(
    *,
    name: str | None = None,
    takes: str = "auto",
    memory_mb: int = 512,
    cpu: float = 0.0,
    gpu: str = "",
    timeout_s: float = 10.0,
    timeout_floor: float | None = None,
    init_timeout_s: float = 10.0,
    concurrency: int = 4,
    queue: int = 10_000,
    keep_alive_s: float = 60.0,
    warm: int = 0,
    deterministic: bool = True,
    cache: bool | None = None,
    hedge: bool = True,
    trust: str = "trusted",
    stateless: bool = False,
    needs: tuple[str, ...] = (),
    batch: dict[str, float] | None = None,
    requirements: tuple[str, ...] = (),
    index_urls: tuple[str, ...] = (),
    image: dict[str, Any] | None = None,
    artefacts: tuple[str, ...] = (),
    preload: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    secrets: tuple[str, ...] | list[str] = (),
) -> Callable[[F], F]: ...
def reward(function: Any = None, /, **settings: Any) -> Any:
    """Mark a function, an async function or a class with `__call__` as a reward. Arguments are `FunctionSpec`'s.

    It takes one `Item`, a list of them, or the arguments of another framework's rewards (the table in
    `serverless.signatures`). For each item it returns a number, `Scored`, `ModelFault` or a dict ({"score", "metrics",
    "steps"}, {"model_fault", "floor"} or the wire form). Raises `TypeError` for an argument that `FunctionSpec` does
    not have.
    """
    _known(settings)

    def mark(target: Any) -> Any:
        setattr(target, ATTRIBUTE, RewardOptions(dict(settings)))
        return target

    return mark if function is None else mark(function)


def declarations(source: str, *, filename: str = "<source>") -> dict[str, dict[str, Any]]:
    """The `@reward` arguments in a source text, by attribute, without running it.

    Raises `SpecInvalid` if an argument is not a literal or the text is not Python.
    """
    try:
        tree = ast.parse(source, filename)
    except SyntaxError as error:
        raise SpecInvalid(f"{filename}:{error.lineno}: not Python: {error.msg}") from None
    found: dict[str, dict[str, Any]] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for decorator in node.decorator_list:
                settings = _decorated(decorator, filename)
                if settings is not None:
                    found[node.name] = settings
    return found


def _decorated(node: ast.expr, filename: str) -> dict[str, Any] | None:
    call = node if isinstance(node, ast.Call) else None
    target = call.func if call else node
    name = target.attr if isinstance(target, ast.Attribute) else target.id if isinstance(target, ast.Name) else ""
    if name != "reward":
        return None
    if call is not None and call.args:
        raise SpecInvalid(f"{filename}:{node.lineno}: @reward takes keyword arguments only")
    settings: dict[str, Any] = {}
    for keyword in call.keywords if call else ():
        try:
            if keyword.arg is None:
                raise ValueError
            if keyword.arg not in _SETTINGS:
                raise SpecInvalid(
                    f"{filename}:{keyword.value.lineno}: @reward has no argument '{keyword.arg}'{_nearest(keyword.arg)}"
                )
            settings[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            shown = f"{keyword.arg}=..." if keyword.arg else "**..."
            raise SpecInvalid(
                f"{filename}:{node.lineno}: @reward({shown}) is not a literal",
                remedy="write the value itself, or set it in the run's spec",
            ) from None
    return settings


_SETTINGS = frozenset(
    {
        "artefacts",
        "batch",
        "cache",
        "concurrency",
        "cpu",
        "deterministic",
        "env",
        "gpu",
        "hedge",
        "image",
        "index_urls",
        "init_timeout_s",
        "keep_alive_s",
        "memory_mb",
        "name",
        "needs",
        "preload",
        "queue",
        "requirements",
        "secrets",
        "stateless",
        "takes",
        "timeout_floor",
        "timeout_s",
        "trust",
        "warm",
    }
)


def _nearest(wrong: str) -> str:
    close = difflib.get_close_matches(wrong, _SETTINGS, n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else f"; it has {', '.join(sorted(_SETTINGS))}"


def _known(settings: dict[str, Any]) -> None:
    unknown = sorted(set(settings) - _SETTINGS)
    if unknown:
        raise TypeError(f"@reward has no argument {unknown[0]!r}; it has {', '.join(sorted(_SETTINGS))}")
