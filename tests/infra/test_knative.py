"""Knative Services of reward functions: settings that become fields, and refusals."""

from __future__ import annotations

import base64
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart.errors import SpecError, UsageError
from rollart.infra.knative import AFFINITY_STEP, TOKEN, knative
from rollart.launch.functions import packages_in
from rollart.tools.infra import render
from serverless.deploy.package import Package, build, read_archive
from serverless.errors import PackageError
from serverless.spec import FunctionSpec
from tests.infra.goldens import RUN, cluster

SOURCE = """
def reward(sample):
    return 1.0
"""


def package(tmp_path: Path, **settings: Any) -> Package:
    (tmp_path / "f.py").write_text(SOURCE)
    return build(FunctionSpec(**{"name": "judge", "source": "f.py", **settings}), base=tmp_path)


def service(*packages: Package, **images: str) -> dict[str, Any]:
    text = knative("c", packages, images={"": "rollart:test", **images}).files["functions.yaml"]
    found: dict[str, Any] = list(yaml.safe_load_all(text))[1]
    return found


def test_settings_of_a_function_become_those_of_its_service(tmp_path: Path) -> None:
    one = package(tmp_path, memory_mb=2048, cpu=2.5, gpu="L4:2", warm=1, concurrency=7, timeout_s=20, keep_alive_s=12.5)
    template = service(one)["spec"]["template"]
    scale = {k.rpartition("/")[2]: v for k, v in template["metadata"]["annotations"].items()}
    assert (scale["min-scale"], scale["max-scale"]) == ("1", "7")
    assert scale["scale-to-zero-pod-retention-period"] == "13s"
    assert (template["spec"]["containerConcurrency"], template["spec"]["timeoutSeconds"]) == (1, 30)
    (container,) = template["spec"]["containers"]
    resources = container["resources"]
    assert resources["requests"] == {"cpu": "2500m", "memory": "2304Mi"}
    assert resources["limits"] == {"memory": "2304Mi", "nvidia.com/gpu": "2"}
    required = template["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = required["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-L4"]}]
    assert AFFINITY_STEP in knative("c", [one], images={"": "rollart:test"}).steps
    for settings in ({}, {"gpu": "any"}):
        other = package(tmp_path, **settings)
        assert "affinity" not in service(other)["spec"]["template"]["spec"]
        assert AFFINITY_STEP not in knative("c", [other], images={"": "rollart:test"}).steps
    assert "min-scale': '0'" in str(service(package(tmp_path)))


def test_secrets_are_references_and_values_are_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "the-value")
    one = package(tmp_path, secrets=("JUDGE_API_KEY",), env={"MODE": "strict"})
    rendered = knative("c", [one], images={"": "rollart:test"})
    (container,) = list(yaml.safe_load_all(rendered.files["functions.yaml"]))[1]["spec"]["template"]["spec"][
        "containers"
    ]
    given = {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}
    assert given["MODE"] == "strict"
    assert given["JUDGE_API_KEY"] == {"secretKeyRef": {"name": "c-rewards", "key": "JUDGE_API_KEY"}}
    assert given[TOKEN] == {"secretKeyRef": {"name": "c-rewards", "key": TOKEN}}
    assert "the-value" not in str(rendered)
    assert f"for each of {TOKEN}, JUDGE_API_KEY" in rendered.steps[0]
    secret = next(step for step in rendered.steps if step.startswith("kubectl create secret"))
    assert secret.endswith(" --from-env-file=rewards.env"), "a value on a command line is in the process list"
    assert "=..." not in "".join(rendered.steps)


def test_the_config_map_holds_the_very_version(tmp_path: Path) -> None:
    one = package(tmp_path, timeout_s=3.0)
    config = next(yaml.safe_load_all(knative("c", [one], images={"": "i"}).files["functions.yaml"]))
    ((name, data),) = config["binaryData"].items()
    path = tmp_path / name
    path.write_bytes(base64.b64decode(data))
    (served,) = packages_in(str(path))
    assert (served.version, served.spec.timeout_s) == (one.version, 3.0)
    other = path.with_name(f"judge-{'0' * 64}.zip")
    path.rename(other)
    with pytest.raises(PackageError, match="changed"):
        read_archive(other)
    with pytest.raises(PackageError, match="is not named NAME-VERSION"):
        read_archive(tmp_path / "judge.zip")


def test_requirements_are_a_dockerfile_unless_the_user_has_an_image(tmp_path: Path) -> None:
    one = package(tmp_path, requirements=("six==1.17.0",))
    files = knative("c", [one], images={"": "rollart:test"}).files
    assert files["judge/requirements.txt"] == b"six==1.17.0\n"
    assert b"FROM rollart:test" in files["judge/Dockerfile"]
    image = service(one)["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image == f"c-judge:{one.version[:12]}"
    assert service(one, judge="mine:1")["spec"]["template"]["spec"]["containers"][0]["image"] == "mine:1"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"timeout_s": 900.0}, "at most 600"),
        ({"name": "9lives"}, "a letter first"),
        ({"image": {"base": "python:3.12"}}, "container image"),
        ({"gpu": "L5"}, "gpu 'L5' .*one of ANY, T4, L4"),
    ],
)
def test_a_function_that_no_service_holds_is_refused(tmp_path: Path, settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        service(package(tmp_path, **settings))


def test_functions_of_one_service_name_are_refused(tmp_path: Path) -> None:
    one, two = (package(tmp_path, name=name) for name in ("My_fn", "my-fn"))
    with pytest.raises(SpecError, match="'My_fn' and 'my-fn' are both the Service 'my-fn'") as refused:
        knative("c", [one, two], images={"": "rollart:test"})
    assert refused.value.remedy == "rename one of them"


def test_a_package_that_is_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(bytes(1_000_000))
    with pytest.raises(SpecError, match="in a ConfigMap"):
        service(package(tmp_path, artefacts=("weights.bin",)))


def test_the_run_gets_urls_of_its_functions() -> None:
    rendered = render("knative", RUN, cluster("local"), namespace="rl", images=["exact=mine:2"])
    services = [d for d in yaml.safe_load_all(rendered.files["functions.yaml"]) if d["kind"] == "Service"]
    assert {s["metadata"]["namespace"] for s in services} == {"rl"}
    images = {s["metadata"]["name"]: s["spec"]["template"]["spec"]["containers"][0]["image"] for s in services}
    assert images["exact"] == "mine:2"
    entry = yaml.safe_load(rendered.steps[-1].partition("functions: ")[2])
    assert entry["http"]["exact"]["url"] == "http://exact.rl.svc.cluster.local/functions/exact"
    assert shlex.split(rendered.steps[1])[:4] == ["kubectl", "create", "secret", "generic"]
    with pytest.raises(UsageError, match="there is no function 'exakt'"):
        render("knative", RUN, cluster("local"), images=["exakt=mine:2"])
