"""Objects that a spec names as `package.module:attribute` in an environment's arguments."""

from __future__ import annotations

import importlib
from typing import Any


def attribute_at(path: str, purpose: str) -> Any:
    """The object at `package.module:attribute`. ValueError, which names the `purpose` of the path, if there is none."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f"{purpose} must be 'package.module:attribute', got {path!r}")
    try:
        holder = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{purpose} {path!r}: there is no module {error.name!r}") from None
    if not hasattr(holder, name):
        raise ValueError(f"{purpose} {path!r}: module {module} has no {name!r}")
    return getattr(holder, name)
