"""A run's rewards: packaged as functions, or imported here if they are stateful."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollart.errors import SpecError, one_line
from rollart.launch.functions import translated_errors
from rollart.launch.prepare import import_attribute
from rollart.settings.functions import effective_spec, function_spec
from rollart.settings.planning import Specs
from rollart.settings.resolve import Resolved
from rollart.settings.run import FunctionEntry
from rollart.user_code import UserCodeGuard
from serverless.deploy.package import Package, build
from serverless.errors import NotOffloadable, ServerlessError, SpecInvalid
from serverless.inline import InlineScorer, inline
from serverless.spec import FunctionSpec
from serverless.workers.local import check_importable, check_isolation, module_exists


@dataclass(frozen=True, slots=True)
class RunRewards:
    """Packages of stateless rewards, and stateful rewards that run beside the environments, with the reason by name
    (`why`)."""

    packages: tuple[Package, ...]
    stateful: Mapping[str, InlineScorer] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)


def check_function(function: FunctionEntry, specs: Specs) -> None:
    """Check a function's source before a start: `RollartError` for anything that would be refused later."""
    functions, base = specs.cluster.functions, Path(specs.base)
    given = [function.artefact] if isinstance(function.artefact, str) else function.artefact or []
    for artefact in given:
        module, colon, _ = artefact.partition(":")
        if colon and len(given) == 1:  # a producer
            if not module_exists(module):
                raise SpecError(f"artefact of function '{function.name}': there is no module '{module}'")
        elif not (base / artefact).exists():
            raise SpecError(f"artefact of function '{function.name}': there is no {base / artefact}")
    try:
        package = _package(function, (), base)
    except NotOffloadable as refused:
        _import_stateful(function, base, refused)
        return
    if "local" in functions.chain:
        with translated_errors():
            if not functions.allow_unsafe:
                check_isolation(package)
            if specs.cluster.runtime.backend == "local" or specs.cluster.runtime.address == "local":
                check_importable(package)


def build_rewards(resolved: Resolved, artefacts: Mapping[str, Sequence[str]]) -> RunRewards:
    """Build the package of every function; `SpecError` for problems in its source."""
    packed, stateful, why, base = [], {}, {}, Path(resolved.base)
    for function in resolved.run.functions:
        given = artefacts.get(function.name, ())
        try:
            packed.append(_package(function, given, base))
        except NotOffloadable as refused:
            target, spec = _import_stateful(function, base, refused)
            directory = Path(given[0]).parent if given else None
            with _in_this_process(function, refused):
                scorer = inline(target, takes=spec.takes, artefacts=directory, timeout_s=spec.timeout_s)
            stateful[function.name], why[function.name] = scorer, "; ".join(refused.reasons)
    return RunRewards(tuple(packed), stateful, why)


def function_packages(specs: Specs, artefacts: Mapping[str, Sequence[str]]) -> tuple[Package, ...]:
    """The packages of functions that can be offloaded. The others are neither checked nor run."""
    found = []
    for function in specs.run.functions:
        with contextlib.suppress(NotOffloadable):
            found.append(_package(function, artefacts.get(function.name, ()), Path(specs.base)))
    return tuple(found)


def _import_stateful(function: FunctionEntry, base: Path, refused: NotOffloadable) -> tuple[Any, FunctionSpec]:
    """The imported object of a function's entry, and its settings. SpecError if it is untrusted, or takes an
    environment."""
    with _in_this_process(function, refused):
        spec = effective_spec(function, base)
        if spec.trust == "untrusted":
            raise SpecInvalid("it is untrusted: it cannot run in this process", remedy="make it stateless")
    target = _import_handler(function, base)
    if {"env", "environment"} & set(inspect.signature(target).parameters):
        raise SpecError(
            f"function '{function.name}' takes an environment", remedy="pay it from the environment's own rewards"
        )
    return target, spec


@contextlib.contextmanager
def _in_this_process(function: FunctionEntry, refused: NotOffloadable) -> Iterator[None]:
    try:
        yield
    except SpecInvalid as error:
        raise SpecError(
            f"function '{function.name}': {refused.message}; {error.message}", remedy=error.remedy
        ) from None


def _import_handler(function: FunctionEntry, base: Path) -> Any:
    """Import the object that a function's entry names, for functions that run here."""
    if not function.source.endswith(".py"):
        return import_attribute(f"{function.source}:{function.handler}", f"function '{function.name}'")
    spec = importlib.util.spec_from_file_location(f"reward_{function.name}", base / function.source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        with UserCodeGuard():
            spec.loader.exec_module(module)
        return getattr(module, function.handler)
    except Exception as error:
        raise SpecError(f"function '{function.name}' cannot be imported: {one_line(error)}") from None


def _package(function: FunctionEntry, artefacts: Sequence[str], base: Path) -> Package:
    try:
        return build(function_spec(function, artefacts), base=base)
    except NotOffloadable:
        raise
    except ServerlessError as error:
        raise SpecError(f"function '{function.name}': {error}") from None
