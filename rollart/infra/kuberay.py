"""A Ray cluster on Kubernetes: manifests for KubeRay's operator (1.5.1 or later: labels of groups and token
authentication)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollart.errors import SpecError
from rollart.infra.files import RenderedFiles, header, yaml_text
from rollart.infra.hosts import HostGroup, hosts_engines
from rollart.infra.needs import PodSettings
from rollart.infra.ray import PORT, health_environment

RAY_VERSION = "2.60.0"
"""The Ray version in the images, which the Ray runtime is tested with."""

SPECS_AT = "/etc/rollart"
"""Directory of the run and cluster specs in pods."""

RUNS_AT = "/var/lib/rollart/runs"
"""Run directories, at the same path on every node: weights, logs and settings of parts."""

RUNS_SIZE = "500Gi"
"""Size of the volume of the run directories: a few versions of the weights with optimizer state, and logs."""

HEAD_CORES, HEAD_MEMORY_GB = 8, 32
"""Resources of the controller, its environments, the local function workers, and Ray's own services."""

FILES_OWNER = 1000
"""The user of our images (infra/Dockerfile): volumes are writable for its group."""

SPOT_NODES = {
    "karpenter.sh/capacity-type": "spot",
    "eks.amazonaws.com/capacityType": "SPOT",
    "cloud.google.com/gke-spot": "true",
    "kubernetes.azure.com/scalesetpriority": "spot",
}
"""Labels of interruptible nodes: Karpenter's, EKS's, GKE's and AKS's. A node of a cluster has one of them."""

IDLE_S = 300
"""Seconds after which an idle rented node is returned: longer than a restart of its parts."""

CLUSTER_LABEL = "rollart/cluster"
"""Label of all pods of a cluster, whether of `raycluster.yaml` or of a job."""

PORTS = {"gcs-server": PORT, "dashboard": 8265, "client": 10001}
_NAME = re.compile(r"^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$")


def kuberay(
    name: str,
    groups: Sequence[HostGroup],
    *,
    pods: PodSettings,
    health_s: float,
    namespace: str = "default",
    command: str = "",
) -> RenderedFiles:
    """`raycluster.yaml`: a permanent cluster, and `runs.yaml`: the resources that its nodes share. With `pods.specs`
    also `rayjob.yaml`: a cluster of its own that runs `command` and then ends. SpecError for names that are invalid in
    Kubernetes."""
    for kind, value in (("cluster", name), *(("pool", g.name) for g in groups)):
        if not _NAME.match(value):
            raise SpecError(
                f"{kind} '{value}' cannot name a thing of Kubernetes (rule: up to 40 lower-case letters, digits and "
                "'-', a letter or digit at both ends)",
                remedy="rename it, for example with cluster.name=...",
            )
    meta = {"namespace": namespace, "labels": {"app.kubernetes.io/part-of": "rollart"}}
    about = header("kuberay", name)
    permanent = _cluster(name, groups, replace(pods, specs=None), health_s)
    manifest = _manifest("ray.io/v1", "RayCluster", name, meta, spec=permanent)
    # Volumes that all nodes mount, and the identity of the pods that call a provider.
    shared = [_volume_claim(f"{name}-runs", meta)]
    if _needs_volume(pods.needs.shared):
        shared.append(_volume_claim(f"{name}-weights", meta))
    if pods.needs.cloud:
        shared.append(_manifest("v1", "ServiceAccount", name, meta))
    shared.append(_network_policy(name, meta, pods.needs.service))
    if pods.needs.service:
        port = {"name": "service", "port": pods.needs.service, "targetPort": pods.needs.service}
        body = {"selector": _controller_labels(name), "ports": [port]}
        shared.append(_manifest("v1", "Service", f"{name}-service", meta, spec=body))
    files = {
        "runs.yaml": yaml_text(*shared, about=about),
        "raycluster.yaml": yaml_text(manifest, about=about),
    }
    apply = "kubectl apply -f runs.yaml -f raycluster.yaml"
    if pods.specs is not None:
        data = {path.replace("/", "__"): text for path, text in pods.specs.items()}  # a key has no slash
        config = _manifest("v1", "ConfigMap", f"{name}-specs", meta, data=data)
        spec = {
            "entrypoint": command,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 3600,
            "backoffLimit": 0,
            "rayClusterSpec": _cluster(name, groups, pods, health_s),
        }
        job = _manifest("ray.io/v1", "RayJob", f"{name}-run", meta, spec=spec)
        files["rayjob.yaml"] = yaml_text(config, job, about=about)
        apply = "kubectl apply -f runs.yaml -f rayjob.yaml   # or raycluster.yaml, for a cluster that stays"
    steps = []  # by hand, where values must not be in a file
    secrets = dict.fromkeys([*pods.needs.secrets, *pods.needs.played])
    if secrets:
        # Values on a command line would be in the process list.
        steps.append(f"write a file run.env with a line KEY=VALUE, without quotes, for each of {', '.join(secrets)}")
        steps.append(f"kubectl create secret generic {name}-secrets -n {namespace} --from-env-file=run.env")
    if pods.needs.cloud:
        steps.append(
            f"give the service account {name} of namespace {namespace} the role that ControllerPolicy (targets cfn, "
            "sam, terraform) is attached to; on EKS: kubectl annotate serviceaccount eks.amazonaws.com/role-arn=..."
        )
    return RenderedFiles(files, (*steps, apply))


