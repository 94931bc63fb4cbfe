"""Rendered infrastructure: the output for built-in specs, which is deterministic, and refusals."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from rollart.cli.commands import TARGETS as OFFERED
from rollart.cli.main import run as rollart
from rollart.errors import SpecError, UsageError
from rollart.infra.needs import spec_files
from rollart.launch.layout import pool_nodes
from rollart.settings.cluster import ClusterSpec
from rollart.settings.resolve import read_specs, resolve_files
from rollart.settings.run import RunSpec
from rollart.tools.infra import TARGETS, render
from tests.infra import goldens
from tests.infra.goldens import AWS, CLUSTERS, FLEET, GOLDEN, MODAL, RUN, cluster


@pytest.fixture(scope="module")
def rendered() -> dict[str, str]:
    return goldens.rendered()


def test_built_in_specs_are_rendered_to_the_golden_files(rendered: dict[str, str]) -> None:
    written = {str(p.relative_to(GOLDEN)): p.read_text() for p in GOLDEN.rglob("*") if p.is_file()}
    assert rendered.keys() == written.keys()
    for name, text in rendered.items():
        assert text == written[name], f"{name}: look at it, then `python tests/infra/goldens.py`"


@pytest.mark.parametrize("target", ["cfn", "sam", "terraform"])
def test_same_specs_same_bytes_archives_included(target: str) -> None:
    one, two = (render(target, RUN, cluster("local"), AWS) for _ in range(2))
    assert one == two
    assert any(name.endswith(".zip") for name in one.files)


def test_the_command_offers_every_target() -> None:
    assert OFFERED == TARGETS


@pytest.mark.parametrize("name", CLUSTERS)
def test_nodes_have_the_labels_that_parts_ask_for(name: str, rendered: dict[str, str]) -> None:
    """A plan's part asks for its pool by the labels that the local runtime gives: a manifest has the same."""
    manifest = yaml.safe_load(rendered[f"{name}/kuberay/raycluster.yaml"])
    groups = {g["groupName"]: g for g in manifest["spec"]["workerGroupSpecs"]}
    resolved = resolve_files(RUN, cluster("local"))
    if name == "local":
        assert {n.id: dict(n.labels) for n in pool_nodes(resolved)} == {n: g["labels"] for n, g in groups.items()}
    for pool, group in groups.items():
        assert group["labels"]["pool"] == pool
        script = rendered[f"{name}/ray/pools/{pool}.sh"]
        assert all(f"{key}={value}" in script for key, value in group["labels"].items())


