"""Lines that `launch --dry-run` adds to the specs: commands of vLLM engines, number formats of parts on GPUs, the
weight path, and the placement of function workers."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from placement.types import Role
from rollart.compose.actors import attached_urls, engine_command, torch_device
from rollart.compose.broadcasts import collective_backend
from rollart.compose.dtypes import engine_dtype, trainer_dtype
from rollart.compose.functions import function_actor, initial_function_hosts
from rollart.compose.routing import SERVING_ROLES
from rollart.spec.resolve import Resolved

__all__ = ["dry_run_lines"]


def dry_run_lines(resolved: Resolved) -> Iterator[str]:
    """One line per engine and one for the trainer, none for embedded parts in float32 on cores; one for broadcasts, and
    one per host of function workers."""
    ours, urls = resolved.cluster.engines.kind != "vllm", attached_urls(resolved)
    for assignment in (a for role in SERVING_ROLES for a in resolved.plan.of(role)):
        if ours:
            device = torch_device(resolved, assignment)
            yield from _dtype_line(assignment.name, device, engine_dtype(resolved, device))
            continue
        command = engine_command(resolved, assignment)
        env = " ".join(f"{name}={shlex.quote(value)}" for name, value in command.env.items())
        line = f"{env} vllm serve MODEL {shlex.join(command.args)}"
        url = urls.get(assignment.name)
        yield f"{assignment.name}: {line if url is None else f'{url}, which runs already, started with {line}'}"
    for assignment in resolved.plan.of(Role.TRAINER):
        if resolved.cluster.trainer.external is None:
            device = torch_device(resolved, assignment)
            yield from _dtype_line(assignment.name, device, trainer_dtype(resolved, device))
    if resolved.run.weights.collective is not None:
        yield f"weights: broadcast over {collective_backend(resolved)}"
    yield from _function_host_lines(resolved)


def _dtype_line(name: str, device: str, dtype: str) -> Iterator[str]:
    if (device, dtype) != ("cpu", "float32"):
        yield f"{name}: computes in {dtype} on {device}"


def _function_host_lines(resolved: Resolved) -> Iterator[str]:
    for name in initial_function_hosts(resolved):
        actor = function_actor(resolved, Path(), name, "")
        labels = " ".join(f"{key}={value}" for key, value in actor.labels.items())
        resources = " ".join(f"{amount:g} {kind}" for kind, amount in actor.resources.items())
        where = f"in {resources}" if resources else "beside its other parts"
        yield f"{name}: function workers on a node with {labels}, {where}"
