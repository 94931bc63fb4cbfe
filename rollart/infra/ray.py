"""A Ray cluster on the user's own hosts (`ray start`, a script per pool), or on EC2 (`ray up`, for pools with an
instance type)."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from rollart.adapters.clusters.ray_cluster import health_settings
from rollart.errors import SpecError
from rollart.infra.files import RenderedFiles, header, script_text, yaml_text
from rollart.infra.hosts import HostGroup
from rollart.infra.needs import PodSettings
from rollart.settings.cluster import RuntimeSpec

PORT = 6379
"""Port of the head's control store (Ray's default)."""

HEAD_INSTANCE = "m7i.2xlarge"
"""8 cores and 32 GB: the controller, its environments, local function workers and Ray's own services."""

HEAD = "ray.head"

TOKEN_AT = "~/.ray/auth_token"
"""Ray's default path, on the machine that runs `ray up` and on every node."""

TOKEN = {"RAY_AUTH_MODE": "token"}
"""Only processes with the token can connect to the cluster, since any connection can run code on it."""

CLIENT = "ray://"

WORKER_PORTS = range(10002, 20000)
"""Ray's default ports of worker processes (`ray start --min-worker-port`, `--max-worker-port`)."""


def ray(name: str, groups: Sequence[HostGroup], *, pods: PodSettings, runtime: RuntimeSpec) -> RenderedFiles:
    """`head.sh` and one script per pool in `pools`; `cluster.yaml` too if pools have the label `instance_type`.
    SpecError if only some pools have it. With `address: start` a run makes its own head."""
    about = header("ray", name)
    files, port, starts_head = {}, _port(runtime), runtime.address == "start"
    if port in WORKER_PORTS:
        raise SpecError(
            f"the head's port is {port} (rule: not within {WORKER_PORTS[0]} to {WORKER_PORTS[-1]}, which Ray gives to "
            "its workers; `ray start` refuses it)",
            remedy=f"another port in runtime.{'port' if starts_head else 'address'}, like {PORT}",
        )
    if not starts_head:
        # The head offers no cores to parts: no pool of a plan is on it.
        options = ["--head", f"--port={port}", "--num-cpus=0", "--num-gpus=0", *_client_options(runtime), "--block"]
        health = [f"export {k}={v}" for k, v in health_environment(runtime.health_s).items()]
        start = f"exec ray start {shlex.join(options)}"
        files["head.sh"] = script_text([*_environment_lines(), *health, start], about)
    for group in groups:
        # Parts select their nodes by label; on a GPU host they take no cores.
        labels = ",".join(f"{key}={value}" for key, value in group.labels.items())
        cpus = 0 if group.gpus else group.cores
        command = ["--labels", labels, f"--num-cpus={cpus}", f"--num-gpus={group.gpus}", "--block"]
        where = ': "${RAY_HEAD:?the address of the head, like 10.0.0.1:6379}"'
        start = f'exec ray start --address="$RAY_HEAD" {shlex.join(command)}'
        files[f"pools/{group.name}.sh"] = script_text([*_environment_lines(), where, start], about)
    launched = "`rollart launch`, which makes the head and says its address and its token's file,"
    first = launched if starts_head else "./head.sh"
    steps = [f"{first} on the head, then RAY_HEAD=its-address:{port or 'PORT'} pools/POOL.sh on every host of a pool"]
    if any(g.instance_type is not None for g in groups):
        without = [g.name for g in groups if g.instance_type is None]
        if without:
            raise SpecError(
                f"pool '{without[0]}' has no label instance_type, and other pools do (rule: all or none)",
                remedy="add it to the pool, like `labels: {instance_type: p5.48xlarge, region: us-east-1}`",
            )
        if starts_head:
            raise SpecError(
                "runtime.address is 'start' and pools have instance_type (rule: `ray up` makes the head)",
                remedy="render with cluster.runtime.address=auto",
            )
        files["cluster.yaml"] = yaml_text(_cluster_config(name, groups, pods, runtime, port), about=about)
        steps = ["ray get-auth-token --generate >/dev/null && RAY_AUTH_MODE=token ray up cluster.yaml"]
    return RenderedFiles(files, tuple(steps))