def test_the_job_runs_the_spec_on_the_cluster_that_it_is_in(rendered: dict[str, str]) -> None:
    config, job = yaml.safe_load_all(rendered["run/kuberay/rayjob.yaml"])
    command = shlex.split(job["spec"]["entrypoint"])
    assert command[:3] == ["rollart", "launch", "/etc/rollart/run.yaml"]
    assert config["data"]["run.yaml"] == RUN.read_text()
    overrides = [argument for argument in command if "=" in argument]
    runtime = read_specs(RUN, cluster("local"), overrides).cluster.runtime
    assert (runtime.backend, runtime.address) == ("ray", "auto")
    claim, _ = yaml.safe_load_all(rendered["run/kuberay/runs.yaml"])
    for group in (job["spec"]["rayClusterSpec"]["headGroupSpec"], *job["spec"]["rayClusterSpec"]["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (volume,) = [v for v in pod["volumes"] if v["name"] == "runs"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "runs"]
        assert mount["mountPath"] == command[command.index("--runs-dir") + 1], "at the same path everywhere"


def pods(job: dict[str, Any]) -> dict[str, Any]:
    """By group the specification of its pods."""
    spec = job["spec"]["rayClusterSpec"]
    groups = {g["groupName"]: g["template"]["spec"] for g in spec["workerGroupSpecs"]}
    return {"head": spec["headGroupSpec"]["template"]["spec"], **groups}


def variables(pod: dict[str, Any]) -> dict[str, Any]:
    return {v["name"]: v.get("value", v.get("valueFrom")) for v in pod["containers"][0].get("env", ())}


def mounts(pod: dict[str, Any]) -> dict[str, str]:
    return {m["mountPath"]: m["name"] for m in pod["containers"][0]["volumeMounts"]}


def test_files_named_by_the_specs_are_on_every_node(rendered: dict[str, str]) -> None:
    """A ConfigMap's keys have no slash: the paths of its volume count."""
    config, job = yaml.safe_load_all(rendered["fleet/kuberay/rayjob.yaml"])
    for pod in pods(job).values():
        (volume,) = [v["configMap"] for v in pod["volumes"] if v["name"] == mounts(pod)["/etc/rollart"]]
        there = {item["path"]: config["data"][item["key"]] for item in volume["items"]}
        assert there.keys() == {"run.yaml", "cluster.yaml", "reward.py", "worlds/__init__.py", "worlds/coin.py"}
        assert len(there) == len(config["data"])
        for path, text in there.items():
            assert text == (FLEET[0].parent / path).read_text()


def test_the_job_of_a_fleet_keeps_its_runtime_settings(rendered: dict[str, str], tmp_path: Path) -> None:
    config, job = yaml.safe_load_all(rendered["fleet/kuberay/rayjob.yaml"])
    for name in ("run.yaml", "cluster.yaml"):
        (tmp_path / name).write_text(config["data"][name])
    words = shlex.split(job["spec"]["entrypoint"])
    specs = read_specs(tmp_path / "run.yaml", tmp_path / "cluster.yaml", [w for w in words if "=" in w])
    runtime = specs.cluster.runtime
    assert (runtime.backend, runtime.address, runtime.token, runtime.wait_s) == ("ray", "auto", None, 1800)
    assert runtime.elastic is not None, "nodes may come and go"
    assert specs.cluster.engines.vllm.python is None, "the image's own"
    assert variables(pods(job)["head"])["ROLLART_VLLM_PYTHON"] == "/opt/vllm/bin/python"


def test_nodes_that_may_come_and_go_have_bounds(rendered: dict[str, str]) -> None:
    for name in ("raycluster", "rayjob"):
        *_, document = yaml.safe_load_all(rendered[f"fleet/kuberay/{name}.yaml"])
        spec = document["spec"].get("rayClusterSpec", document["spec"])
        bounds = {g["groupName"]: (g["minReplicas"], g["replicas"], g["maxReplicas"]) for g in spec["workerGroupSpecs"]}
        assert bounds == {"h100": (2, 2, 2), "spot": (1, 1, 4), "cores": (2, 2, 2)}
        assert spec["enableInTreeAutoscaling"]
    types = yaml.safe_load(rendered["fleet/ray/cluster.yaml"])["available_node_types"]
    assert (types["spot"]["min_workers"], types["spot"]["max_workers"]) == (1, 4)


def test_secrets_and_identities_are_with_those_who_need_them(rendered: dict[str, str]) -> None:
    """Environments run code that policies wrote: their hosts have neither the account nor the functions' tokens."""
    _, job = yaml.safe_load_all(rendered["fleet/kuberay/rayjob.yaml"])
    found = pods(job)
    tokens = {name: {k for k in variables(pod) if k.endswith("_TOKEN")} for name, pod in found.items()}
    assert tokens == {"head": {"REWARDS_TOKEN"}, "h100": set(), "spot": set(), "cores": {"OPENENV_TOKEN"}}
    accounts = {name for name, pod in found.items() if pod.get("serviceAccountName") == "fleet"}
    assert accounts == {"head", "h100", "spot"}
    kinds = [d["kind"] for d in yaml.safe_load_all(rendered["fleet/kuberay/runs.yaml"])]
    assert kinds == ["PersistentVolumeClaim", "ServiceAccount", "NetworkPolicy"]
    steps = render("kuberay", *FLEET).steps
    assert any("REWARDS_TOKEN" in step for step in steps)
    assert any("secret generic fleet-secrets" in step and "--from-env-file" in step for step in steps)
    assert any("ControllerPolicy" in step for step in steps)


def test_weights_have_their_bucket_their_disk_and_their_volume(rendered: dict[str, str]) -> None:
    _, job = yaml.safe_load_all(rendered["fleet/kuberay/rayjob.yaml"])
    pulled = {name for name, pod in pods(job).items() if "/mnt/nvme/rollart" in mounts(pod)}
    assert pulled == {"h100", "spot"}
    storage = yaml.safe_load(rendered["fleet/cfn/storage.yaml"])["Resources"]
    assert storage["Bucket"]["Properties"]["BucketName"] == "team-weights"
    main = json.loads(rendered["fleet/terraform/main.tf.json"])["resource"]
    assert main["aws_s3_bucket"]["weights"]["bucket"] == "team-weights"
    for text in (rendered["fleet/cfn/functions.yaml"], rendered["fleet/sam/template.yaml"]):
        assert "AWS::Lambda" not in text
        assert "AWS::IAM::Role" not in text
    shared = render("kuberay", *FLEET, ["weights.store={kind: files, url: /shared/weights}"]).files
    claims = [d["metadata"]["name"] for d in yaml.safe_load_all(shared["runs.yaml"]) if "Claim" in d["kind"]]
    assert claims == ["fleet-runs", "fleet-weights"]
    _, job = yaml.safe_load_all(shared["rayjob.yaml"])
    assert all("/shared/weights" in mounts(pod) for pod in pods(job).values())


def test_the_head_listens_at_the_port_of_the_spec() -> None:
    ours = render(
        "ray", *FLEET, ["cluster.pools.h100.labels={}", "cluster.pools.spot.labels={}", "cluster.pools.cores.labels={}"]
    )
    assert b"--port=6380" in ours.files["head.sh"]
    assert "RAY_HEAD=its-address:6380" in ours.steps[0]
    with pytest.raises(SpecError, match=r"the head's port is 10005 \(rule: not within 10002 to 19999"):
        render("ray", None, cluster("local"), ["cluster.runtime={backend: ray, address: '10.0.0.1:10005'}"])
    made = render("ray", None, cluster("local"), ["cluster.runtime={backend: ray, address: start, port: 7001}"])
    assert "head.sh" not in made.files, "a run makes it"
    assert "RAY_HEAD=its-address:7001" in made.steps[0]


def test_an_outside_trainer_finds_the_controller_and_needs_its_token() -> None:
    given = ["cluster.trainer={external: '0.0.0.0:8200', external_token: 'env:DESK_TOKEN', device: H100, threads: 8}"]
    files = render("kuberay", *FLEET, given).files
    (service,) = [d for d in yaml.safe_load_all(files["runs.yaml"]) if d["kind"] == "Service"]
    _, job = yaml.safe_load_all(files["rayjob.yaml"])
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    assert service["spec"]["selector"].items() <= head["metadata"]["labels"].items()
    (port,) = service["spec"]["ports"]
    assert {"name": "service", "containerPort": port["targetPort"]} in head["spec"]["containers"][0]["ports"]
    assert port["port"] == 8200
    assert {name for name, pod in pods(job).items() if "DESK_TOKEN" in variables(pod)} == {"head"}
    alone = render("kuberay", *FLEET, ["cluster.trainer={external: '127.0.0.1:8200', device: H100, threads: 8}"]).files
    assert b"kind: Service\n" not in alone["runs.yaml"], "no client outside can call it"


def test_rays_client_has_a_port_of_its_own() -> None:
    files = render("ray", None, cluster("local"), ["cluster.runtime={backend: ray, address: 'ray://head:10009'}"]).files
    assert b"--port=6379" in files["head.sh"]
    assert b"--ray-client-server-port=10009" in files["head.sh"]


def test_an_image_for_one_pool_and_one_for_the_rest() -> None:
    files = render("kuberay", *FLEET, images=["team:1", "cores=worlds:2", "head=team:3"]).files
    spec = yaml.safe_load(files["raycluster.yaml"])["spec"]
    used = {g["groupName"]: g["template"]["spec"]["containers"][0]["image"] for g in spec["workerGroupSpecs"]}
    assert used == {"h100": "team:1", "spot": "team:1", "cores": "worlds:2"}
    assert spec["headGroupSpec"]["template"]["spec"]["containers"][0]["image"] == "team:3"
    with pytest.raises(UsageError, match=r"there is no pool 'core'; did you mean 'cores'\?"):
        render("kuberay", *FLEET, images=["core=worlds:2"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("weights.store={kind: files, url: shared}", r"weights.store.url is 'shared' \(rule: an absolute directory"),
        (
            "cluster.environments.python=envs/bin/python",
            r"environments.python is 'envs/bin/python', beside the cluster",
        ),
        ("model={path: policy, context: 256}", r"model.path is 'policy', beside the run file"),
        ("cluster.prices=../prices.yaml", "prices"),
    ],
)
def test_files_that_pods_could_not_read_are_refused(override: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        render("kuberay", *FLEET, [override])


def test_data_and_tools_beside_the_run_go_along(tmp_path: Path) -> None:
    files = {"train.jsonl": '{"prompt": "a", "completion": "b"}\n', "my_tools.py": "TOOLS = []\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    domain = {"name": "d", "environment": "team.worlds:Coin", "chat": {"tools": "my_tools:TOOLS"}}
    setup: dict[str, Any] = {"name": "r", "model": {"path": "/models/m"}, "domains": [domain]}
    where = ClusterSpec.model_validate(yaml.safe_load(cluster("local").read_text()))
    for data, along in (("train.jsonl", {*files}), ("/data/train.jsonl", {"my_tools.py"})):
        run = RunSpec.model_validate(setup | {"training": {"algorithm": "sft", "data": data}})
        assert spec_files(run, where, tmp_path, tmp_path).keys() == along


def test_a_cluster_of_ray_up_has_a_head_of_its_own() -> None:
    with pytest.raises(SpecError, match="`ray up` makes the head"):
        render("ray", *FLEET, ["cluster.runtime.address=start"])


def _allocatable(cores: int, memory_gb: float) -> tuple[float, float]:
    """The resources of a host that GKE's kubelet can allocate (cores, GB), by its published reservations, and without
    the 0.25 cores and 0.5 GB that daemon sets of a plain cluster take."""
    kept = sum(share * max(0.0, min(cores, b) - a) for a, b, share in ((0, 1, 0.06), (1, 2, 0.01), (2, 4, 0.005)))
    kept += 0.0025 * max(0, cores - 4)
    steps = ((0, 4, 0.25), (4, 8, 0.2), (8, 16, 0.1), (16, 128, 0.06), (128, math.inf, 0.02))
    memory = sum(share * max(0.0, min(memory_gb, b) - a) for a, b, share in steps) + 0.1
    return cores - kept - 0.25, memory_gb - memory - 0.5


@pytest.mark.parametrize("size", [2, 4, 8, 32, 96, 192])
def test_the_pod_of_a_cpu_host_fits_on_it_and_offers_all_cores(tmp_path: Path, size: int) -> None:
    spec = f"name: c\npools:\n  - {{name: env, device: cpu, count: {2 * size}, devices_per_host: {size}}}\n"
    (tmp_path / "c.yaml").write_text(spec)
    manifest = yaml.safe_load(render("kuberay", None, tmp_path / "c.yaml").files["raycluster.yaml"])
    (group,) = manifest["spec"]["workerGroupSpecs"]
    resources = group["template"]["spec"]["containers"][0]["resources"]
    cores, memory_gb = _allocatable(size, 4.0 * size)
    assert float(resources["requests"]["cpu"].removesuffix("m")) / 1000 <= cores
    assert float(resources["requests"]["memory"].removesuffix("M")) / 1000 <= memory_gb
    assert float(resources["requests"]["cpu"].removesuffix("m")) / 1000 >= size / 2, "a host has one such pod"
    assert "cpu" not in resources["limits"]
    assert group["rayStartParams"]["num-cpus"] == str(size), "the plan counts all cores"


def test_devices_add_up(rendered: dict[str, str]) -> None:
    manifest = yaml.safe_load(rendered["rollart-96h800-32h20/kuberay/raycluster.yaml"])
    gpus = {
        g["groupName"]: g["replicas"]
        * int(g["template"]["spec"]["containers"][0]["resources"]["limits"].get("nvidia.com/gpu", 0))
        for g in manifest["spec"]["workerGroupSpecs"]
    }
    assert gpus == {"h800": 96, "h20": 32, "env": 0}


def test_spot_pools_have_interruptible_nodes(rendered: dict[str, str]) -> None:
    _, job = yaml.safe_load_all(rendered["fleet/kuberay/rayjob.yaml"])
    found = pods(job)
    assert {name for name, pod in found.items() if "affinity" in pod} == {"spot"}
    terms = found["spot"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    keys = {term["matchExpressions"][0]["key"] for term in terms["nodeSelectorTerms"]}
    assert keys | {"nvidia.com/gpu"} == {t["key"] for t in found["spot"]["tolerations"]}


def test_a_spot_pool_that_is_not_rented_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("name: c\npools: [{name: here, count: 2, spot: true}]\n")
    with pytest.raises(SpecError, match="spot is true and rented is false"):
        render("kuberay", None, tmp_path / "c.yaml")


@pytest.mark.parametrize("name", [*CLUSTERS, "fleet"])
def test_the_network_policy_covers_every_pod(name: str, rendered: dict[str, str]) -> None:
    policies = [d for d in yaml.safe_load_all(rendered[f"{name}/kuberay/runs.yaml"]) if d["kind"] == "NetworkPolicy"]
    ((key, value),) = policies[0]["spec"]["podSelector"]["matchLabels"].items()
    spec = yaml.safe_load(rendered[f"{name}/kuberay/raycluster.yaml"])["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert group["template"]["metadata"]["labels"][key] == value
    everywhere = [rule["ports"] for rule in policies[0]["spec"]["ingress"] if "from" not in rule]
    assert everywhere == [], "without an outside trainer no port is open to all"


def test_a_functions_role_reaches_its_logs_and_nothing_else(rendered: dict[str, str]) -> None:
    resources = yaml.safe_load(rendered["run/cfn/functions.yaml"])["Resources"]
    (policy,) = resources["FunctionsRole"]["Properties"]["Policies"]
    (statement,) = policy["PolicyDocument"]["Statement"]
    assert statement["Action"] == ["logs:CreateLogStream", "logs:PutLogEvents"]
    assert statement["Resource"] == [{"Fn::GetAtt": [f"{name}Logs", "Arn"]} for name in ("Exact", "Length")]
    logs, secrets = resources["JudgeRole"]["Properties"]["Policies"]
    assert logs["PolicyDocument"]["Statement"][0]["Resource"] == [{"Fn::GetAtt": ["JudgeLogs", "Arn"]}]
    assert [(s["Action"], [str(r).rpartition(":")[2] for r in s["Resource"]]) for s in _statements(secrets)] == [
        ("secretsmanager:GetSecretValue", ["prod/judge-??????'}"]),
        ("ssm:GetParameter", ["parameter/log'}"]),
        ("kms:Decrypt", ["key/k"]),
    ]
    for text in rendered.values():
        for document in yaml.safe_load_all(text) if "AWSTemplate" in text else ():
            allowed = [s for s in _statements(document) if s["Effect"] == "Allow"]
            assert all("*" not in str(s["Action"]) and s.get("Resource") != "*" for s in allowed)


def test_a_template_holds_no_value_of_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "the-value")
    for target, given in (("cfn", AWS), ("sam", AWS), ("terraform", AWS), ("modal", MODAL), ("kuberay", ())):
        files = render(target, RUN, cluster("local"), given).files
        assert not any(b"the-value" in data for data in files.values())
        assert any(b"JUDGE_API_KEY" in data for data in files.values())
    stored = (*AWS[:2], "cluster.functions.secrets={JUDGE_API_KEY: {lambda_env: true}}")
    with pytest.raises(SpecError, match="secret JUDGE_API_KEY of function 'judge' would be in the rendered files"):
        render("cfn", RUN, cluster("local"), stored)


def _statements(value: object) -> list[dict[str, object]]:
    if isinstance(value, dict):
        own = [value] if "Effect" in value else []
        return own + [s for part in value.values() for s in _statements(part)]
    return [s for part in value for s in _statements(part)] if isinstance(value, list) else []


@pytest.mark.parametrize("name", ["run", "fleet"])
def test_terraform_references_exist(name: str, rendered: dict[str, str]) -> None:
    """Nothing here can apply it: every reference is followed, and every archive is beside it."""
    main = json.loads(rendered[f"{name}/terraform/main.tf.json"])
    there = {f"{kind}.{label}" for kind, labels in main["resource"].items() for label in labels}
    text = json.dumps(main)
    used = set(re.findall(r"\$\{(aws_\w+\.\w+)", text))
    data = {f"{kind}.{label}" for kind, labels in main.get("data", {}).items() for label in labels}
    assert set(re.findall(r"\$\{data\.(aws_\w+\.\w+)", text)) == data
    used |= {d for labels in main["resource"].values() for body in labels.values() for d in body.get("depends_on", ())}
    assert used
    assert used <= there
    files = render("terraform", RUN, cluster("local"), AWS).files
    main = json.loads(files["main.tf.json"])
    for body in main["resource"]["aws_lambda_function"].values():
        assert body["filename"].removeprefix("${path.module}/") in files


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--target", "helm"], "'helm' is not one of 'kuberay', 'ray'"),
        (["--target", "cfn"], r"functions.backend local \(rule: cfn renders functions of aws_lambda\)"),
        (["--target", "modal"], r"functions.backend local \(rule: modal renders functions of modal\)"),
        (["--target", "kuberay", "cluster.name=A_B"], "cluster 'A_B' cannot name a thing of Kubernetes"),
        (["--target", "ray", "cluster.pools.here.labels={x: 'a b'}"], "pool 'here' has the label x: a b"),
        (["--target", "ray", "cluster.pools.here.labels={instance_type: m7i}"], "pool 'here' has no label region"),
        (["--target", "cfn", *AWS, "cluster.functions.aws_lambda.prefix=" + 48 * "p"], None),
        (["--target", "cfn", *AWS, "functions=[]", "domains.lake.rewards=[]"], "has no reward function that leaves"),
    ],
)
def test_a_spec_that_cannot_be_rendered_is_one_line_and_exit_code_2(
    arguments: list[str], line: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [str(RUN), "--cluster", str(cluster("local")), "-o", str(tmp_path / "out")]
    code = rollart(["infra", "render", *options, *arguments])
    stderr = capsys.readouterr().err
    if line is None:
        assert code == 0
        return
    assert code == 2, stderr
    assert re.search(line, stderr)
    assert sum(text.startswith("rollart:") for text in stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("target", "names", "message"),
    [
        ("cfn", ("quick_a", "quick-a"), "function 'quick-a' would be 'QuickA' in a template, as function 'quick_a'"),
        ("sam", ("exactOne", "exactone"), "as function 'exactOne'"),
        ("terraform", ("exact", "exact_logs"), "'exact_logs' would be 'ExactLogs' in a template, as function 'exact'"),
        ("sam", ("bucket", "exact"), "'Bucket' in a template, as a resource of another kind"),
        ("modal", ("quick_a", "quick-a"), "function 'quick-a' would be the variable quick_a, as 'quick_a' is"),
    ],
)
def test_functions_that_would_have_one_name_are_not_lost(
    tmp_path: Path, target: str, names: tuple[str, str], message: str
) -> None:
    text = RUN.read_text()
    for old, new in zip(("exact", "length"), names, strict=True):
        text = text.replace(f"name: {old}", f"name: {new}").replace(f"function: {old}", f"function: {new}")
    (tmp_path / "run.yaml").write_text(text)
    (tmp_path / "reward.py").write_text(RUN.with_name("reward.py").read_text())
    backend = "modal" if target == "modal" else "aws_lambda"
    with pytest.raises(SpecError, match=re.escape(message)):
        render(target, tmp_path / "run.yaml", cluster("local"), [f"cluster.functions.backend={backend}"])


def test_some_pools_with_instances_and_some_without_are_no_cluster_of_ray_up() -> None:
    with pytest.raises(SpecError, match="pool 'h20' has no label instance_type"):
        render(
            "ray",
            None,
            cluster("rollart-96h800-32h20"),
            ["cluster.pools.h800.labels={instance_type: p5.48xlarge, region: us-east-1}"],
        )


def test_files_are_written_and_scripts_can_be_run(tmp_path: Path) -> None:
    runner = CliRunner()
    from rollart.cli.commands import cli

    done = runner.invoke(
        cli, ["infra", "render", "--cluster", str(cluster("local")), "--target", "ray", "-o", str(tmp_path)]
    )
    assert done.exit_code == 0
    assert (tmp_path / "pools/here.sh").stat().st_mode & 0o100
    assert str(tmp_path / "head.sh") in done.stdout
    assert "next: ./head.sh" in done.stderr
    (tmp_path / "file").touch()
    command = ["infra", "render", "--cluster", str(cluster("local")), "--target", "ray", "-o"]
    refused = runner.invoke(cli, [*command, str(tmp_path / "file" / "below")], standalone_mode=False)
    assert isinstance(refused.exception, UsageError)
    assert "cannot write" in str(refused.exception)


def test_a_function_may_be_named_as_no_label_of_terraform_is(tmp_path: Path) -> None:
    text = RUN.read_text().replace("name: exact", "name: 2exact").replace("function: exact", "function: 2exact")
    (tmp_path / "run.yaml").write_text(text)
    (tmp_path / "reward.py").write_text(RUN.with_name("reward.py").read_text())
    files = render("terraform", tmp_path / "run.yaml", cluster("local"), AWS).files
    labels = json.loads(files["main.tf.json"])["resource"]["aws_lambda_function"]
    assert any("2exact" in label for label in labels)
    assert all(re.fullmatch(r"[a-z_][a-z0-9_]*", label) for label in labels)
