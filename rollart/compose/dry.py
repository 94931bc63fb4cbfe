"""What `launch --dry-run` says beyond the specs: how engines that are not ours would be started."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from rollart.compose.actors import attached, engine_command
from rollart.compose.routing import SERVING
from rollart.spec.resolve import Resolved

__all__ = ["commands"]


def commands(resolved: Resolved) -> Iterator[str]:
    """One line per engine; none where they are embedded."""
    if resolved.cluster.engines.kind != "vllm":
        return
    urls = attached(resolved)
    for assignment in (a for role in SERVING for a in resolved.plan.of(role)):
        command = engine_command(resolved, assignment)
        env = " ".join(f"{name}={shlex.quote(value)}" for name, value in command.env.items())
        line = f"{env} vllm serve MODEL {shlex.join(command.args)}"
        url = urls.get(assignment.name)
        yield f"{assignment.name}: {line if url is None else f'{url}, which runs already, started with {line}'}"
