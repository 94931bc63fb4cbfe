"""External trainers: how the bridge to one is started."""

from __future__ import annotations

import os
from pathlib import Path

from rollart.errors import SpecError
from rollart.spec.resolve import Resolved, Specs

__all__ = ["bridge_command", "refuse_missing_token"]

TOKEN_FILE = "service.token"
"""File of the token in the run's directory, mode 600."""


def bridge_command(resolved: Resolved, directory: Path, config: Path) -> tuple[list[str], dict[str, str]]:
    """The bridge's arguments and environment variables. SpecError for a missing token."""
    trainer = resolved.cluster.trainer
    arguments, variable = ["--config", str(config), "--listen", str(trainer.external)], _variable(resolved)
    if variable:
        return [*arguments, "--token-env", variable], {variable: _token(variable)}
    if trainer.external_token is not None:
        return [*arguments, "--token-file", str(directory / TOKEN_FILE)], {}
    return arguments, {}


def refuse_missing_token(resolved: Resolved | Specs) -> None:
    """SpecError if the external trainer's token belongs in an environment variable that is not set."""
    variable = _variable(resolved)
    if resolved.cluster.trainer.external is not None and variable:
        _token(variable)


def _variable(resolved: Resolved | Specs) -> str:
    return (resolved.cluster.trainer.external_token or "").partition("env:")[2]


def _token(variable: str) -> str:
    token = os.environ.get(variable, "")
    if not token:
        raise SpecError(
            f"trainer.external_token: the environment variable {variable} is not set", remedy=f"export {variable}=…"
        )
    return token
