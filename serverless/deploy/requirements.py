"""The lock of a function: exact versions of its requirements and of their dependencies.

Pins come from the installed packages, with which the function was written and tested; exact pins, also those of a
requirements file, are kept. Names are normalised (PEP 503) and sorted, so that the same environment gives the same
lock.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from serverless.errors import PackageError

if TYPE_CHECKING:
    from packaging.requirements import Requirement


@dataclass(frozen=True, slots=True)
class RequirementLock:
    """The lock. `pins` are `name==version`; `unpinned` are requirements that cannot be pinned because they are not
    installed.

    A package with unpinned requirements can be rehearsed, but a provider refuses it: its content would change over
    time.
    """

    pins: tuple[str, ...] = ()
    unpinned: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.pins, *self.unpinned)


def lock(requirements: Sequence[str], root: pathlib.Path) -> RequirementLock:
    """Pin `requirements`. Paths among them (`*.txt`, `-r FILE`) are relative to `root`.

    Raises `PackageError` for a requirement that cannot be read, is requested in two versions, or contradicts the
    installed version.
    """
    if not requirements:
        return RequirementLock()
    from packaging.utils import canonicalize_name

    pins: dict[str, str] = {}
    unpinned: list[str] = []
    pending: list[tuple[Requirement, str]] = []
    for text, origin in _lines(requirements, root):
        wanted = _parse(text, origin)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            pending.append((wanted, origin))
    seen: set[tuple[str, frozenset[str]]] = set()
    while pending:
        wanted, origin = pending.pop(0)
        name = str(canonicalize_name(wanted.name))
        try:
            installed = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            installed = ""
        version = _exact(wanted) or installed
        if not version:
            unpinned.append(str(wanted))
            continue
        _pin(pins, name, version, wanted, origin)
        if installed == version and (name, frozenset(wanted.extras)) not in seen:
            seen.add((name, frozenset(wanted.extras)))
            pending += [(needed, name) for needed in _needs(wanted)]
    return RequirementLock(tuple(f"{n}=={v}" for n, v in sorted(pins.items())), tuple(sorted(set(unpinned))))


def _lines(requirements: Iterable[str], root: pathlib.Path) -> list[tuple[str, str]]:
    """Requirement texts with their origins; those of files without comments, options, hashes and continuation marks."""
    out: list[tuple[str, str]] = []
    for entry in requirements:
        text = entry.removeprefix("-r ").strip()
        if not (entry.startswith("-r ") or text.endswith(".txt")):
            out.append((text, "requirements"))
            continue
        path = root / text
        try:
            content = path.read_text()
        except OSError as error:
            raise PackageError(
                f"requirements file {path}: {error.strerror}", remedy="check the path in the declaration"
            ) from None
        for number, raw in enumerate(content.replace("\\\n", " ").splitlines(), 1):
            line = raw.split(" #")[0].split(" --hash")[0].strip()
            if line and not line.startswith(("#", "-")):
                out.append((line, f"{text}:{number}"))
    return out


def _parse(text: str, origin: str) -> Requirement:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        wanted = Requirement(text)
    except InvalidRequirement as error:
        raise PackageError(f"{origin}: {text!r} is not a requirement: {error}", remedy="write name==version") from None
    if wanted.url is not None:
        raise PackageError(
            f"{origin}: {text!r} names a URL, whose content may change",
            remedy="publish it to an index, or pack its files as source or artefacts",
        )
    return wanted


def _exact(wanted: Requirement) -> str | None:
    specifiers = list(wanted.specifier)
    if len(specifiers) == 1 and specifiers[0].operator in ("==", "===") and not specifiers[0].version.endswith("*"):
        return specifiers[0].version
    return None


def _pin(pins: dict[str, str], name: str, version: str, wanted: Requirement, origin: str) -> None:
    from packaging.version import Version

    if name in pins and Version(pins[name]) == Version(version):
        return
    if name in pins and _exact(wanted) is not None:
        raise PackageError(
            f"{origin}: {wanted} contradicts {name}=={pins[name]}", remedy="require one version of each distribution"
        )
    if name in pins:
        version = pins[name]
    direct = origin == "requirements" or ":" in origin
    if direct and not wanted.specifier.contains(version, prereleases=True):
        raise PackageError(
            f"{origin}: {wanted} is required, but {name} {version} is installed",
            remedy=f"pip install '{wanted}', or pin it",
        )
    pins.setdefault(name, version)


def _needs(wanted: Requirement) -> list[Requirement]:
    """The dependencies of an installed distribution, with the requested extras."""
    from packaging.requirements import Requirement

    needed = []
    for text in metadata.requires(wanted.name) or []:
        one = Requirement(text)
        extras = ["", *sorted(wanted.extras)]
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras):
            needed.append(one)
    return needed
