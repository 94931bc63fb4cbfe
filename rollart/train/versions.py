"""Paths of published versions, and the marker of a complete one."""

from __future__ import annotations

from pathlib import Path

MARKER = "COMPLETE"


def version_path(root: Path, version: int) -> Path:
    return root / f"v{version:06d}"
