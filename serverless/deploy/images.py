"""Container images of functions: the build context of a Lambda image, its size, and the engine that builds it.

A Lambda image is built from Debian, or from the function's base image or Dockerfile, like its image on Modal: one list
of Debian packages serves both. AWS's runtime client (`awslambdaric`) makes any image with Python one of Lambda.

    Dockerfile                  the user's or ours, then the requirements, the package and the entry point
    .rollart/requirements.txt   the lock
    .rollart/package/...        the files of the package
    ...                         the files that the user's Dockerfile copies

The context has the same bytes for the same package, and its digest is the image's tag.
"""

from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from serverless import keys
from serverless.deploy.dockerfile import IMAGE
from serverless.deploy.package import HANDLER, Package
from serverless.deploy.requirements import Wheel, WheelTarget, index_urls, resolve
from serverless.errors import BackendFailed, PackageError

DEBIAN, DEBIAN_GLIBC = "bookworm", "2_36"
"""The Debian of base images that no function names: that of Python's own images and of Modal."""

RUNTIME_CLIENT = "awslambdaric==4.2.2"

IMAGE_BYTES = 10_000_000_000
"""Lambda's limit of an image, uncompressed."""

_BASE_BYTES = 130_000_000
"""Python's slim image, uncompressed (python:3.12-slim-bookworm, amd64)."""

_UNPACKED = 3.5
"""Unpacked bytes per byte of a wheel that is not installed here. Measured: 3.6 (torch 2.13.0+cpu), 4.0 (pydantic 2.14).
"""

_APT = "apt-get update && apt-get install --yes --no-install-recommends {} && rm -rf /var/lib/apt/lists/*"

_ENGINES = ("docker", "podman", "buildah")

_PROBE_S, _LOGIN_S, _BUILD_S = 20.0, 60.0, 3600.0


def wheel_target(package: Package, python: str, architecture: str = "x86_64") -> WheelTarget:
    """The target of a package in an image. Of a base image or Dockerfile of the user's, the provider's Python version
    and Debian's glibc are assumed."""
    return WheelTarget(python, DEBIAN_GLIBC, architecture, index_urls(package.spec))


def base_image(package: Package, python: str) -> str:
    """The base image of a function without a Dockerfile."""
    image = package.spec.image
    return (image.base if image is not None else "") or f"python:{python}-slim-{DEBIAN}"


@dataclass(frozen=True, slots=True)
class BuildContext:
    """The build context of a Lambda image, by relative path."""

    files: Mapping[str, bytes]
    architecture: str

    @property
    def tag(self) -> str:
        """The image's tag: a digest of the context and the architecture."""
        return keys.content_digest({"architecture": self.architecture}, self.files)[:40]

    @property
    def platform(self) -> str:
        """The platform, as container engines name it."""
        return "linux/arm64" if self.architecture == "arm64" else "linux/amd64"

    def write(self, directory: pathlib.Path) -> None:
        for path, data in self.files.items():
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)


def build_context(
    package: Package, *, python: str, architecture: str = "x86_64", further: Mapping[str, bytes] | None = None
) -> BuildContext:
    """The build context of a package's Lambda image. `further` are files beside those of the package. Raises
    `PackageError` for requirements that are not pinned."""
    package.check_pinned()
    image = package.spec.image
    own = {path: data for path, data in package.files.items() if not path.startswith(IMAGE)} | dict(further or {})
    files = {f".rollart/package/{path}": data for path, data in own.items()}
    if f"{IMAGE}Dockerfile" in package.files:
        head = package.files[f"{IMAGE}Dockerfile"].decode()
        context = f"{IMAGE}context/"
        files |= {path.removeprefix(context): data for path, data in package.files.items() if path.startswith(context)}
    else:
        head = f"FROM {base_image(package, python)}\n"
        if image is not None and image.system:
            # hadolint: versions of Debian's packages are those of the base image's release.
            head += f"# hadolint ignore=DL3008\nRUN {_APT.format(' '.join(sorted(image.system)))}\n"
    lock = "".join(f"{pin}\n" for pin in package.spec.requirements)
    files[".rollart/requirements.txt"] = f"{lock}{RUNTIME_CLIENT}\n".encode()
    files["Dockerfile"] = (head + "\n".join(_tail(index_urls(package.spec))) + "\n").encode()
    return BuildContext(files, architecture)


def _tail(indexes: Sequence[str]) -> Iterator[str]:
    further = "".join(f" --extra-index-url {shlex.quote(url)}" for url in indexes)
    yield "WORKDIR /var/task"
    yield "COPY .rollart/requirements.txt ./"
    yield f"RUN python -m pip install --no-cache-dir --only-binary=:all:{further} -r requirements.txt"
    yield "COPY .rollart/package ./"
    yield 'ENTRYPOINT ["python", "-m", "awslambdaric"]'
    yield f'CMD ["{HANDLER}"]'


