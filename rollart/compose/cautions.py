"""Warnings of `rollart validate`, `launch --dry-run` and `launch` about runs that can start and about which the user
has to know something."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.metadata
import re
import sys
from collections.abc import Collection, Iterator

from rollart.compose.extras import CPU_INDEX, torch_build
from rollart.compose.rewards import function_packages
from rollart.errors import RollartError
from rollart.spec.resolve import Resolved, Specs
from serverless.deploy.package import Package

__all__ = ["launch_warnings"]

LAMBDA_PACKAGE_MB = 250
"""Unpacked size of a function's zip on AWS Lambda."""

LARGE_DISTRIBUTIONS = frozenset({"torch", "tensorflow", "jax", "jaxlib", "vllm"})
"""Distributions larger than that by themselves."""

LONG_RUN_STEPS = 200
"""Steps from which a run is worth more than its last two versions. A guess: hours on GPUs, minutes on cores."""

ENVIRONMENT_VARIABLE = re.compile(r"^(?:os\.)?(?:environ\[|environ\.get\(|getenv\()['\"](\w+)['\"]")


def launch_warnings(specs: Resolved | Specs) -> list[str]:
    """The warnings, one line each."""
    found = [*_unauthenticated_services(specs), *_few_kept_versions(specs), *_unused_cuda(specs)]
    with contextlib.suppress(RollartError):  # packing errors are reported elsewhere
        for package in function_packages(specs, {}):
            found += (f"function '{package.spec.name}': {text}" for text in _package_warnings(package, specs))
    return found


def _unauthenticated_services(specs: Resolved | Specs) -> Iterator[str]:
    cluster = specs.cluster
    if cluster.runtime.backend == "ray" or cluster.engines.kind == "vllm":
        yield (
            "engines and the trainer answer HTTP without a token, and take requests of any host that reaches their "
            "ports: keep those ports inside the cluster's network"
        )


def _few_kept_versions(specs: Resolved | Specs) -> Iterator[str]:
    if specs.run.steps >= LONG_RUN_STEPS:
        yield (
            f"of {specs.run.steps} versions the last two are kept, and held-out episodes are played before the first "
            "step and after the last: a policy that collapses in between has no earlier version to return to. Copy "
            "versions out of the run's directory weights as it goes, or train in several runs"
        )


def _unused_cuda(specs: Resolved | Specs) -> Iterator[str]:
    cores = all(pool.device == "cpu" for pool in specs.cluster.pools)
    if cores and specs.cluster.runtime.backend == "local" and torch_build() == "cuda":
        yield (
            "torch is installed with gigabytes of CUDA packages, and the cluster has CPU cores alone: pip install "
            f"--index-url {CPU_INDEX} torch, and uninstall the nvidia packages"
        )


def _package_warnings(package: Package, specs: Resolved | Specs) -> Iterator[str]:
    yield from package.warnings
    remote = [name for name in specs.cluster.functions.chain if name in ("aws_lambda", "modal")]
    if not remote:
        return
    where = " and ".join(remote)
    pinned = {_canonical(re.split(r"[=<>!~ \[;@]", line)[0]): line for line in package.spec.requirements}
    for line in pinned.values():
        if "+" in line.partition("==")[2]:
            yield (
                f"requirement {line} is a local build, which no package index has: {where} cannot install it; "
                f"require the released version"
            )
    if "aws_lambda" in remote and (large := sorted(LARGE_DISTRIBUTIONS & pinned.keys())):
        limit = f"the {LAMBDA_PACKAGE_MB} MB that AWS Lambda unpacks"
        yield f"{large[0]} is larger than {limit}: use another provider for it"
    trees = list(_syntax_trees(package))
    for name in sorted({name for tree in trees for name in _imports(tree)}):
        if not _is_provided(name, package, pinned.keys()):
            yield f"it imports {name}, which is neither packed nor in its requirements: on {where} the import may fail"
    for variable in sorted({name for tree in trees for name in _environment_variables(tree)}):
        yield (
            f"it reads the environment variable {variable}, and functions on {where} are given no variables or secrets"
        )


def _syntax_trees(package: Package) -> Iterator[ast.Module]:
    for name, data in package.files.items():
        if name.startswith("function/") and name.endswith(".py"):
            yield ast.parse(data)


def _imports(tree: ast.Module) -> Iterator[str]:
    """Top-level names of imported modules, imports inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]


def _environment_variables(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript | ast.Call) and (match := ENVIRONMENT_VARIABLE.match(ast.unparse(node))):
            yield match[1]


def _is_provided(name: str, package: Package, pinned: Collection[str]) -> bool:
    if name in sys.stdlib_module_names or name in ("rollart", "serverless"):
        return True
    prefix = f"function/{name}"
    if any(file == f"{prefix}.py" or file.startswith(f"{prefix}/") for file in package.files):
        return True
    return any(_canonical(one) in pinned for one in (name, *_distributions().get(name, ())))


@functools.cache
def _distributions() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
