"""From specs to rendered infrastructure: collects the inputs of each target and passes them to `rollart.infra`."""

from __future__ import annotations

import asyncio
import os
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from rollart.errors import SpecError, UsageError, did_you_mean
from rollart.infra.aws import aws_functions, cloudformation, sam, terraform
from rollart.infra.files import RenderedFiles
from rollart.infra.hosts import host_groups, hosts_engines
from rollart.infra.knative import knative
from rollart.infra.kuberay import RUNS_AT, SPECS_AT, kuberay
from rollart.infra.modal_file import modal
from rollart.infra.needs import PodSettings, cluster_needs, spec_files
from rollart.infra.ray import ray
from rollart.launch.functions import function_secrets, function_settings, secret_variables, translated_errors
from rollart.launch.prepare import produce_artefacts
from rollart.launch.rewards import function_packages
from rollart.settings.cluster import PYTHON_VARIABLE, ClusterSpec
from rollart.settings.load import load_cluster, split_overrides
from rollart.settings.planning import Specs
from rollart.settings.resolve import read_specs, resolve_specs
from serverless.deploy.aws_function import AwsSettings
from serverless.deploy.package import Package

NODE_TARGETS = ("kuberay", "ray")
"""Targets that render pools; the others render reward functions."""

PROVIDER_OF_TARGET = {"cfn": "aws_lambda", "sam": "aws_lambda", "terraform": "aws_lambda", "modal": "modal"}
TARGETS = (*NODE_TARGETS, "cfn", "sam", "modal", "terraform", "knative")
NAMESPACE = "default"

ENGINE_IMAGES = {"embedded": "rollart", "vllm": "rollart-vllm"}
"""Images of engine hosts by kind of engine, as built from infra/Dockerfile."""

HOST_IMAGE, ENVIRONMENT_IMAGE = "rollart", "rollart-environments"
"""Images of other hosts, and of environment hosts whose interpreter lies below `ENVIRONMENT_PYTHON_PREFIX`."""

ENVIRONMENT_PYTHON_PREFIX, VLLM_PYTHON = "/opt/environments/", "/opt/vllm/bin/python"

NODE_WAIT_S = 1800
"""Default wait for the nodes of a run: hosts are rented and images pulled within minutes."""


def render(
    target: str,
    run: Path | None,
    cluster: Path,
    overrides: Sequence[str] = (),
    *,
    images: Sequence[str] = (),
    namespace: str = NAMESPACE,
) -> RenderedFiles:
    """The files of one of `TARGETS`. `images`: IMAGE, or POOL=IMAGE for one pool or `head`. With a run, pools have as
    many rented hosts as its plan uses. SpecError if the specs contain nothing for the target. Deterministic."""
    specs = read_specs(run, cluster, overrides)
    if target in NODE_TARGETS:
        return _render_nodes(target, specs, run, cluster, overrides, images, namespace)
    if target == "knative":
        return _render_knative(specs, images, namespace)
    provider = PROVIDER_OF_TARGET[target]
    chain = specs.cluster.functions.chain
    store, bucket = specs.run.weights.store, ""  # for the run's weights
    if provider == "aws_lambda" and run is not None and store is not None and store.kind == "s3":
        bucket = store.url.removeprefix("s3://").partition("/")[0]
    if provider not in chain and not bucket:
        raise SpecError(
            f"cluster '{specs.cluster.name}' has functions.backend {', '.join(chain)} (rule: {target} renders "
            f"functions of {provider})",
            remedy=f"set it in the cluster spec, or add cluster.functions.backend={provider}",
        )
    packages: tuple[Package, ...] = ()
    if provider in chain:
        packages = _packages(specs)
        if not packages and not bucket:
            raise SpecError(
                f"run '{specs.run.name}' has no reward function that leaves for functions: nothing to render for "
                f"{target}",
                remedy="give it `functions`, or render kuberay or ray",
            )
    name, given = specs.cluster.name, specs.cluster.functions
    secrets = function_secrets(given, cluster.parent)
    with translated_errors():
        if target == "modal":
            return modal(name, packages, function_settings("modal", given), secrets)
        settings: AwsSettings = function_settings("aws_lambda", given)
        found = aws_functions(packages, settings, secrets)
        if target == "terraform":
            return terraform(name, found, region=settings.region, role_arn=settings.role_arn, bucket=bucket)
        template = {"cfn": cloudformation, "sam": sam}[target]
        return template(name, found, role_arn=settings.role_arn, bucket=bucket)


def _packages(specs: Specs) -> tuple[Package, ...]:
    with tempfile.TemporaryDirectory(prefix="rollart-infra-") as directory:
        # Producers make their artefacts here, as for a run.
        return function_packages(specs, asyncio.run(produce_artefacts(specs, Path(directory))))


