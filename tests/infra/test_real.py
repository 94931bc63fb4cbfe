"""Rendered infrastructure in the programs that read it: Ray's and Kubernetes' own checks, CloudFormation and SAM
deployed and called, Modal's client."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from placement.types import Role
from rollart.infra.files import write
from rollart.settings.load import builtin
from rollart.settings.resolve import resolve_files
from rollart.tools.infra import render
from serverless.deploy.aws import AwsDeployer
from serverless.deploy.package import build
from serverless.providers.aws import AwsLambdaBackend
from serverless.spec import FunctionSpec
from tests.infra.goldens import FLEET, GOLDEN, MODAL, RUN, cluster
from tests.serverless.aws.provider import AwsLambda, client, plane, settings
from tests.serverless.modal_plane.provider import MISSING, running_plane

pytestmark = pytest.mark.slow

aws = pytest.mark.skipif(bool(AwsLambda.missing), reason=AwsLambda.missing or "-")
HERE = f"python3.{sys.version_info.minor}"
"""Lambda runs on the interpreter that runs here."""


EVENT = [{"id": "1", "messages": [{"role": "assistant", "content": "4"}], "reference_answer": "4"}]

MANIFESTS = sorted(p for p in GOLDEN.rglob("kuberay/*.yaml"))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: str(p.relative_to(GOLDEN)))
def test_kubernetes_and_rays_autoscaler_take_the_manifests(path: Path) -> None:
    taken(path.read_text())


def test_the_service_of_an_external_trainer_is_valid_in_kubernetes() -> None:
    given = ["cluster.trainer={external: '0.0.0.0:8200', external_token: file, device: H100, threads: 8}"]
    files = render("kuberay", *FLEET, given).files
    for name in ("runs.yaml", "rayjob.yaml"):
        taken(files[name].decode())


def taken(text: str) -> None:
    import kubernetes_validate
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    for document in yaml.safe_load_all(text):
        if not document["apiVersion"].startswith("ray.io/"):
            kubernetes_validate.validate(document, "1.33", strict=True)
            continue
        spec = document["spec"].get("rayClusterSpec", document["spec"])
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            pod = {"metadata": {"name": "a"}, **group["template"], "apiVersion": "v1", "kind": "Pod"}
            kubernetes_validate.validate(pod, "1.33", strict=True)
        config = _derive_autoscaling_config_from_ray_cr({"metadata": document["metadata"], "spec": spec})
        for group in spec["workerGroupSpecs"]:
            kind = config["available_node_types"][group["groupName"]]
            assert kind["labels"] == group["labels"]
            assert (kind["resources"].get("GPU", 0) > 0) == (group["labels"]["device"] != "cpu")
        assert config["available_node_types"]["headgroup"]["resources"]["CPU"] == 0


KNATIVE_POD = {"affinity", "containers", "enableServiceLinks", "hostAliases", "imagePullSecrets", "nodeSelector"}
KNATIVE_POD |= {"runtimeClassName", "securityContext", "serviceAccountName", "tolerations", "volumes"}
KNATIVE_POD |= {"containerConcurrency", "timeoutSeconds"}
KNATIVE_CONTAINER = {"args", "command", "env", "envFrom", "image", "imagePullPolicy", "livenessProbe", "name", "ports"}
KNATIVE_CONTAINER |= {"readinessProbe", "resources", "securityContext", "volumeMounts", "workingDir"}
"""Fields that Knative Serving takes of a pod and a container (pkg/apis/serving/fieldmask.go); it refuses others."""


def test_kubernetes_takes_the_pods_of_knative_services() -> None:
    """There is no schema of Knative's here: its fields are compared with its own list, and the rest is a pod."""
    import kubernetes_validate

    for document in yaml.safe_load_all((GOLDEN / "run/knative/functions.yaml").read_text()):
        if document["kind"] == "ConfigMap":
            kubernetes_validate.validate(document, "1.33", strict=True)
            continue
        assert (document["apiVersion"], document["spec"].keys()) == ("serving.knative.dev/v1", {"template"})
        template = document["spec"]["template"]
        assert template["spec"].keys() <= KNATIVE_POD
        assert all(container.keys() <= KNATIVE_CONTAINER for container in template["spec"]["containers"])
        assert all(isinstance(value, str) for value in template["metadata"]["annotations"].values())
        spec = {k: v for k, v in template["spec"].items() if k not in ("containerConcurrency", "timeoutSeconds")}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", **template["metadata"]}, "spec": spec}
        kubernetes_validate.validate(pod, "1.33", strict=True)


@pytest.mark.parametrize(("name", "pool"), [("aws-mix", "p5"), ("fleet", "h100")])
def test_ray_accepts_the_configuration_of_ray_up(name: str, pool: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load((GOLDEN / name / "ray/cluster.yaml").read_text()))
    config.setdefault("cluster_synced_files", [])
    validate_config(config)
    market = {n: k["node_config"].get("InstanceMarketOptions") for n, k in config["available_node_types"].items()}
    assert {n: m for n, m in market.items() if m} == ({"spot": {"MarketType": "spot"}} if name == "fleet" else {})
    assert config["available_node_types"][pool]["resources"] == {"CPU": 0, "GPU": 8}


