"""vLLM servers for tests, started as in a run: the wrapper program with the arguments of a cluster spec."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from placement.types import Role
from rollart.launch.vllm import vllm_command
from rollart.settings.cluster import VllmSpec
from tests.e2e.harness import events
from tests.engine.models import QWEN
from tests.engine.models import publish as publish_random

PYTHON = os.environ.get("ROLLART_VLLM_PYTHON", "")

REQUIRED = bool(os.environ.get("ROLLART_VLLM_REQUIRED"))
"""Set by `make vllm-test`: a missing vLLM is then an error."""

needs_vllm = pytest.mark.skipif(
    not PYTHON and not REQUIRED, reason="vLLM has an environment of its own: `make vllm-test`, or ROLLART_VLLM_PYTHON"
)

CONFIG: dict[str, Any] = {
    **QWEN,
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 256,
    "hidden_size": 64,
    "head_dim": 32,
    "intermediate_size": 128,
    "vocab_size": 64,
    "tie_word_embeddings": False,
}
"""vLLM's CPU kernels require a head dimension that is a multiple of 32."""

TIED: dict[str, Any] = {**CONFIG, "tie_word_embeddings": True}


def publish(directory: Path, seed: int, config: Mapping[str, Any] = CONFIG) -> Path:
    """A version with random weights, once per directory."""
    return directory if (directory / "COMPLETE").exists() else publish_random(directory, seed, config)


HIDING = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--mount", "sh", "-c"]
"""Runs a program in its own mount namespace, by exec: one process."""


@functools.cache
def can_hide() -> bool:
    """True if processes may create mount namespaces here; an unprivileged container may not."""
    try:
        return subprocess.run([*HIDING, "mount -t tmpfs none /mnt"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


SPEC = VllmSpec(dtype="float32", kv_gb=0.064, block_size=32)


def counted(directory: Path, engine: str, name: str) -> float:
    """The increase of one of an engine's counters in a run, from its ledger."""
    return sum(e[name] for e in events(directory, "engine_did") if e["subject"] == engine)


@contextlib.contextmanager
def server(
    model: Path,
    log: Path,
    *,
    role: Role = Role.ENGINE,
    version: int = 0,
    context: int = 256,
    hidden: Path | None = None,
    extra: Sequence[str] = (),
) -> Iterator[str]:
    """The URL of a vLLM server. It is stopped with SIGTERM and must leave no process. `hidden`: a directory that is
    empty for it, if this machine permits that (see `can_hide`)."""
    made = vllm_command(SPEC, role=role, cpu=True, context=context, slots=16)
    command = [sys.executable, "-m", "rollart.adapters.engines.vllm_server", "--python", PYTHON, "--log", str(log)]
    command += ["--model", str(model), "--weight-version", str(version), "--args", json.dumps([*made.args, *extra])]
    if hidden is not None and can_hide():
        command = [*HIDING, 'mount -t tmpfs none "$HIDDEN" && exec "$@"', "sh", *command]
    with log.open("wb") as said:
        env = {**os.environ, **made.env, "HIDDEN": str(hidden)}
        started = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env=env,
            start_new_session=True,
        )
    try:
        assert started.stdout is not None
        word, _, url = started.stdout.readline().strip().partition(" ")
        if word != "ready":
            started.wait(30)
            raise AssertionError(log.read_text(errors="replace")[-3000:])
        yield url
    finally:
        started.send_signal(signal.SIGTERM)
        started.communicate(timeout=30)
