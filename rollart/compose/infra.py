"""From specs to rendered infrastructure: what each target needs is read, packed and given to `rollart.infra`."""

from __future__ import annotations

import asyncio
import shlex
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from rollart.compose.prepare import produce_artefacts
from rollart.compose.providers import function_settings, translated
from rollart.compose.rewards import packed
from rollart.errors import SpecError
from rollart.infra.aws import AwsFunction, functions
from rollart.infra.cloudformation import cloudformation, sam
from rollart.infra.files import Rendered
from rollart.infra.hosts import groups
from rollart.infra.kuberay import RUNS_AT, SPECS_AT, kuberay
from rollart.infra.modal_file import modal
from rollart.infra.ray import ray
from rollart.infra.terraform import terraform
from rollart.spec.cluster import ClusterFunctions
from rollart.spec.resolve import Specs, read_specs, resolve_specs
from serverless.deploy.aws_settings import AwsSettings
from serverless.deploy.package import Package

__all__ = ["NAMESPACE", "RAY_VERSION", "TARGETS", "render"]

NODES = ("kuberay", "ray")
"""Targets that the pools are for; the others are for reward functions."""

PROVIDER = {"cfn": "aws_lambda", "sam": "aws_lambda", "terraform": "aws_lambda", "modal": "modal"}
TARGETS = (*NODES, "cfn", "sam", "modal", "terraform")
NAMESPACE = "default"

RAY_VERSION = "2.60.0"
"""What our images have, and what the Ray runtime is tested on."""

IMAGES = {"embedded": "rollart", "vllm": "rollart-vllm"}
"""As infra/Dockerfile is built, by kind of engine."""


def render(
    target: str,
    run: Path | None,
    cluster: Path,
    overrides: Sequence[str] = (),
    *,
    image: str | None = None,
    namespace: str = NAMESPACE,
) -> Rendered:
    """The files of one of `TARGETS`. With a run, pools have as many rented hosts as its plan uses. SpecError where a
    spec has nothing for the target; same specs, same bytes."""
    specs = read_specs(run, cluster, overrides)
    if target in NODES:
        image = image or f"{IMAGES[specs.cluster.engines.kind]}:{metadata.version('rollart')}"
        return _nodes(target, specs, run, cluster, overrides, image, namespace)
    provider = PROVIDER[target]
    chain = specs.cluster.functions.chain
    if provider not in chain:
        raise SpecError(
            f"cluster '{specs.cluster.name}' has functions.backend {', '.join(chain)} (rule: {target} renders "
            f"functions of {provider})",
            remedy=f"set it in the cluster spec, or add cluster.functions.backend={provider}",
        )
    packages = _packages(specs, target)
    with translated():
        return _functions(target, specs.cluster.name, packages, specs.cluster.functions)


def _nodes(
    target: str,
    specs: Specs,
    run: Path | None,
    cluster: Path,
    overrides: Sequence[str],
    image: str,
    namespace: str,
) -> Rendered:
    name = specs.cluster.name
    found = groups(specs.cluster, specs.prices, None if run is None else resolve_specs(specs).plan)
    health_s = specs.cluster.runtime.health_s
    if target == "ray":
        return ray(name, found, image=image, health_s=health_s)
    command, texts = "", None
    if run is not None:
        texts = {"run.yaml": _text(run), "cluster.yaml": _text(cluster)}
        launch = ["rollart", "launch", f"{SPECS_AT}/run.yaml", "--cluster", f"{SPECS_AT}/cluster.yaml"]
        here = ["--runs-dir", RUNS_AT, "cluster.runtime={backend: ray, address: auto}"]
        command = shlex.join([*launch, *here, *overrides])
    return kuberay(
        name, found, ray_version=RAY_VERSION, image=image, health_s=health_s, namespace=namespace, command=command,
        specs=texts,
    )  # fmt: skip


def _functions(target: str, name: str, packages: Sequence[Package], given: ClusterFunctions) -> Rendered:
    if target == "modal":
        return modal(name, packages, function_settings("modal", given))
    settings: AwsSettings = function_settings("aws_lambda", given)
    found: tuple[AwsFunction, ...] = functions(packages, settings)
    if target == "terraform":
        return terraform(name, found, region=settings.region, role_arn=settings.role_arn)
    template = {"cfn": cloudformation, "sam": sam}[target]
    return template(name, found, role_arn=settings.role_arn)


def _packages(specs: Specs, target: str) -> tuple[Package, ...]:
    """What producers make for a function is made here, as for a run."""
    with tempfile.TemporaryDirectory(prefix="rollart-infra-") as directory:
        artefacts = asyncio.run(produce_artefacts(specs, Path(directory)))
        found = packed(specs, artefacts)
    if not found:
        raise SpecError(
            f"run '{specs.run.name}' has no reward function that leaves for functions: nothing to render for {target}",
            remedy="give it `functions`, or render kuberay or ray",
        )
    return found


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