@dataclass(frozen=True, slots=True)
class SizeEstimate:
    """Sizes of a package with its wheels, in bytes. `download` is that of the wheels; `least` and `likely` are bounds
    of the unpacked files; `unknown` are wheels without a size."""

    wheels: int
    download: int
    least: int
    likely: int
    unknown: tuple[str, ...]

    @staticmethod
    def of(package: Package, wheels: Sequence[Wheel]) -> SizeEstimate:
        """The estimate: the size of an equal build that is installed here, else that of the download as the least and
        `_UNPACKED` times that as the likely one."""
        files = sum(len(data) for path, data in package.files.items() if not path.startswith(IMAGE))
        here = [wheel.unpacked for wheel in wheels]
        pairs = list(zip(wheels, here, strict=True))
        return SizeEstimate(
            len(wheels),
            sum(wheel.size for wheel in wheels),
            files + sum(size or wheel.size for wheel, size in pairs),
            files + sum(size or round(wheel.size * _UNPACKED) for wheel, size in pairs),
            tuple(wheel.name for wheel, size in pairs if not size and not wheel.size),
        )

    def __str__(self) -> str:
        sized = f"{self.download / 1e6:.1f} MB of {self.wheels} wheels, " if self.download else ""
        without = f", without {', '.join(self.unknown)} of unknown size" if self.unknown else ""
        return f"{sized}about {self.likely / 1e6:.1f} MB unpacked{without}"


def check_image_size(package: Package, estimate: SizeEstimate) -> None:
    """Raise `PackageError` if an image cannot fit on Lambda."""
    if estimate.least > IMAGE_BYTES:
        raise PackageError(
            f"function {package.spec.name}: its image is at least {estimate.least / 1e9:.1f} GB, Lambda takes "
            f"{IMAGE_BYTES / 1e9:.0f} GB",
            remedy="drop requirements, load weights from object storage in load(), or deploy it on Modal",
        )


def image_lines(package: Package, python: str, estimate: SizeEstimate, *, base_bytes: int = _BASE_BYTES) -> list[str]:
    """The image that would be built, for a dry run."""
    image = package.spec.image
    if f"{IMAGE}Dockerfile" in package.files:
        copied = sum(path.startswith(f"{IMAGE}context/") for path in package.files)
        lines = [f"from the function's Dockerfile and {copied} files that it copies"]
        base_bytes = 0
    else:
        base = base_image(package, python)
        lines = [f"from {base}"]
        if image is not None and image.base:
            base_bytes = 0
        if image is not None and image.system:
            lines.append(f"apt: {', '.join(image.system)}")
    if base_bytes:
        lines.append(f"{estimate}; {(estimate.likely + base_bytes) / 1e6:.0f} MB with its base")
    else:
        lines.append(f"{estimate}, and its base")
    if further := index_urls(package.spec):
        lines.append(f"wheels also of {', '.join(further)}")
    return lines


def modal_lines(package: Package, python: str = "") -> list[str]:
    """The image that Modal would build, for a dry run. Raises `PackageError` for requirements without wheels there."""
    python = python or python_version()
    package.check_pinned()
    estimate = SizeEstimate.of(package, resolve(package.spec, wheel_target(package, python)))
    gpu = [f"on a GPU of type {package.spec.gpu}"] if package.spec.gpu else []
    return ["build its image", *image_lines(package, python, estimate), *gpu]


def python_version() -> str:
    """The minor version of this interpreter, which Modal's containers have unless its settings name another."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True, slots=True)
class ContainerEngine:
    """A program that builds images: docker, podman or buildah. Its commands are those that the three share."""

    program: str

    @property
    def name(self) -> str:
        return pathlib.Path(self.program).name

    def build(self, context: BuildContext, uri: str) -> None:
        """Build an image for the context's architecture and name it `uri`. Raises `BackendFailed` with the end of the
        engine's output."""
        platform = context.platform
        with tempfile.TemporaryDirectory(prefix="rollart-image-") as directory:
            context.write(pathlib.Path(directory))
            format_ = [] if self.name == "docker" else ["--format", "docker"]
            self._run(["build", "--platform", platform, *format_, "--tag", uri, directory], "building", uri, _BUILD_S)

    def push(self, uri: str, *, user: str, password: str) -> None:
        """Push an image. The password is the engine's standard input, and so in no process list."""
        registry = uri.partition("/")[0]
        login = ["login", "--username", user, "--password-stdin", registry]
        self._run(login, "signing in to push", uri, _LOGIN_S, password)
        self._run(["push", uri], "pushing", uri, _BUILD_S)

    def _run(self, arguments: list[str], doing: str, uri: str, limit_s: float, given: str = "") -> None:
        # Lambda takes single manifests only: an index with attestations, BuildKit's default, is refused.
        environment = {**os.environ, "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
        problem = f"{self.name}: {doing} {uri}"
        try:
            done = subprocess.run(
                [self.program, *arguments],
                input=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=limit_s,
                env=environment,
            )
        except subprocess.TimeoutExpired:
            raise BackendFailed(f"{problem}: not done in {limit_s:g} s") from None
        if done.returncode:
            words = " ".join(done.stdout.split())[-600:]
            raise BackendFailed(f"{problem}: exit code {done.returncode}: {words}", remedy=f"see {self.name}'s message")


def find_engine() -> tuple[ContainerEngine | None, str]:
    """The first engine on PATH that answers; None and the reason if there is none."""
    reasons = []
    for name in _ENGINES:
        program = shutil.which(name)
        if program is None:
            continue
        try:
            probed = subprocess.run([program, "version"], capture_output=True, text=True, timeout=_PROBE_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons.append(f"{name}: {error}")
            continue
        if probed.returncode == 0:
            return ContainerEngine(program), ""
        reasons.append(f"{name}: {' '.join(probed.stderr.split())[:200]}")
    return None, "; ".join(reasons) or f"none of {', '.join(_ENGINES)} is on PATH"
