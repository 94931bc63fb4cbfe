"""What every spec model shares: frozen, no unknown keys, a name grammar."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints

__all__ = ["Entry", "ImportPath", "Name"]

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)]
"""Letters, digits, '_', '.', '-': a name becomes a directory, a label and a function name."""

ImportPath = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*(\.\w+)*$")]
"""`package.module:attribute`."""


class Entry(BaseModel):
    """Base of every mapping in a spec: unknown keys are errors, values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())
