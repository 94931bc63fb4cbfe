"""vLLM: the only translation of a planned engine into its command line, and checks of the installation and of the
packages that engines need. vLLM is not imported.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from placement.types import Role
from rollart.errors import SpecError, UsageError
from rollart.settings.cluster import PYTHON_VARIABLE, VllmSpec
from rollart.settings.planning import model_config
from rollart.settings.resolve import Resolved

CONNECTOR = "NixlConnector"

KV_LEASE_S = 10
"""Seconds for which a prefill engine keeps KV without a pull; a decode engine renews the lease while its request waits.
A weight update waits as long for KV of a dead decode engine, so it is shorter than vLLM's 30 s."""

GB = 10**9


@dataclass(frozen=True, slots=True)
class VllmCommand:
    """Arguments and environment of `vllm serve`, without model, host and ports."""

    args: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def vllm_command(
    spec: VllmSpec, *, role: Role = Role.ENGINE, devices: int = 1, cpu: bool = False, context: int, slots: int
) -> VllmCommand:
    """The command of an engine on `devices` cores or GPUs, for `slots` concurrent contexts of `context` tokens."""
    env = {
        "VLLM_SERVER_DEV_MODE": "1",  # enables pause, resume and weight updates
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    args = [
        "--max-model-len",
        str(context),
        "--max-num-seqs",
        str(slots),
        "--dtype",
        spec.dtype,
        "--skip-tokenizer-init",  # token in, token out
        "--enable-scale-out",  # /inference/v1/generate
        "--enable-prompt-tokens-details",  # number of cached tokens
        "--logprobs-mode",
        "processed_logprobs",  # after temperature and legal actions, as importance ratios need them
        "--weight-transfer-config",
        json.dumps({"backend": "rollart"}),
        "--disable-uvicorn-access-log",
    ]
    if spec.block_size is not None:
        args += ["--block-size", str(spec.block_size)]
    if cpu:
        args += ["--kv-cache-memory-bytes", str(int(spec.kv_gb * GB)), *CPU_ARGS]
        args += ["--max-num-batched-tokens", str(max(CPU_STEP_TOKENS, context))]
        env |= {**CPU_ENV, "OMP_NUM_THREADS": str(devices)}
    else:
        args += ["--tensor-parallel-size", str(devices), "--gpu-memory-utilization", f"{spec.memory:g}"]
    if role in (Role.PREFILL, Role.DECODE):
        transfer = {
            "kv_connector": CONNECTOR,
            "kv_role": "kv_both",  # roles are the router's, and may flip
            "kv_buffer_device": "cpu" if cpu else "cuda",
            "kv_load_failure_policy": "fail",  # the gateway then prefills on the decode engine, and records it
            # Without `bidirectional_kv_xfer`: a weight update would wait for all KV offered back to prefill engines.
            "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": KV_LEASE_S},
        }
        args += ["--kv-transfer-config", json.dumps(transfer)]
        if cpu:
            env["UCX_TLS"] = "tcp,sm,self"
    return VllmCommand((*args, *spec.args), {**env, **spec.env})


CPU_ARGS = ("--enforce-eager", "--distributed-executor-backend", "uni", "--no-enable-chunked-prefill")
"""Compilation takes a minute at every start; the worker needs no separate process; and a request with a seed whose
prompt is computed in two steps crashes vLLM 0.32 ("CPU Generator does not use offset")."""

CPU_STEP_TOKENS = 2048
"""Minimum tokens per step. Without chunked prefill it also bounds the prompt."""

CPU_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # keeps `uni`; the engine core still has a separate process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # by default all engines of a host share core 0
    "TORCH_COMPILE_DISABLE": "1",  # the first log-probability would be compiled, eager or not
}


INTERPRETER_TIMEOUT_S = 60.0
"""Timeout of an interpreter that lists its packages: a fraction of a second, unless its disk is slow."""

SERVER_TIMEOUT_S = 10.0
"""Timeout of a running server, which answers from its event loop under any load."""

ARCHITECTURE_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)
"""Configuration keys that determine the shapes of a model's weights."""

PLUGIN_REMEDY = "pip install integrations/vllm into vLLM's environment"

_PACKAGES_SCRIPT = """
import importlib.metadata as m, importlib.util as u, json
try: version = m.version("vllm") if u.find_spec("vllm") else ""
except m.PackageNotFoundError: version = ""
points = [e for e in m.entry_points(group="vllm.general_plugins") if e.name == "rollart"]
plugin = any(u.find_spec(e.value.partition(":")[0]) for e in points)
print(json.dumps([version, plugin, u.find_spec("nixl") is not None]))
"""


