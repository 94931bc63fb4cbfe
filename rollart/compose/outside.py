"""A run's trainer that is not ours: how the bridge to it is started."""

from __future__ import annotations

import os
from pathlib import Path

from rollart.errors import SpecError
from rollart.spec.resolve import Resolved, Specs

__all__ = ["bridge_command", "refuse_missing_token"]

TOKEN_FILE = "service.token"
"""In the run's directory, mode 600."""


def bridge_command(resolved: Resolved, directory: Path, config: Path) -> tuple[list[str], dict[str, str]]:
    """Arguments of the bridge and what its environment needs. SpecError for a token that is not there."""
    trainer = resolved.cluster.trainer
    arguments, variable = ["--config", str(config), "--listen", str(trainer.external)], _variable(resolved)
    if variable:
        return [*arguments, "--token-env", variable], {variable: _token(variable)}
    if trainer.external_token is not None:
        return [*arguments, "--token-file", str(directory / TOKEN_FILE)], {}
    return arguments, {}


def refuse_missing_token(resolved: Resolved | Specs) -> None:
    """SpecError where the outside trainer's token is to be in a variable, and is not."""
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