@pytest.mark.parametrize("path", sorted(GOLDEN.rglob("*.sh")), ids=lambda p: str(p.relative_to(GOLDEN)))
def test_scripts_call_ray_with_options_that_it_has(path: Path, tmp_path: Path) -> None:
    """The script runs with a stub of `ray` that records its arguments, and Ray's own parser reads them."""
    from ray._private.label_utils import parse_node_labels_string
    from ray.scripts.scripts import start

    recorded = tmp_path / "recorded"
    (tmp_path / "ray").write_text(f'#!/bin/sh\nprintf "%s\\n" "$RAY_AUTH_MODE" "$@" >{recorded}\n')
    (tmp_path / "ray").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), "RAY_HEAD": "10.0.0.1:6379"}
    subprocess.run(["sh", str(path)], env=env, check=True)
    mode, command, *arguments = recorded.read_text().splitlines()
    assert (mode, command) == ("token", "start")
    given = start.make_context("start", arguments).params
    assert given["block"]
    if path.name != "head.sh":
        assert given["address"] == "10.0.0.1:6379"
        assert parse_node_labels_string(given["labels"])["pool"] == path.stem


def test_rented_pools_begin_with_the_hosts_of_the_plan() -> None:
    run = builtin("runs/agentic-math-32b.yaml")
    manifest = yaml.safe_load(render("kuberay", run, cluster("aws-mix")).files["raycluster.yaml"])
    plan = resolve_files(run, cluster("aws-mix")).plan
    used = {a.pool for role in Role for a in plan.of(role)}
    for group in manifest["spec"]["workerGroupSpecs"]:
        assert (group["replicas"] > 0) == (group["groupName"] in used)
        assert group["minReplicas"] == 0 <= group["replicas"] <= group["maxReplicas"]


@pytest.fixture(scope="module")
def account() -> Iterator[Any]:
    with plane() as one:
        yield one


def overrides(prefix: str) -> list[str]:
    given = {"region": "us-east-1", "runtime": HERE, "prefix": prefix, "bucket": "", "log_retention_days": 7}
    return ["cluster.functions.backend=aws_lambda", f"cluster.functions.aws_lambda={json.dumps(given)}"]


