"""The product's source files and their syntax trees, parsed once for all tests about the code itself."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PRODUCT = [
    path for package in ("rollart", "serverless", "placement") for path in sorted((ROOT / package).rglob("*.py"))
]


@functools.cache
def source(path: Path) -> str:
    return path.read_text()


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(source(path), str(path))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of the file, in no particular order."""
    return tuple(ast.walk(tree(path)))
