"""What a run needs beside rollart itself, by what its spec asks for; said before anything is made or started."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass

from rollart.compose.outside import refuse_missing_token
from rollart.errors import SpecError
from rollart.spec.resolve import Resolved, Specs
from rollart.spec.run_parts import HarnessSpec

__all__ = ["CPU_INDEX", "Requirement", "requirements", "refuse_missing", "refuse_without_cuda", "torch_build"]

ENVIRONMENT_MODULES = {
    "rollart.adapters.envs.frozen_lake": "gymnasium",
    "rollart.adapters.envs.gymnasium": "gymnasium",
    "rollart.adapters.envs.reasoning_gym": "reasoning_gym",
}
"""Modules that our own environments import when they are made."""

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Has torch without CUDA, which PyPI has not for Linux."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """A module, the extra that installs it, and what in the spec asks for it. Without those that are not `needed`
    some runs like it start all the same."""

    module: str
    extra: str
    asked: str
    needed: bool = True

    @property
    def here(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    @property
    def remedy(self) -> str:
        cpu = f" (--extra-index-url {CPU_INDEX} where there is no GPU)" if self.module == "torch" else ""
        return f"pip install 'rollart[{self.extra}]'{cpu}"


def requirements(resolved: Resolved | Specs) -> Iterator[Requirement]:
    """Of the interpreter that rollart runs in. A module may be asked for more than once."""
    run, cluster = resolved.run, resolved.cluster
    if cluster.trainer.external is None:
        yield Requirement("torch", "local", "the embedded trainer")
        yield Requirement("transformers", "local", "the embedded trainer")
    if run.training.lora is not None:
        yield Requirement("peft", "lora", "training.lora")
    if cluster.runtime.backend == "ray":
        yield Requirement("ray", "ray", "cluster.runtime.backend is 'ray'")
    if run.weights.store is not None and run.weights.store.kind == "s3":
        yield Requirement("aiobotocore", "aws", "weights.store.kind is 's3'")
    for domain in run.domains:
        if isinstance(domain.environment, HarnessSpec):
            yield Requirement(
                "jinja2", "proxy", f"domains.{domain.name}: a chat template, if the tokenizer has one", False
            )
        elif cluster.environments.python is None or not cluster.environments.workers:
            module = ENVIRONMENT_MODULES.get(domain.environment.partition(":")[0])
            if module is not None:
                yield Requirement(module, "envs", f"domains.{domain.name}.environment")


def refuse_missing(resolved: Resolved | Specs) -> None:
    """`SpecError` for the first that is not here, or a token that is not. What runs on machines of a cluster of others
    is theirs to have."""
    runtime = resolved.cluster.runtime
    elsewhere = runtime.backend == "ray" and runtime.address != "local"
    for need in requirements(resolved):
        if need.needed and not need.here and (not elsewhere or need.module == "ray"):
            raise SpecError(f"{need.asked}, and {need.module} is not installed", remedy=need.remedy)
    refuse_missing_token(resolved)


def torch_build() -> str:
    """What the installed torch was built for: `cpu`, `cuda`, or '' where neither its version nor its requirements say,
    or torch is not here. torch is not imported."""
    try:
        build = importlib.metadata.version("torch").partition("+")[2]
        required = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    cuda = build.startswith("cu") or any(re.match(r"nvidia-|cuda-", one) for one in required)
    return "cuda" if cuda else "cpu" if build == "cpu" else ""


def refuse_without_cuda(part: str) -> None:
    """`SpecError` for a part on a GPU of this machine, where torch is built for cores alone."""
    if torch_build() == "cpu":
        raise SpecError(
            f"{part} computes on a GPU, and the torch that is installed here is built for CPU cores alone",
            remedy="pip install torch of an index with CUDA builds, or plan the part on cores",
        )
