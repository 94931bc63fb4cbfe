"""Reward functions on Kubernetes with Knative Serving: a Service each, that scales to zero and runs our HTTP front.

A Service's pods hold one worker: Knative sends a pod one call at a time, starts pods as calls wait, up to the
function's `concurrency`, and stops them after its `keep_alive_s`. The package travels in a ConfigMap, and the pod runs
`rollart rewards serve` on it.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollart.errors import SpecError
from rollart.infra.files import RenderedFiles, header, refuse_image, yaml_text
from serverless.deploy.package import Package, archive_name, with_record, zip_archive
from serverless.spec import FunctionSpec

PORT = 8080
"""The port that Knative expects by default."""

PACKAGE_AT = "/etc/rollart/function"
TOKEN = "ROLLART_REWARDS_TOKEN"
"""The variable with the token that every call must bear."""

FRONT_MB = 256
"""Memory of the front and of the process that workers are forked from, beside a worker's own."""

MB_PER_CORE = 1769
"""Memory per core, as on Lambda, for functions without `cpu`."""

CONFIG_MAP_BYTES = 1_000_000
"""Kubernetes refuses a ConfigMap above 1 MiB."""

START_S = 30
"""Longest start of a front: interpreter, imports, and the function's own."""

LONGEST_S = 600
"""Knative's default `max-revision-timeout-seconds`."""

GPU_PRODUCT = "nvidia.com/gpu.product"
"""The node label with the name of its GPUs, by NVIDIA's GPU feature discovery, which the GPU operator installs."""

GPU_PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "ANY": (),
    "T4": ("Tesla-T4", "NVIDIA-T4"),
    "L4": ("NVIDIA-L4",),
    "L40S": ("NVIDIA-L40S",),
    "A10": ("NVIDIA-A10", "NVIDIA-A10G"),
    "A100-40GB": ("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB"),
    "A100-80GB": ("NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-80GB-PCIe"),
    "H100": ("NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe", "NVIDIA-H100-NVL"),
    "H200": ("NVIDIA-H200", "NVIDIA-H200-NVL"),
    "B200": ("NVIDIA-B200",),
}
"""The values of that label, the names of NVIDIA's driver with '-' for spaces, by the type of a function's GPU."""

AFFINITY_STEP = (
    "kubectl patch configmap config-features -n knative-serving --type merge "
    """-p '{"data": {"kubernetes.podspec-affinity": "enabled"}}'"""
)
"""Knative refuses pods with node affinity by default."""

