"""The lock of a function: exact versions of its requirements and of their dependencies, and their wheels for the
machine that a provider runs the function on.

Pins come from the installed packages, with which the function was written and tested; exact pins, also those of a
requirements file, are kept. Names are normalised (PEP 503) and sorted, so that the same environment gives the same
lock. A pin is a public version: this machine's build of it (torch 2.13.0+cpu) is not that of the target, whose wheels
`uv` resolves and installs.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from serverless.errors import ExtraMissing, IndexUnreachable, PackageError
from serverless.spec import FunctionSpec

if TYPE_CHECKING:
    from packaging.requirements import Requirement

TORCH_CPU = "https://download.pytorch.org/whl/cpu"
"""PyTorch's index of builds without CUDA. PyPI's for Linux is 2.7 GB with its CUDA libraries (torch 2.13.0)."""

_TORCH = frozenset({"torch", "torchaudio", "torchvision"})

_BUILD = re.compile(r"cpu|cu\d+|rocm[\d.]+|xpu")
"""Local version labels of PyTorch's builds: the same source for another accelerator (PEP 440 "+label")."""

_OF_BUILD = ("cuda-", "nvidia-", "pytorch-triton", "triton")
"""Prefixes of dependencies that only CUDA builds have, and pin themselves."""

_RESOLVE_S, _INSTALL_S = 120.0, 600.0

_UNREACHABLE = re.compile(r"failed to fetch|error sending request|failed to lookup|connection", re.IGNORECASE)
_CHECK_NETWORK = "check the network and the package indexes"


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
        version, label = _public(_exact(wanted) or installed)
        if not version or (label and not _BUILD.fullmatch(label)):
            unpinned.append(f"{name}=={version}+{label}" if label else str(wanted))
            continue
        if origin in pins and name.startswith(_OF_BUILD):
            continue
        _pin(pins, name, version, wanted, origin)
        if _public(installed)[0] == version and (name, frozenset(wanted.extras)) not in seen:
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


def _public(version: str) -> tuple[str, str]:
    """A version without its local label, and the label."""
    public, _, label = version.partition("+")
    return public, label


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
    if direct and not _exact(wanted) and not wanted.specifier.contains(version, prereleases=True):
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


@dataclass(frozen=True, slots=True)
class WheelTarget:
    """The interpreter and machine that requirements are installed for, and the indexes that have their wheels.

    `python` is a minor version ("3.12"), `glibc` that of the system ("2_34").
    """

    python: str
    glibc: str
    architecture: str = "x86_64"
    index_urls: tuple[str, ...] = ()

    @property
    def platform(self) -> str:
        """The platform, as uv names it."""
        return f"{'aarch64' if self.architecture == 'arm64' else 'x86_64'}-manylinux_{self.glibc}"

    def __str__(self) -> str:
        return f"Python {self.python} on {self.architecture}, glibc {self.glibc.replace('_', '.')}"


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel of the target. `size` is that of the download in bytes, 0 if the index does not give it."""

    name: str
    version: str
    size: int = 0

    @property
    def unpacked(self) -> int:
        """Bytes of its files, as the same build has them here; 0 if it is not installed here."""
        try:
            if metadata.version(self.name) != self.version:
                return 0
            return sum(file.size or 0 for file in metadata.files(self.name) or ())
        except metadata.PackageNotFoundError:
            return 0


def index_urls(spec: FunctionSpec) -> tuple[str, ...]:
    """The indexes beside PyPI: those of the function, else PyTorch's CPU builds for torch without a GPU."""
    needs_torch = _TORCH.intersection(one.partition("==")[0] for one in spec.requirements)
    return spec.index_urls or ((TORCH_CPU,) if needs_torch and not spec.gpu else ())


def resolve(spec: FunctionSpec, target: WheelTarget) -> tuple[Wheel, ...]:
    """The wheels of a function's pins and of their dependencies for a target, from the indexes' metadata: none
    is downloaded. Raises `PackageError` for one that has no wheel there, and `IndexUnreachable`."""
    if not spec.requirements:
        return ()
    found = _uv(spec, target, ["compile", "--format", "pylock.toml", "--no-header", "-"], _RESOLVE_S)
    return tuple(
        Wheel(one["name"], one["version"], one["wheels"][0].get("size", 0))
        for one in tomllib.loads(found)["packages"]
        if one.get("wheels")
    )


def install(spec: FunctionSpec, target: WheelTarget, directory: pathlib.Path) -> None:
    """Install the wheels of `resolve` into a directory."""
    options = ["--requirements", "-", "--target", str(directory), "--python", sys.executable, "--link-mode", "copy"]
    _uv(spec, target, ["install", *options], _INSTALL_S)


def _uv(spec: FunctionSpec, target: WheelTarget, command: Sequence[str], limit_s: float) -> str:
    """The output of a command of `uv pip` with the requirements as its standard input."""
    if importlib.util.find_spec("uv") is None:
        raise ExtraMissing("uv", "aws")
    action, *options = command
    arguments = [sys.executable, "-m", "uv", "pip", action, "--quiet", "--no-progress", "--only-binary", ":all:"]
    arguments += ["--python-version", target.python, "--python-platform", target.platform]
    arguments += ["--index-strategy", "unsafe-best-match"]  # as pip: an index of builds has old versions of others
    for url in target.index_urls:
        arguments += ["--index", url]
    environment = {"UV_PYTHON_DOWNLOADS": "never", "UV_HTTP_RETRIES": "1", **_pip_indexes(), **os.environ}
    problem = f"function {spec.name}: requirements for {target}"
    try:
        done = subprocess.run(
            [*arguments, *options],
            input="\n".join(spec.requirements),
            capture_output=True,
            text=True,
            timeout=limit_s,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise IndexUnreachable(f"{problem}: not done in {limit_s:g} s", remedy=_CHECK_NETWORK) from None
    if done.returncode:
        cause = " ".join(done.stderr.split())
        if _UNREACHABLE.search(cause):
            raise IndexUnreachable(f"{problem}: {cause[:500]}", remedy=_CHECK_NETWORK)
        raise PackageError(
            f"{problem}: {cause[:500]}",
            remedy="require versions with wheels for that machine; `index_urls` names further indexes",
        )
    return done.stdout


_PIP = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS"}
"""uv's variables for pip's settings, which uv does not read."""


@functools.cache
def _pip_indexes() -> Mapping[str, str]:
    """The indexes of pip's configuration, as variables of uv. A variable overrides a file, as for pip."""
    if importlib.util.find_spec("pip") is None:
        return {}
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    found: dict[str, str] = {}
    for line in sorted(listed.stdout.splitlines(), key=lambda line: line.startswith(":env:")):
        key, _, value = line.partition("=")
        option = key.rpartition(".")[2]
        if option in _PIP:
            found[_PIP[option]] = str(ast.literal_eval(value))
    if "UV_FIND_LINKS" in found:
        found["UV_FIND_LINKS"] = ",".join(found["UV_FIND_LINKS"].split())
    return found