def _manifest(version: str, kind: str, name: str, meta: Mapping[str, Any], **body: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, **meta}, **body}


def _controller_labels(name: str) -> dict[str, str]:
    """Labels that select the head, of a cluster or of a job."""
    return {CLUSTER_LABEL: name, "rollart/part": "controller"}


def _network_policy(name: str, meta: Mapping[str, Any], service: int) -> dict[str, Any]:
    """Allowed connections to the cluster's pods: from each other at all ports (engines that hand off KV and ranks of a
    trainer choose theirs), from pods of the namespace and KubeRay's operator at the dashboard, where jobs are
    submitted, and from anywhere at the port of an external trainer, which has a token of its own."""
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}}
    dashboard = {"protocol": "TCP", "port": PORTS["dashboard"]}
    selector = {"matchLabels": {CLUSTER_LABEL: name}}
    ingress = [
        {"from": [{"podSelector": selector}]},
        {"from": [{"podSelector": {}}, operator], "ports": [dashboard]},
        *([{"ports": [{"protocol": "TCP", "port": service}]}] if service else []),
    ]
    spec = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": ingress}
    return _manifest("networking.k8s.io/v1", "NetworkPolicy", name, meta, spec=spec)


def _needs_volume(path: str) -> bool:
    """True if a directory is not on a volume that all pods have."""
    return bool(path) and not any(path == root or path.startswith(f"{root}/") for root in (RUNS_AT, "/dev/shm"))


def _volume_claim(name: str, meta: Mapping[str, Any]) -> dict[str, Any]:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": RUNS_SIZE}}}
    return _manifest("v1", "PersistentVolumeClaim", name, meta, spec=spec)


def _cluster(name: str, groups: Sequence[HostGroup], pods: PodSettings, health_s: float) -> dict[str, Any]:
    spec: dict[str, Any] = {"rayVersion": RAY_VERSION, "authOptions": {"mode": "token"}}
    if any(g.least < g.most for g in groups):
        spec["enableInTreeAutoscaling"] = True
        spec["autoscalerOptions"] = {"version": "v2", "idleTimeoutSeconds": IDLE_S, "upscalingMode": "Default"}
    needs = pods.needs
    separate_hosts = any(g.plays for g in groups)
    env = [{"name": k, "value": v} for k, v in (health_environment(health_s) | dict(pods.env)).items()]
    env += _secrets(name, (*needs.secrets, *(() if separate_hosts else needs.played)))
    head = _pod("ray-head", pods.of("head"), HEAD_CORES, HEAD_MEMORY_GB, env=env)
    _mount_volumes(head, name, pods, engines=False)
    if needs.cloud:
        head["spec"]["serviceAccountName"] = name
    ports = PORTS | ({"service": needs.service} if needs.service else {})
    head["spec"]["containers"][0]["ports"] = [{"name": n, "containerPort": port} for n, port in ports.items()]
    head["metadata"] = {"labels": _controller_labels(name)}
    # No part of a plan runs on the head: the plan has no such pool.
    params = {"dashboard-host": "0.0.0.0", "num-cpus": "0"}
    spec["headGroupSpec"] = {"rayStartParams": params, "template": head}
    spec["workerGroupSpecs"] = [_workers(group, name, pods, engines=hosts_engines(group, groups)) for group in groups]
    return spec


