"""A run's rewards: packaged as functions, or imported here if they are stateful."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollart.errors import RollartError, SpecError, one_line
from rollart.launch.functions import (
    cases_beside,
    check_targets,
    deployer,
    function_secrets,
    is_deployable,
    one_worker,
    translated_errors,
)
from rollart.launch.hosts import provider_run_id
from rollart.launch.prepare import import_attribute
from rollart.settings.cluster import ClusterFunctions
from rollart.settings.functions import FunctionRelease, effective_spec, function_spec, released_spec
from rollart.settings.planning import Specs
from rollart.settings.providers import provider_names
from rollart.settings.resolve import Resolved
from rollart.settings.run import FunctionEntry
from rollart.user_code import UserCodeGuard
from serverless.deploy.local import LocalDeployer
from serverless.deploy.package import Package, build, restore
from serverless.errors import BackendFailed, NotOffloadable, ServerlessError, SpecInvalid
from serverless.history import find_differences, refusal
from serverless.inline import InlineScorer, inline
from serverless.providers.base import Deployer, find_version, split_reference
from serverless.rehearse import read_cases
from serverless.secrets import refuse_packed_secrets
from serverless.spec import FunctionSpec
from serverless.types import Item
from serverless.workers.local import check_importable, check_isolation, module_exists

ORDER_CHECK_S = 60.0
"""Longest check of one function before its deployment, in seconds."""


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
    if function.function is not None:
        _check_release(function, specs)
        return
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
    with translated_errors():
        _check_package(package, specs)
    with translated_errors(f"function '{function.name}': "):
        _order_cases(function, package.spec, base, functions)


def check_releases(resolved: Resolved, directory: Path) -> None:
    """Check the drawn versions of deployed functions as `check_function` checks sources: `RollartError` for anything
    that would be refused once engines run."""
    for entry in resolved.run.functions:
        if entry.function is not None:
            package = _released_package(entry, resolved.releases[entry.name], directory)
            with translated_errors():
                _check_package(package, resolved)


def _check_package(package: Package, specs: Specs) -> None:
    """Raise the function layer's errors for a package that a provider of the run would refuse, as far as this is known
    without asking another machine, and for one that contains the value of a secret."""
    functions, runtime = specs.cluster.functions, specs.cluster.runtime
    refuse_packed_secrets(package, function_secrets(functions, Path(specs.base)))
    check_targets(package, functions)
    if "local" in functions.chain:
        if not functions.allow_unsafe:
            check_isolation(package)
        if runtime.backend == "local" or runtime.address == "local":
            check_importable(package)


def build_rewards(resolved: Resolved, artefacts: Mapping[str, Sequence[str]], directory: Path) -> RunRewards:
    """Build the package of every function, or read that of a deployed one from the run's `directory`; `SpecError` for
    problems in its source."""
    packed, stateful, why, base = [], {}, {}, Path(resolved.base)
    secrets = function_secrets(resolved.cluster.functions, base)
    for function in resolved.run.functions:
        if function.function is not None:
            packed.append(_released_package(function, resolved.releases[function.name], directory))
            continue
        given = artefacts.get(function.name, ())
        try:
            package = _package(function, given, base)
            with translated_errors():
                refuse_packed_secrets(package, secrets)  # artefacts are packed here for the first time
            packed.append(package)
        except NotOffloadable as refused:
            target, spec = _import_stateful(function, base, refused)
            beside = Path(given[0]).parent if given else None
            with _in_this_process(function, refused):
                scorer = inline(
                    target,
                    takes=spec.takes,
                    artefacts=beside,
                    timeout_s=spec.timeout_s,
                    arguments=spec.arguments,
                )
            stateful[function.name], why[function.name] = scorer, "; ".join(refused.reasons)
    return RunRewards(tuple(packed), stateful, why)


def reward_cases(resolved: Resolved, packages: Sequence[Package]) -> dict[str, list[Item]]:
    """The items that the order of calls is checked with, by function: those of cases.jsonl beside its source.
    SpecInvalid for an invalid line."""
    specs, base, functions = {p.spec.name: p.spec for p in packages}, resolved.base, resolved.cluster.functions
    entries = [function for function in resolved.run.functions if function.name in specs]
    found = {entry.name: _order_cases(entry, specs[entry.name], base, functions) for entry in entries}
    return {name: items for name, items in found.items() if items}


def _order_cases(entry: FunctionEntry, spec: FunctionSpec, base: str | Path, functions: ClusterFunctions) -> list[Item]:
    """The items of cases.jsonl beside a function's source; none where a run does not read them: without a file as
    source, without that check, and of a function that is not deterministic."""
    if not (functions.order_check and spec.deterministic and entry.source and entry.source.endswith(".py")):
        return []
    path = cases_beside(entry.source, base=base)
    if not path.is_file():
        return []
    try:
        return [case.item for case in read_cases(path)]
    except SpecInvalid as error:
        remedy = error.remedy or f"correct {path}, or rename it: a run checks its function with it"
        raise SpecInvalid(error.message, remedy=remedy) from None


async def check_order(packages: Sequence[Package], source: str, functions: ClusterFunctions) -> list[str]:
    """Call deterministic functions of a file on its cases in two orders, in a worker on this machine. `SpecError` for
    one whose answers depend on earlier calls; notes on those that cannot be checked here."""
    path, notes = cases_beside(source), []
    secrets = function_secrets(functions, Path.cwd())
    checked = [package for package in packages if package.spec.deterministic]
    if not path.is_file():
        return [f"{p.spec.name}: not checked for dependence on earlier calls: there is no {path}" for p in checked]
    items = [case.item for case in read_cases(path)]
    for package in checked:
        try:
            async with one_worker((), functions, None, secrets, package) as call:
                _, found = await find_differences(package.spec, items, call, limit_s=ORDER_CHECK_S)
        except BackendFailed as error:
            notes.append(f"{package.spec.name}: not checked for dependence on earlier calls: {error.message}")
            continue
        if found:
            raise refusal(package.spec.name, found)
    return notes


async def draw_releases(resolved: Resolved, directory: Path) -> Resolved:
    """The run with a version for each deployed function that it names, and those packages in its directory.

    A version is drawn once, by the weights of the alias `live` and seeded by the run's id; a run that has drawn one
    keeps it, whatever is deployed, promoted or rolled back meanwhile. Raises `RollartError` if a function is not
    deployed, or cannot be read back.
    """
    named = [entry for entry in resolved.run.functions if entry.function is not None]
    releases, functions = dict(resolved.releases), dict(resolved.functions)
    drawn = {e.name: r for e in named if (r := releases.get(e.name)) is not None and r.reference == e.function}
    missing = [e for e in named if e.name not in drawn or not _release_directory(directory, e.name).exists()]
    if not missing:
        return resolved
    settings = resolved.cluster.functions
    with translated_errors("reward functions: "):
        async with deployer(release_provider(resolved), settings, root=Path(settings.local.root)) as control:
            for entry in missing:
                draw = random.Random(f"{provider_run_id(directory)}/{entry.name}").random()
                release, package = await _read_release(entry, control, drawn.get(entry.name), draw)
                package.install_record(_release_directory(directory, entry.name))
                releases[entry.name] = release
                functions[entry.name] = effective_spec(entry, resolved.base, release)
    return replace(resolved, releases=releases, functions=functions)


async def _read_release(
    entry: FunctionEntry, control: Deployer, drawn: FunctionRelease | None, draw: float
) -> tuple[FunctionRelease, Package]:
    """The version that an entry names, or the one `drawn` before, and its package."""
    assert entry.function is not None
    function, wanted = split_reference(entry.function)
    versions = await control.versions(function)
    chosen = find_version(function, versions, drawn.version if drawn is not None else wanted, draw=draw)
    package = await control.package(function, chosen.provider_version)
    if drawn is not None:
        return drawn, package
    unset = {"name", "source", "handler", "artefacts"}
    release = FunctionRelease(
        reference=entry.function,
        provider=control.provider,
        version=chosen.version,
        number=chosen.provider_version,
        weights={one.provider_version: one.weight for one in versions if one.weight},
        settings=package.spec.model_dump(mode="json", exclude_unset=True, exclude=unset),
    )
    return release, package


def release_provider(specs: Specs) -> str:
    """The provider that deployed functions of a run are drawn from: the first of its chain that keeps versions."""
    chain = specs.cluster.functions.chain
    for name in chain:
        if is_deployable(name):
            return name
    raise SpecError(
        f"functions.backend is {', '.join(chain)}, which keeps no versions of functions",
        remedy=f"add one of {', '.join(filter(is_deployable, provider_names()))}, or name the source of the function",
    )


def _check_release(entry: FunctionEntry, specs: Specs) -> None:
    """Check that a deployed function is there, where no other machine has to be asked, unless its version is drawn."""
    root = Path(specs.cluster.functions.local.root)
    if release_provider(specs) != "local" or entry.function is None or entry.name in specs.releases:
        return
    function, wanted = split_reference(entry.function)
    with translated_errors(f"function '{entry.name}' in {root}: "):
        find_version(function, LocalDeployer(root).kept(function), wanted, draw=0.0)


def _released_package(entry: FunctionEntry, release: FunctionRelease, directory: Path) -> Package:
    """The package of a drawn version, from the run's directory, with the settings of the entry."""
    root = _release_directory(directory, entry.name)
    files = {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with translated_errors(f"function '{entry.name}': "):
        package = restore(entry.name, release.version, files)
    deployment = (release.provider, release.number)
    return replace(package, spec=released_spec(entry, package.spec), deployment=deployment)


def _release_directory(directory: Path, name: str) -> Path:
    return directory / "releases" / name


def function_packages(specs: Specs, artefacts: Mapping[str, Sequence[str]]) -> tuple[Package, ...]:
    """The packages of functions that can be offloaded. The others are neither checked nor run."""
    return packages_and_stateful(specs, artefacts)[0]


def packages_and_stateful(
    specs: Specs, artefacts: Mapping[str, Sequence[str]]
) -> tuple[tuple[Package, ...], dict[str, str]]:
    """The packages of functions that can be offloaded, and the reasons why others cannot, by name: these run beside
    the environments."""
    found, stateful = [], {}
    for function in specs.run.functions:
        if function.function is not None:  # it is deployed already
            continue
        try:
            found.append(_package(function, artefacts.get(function.name, ()), Path(specs.base)))
        except NotOffloadable as refused:
            stateful[function.name] = str(refused)
    return tuple(found), stateful


def recorded_packages(
    specs: Specs, artefacts: Mapping[str, Sequence[str]], directory: Path
) -> dict[str, Package | str]:
    """The package of every function of a recorded run as its source is now, or as it was drawn into the run's
    `directory`; the reason for one that cannot be packed."""
    found: dict[str, Package | str] = {}
    for entry in specs.run.functions:
        try:
            if entry.function is None:
                found[entry.name] = _package(entry, artefacts.get(entry.name, ()), Path(specs.base))
            else:
                found[entry.name] = _released_package(entry, specs.releases[entry.name], directory)
        except (NotOffloadable, RollartError) as error:
            found[entry.name] = error.message
    return found


def _import_stateful(function: FunctionEntry, base: Path, refused: NotOffloadable) -> tuple[Any, FunctionSpec]:
    """The imported object of a function's entry, and its settings. SpecError if it is untrusted, or takes an
    environment."""
    with _in_this_process(function, refused):
        spec = effective_spec(function, base)
        if spec.trust == "untrusted":
            raise SpecInvalid("it is untrusted: it cannot run in this process", remedy="make it stateless")
        if spec.secrets or spec.env:
            raise SpecInvalid("it has variables of its own, which only functions get", remedy="make it stateless")
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
