"""A Ray cluster on Kubernetes: manifests for KubeRay's operator (1.5.1 or later: labels of groups and token
authentication)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollart.errors import SpecError
from rollart.infra.files import Rendered, yaml_text
from rollart.infra.hosts import HostGroup
from rollart.infra.ray_settings import PORT, health_environment

__all__ = ["RUNS_AT", "SPECS_AT", "kuberay"]

SPECS_AT = "/etc/rollart"
"""Where pods find the run and the cluster spec."""

RUNS_AT = "/var/lib/rollart/runs"
"""Run directories, at the same path on every node: weights, logs and settings of parts are there."""

RUNS_SIZE = "500Gi"
"""Of their volume: a few versions of the weights with optimizer, and logs."""

HEAD_CORES, HEAD_MEMORY_GB = 8, 32
"""Of the controller, its environments, the local function workers, and Ray's own services."""

IDLE_S = 300
"""A rented node that nothing runs on is given back after this: longer than a restart of what ran there."""

PORTS = {"gcs-server": PORT, "dashboard": 8265, "client": 10001}
_NAME = re.compile(r"^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$")


def kuberay(
    name: str,
    groups: Sequence[HostGroup],
    *,
    ray_version: str,
    image: str,
    health_s: float,
    namespace: str = "default",
    command: str = "",
    specs: Mapping[str, str] | None = None,
) -> Rendered:
    """`raycluster.yaml`: a cluster that stays, and `runs.yaml`: the volume that its nodes share. With `specs` (text by
    file name, at `SPECS_AT` on the head) also `rayjob.yaml`: a cluster of its own that runs `command` and goes.
    SpecError for names that Kubernetes has not."""
    for what, value in (("cluster", name), *(("pool", g.name) for g in groups)):
        if not _NAME.match(value):
            raise SpecError(
                f"{what} '{value}' cannot name a thing of Kubernetes (rule: up to 40 lower-case letters, digits and "
                "'-', a letter or digit at both ends)",
                remedy="rename it, for example with cluster.name=...",
            )
    cluster = _cluster(name, groups, ray_version, image, health_s)
    meta = {"namespace": namespace, "labels": {"app.kubernetes.io/part-of": "rollart"}}
    about = f"Rendered by `rollart infra render --target kuberay` for cluster {name}: change the spec, not this."
    manifest = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": name, **meta}, "spec": cluster}
    files = {
        "runs.yaml": yaml_text(_claim(name, meta), about=about),
        "raycluster.yaml": yaml_text(manifest, about=about),
    }
    steps = ["kubectl apply -f runs.yaml -f raycluster.yaml"]
    if specs is not None:
        config = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{name}-specs", **meta},
            "data": dict(specs),
        }
        job = {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": {"name": f"{name}-run", **meta},
            "spec": {
                "entrypoint": command,
                "shutdownAfterJobFinishes": True,
                "ttlSecondsAfterFinished": 3600,
                "backoffLimit": 0,
                "rayClusterSpec": _mounted(cluster, f"{name}-specs"),
            },
        }
        files["rayjob.yaml"] = yaml_text(config, job, about=about)
        steps = ["kubectl apply -f runs.yaml -f rayjob.yaml   # or raycluster.yaml, for a cluster that stays"]
    return Rendered(files, tuple(steps))


def _claim(name: str, meta: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": f"{name}-runs", **meta},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": RUNS_SIZE}}},
    }


def _cluster(name: str, groups: Sequence[HostGroup], ray_version: str, image: str, health_s: float) -> dict[str, Any]:
    spec: dict[str, Any] = {"rayVersion": ray_version, "authOptions": {"mode": "token"}}
    if any(g.least < g.most for g in groups):
        spec["enableInTreeAutoscaling"] = True
        spec["autoscalerOptions"] = {"version": "v2", "idleTimeoutSeconds": IDLE_S, "upscalingMode": "Default"}
    head = _pod("ray-head", image, HEAD_CORES, HEAD_MEMORY_GB, runs=f"{name}-runs", env=health_environment(health_s))
    head["spec"]["containers"][0]["ports"] = [{"name": n, "containerPort": port} for n, port in PORTS.items()]
    # Nothing of a plan runs on the head: the plan has no such pool.
    params = {"dashboard-host": "0.0.0.0", "num-cpus": "0"}
    spec["headGroupSpec"] = {"rayStartParams": params, "template": head}
    spec["workerGroupSpecs"] = [_workers(group, image, f"{name}-runs") for group in groups]
    return spec


def _workers(group: HostGroup, image: str, runs: str) -> dict[str, Any]:
    pod = _pod("ray-worker", image, group.cores, group.memory_gb, runs=runs, gpus=group.gpus)
    if group.instance_type is not None:
        pod["spec"]["nodeSelector"] = {"node.kubernetes.io/instance-type": group.instance_type}
    if group.gpus:
        pod["spec"]["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return {
        "groupName": group.name,
        "replicas": group.hosts,
        "minReplicas": group.least,
        "maxReplicas": group.most,
        "labels": dict(group.labels),
        # Engines and trainers count cores of CPU pools and GPUs of the others: no part asks for a GPU host's cores.
        "rayStartParams": {} if not group.gpus else {"num-cpus": "0"},
        "template": pod,
    }


def _pod(
    container: str,
    image: str,
    cores: int,
    memory_gb: int,
    *,
    runs: str,
    gpus: int = 0,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A pod with GPUs has its host alone, so nothing but their number limits it. `runs`: the claim of the volume that
    every node has."""
    wanted: dict[str, str] = {"cpu": str(cores), "memory": f"{memory_gb}G"}
    limits = dict(wanted)
    if gpus:
        limits = {"nvidia.com/gpu": str(gpus)}
    body: dict[str, Any] = {
        "name": container,
        "image": image,
        "resources": {"requests": wanted | limits, "limits": limits},
    }
    if env:
        body["env"] = [{"name": k, "value": v} for k, v in env.items()]
    # Weights and KV move between processes of a host through shared memory, of which a pod has 64 MB otherwise.
    body["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "runs", "mountPath": RUNS_AT}]
    shm = {"medium": "Memory"} if gpus else {"medium": "Memory", "sizeLimit": f"{max(1, memory_gb // 2)}G"}
    volumes = [{"name": "shm", "emptyDir": shm}, {"name": "runs", "persistentVolumeClaim": {"claimName": runs}}]
    return {"spec": {"containers": [body], "volumes": volumes}}


def _mounted(cluster: Mapping[str, Any], config_map: str) -> dict[str, Any]:
    """The same cluster, whose head sees the specs: there `rollart launch` runs."""
    head = cluster["headGroupSpec"]
    pod = head["template"]["spec"]
    container = pod["containers"][0]
    mounts = [*container["volumeMounts"], {"name": "specs", "mountPath": SPECS_AT, "readOnly": True}]
    volumes = [*pod["volumes"], {"name": "specs", "configMap": {"name": config_map}}]
    seeing = {**pod, "containers": [{**container, "volumeMounts": mounts}], "volumes": volumes}
    return {**cluster, "headGroupSpec": {**head, "template": {"spec": seeing}}}
