"""What a spec names by `package.module:attribute` inside an environment's arguments."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["attribute_at"]


def attribute_at(path: str, what: str) -> Any:
    """The object at `package.module:attribute`; ValueError names what it was for."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f"{what} must be 'package.module:attribute', got {path!r}")
    try:
        holder = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{what} {path!r}: there is no module {error.name!r}") from None
    if not hasattr(holder, name):
        raise ValueError(f"{what} {path!r}: module {module} has no {name!r}")
    return getattr(holder, name)