def _render_knative(specs: Specs, images: Sequence[str], namespace: str) -> RenderedFiles:
    """Any backend will do: runs then call the Services by their URLs."""
    packages = _packages(specs)
    if not packages:
        raise SpecError(
            f"run '{specs.run.name}' has no reward function that leaves for functions: nothing to render for knative",
            remedy="give it `functions`",
        )
    image = f"{HOST_IMAGE}:{metadata.version('rollart')}"
    given = {"": image} | _given_images(images, [package.spec.name for package in packages], "function")
    with translated_errors():
        return knative(specs.cluster.name, packages, images=given, namespace=namespace)


def _render_nodes(
    target: str,
    specs: Specs,
    run: Path | None,
    cluster: Path,
    overrides: Sequence[str],
    images: Sequence[str],
    namespace: str,
) -> RenderedFiles:
    name, runtime = specs.cluster.name, specs.cluster.runtime
    resolved = None if run is None else resolve_specs(specs)
    found = host_groups(specs.cluster, specs.prices, None if resolved is None else resolved.plan)
    functions = () if resolved is None else resolved.functions.values()
    given, version = _given_images(images, [*(g.name for g in found), "head"]), metadata.version("rollart")
    without_engines = [g for g in found if not hosts_engines(g, found)]
    others = {"head": f"{HOST_IMAGE}:{version}", **{g.name: f"{HOST_IMAGE}:{version}" for g in without_engines}}
    if (specs.cluster.environments.python or "").startswith(ENVIRONMENT_PYTHON_PREFIX):
        others |= {g.name: f"{ENVIRONMENT_IMAGE}:{version}" for g in without_engines if g.plays}
    pods = PodSettings(
        given.get("", f"{ENGINE_IMAGES[specs.cluster.engines.kind]}:{version}"),
        ({} if "" in given else others) | given,
        cluster_needs(
            specs.run if run is not None else None,
            specs.cluster,
            secret_variables(specs.cluster.functions, functions, cluster.parent),
        ),
        env={PYTHON_VARIABLE: VLLM_PYTHON} if specs.cluster.engines.kind == "vllm" else {},
    )
    if target == "ray":
        return ray(name, found, pods=pods, runtime=runtime)
    command = ""
    if run is not None:
        texts = {at: path.read_text(encoding="utf-8") for at, path in (("run.yaml", run), ("cluster.yaml", cluster))}
        raw = load_cluster(cluster, split_overrides(overrides)[1])  # without resolving its paths on this machine
        texts |= spec_files(specs.run, raw, run.parent, cluster.parent)
        command = shlex.join(_head_command(raw, overrides, ours="" not in given))
        pods = replace(pods, specs=texts)
    return kuberay(
        name,
        found,
        pods=pods,
        health_s=runtime.health_s,
        namespace=namespace,
        command=command,
    )


def _head_command(cluster: ClusterSpec, overrides: Sequence[str], *, ours: bool) -> list[str]:
    """The head's command: the same specs, with the cluster of the head itself."""
    runtime, environments = cluster.runtime, cluster.environments
    here = ["cluster.runtime.backend=ray", "cluster.runtime.address=auto"]
    here += ["cluster.runtime.token="] if runtime.token is not None else []
    here += ["cluster.runtime.port=0"] if runtime.port else []
    here += [f"cluster.runtime.wait_s={NODE_WAIT_S}"] if "wait_s" not in runtime.model_fields_set else []
    python = cluster.engines.vllm.python
    if python is not None and (ours or not os.path.isabs(python)):
        here.append("cluster.engines.vllm.python=")  # the image's own
    if environments.python is not None and not os.path.isabs(environments.python):
        raise SpecError(
            f"environments.python is '{environments.python}', beside the cluster file (rule: a path of the image)",
            remedy="give it as the image has it (infra/Dockerfile: /opt/environments/bin/python), or leave it out",
        )
    launch = ["rollart", "launch", f"{SPECS_AT}/run.yaml", "--cluster", f"{SPECS_AT}/cluster.yaml"]
    return [*launch, "--runs-dir", RUNS_AT, *overrides, *here]


def _given_images(given: Sequence[str], names: Sequence[str], noun: str = "pool") -> dict[str, str]:
    """Images by name, or '' for all others."""
    found: dict[str, str] = {}
    for one in given:
        where, separator, image = one.rpartition("=")
        if separator and where not in names:
            kinds = "POOL=IMAGE, head=IMAGE" if noun == "pool" else f"{noun.upper()}=IMAGE"
            raise UsageError(
                f"--image {one}: there is no {noun} '{where}'{did_you_mean(where, list(names))}",
                remedy=f"give {kinds}, or an image for all others",
            )
        found[where] = image
    return found