_NAME = re.compile(r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")


def knative(
    name: str, packages: Sequence[Package], *, images: Mapping[str, str], namespace: str = "default"
) -> RenderedFiles:
    """`functions.yaml`: a ConfigMap and a Service for each function, and a Dockerfile where it has requirements.
    `images`: by function, '' for all others. SpecError for functions that Knative cannot hold."""
    documents: list[Mapping[str, Any]] = []
    files: dict[str, bytes] = {}
    builds: list[str] = []
    named: dict[str, str] = {}
    for package in packages:
        spec = package.spec
        refuse_image(spec)
        service = _service_name(spec)
        if service in named:
            raise SpecError(
                f"functions '{named[service]}' and '{spec.name}' are both the Service '{service}' of Kubernetes (rule: "
                "one name each, in lower case and with '-' for '_')",
                remedy="rename one of them",
            )
        named[service] = spec.name
        image = images.get(spec.name) or images[""]
        if spec.requirements and spec.name not in images:
            package.check_pinned()
            base, image = image, f"{name}-{service}:{package.version[:12]}"
            files[f"{service}/Dockerfile"] = (
                f"# {header('knative', name)}\nFROM {base}\nUSER root\nCOPY requirements.txt /tmp/requirements.txt\n"
                "RUN pip install --no-cache-dir -r /tmp/requirements.txt\nUSER rollart\n"
            ).encode()
            files[f"{service}/requirements.txt"] = "".join(f"{one}\n" for one in spec.requirements).encode()
            builds.append(f"docker build -t {image} {service} && docker push {image}")
        meta = {
            "namespace": namespace,
            "labels": {"app.kubernetes.io/part-of": "rollart", "app.kubernetes.io/name": service},
            "annotations": {"rollart/function": spec.name, "rollart/version": package.version},
        }
        documents.append(_config_map(service, package, meta))
        documents.append(_service(service, name, package, meta, image))
    files["functions.yaml"] = yaml_text(*documents, about=header("knative", name))
    secrets = sorted({variable for package in packages for variable in package.spec.secrets})
    # A pod knows the Idempotency-Keys of its own calls alone: a lost call might be repeated by another pod.
    urls = ", ".join(
        f"{spec.name}: {{url: 'http://{_service_name(spec)}.{namespace}.svc.cluster.local/functions/{spec.name}', "
        f"token_env: {TOKEN}, idempotent: false}}"
        for spec in (package.spec for package in packages)
    )
    steps = (
        # Values on a command line would be in the process list.
        f"write a file rewards.env with a line KEY=VALUE, without quotes, for each of {', '.join((TOKEN, *secrets))}",
        f"kubectl create secret generic {name}-rewards -n {namespace} --from-env-file=rewards.env",
        *builds,
        *([AFFINITY_STEP] if any(_affinity(package.spec) for package in packages) else ()),
        "kubectl apply -f functions.yaml",
        f"in the cluster spec of runs: functions: {{backend: http, http: {{{urls}}}}}",
    )
    return RenderedFiles(files, steps)


def _service_name(spec: FunctionSpec) -> str:
    service = spec.name.lower().replace("_", "-")
    if not _NAME.match(service):
        raise SpecError(
            f"function '{spec.name}' cannot name a Service of Kubernetes (rule: up to 63 letters, digits, '_' and '-', "
            "a letter first, a letter or digit last)",
            remedy="rename the function",
        )
    return service


def _config_map(service: str, package: Package, meta: Mapping[str, Any]) -> dict[str, Any]:
    archive = zip_archive(with_record(package))
    data = base64.b64encode(archive).decode()
    if len(data) > CONFIG_MAP_BYTES:
        raise SpecError(
            f"the package of function '{package.spec.name}' has {len(data):,} bytes (rule: at most "
            f"{CONFIG_MAP_BYTES:,} in a ConfigMap)",
            remedy="keep artefacts out of the package: read them from a volume or an image",
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{service}-package", **meta},
        "binaryData": {archive_name(package): data},
    }


def _service(service: str, cluster: str, package: Package, meta: Mapping[str, Any], image: str) -> dict[str, Any]:
    spec = package.spec
    timeout_s = math.ceil(spec.timeout_s + spec.init_timeout_s)
    if timeout_s > LONGEST_S:
        raise SpecError(
            f"function '{spec.name}' may take {timeout_s} s with its start (rule: at most {LONGEST_S}, Knative's "
            "default max-revision-timeout-seconds)",
            remedy="lower timeout_s or init_timeout_s",
        )
    probe = {"httpGet": {"path": "/health", "port": PORT}}
    container = {
        "name": "rewards",
        "image": image,
        "command": ["rollart", "rewards", "serve", f"{PACKAGE_AT}/{archive_name(package)}"],
        "args": ["--host", "0.0.0.0", "--port", str(PORT), "--token-env", TOKEN, "--json"],
        "ports": [{"name": "http1", "containerPort": PORT}],
        "env": [
            # Kubernetes expands $(NAME) in values, and $$ before it keeps it.
            *({"name": key, "value": value.replace("$(", "$$(")} for key, value in sorted(spec.env.items())),
            *(
                {"name": key, "valueFrom": {"secretKeyRef": {"name": f"{cluster}-rewards", "key": key}}}
                for key in (TOKEN, *sorted(spec.secrets))
            ),
        ],
        "resources": _resources(spec),
        "readinessProbe": {**probe, "periodSeconds": 1, "failureThreshold": START_S},
        "livenessProbe": {**probe, "initialDelaySeconds": START_S, "periodSeconds": 10},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [{"name": "package", "mountPath": PACKAGE_AT, "readOnly": True}],
    }
    annotations = {
        **meta["annotations"],
        "autoscaling.knative.dev/class": "kpa.autoscaling.knative.dev",
        "autoscaling.knative.dev/metric": "concurrency",
        "autoscaling.knative.dev/target": "1",
        "autoscaling.knative.dev/min-scale": str(spec.warm),
        "autoscaling.knative.dev/max-scale": str(spec.concurrency),
        "autoscaling.knative.dev/scale-to-zero-pod-retention-period": f"{math.ceil(min(spec.keep_alive_s, 3600))}s",
    }
    template = {
        "metadata": {"labels": meta["labels"], "annotations": annotations},
        "spec": {
            "containerConcurrency": 1,
            "timeoutSeconds": timeout_s,
            "enableServiceLinks": False,
            **_affinity(spec),
            "containers": [container],
            "volumes": [{"name": "package", "configMap": {"name": f"{service}-package"}}],
        },
    }
    labels = {**meta["labels"], "networking.knative.dev/visibility": "cluster-local"}
    return {
        "apiVersion": "serving.knative.dev/v1",
        "kind": "Service",
        "metadata": {"name": service, **meta, "labels": labels},
        "spec": {"template": template},
    }


def _resources(spec: FunctionSpec) -> dict[str, Any]:
    """Requests and limits of a pod: its worker and the front. A limit of GPUs is also their request."""
    memory = f"{spec.memory_mb + FRONT_MB}Mi"
    cores = spec.cpu or max(0.1, spec.memory_mb / MB_PER_CORE)
    limits: dict[str, Any] = {"memory": memory}
    if spec.gpu:
        limits["nvidia.com/gpu"] = str(spec.gpus[1])
    return {"requests": {"cpu": f"{math.ceil(1000 * cores)}m", "memory": memory}, "limits": limits}


def _affinity(spec: FunctionSpec) -> dict[str, Any]:
    """The node affinity of a pod: nodes with the function's type of GPU; none without a type. SpecError for an unknown
    type, of which a pod could get any."""
    kind, _ = spec.gpus
    if not kind:
        return {}
    if kind not in GPU_PRODUCTS:
        raise SpecError(
            f"function '{spec.name}' has gpu '{spec.gpu}' (rule: on Knative one of {', '.join(GPU_PRODUCTS)}, whose "
            f"values of the node label {GPU_PRODUCT} are known)",
            remedy="choose one of these, or `any` where the cluster has GPUs of one type",
        )
    products = GPU_PRODUCTS[kind]
    if not products:
        return {}
    term = {"matchExpressions": [{"key": GPU_PRODUCT, "operator": "In", "values": list(products)}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    return {"affinity": {"nodeAffinity": required}}