def health_environment(health_s: float) -> dict[str, str]:
    """Ray reads each of its settings from its own variable; these affect the head. A node is lost after `health_s` of
    silence; with Ray's defaults after 18 s."""
    return {f"RAY_{name}": str(value) for name, value in health_settings(health_s).items()}


def _port(runtime: RuntimeSpec) -> int:
    """Port of the head: from the address, or from `port` with `address: start` (0: a free one)."""
    if runtime.address == "start":
        return runtime.port
    scheme, _, port = runtime.address.rpartition(":")
    return int(port) if port.isdecimal() and not scheme.startswith(CLIENT) else PORT


def _client_options(runtime: RuntimeSpec) -> list[str]:
    """The option for clients outside the cluster's network."""
    remote = runtime.address.startswith(CLIENT)
    return [f"--ray-client-server-port={runtime.address.rpartition(':')[2]}"] if remote else []


def _environment_lines() -> list[str]:
    """The token is a file on every host, at Ray's default path unless the user sets another."""
    default = 'export RAY_AUTH_TOKEN_PATH="$HOME/.ray/auth_token"'
    given = 'test -n "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}"'
    return [*(f"export {k}={shlex.quote(v)}" for k, v in TOKEN.items()), f"{given} || {default}"]


def _cluster_config(
    name: str, groups: Sequence[HostGroup], pods: PodSettings, runtime: RuntimeSpec, port: int
) -> dict[str, Any]:
    regions = {g.name: g.labels.get("region") for g in groups}
    region = next(iter(regions.values()))
    if None in regions.values():
        missing = next(pool for pool, value in regions.items() if value is None)
        raise SpecError(
            f"pool '{missing}' has no label region (rule: a cluster of `ray up` needs it of every pool)",
            remedy="add `labels: {region: ...}` to the pool",
        )
    if len(set(regions.values())) > 1:
        shown = ", ".join(f"{pool}: {value}" for pool, value in regions.items())
        raise SpecError(f"pools differ in label region ({shown}) (rule: a cluster of `ray up` is of one)")
    exports = " ".join(f"{k}={v}" for k, v in (TOKEN | health_environment(runtime.health_s) | dict(pods.env)).items())
    client = "".join(f"{option} " for option in _client_options(runtime))
    head = f"{exports} ray start --head --port={port} {client}--autoscaling-config=~/ray_bootstrap_config.yaml"
    worker = f"RAY_AUTH_MODE={TOKEN['RAY_AUTH_MODE']} ray start --address=$RAY_HEAD_IP:{port}"
    return {
        "cluster_name": name,
        "max_workers": sum(g.most for g in groups),
        "idle_timeout_minutes": 5,
        "provider": {"type": "aws", "region": region, "cache_stopped_nodes": False, "use_internal_ips": False},
        "auth": {"ssh_user": "ubuntu"},
        "docker": {
            "image": pods.of("head"),
            "container_name": "rollart",
            "run_options": ["--ulimit nofile=65536:65536"],
        },
        "file_mounts": {TOKEN_AT: TOKEN_AT},
        "head_node_type": HEAD,
        "available_node_types": {
            HEAD: {"resources": {"CPU": 0, "GPU": 0}, "node_config": _node(HEAD_INSTANCE)},
            **{group.name: _node_type(group, pods) for group in groups},
        },
        "head_start_ray_commands": ["ray stop", f"ulimit -n 65536; {head}"],
        "worker_start_ray_commands": ["ray stop", f"ulimit -n 65536; {worker}"],
    }


def _node_type(group: HostGroup, pods: PodSettings) -> dict[str, Any]:
    return {
        "min_workers": group.least,
        "max_workers": group.most,
        "resources": {"CPU": 0 if group.gpus else group.cores, "GPU": group.gpus},
        "labels": dict(group.labels),
        **({} if pods.of(group.name) == pods.of("head") else {"docker": {"worker_image": pods.of(group.name)}}),
        "node_config": _node(str(group.instance_type), group.labels.get("instance_profile"), spot=group.spot),
    }


def _node(instance: str, profile: str | None = None, *, spot: bool = False) -> dict[str, Any]:
    disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 500, "VolumeType": "gp3"}}
    identity = {} if profile is None else {"IamInstanceProfile": {"Name": profile}}
    market = {"InstanceMarketOptions": {"MarketType": "spot"}} if spot else {}
    return {"InstanceType": instance, "BlockDeviceMappings": [disk], **identity, **market}
