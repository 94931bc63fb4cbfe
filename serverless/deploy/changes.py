"""The differences between a deployed package and a new one: settings, requirements, source and weights. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from serverless.deploy.package import Package
from serverless.providers.base import DeployedFunction
from serverless.spec import FunctionSpec

_OWN = ("serverless/", "shims/", "rollart_")
"""Prefixes of the files that rollart adds to a package."""


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file that differs between two packages. `change` is "added", "removed" or "changed"; `diff` is the unified diff
    of a text, '' for a file that is none."""

    path: str
    change: str
    diff: str = ""

    @property
    def lines(self) -> tuple[int, int]:
        """The numbers of added and of removed lines."""
        body = [line for line in self.diff.splitlines() if not line.startswith(("+++", "---"))]
        return sum(line.startswith("+") for line in body), sum(line.startswith("-") for line in body)


def file_changes(before: Package, after: Package) -> list[FileChange]:
    """The changed files of the function, by path. Files that rollart itself adds are one entry, without a diff."""
    found, ours = [], 0
    for path in sorted(before.files.keys() | after.files.keys()):
        old, new = before.files.get(path), after.files.get(path)
        if old == new:
            continue
        if path.startswith(_OWN):
            ours += 1
            continue
        change = "added" if old is None else "removed" if new is None else "changed"
        found.append(FileChange(path, change, _diff(path, old, new)))
    if ours:
        found.append(FileChange("rollart's own modules", "changed"))
    return found


def _diff(path: str, old: bytes | None, new: bytes | None) -> str:
    try:
        was, now = [(data or b"").decode().splitlines(keepends=True) for data in (old, new)]
    except UnicodeDecodeError:
        return ""
    source, target = "/dev/null" if old is None else f"a/{path}", "/dev/null" if new is None else f"b/{path}"
    lines = (line if line.endswith("\n") else f"{line}\n" for line in difflib.unified_diff(was, now, source, target))
    return "".join(lines)


def spec_lines(before: FunctionSpec, after: FunctionSpec) -> list[str]:
    """A line of text per setting of the version that differs. Of a list the added and removed entries; a mapping by its
    keys."""
    old, new = dict(_flat(before.identity())), dict(_flat(after.identity()))
    return [
        _setting(key, old.get(key), new.get(key)) for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)
    ]


def _flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _setting(key: str, old: object, new: object) -> str:
    if isinstance(old, list | None) and isinstance(new, list | None) and (old, new) != (None, None):
        added = [f"+{one}" for one in new or () if one not in (old or ())]
        removed = [f"-{one}" for one in old or () if one not in (new or ())]
        return f"{key}: {' '.join([*removed, *added]) or 'another order'}"
    return f"{key}: {_shown(old)} -> {_shown(new)}"


def _shown(value: object) -> str:
    return "none" if value in (None, "") else str(value)


def weight_lines(versions: Sequence[DeployedFunction], version: str, canary: float) -> tuple[str, ...]:
    """The lines for the version and the weights of a deployment over the deployed `versions`."""
    current = next((one for one in versions if one.current), None)
    before = next((one for one in versions if one.weight and not one.current), None)
    if current is None or (canary and current.version == version):
        return ()
    if not canary:
        lines = [] if current.version == version else [f"version: {current.version[:12]} -> {version[:12]}"]
        if before is not None and before.version != version:
            lines.append(f"canary: {before.version[:12]} ({before.weight:.0%}) -> none")
        return tuple(lines)
    old = "none" if before is None else f"{before.version[:12]} ({before.weight:.4g})"
    new = f"{version[:12]} ({canary:.4g})"
    return () if old == new else (f"canary: {old} -> {new}", f"version: {current.version[:12]} stays current")