def _workers(group: HostGroup, name: str, pods: PodSettings, *, engines: bool) -> dict[str, Any]:
    """The worker group of a pool. `engines`: True if engines may run there. Hosts of environments alone have no
    identity, since environments run code written by policies."""
    env = _secrets(name, pods.needs.played if group.plays else ())
    pod = _pod("ray-worker", pods.of(group.name), group.cores, group.memory_gb, gpus=group.gpus, env=env)
    pod["metadata"] = {"labels": {CLUSTER_LABEL: name}}
    _mount_volumes(pod, name, pods, engines=engines)
    if engines and pods.needs.pulls:
        pod["spec"]["serviceAccountName"] = name
    if group.instance_type is not None:
        pod["spec"]["nodeSelector"] = {"node.kubernetes.io/instance-type": group.instance_type}
    tainted = ["nvidia.com/gpu"] if group.gpus else []
    if group.spot:
        terms = [{"matchExpressions": [{"key": k, "operator": "In", "values": [v]}]} for k, v in SPOT_NODES.items()]
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        pod["spec"]["affinity"] = {"nodeAffinity": required}
        tainted += SPOT_NODES
    if tainted:
        pod["spec"]["tolerations"] = [{"key": k, "operator": "Exists", "effect": "NoSchedule"} for k in tainted]
    return {
        "groupName": group.name,
        "replicas": group.hosts,
        "minReplicas": group.least,
        "maxReplicas": group.most,
        "labels": dict(group.labels),
        # Engines and trainers count cores of CPU pools and GPUs of the others: no part requests a GPU host's cores.
        # They count all cores of a CPU host, although its pod requests fewer.
        "rayStartParams": {"num-cpus": "0" if group.gpus else str(group.cores)},
        "template": pod,
    }


def _secrets(name: str, keys: Sequence[str]) -> list[dict[str, Any]]:
    return [{"name": k, "valueFrom": {"secretKeyRef": {"name": f"{name}-secrets", "key": k}}} for k in keys]


def _pod(
    container: str, image: str, cores: int, memory_gb: int, *, gpus: int = 0, env: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A pod that has a host to itself: it uses all cores, and requests the amount that the kubelet of such a host can
    allocate. With GPUs, only their number limits it."""
    if gpus:
        requests, limits = {"cpu": str(cores), "memory": f"{memory_gb}G"}, {"nvidia.com/gpu": str(gpus)}
    else:
        # The kubelet, the system and daemon sets of a CPU host keep a part: on GKE and EKS up to a core, half a GB, a
        # quarter of the first 16 GB and 6 % of more.
        megabytes = 1000 * memory_gb - 500 - 250 * min(16, memory_gb) - 60 * max(0, memory_gb - 16)
        requests = {"cpu": f"{1000 * cores - min(1000, 250 * cores)}m", "memory": f"{megabytes}M"}
        limits = {"memory": requests["memory"]}
    resources = {"requests": requests | limits, "limits": limits}
    body: dict[str, Any] = {"name": container, "image": image, "resources": resources}
    if env:
        body["env"] = list(env)
    # Processes of a host exchange weights and KV through shared memory, which a pod limits to 64 MB by default.
    body["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
    shm = {"medium": "Memory"} if gpus else {"medium": "Memory", "sizeLimit": f"{max(1, memory_gb // 2)}G"}
    owner = {"fsGroup": FILES_OWNER, "fsGroupChangePolicy": "OnRootMismatch"}
    volumes = [{"name": "shm", "emptyDir": shm}]
    return {"spec": {"securityContext": owner, "containers": [body], "volumes": volumes}}


def _mount_volumes(pod: Mapping[str, Any], name: str, pods: PodSettings, *, engines: bool) -> None:
    """Mount the directories of a pod: the runs; the weights' store and, on engine hosts, the disk that they are pulled
    to; the run's specs and the files beside them, read only."""
    mounts, volumes = pod["spec"]["containers"][0]["volumeMounts"], pod["spec"]["volumes"]

    def mount(volume: str, path: str, source: Mapping[str, Any], **more: Any) -> None:
        mounts.append({"name": volume, "mountPath": path, **more})
        volumes.append({"name": volume, **source})

    mount("runs", RUNS_AT, {"persistentVolumeClaim": {"claimName": f"{name}-runs"}})
    if _needs_volume(pods.needs.shared):
        mount("weights", pods.needs.shared, {"persistentVolumeClaim": {"claimName": f"{name}-weights"}})
    if engines and _needs_volume(pods.needs.local):
        mount("pulled", pods.needs.local, {"emptyDir": {}})
    if pods.specs is not None:
        items = [{"key": path.replace("/", "__"), "path": path} for path in pods.specs]
        mount("specs", SPECS_AT, {"configMap": {"name": f"{name}-specs", "items": items}}, readOnly=True)