@dataclass(frozen=True, slots=True)
class VllmInstallation:
    """Packages of an environment: vLLM's version ('' if not installed), rollart's plugin, NIXL."""

    version: str
    plugin: bool
    nixl: bool


def vllm_python(resolved: Resolved) -> str:
    """The interpreter from the cluster spec or the environment. SpecError if neither names one."""
    python = resolved.cluster.engines.vllm.python or os.environ.get(PYTHON_VARIABLE)
    if not python:
        raise SpecError(
            f"engines.vllm.python is not given, nor is {PYTHON_VARIABLE} (rule: the interpreter of the environment "
            "that vLLM is installed in)",
            remedy="see docs/fleet.md, vLLM engines",
        )
    return python


def vllm_home(python: str) -> VllmInstallation:
    """The packages that an interpreter of this machine finds. `UsageError` if it cannot be run."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # the controller's, not vLLM's
    try:
        found = subprocess.run(
            [python, "-c", _PACKAGES_SCRIPT], capture_output=True, text=True, timeout=INTERPRETER_TIMEOUT_S, env=env
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = error.strerror if isinstance(error, OSError) else f"silent for {INTERPRETER_TIMEOUT_S:g} s"
        raise UsageError(
            f"vLLM's interpreter {python} cannot be run: {why}", remedy=f"mend engines.vllm.python or {PYTHON_VARIABLE}"
        ) from None
    try:
        return VllmInstallation(*json.loads(found.stdout.splitlines()[-1]))
    except (ValueError, TypeError, IndexError):
        stderr = found.stderr.strip().splitlines() or ["it printed nothing"]
        raise UsageError(
            f"{python} is no interpreter that vLLM could run under: {stderr[-1][:200]}",
            remedy=f"mend engines.vllm.python or {PYTHON_VARIABLE}",
        ) from None


def refuse_dead_servers(resolved: Resolved) -> None:
    """`UsageError` for a server of `engines.attach` that does not answer, or whose model has other sizes than the
    run's, if its directory is readable here: a publish into it would fail after the trainer's start."""
    trained = resolved.run.model.model_copy(update={"config": None})  # plans are computed for `config`
    for url in resolved.cluster.engines.attach:
        _get(url, "/health")
        try:
            served = Path(json.loads(_get(url, "/v1/models"))["data"][0]["root"])
            served_config = json.loads((served / "config.json").read_text())
        except (OSError, ValueError, KeyError, IndexError, TypeError, UsageError):
            continue  # a name of the Hub, or another machine's directory: the first publish compares the weights
        run_config = model_config(resolved.run.model_copy(update={"model": trained}), resolved.base)
        for key in ("architectures", *ARCHITECTURE_KEYS):
            if key in run_config and key in served_config and run_config[key] != served_config[key]:
                raise UsageError(
                    f"engines.attach: {url} serves another model ({served}): {key} is {served_config[key]!r} (rule: "
                    f"the run's, {run_config[key]!r})",
                    remedy="start the server with the run's model, or mend engines.attach",
                )


def refuse_without_vllm(resolved: Resolved) -> None:
    """`UsageError` for a run whose vLLM servers could not start here. On Ray the interpreter belongs to other machines,
    and only has to be named."""
    if resolved.cluster.engines.attach:
        return
    python = vllm_python(resolved)
    if resolved.cluster.runtime.backend == "ray" and resolved.cluster.runtime.address != "local":
        return
    installation = vllm_home(python)
    if not installation.version:
        raise UsageError(f"{python} has no vLLM", remedy=f"name another with engines.vllm.python or {PYTHON_VARIABLE}")
    if not installation.plugin:
        raise UsageError(f"{python} has vLLM {installation.version} without rollart's plugin", remedy=PLUGIN_REMEDY)
    if not installation.nixl and resolved.plan.of(Role.PREFILL, Role.DECODE):
        raise UsageError(
            f"{python} has no nixl, which prefill engines need to hand KV to decode engines",
            remedy="pip install nixl into vLLM's environment, or plan engines that do both",
        )


def _get(url: str, route: str) -> bytes:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as the run will ask
    try:
        with direct.open(url.rstrip("/") + route, timeout=SERVER_TIMEOUT_S) as answer:
            return bytes(answer.read())
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or error
    raise UsageError(
        f"engines.attach: {url} does not answer {route}: {getattr(why, 'strerror', None) or why}",
        remedy="start the server, or mend engines.attach",
    )
