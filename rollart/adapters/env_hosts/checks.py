"""Checks that a run's environments can be made where they are to run, without playing an episode.

`python -m rollart.adapters.env_hosts.checks` reads `{"path": [...], "domains": {...}, "images": ... or null,
"worked": [...]}`
from stdin, as JSON; the first three have the form of a host's. It writes lines of JSON: `{"looking": NAME}` before each
check, so that its reader knows which one ended the process, `{"trouble": [domain, argument, message]}` for a problem,
and `{"quick": domain}` for an environment that declares itself quick. It needs rollart and the imports of the
environments, nothing else.
"""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollart.adapters.envs.worked import METHOD, checked_example
from rollart.errors import did_you_mean, one_line
from rollart.user_code import UserCodeGuard, declares_quick

MODULE = "rollart.adapters.env_hosts.checks"

WARM_START_ARGUMENT = "+"
"""Stands in place of an argument for the warm start, which asks for worked examples."""


@dataclass(frozen=True, slots=True)
class EnvironmentProblem:
    """A problem with a domain's environment, or with the image hook (`domain` ''). `argument` is the entry of
    `environment_args` that causes it; '' for none, `*` for all of them, `WARM_START_ARGUMENT` for the warm start."""

    domain: str
    argument: str
    message: str


def check_environments(
    domains: Mapping[str, Any],
    images: Mapping[str, Any] | None = None,
    *,
    worked: Collection[str] = (),
    on_check: Callable[[str], object] = lambda name: None,
    quick: Callable[[str], object],
) -> Iterator[EnvironmentProblem]:
    """Import each domain's environment and make one instance, then the image hook. `worked`: domains that must give
    worked examples. `on_check` is called with the name of each check before it runs, `quick` with each domain whose
    environment declares itself quick."""
    for name, one in domains.items():
        on_check(f"domain '{name}'")
        instance = yield from _check_environment(
            name, str(one["environment"]), dict(one.get("arguments", {})), worked=name in worked
        )
        if declares_quick(instance):
            quick(name)
    if images is not None:
        on_check("environments.images")
        path = str(images["hook"])
        hook = yield from _make("", path, dict(images.get("arguments", {})), "images_args")
        lacking = [name for name in ("images", "ensure") if not callable(getattr(hook, name, None))]
        if lacking and hook is not _NOT_MADE:
            message = f"'{path}' has no {' and no '.join(lacking)} (rule: async images() and ensure(image))"
            yield EnvironmentProblem("", "", message)


def _check_environment(
    domain: str, path: str, arguments: Mapping[str, Any], *, worked: bool
) -> Generator[EnvironmentProblem, None, Any]:
    """Returns the environment; `_NOT_MADE` if it cannot be made."""
    instance = yield from _make(domain, path, arguments, "environment_args")
    if instance is _NOT_MADE:
        return instance
    lacking = [name for name in ("reset", "step", "close") if not callable(getattr(instance, name, None))]
    if lacking:
        yield EnvironmentProblem(
            domain,
            "",
            f"'{path}' makes {type(instance).__name__} without {', '.join(lacking)} (rule: an environment has "
            "async reset(seed), step(action) and close())",
        )
    solve = getattr(instance, METHOD, None)
    if worked and not callable(solve):
        message = f"'{path}' gives no worked examples (rule: worked_example(seed) -> (prompt, answer))"
        yield EnvironmentProblem(domain, WARM_START_ARGUMENT, message)
    elif worked and solve is not None:
        try:
            with UserCodeGuard():
                checked_example(solve(0))
        except Exception as error:  # user code may raise anything
            message = f"'{path}' gave no worked example: {one_line(error, 500)}"
            yield EnvironmentProblem(domain, WARM_START_ARGUMENT, message)
    return instance


_NOT_MADE = object()


def _make(domain: str, path: str, arguments: Mapping[str, Any], field: str) -> Generator[EnvironmentProblem, None, Any]:
    """Returns the object that a spec names, or `_NOT_MADE`. `field`: the spec's field of its arguments."""
    make, problem = _import_callable(path)
    if make is None:
        yield EnvironmentProblem(domain, "", problem)
        return _NOT_MADE
    unknown = list(_unknown_arguments(make, arguments))
    for key, hint in unknown:
        yield EnvironmentProblem(domain, key, f"{field} has '{key}' (rule: what {path} takes{hint})")
    if unknown:
        return _NOT_MADE
    try:
        with UserCodeGuard():
            return make(**arguments)
    except Exception as error:  # user code may raise anything
        text = str(dict(arguments))
        given = f" with {text if len(text) <= 200 else text[:197] + '...'}" if arguments else ""
        message = f"'{path}' cannot be made{given}: {one_line(error, 500)}"
        yield EnvironmentProblem(domain, "*" if arguments else "", message)
        return _NOT_MADE


def _import_callable(path: str) -> tuple[Callable[..., Any] | None, str]:
    """The callable that a spec names, or the reason why there is none."""
    module, _, name = path.partition(":")
    try:
        with UserCodeGuard():
            holder = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = str(error.name)
        is_missing = module == missing or module.startswith(f"{missing}.")
        hint = _similar_module_hint(missing) if is_missing else ""
        return None, f"'{path}' cannot be imported: there is no module '{missing}'{hint}"
    except Exception as error:
        return None, f"'{path}' cannot be imported: {one_line(error, 500)}"
    if not hasattr(holder, name):
        known = [other for other, value in vars(holder).items() if callable(value) and not other.startswith("_")]
        return None, f"'{path}': module {module} has no '{name}'{did_you_mean(name, known)}"
    found: Any = getattr(holder, name)
    return (found, "") if callable(found) else (None, f"'{path}' is {type(found).__name__}, which makes nothing")


def _similar_module_hint(module: str) -> str:
    """A module with a similar name beside the missing one's siblings, or in the spec's directory."""
    parent, _, name = module.rpartition(".")
    try:
        # Without a package: the spec's directory, and the working directory.
        search_path = list(importlib.import_module(parent).__path__) if parent else sys.path[:2]
    except Exception:
        return ""
    near = did_you_mean(name, [found.name for found in pkgutil.iter_modules(search_path)])
    return near if "did you mean" in near else ""


def _unknown_arguments(make: Callable[..., Any], arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Arguments that `make` does not accept, each with a hint."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # it has no readable signature
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for key in arguments:
        if key not in known:
            yield key, did_you_mean(key, known)


def main() -> None:
    """Run the checks that stdin asks for."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # stdout carries the results alone, without output of environments
    faulthandler.enable()
    request = json.load(sys.stdin)
    sys.path[:0] = request["path"]

    def emit(**line: Any) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    for one in check_environments(
        request["domains"],
        request["images"],
        worked=request["worked"],
        on_check=lambda name: emit(looking=name),
        quick=lambda name: emit(quick=name),
    ):
        emit(trouble=[one.domain, one.argument, one.message])
    emit(looking="")
    os._exit(0)  # without waiting for threads of environments


if __name__ == "__main__":
    main()
