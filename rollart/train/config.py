"""Reads and validates `trainer.json`: a misspelt key is an error, not a default."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from rollart.errors import UsageError
from rollart.settings.training import TrainerConfig


def load_config(path: str | Path) -> TrainerConfig:
    """Read and validate a config file. `UsageError`, one line, names the file and the wrong key."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from error
    try:
        return parse_config(raw)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def parse_config(raw: object) -> TrainerConfig:
    """`ValueError`, one line, names the first wrong key."""
    try:
        return TrainerConfig.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(["config", *map(str, first["loc"])])
        given = "" if first["type"] == "missing" else f", got {first['input']!r:.200}"
        raise ValueError(f"{where}: {first['msg'].removeprefix('Value error, ')}{given}") from None
