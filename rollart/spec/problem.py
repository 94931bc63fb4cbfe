"""Violations of the rules of a spec."""

from __future__ import annotations

from dataclasses import dataclass

from rollart.spec.document import KeyPath

__all__ = ["RuleViolation"]


@dataclass(frozen=True, slots=True)
class RuleViolation:
    """A broken rule and the path of the value that breaks it."""

    loc: KeyPath
    message: str
