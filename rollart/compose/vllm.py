"""The only translation of a planned engine into vLLM's command line. Pure: no lookups and no starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from placement.types import Role
from rollart.spec.vllm import VllmSpec

__all__ = ["CONNECTOR", "KV_LEASE_S", "VllmCommand", "vllm_command"]

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
        args += ["--kv-transfer-config", json.dumps(_kv_transfer_config(cpu))]
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


def _kv_transfer_config(cpu: bool) -> dict[str, object]:
    return {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",  # roles are the router's, and may flip
        "kv_buffer_device": "cpu" if cpu else "cuda",
        "kv_load_failure_policy": "fail",  # the gateway then prefills on the decode engine, and records it
        # Without `bidirectional_kv_xfer`: a weight update would wait for all KV offered back to prefill engines.
        "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": KV_LEASE_S},
    }
