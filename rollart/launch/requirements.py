"""Optional dependencies of a run, by the features in its spec; checked before any part is made or started."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass

from rollart.errors import SpecError
from rollart.launch.layout import external_token
from rollart.settings.planning import Specs
from rollart.settings.run import HarnessSpec
from rollart.settings.telemetry import TelemetrySpec

ENVIRONMENT_MODULES = {
    "rollart.adapters.envs.frozen_lake": "gymnasium",
    "rollart.adapters.envs.gymnasium": "gymnasium",
    "rollart.adapters.envs.reasoning_gym": "reasoning_gym",
}
"""Modules that the shipped environments import when they are created."""

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""An index with CPU builds of torch for Linux, which PyPI lacks."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """A module, the extra that installs it, and the setting that requires it. Without a module that is not `needed`,
    some runs with this setting still start."""

    module: str
    extra: str
    asked: str
    needed: bool = True

    @property
    def here(self) -> bool:
        try:
            return importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:  # of a package that it is in
            return False

    @property
    def remedy(self) -> str:
        cpu = f" (--extra-index-url {CPU_INDEX} where there is no GPU)" if self.module == "torch" else ""
        return f"pip install 'rollart[{self.extra}]'{cpu}"


def requirements(resolved: Specs) -> Iterator[Requirement]:
    """Requirements on rollart's own interpreter. A module may appear more than once."""
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
    yield from _clients(run.telemetry)
    for domain in run.domains:
        if isinstance(domain.environment, HarnessSpec):
            yield Requirement(
                "jinja2", "proxy", f"domains.{domain.name}: a chat template, if the tokenizer has one", False
            )
            continue
        if domain.chat is not None:
            yield Requirement("jinja2", "proxy", f"domains.{domain.name}.chat")
        if cluster.environments.python is None or not cluster.environments.workers:
            module = ENVIRONMENT_MODULES.get(domain.environment.partition(":")[0])
            if module is not None:
                yield Requirement(module, "envs", f"domains.{domain.name}.environment")


def _clients(telemetry: TelemetrySpec) -> Iterator[Requirement]:
    if telemetry.metrics is not None:
        yield Requirement("prometheus_client", "metrics", "telemetry.metrics")
    if telemetry.otlp is not None:
        yield Requirement("opentelemetry.exporter.otlp.proto.http", "otel", "telemetry.otlp")
    for tracker in telemetry.track:
        yield Requirement(tracker, tracker, f"telemetry.track has '{tracker}'")


def refuse_missing(resolved: Specs) -> None:
    """`SpecError` for the first missing module or token. Machines of an external cluster are not checked."""
    runtime = resolved.cluster.runtime
    elsewhere = runtime.backend == "ray" and runtime.address != "local"
    for need in requirements(resolved):
        if need.needed and not need.here and (not elsewhere or need.module == "ray"):
            raise SpecError(f"{need.asked}, and {need.module} is not installed", remedy=need.remedy)
    external_token(resolved)


def torch_build() -> str:
    """The build of the installed torch: `cpu`, `cuda`, or '' if unknown or if torch is not installed. Read from the
    package metadata, without importing torch."""
    try:
        build = importlib.metadata.version("torch").partition("+")[2]
        required = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    cuda = build.startswith("cu") or any(re.match(r"nvidia-|cuda-", one) for one in required)
    return "cuda" if cuda else "cpu" if build == "cpu" else ""


def refuse_without_cuda(part: str) -> None:
    """`SpecError` for a part on a GPU of this machine if torch is a CPU build."""
    if torch_build() == "cpu":
        raise SpecError(
            f"{part} computes on a GPU, and the torch that is installed here is built for CPU cores alone",
            remedy="pip install torch of an index with CUDA builds, or plan the part on cores",
        )
