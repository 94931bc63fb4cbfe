"""What is wrong with a spec, and where."""

from __future__ import annotations

from dataclasses import dataclass

from rollart.spec.document import Loc

__all__ = ["Problem"]


@dataclass(frozen=True, slots=True)
class Problem:
    """A broken rule and the path of the value that breaks it."""

    loc: Loc
    message: str