def lint(*paths: Path) -> None:
    # Without the rules that depend on today's date: AWS's deprecation of runtimes is not under test.
    linter = str(Path(sys.executable).with_name("cfn-lint"))
    command = [linter, "--ignore-checks", "E2531", "E2533", "W2531", "--"]
    done = subprocess.run([*command, *map(str, paths)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def deployed(one: Any, name: str, template: Mapping[str, Any], parameters: Mapping[str, str]) -> dict[str, str]:
    """The outputs of a stack of this template."""
    stacks = client(one, "cloudformation")
    stacks.create_stack(
        StackName=name,
        TemplateBody=json.dumps(template),
        Capabilities=["CAPABILITY_IAM"],
        Parameters=[{"ParameterKey": k, "ParameterValue": v} for k, v in parameters.items()],
    )
    (stack,) = stacks.describe_stacks(StackName=name)["Stacks"]
    assert stack["StackStatus"] == "CREATE_COMPLETE", stack
    return {o["OutputKey"]: o["OutputValue"] for o in stack.get("Outputs", [])}


def pointed(one: Any, name: str) -> None:
    """moto's CloudFormation makes no alias and no tags: they are made here from the template."""
    functions = client(one)
    found = functions.get_function_configuration(FunctionName=name)
    functions.tag_resource(
        Resource=found["FunctionArn"], Tags={"rollart:digest": found["Description"].removeprefix("rollart:")}
    )
    (version,) = [
        v["Version"]
        for v in functions.list_versions_by_function(FunctionName=name)["Versions"]
        if v["Version"] != "$LATEST"
    ]
    functions.create_alias(FunctionName=name, Name="live", FunctionVersion=version)


async def works(one: Any, prefix: str) -> None:
    """A run finds the functions deployed, and calls them."""
    given = settings(one, prefix=prefix, log_retention_days=7)
    packages = {
        name: build(FunctionSpec(name=name, source=f"{RUN.parent / 'reward.py'}:{name}"))
        for name in ("exact", "length")
    }
    async with AwsDeployer(given) as deployer:
        for name, package in packages.items():
            change = await deployer.plan(package)
            assert not [line for line in change.lines if "warm" not in line], (
                f"{name} equals the one that would be deployed"
            )
    calls = sum(one.executions.values())
    async with AwsLambdaBackend(given) as backend:
        for package in packages.values():
            await backend.deploy(package)
        reply = await backend.invoke("exact", EVENT, deadline_s=30.0)
    assert reply.fault is None, reply.fault
    assert isinstance(reply.body, list)
    assert reply.body[0]["aggregate_reward_score"] == 1.0
    assert sum(one.executions.values()) > calls


@aws
def test_cloudformation_is_deployed_and_called(account: Any, tmp_path: Path) -> None:
    files = render("cfn", RUN, cluster("local"), overrides("cfn-"))
    write(files, tmp_path)
    lint(tmp_path / "storage.yaml", tmp_path / "functions.yaml")
    bucket = deployed(account, "cfn-storage", yaml.safe_load(files.files["storage.yaml"]), {})["Bucket"]
    upload(account, bucket, files.files)
    deployed(account, "cfn-functions", yaml.safe_load(files.files["functions.yaml"]), {"Bucket": bucket})
    for name in ("cfn-exact", "cfn-length"):
        pointed(account, name)
    groups = client(account, "logs").describe_log_groups(logGroupNamePrefix="/aws/lambda/cfn-")["logGroups"]
    assert {g["logGroupName"]: g["retentionInDays"] for g in groups} == {
        "/aws/lambda/cfn-exact": 7,
        "/aws/lambda/cfn-length": 7,
        "/aws/lambda/cfn-judge": 7,
    }
    judge = client(account).get_function_configuration(FunctionName="cfn-judge")
    role = judge["Role"].rpartition("/")[2]
    found = client(account, "iam").get_role_policy(RoleName=role, PolicyName="own-secrets")["PolicyDocument"]
    for secret in ("JUDGE_API_KEY", "LOG_KEY"):
        assert f"arn:aws:secretsmanager:us-east-1:123456789012:secret:{secret}-??????" in str(found)
    asyncio.run(works(account, "cfn-"))


@aws
def test_a_bucket_for_weights_alone_is_deployed_and_may_be_used(account: Any, tmp_path: Path) -> None:
    files = render("cfn", *FLEET)
    write(files, tmp_path)
    write(render("sam", *FLEET), tmp_path)
    lint(tmp_path / "storage.yaml", tmp_path / "functions.yaml", tmp_path / "template.yaml")
    outputs = deployed(account, "weights-storage", yaml.safe_load(files.files["storage.yaml"]), {})
    assert outputs["Bucket"] == "team-weights"
    outputs = deployed(
        account, "weights-leave", yaml.safe_load(files.files["functions.yaml"]), {"Bucket": "team-weights"}
    )
    version = client(account, "iam").get_policy_version(PolicyArn=outputs["ControllerPolicy"], VersionId="v1")
    statements = version["PolicyVersion"]["Document"]["Statement"]
    assert [statement["Sid"] for statement in statements] == ["Weights", "ListWeights"]


@aws
def test_sam_is_translated_deployed_and_called(account: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SAM's own translator, after its client's first step: archives go to a bucket, and their URIs are filled in."""
    from samtranslator.translator.managed_policy_translator import ManagedPolicyLoader
    from samtranslator.translator.transform import transform

    files = render("sam", RUN, cluster("local"), overrides("sam-"))
    write(files, tmp_path)
    lint(tmp_path / "template.yaml")
    client(account, "s3").create_bucket(Bucket="sam-code")
    upload(account, "sam-code", files.files)
    template = yaml.safe_load(files.files["template.yaml"])
    for resource in template["Resources"].values():
        if "CodeUri" in resource["Properties"]:
            resource["Properties"]["CodeUri"] = f"s3://sam-code/{resource['Properties']['CodeUri']}"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    plain = transform(template, {}, ManagedPolicyLoader(client(account, "iam")))
    deployed(account, "sam", plain, {})
    for name in ("sam-exact", "sam-length"):
        pointed(account, name)
    asyncio.run(works(account, "sam-"))


def upload(one: Any, bucket: str, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        if name.endswith(".zip"):
            client(one, "s3").put_object(Bucket=bucket, Key=name, Body=data)


@pytest.mark.skipif(bool(MISSING), reason=MISSING or "-")
def test_modals_client_deploys_the_app_and_calls_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = f"3.{sys.version_info.minor}"
    given = [MODAL[0], f"cluster.functions.modal={{python: '{python}', prefix: infra-}}"]
    write(render("modal", RUN, cluster("local"), given), tmp_path)
    spec = importlib.util.spec_from_file_location("modal_app", tmp_path / "modal_app.py")
    assert spec is not None
    assert spec.loader is not None
    app = importlib.util.module_from_spec(spec)
    with running_plane() as one:
        for name, value in one.environ.items():
            monkeypatch.setenv(name, value)
        spec.loader.exec_module(app)

        import modal

        app.exact.deploy()
        call = modal.Function.from_name("infra-exact", "call")
        request = {"id": "r", "name": "exact", "version": "v", "memory_mb": 256, "timeout_s": 5, "event": EVENT}
        answer = json.loads(call.remote(json.dumps(request).encode()))
    assert "fault" not in answer, answer
    assert answer["body"][0]["aggregate_reward_score"] == 1.0
