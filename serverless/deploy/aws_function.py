"""A function on AWS Lambda, described once: its name, configuration, tags, permissions and archive.

`AwsDeployer` applies the description with boto3; `rollart.infra.aws` renders it as CloudFormation, SAM or Terraform.
The archive is the package with its requirements as wheels for Lambda's Linux and interpreter.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

from pydantic import Field, field_validator

from serverless.deploy.package import Package, zip_archive
from serverless.errors import PackageError, SpecInvalid
from serverless.spec import FunctionSpec, Settings

ALIAS = "live"
"""The alias of the current version: deployments and rollbacks move it. A run calls its own alias."""

DIGEST_TAG = "rollart:digest"
"""The tag that marks a function of `rollart`; its value is the digest of the package."""

DESCRIPTION_PREFIX = "rollart:"
"""A version's description is this and the digest of its package."""

DIRECT_BYTES = 50_000_000
"""A larger archive goes through S3 (Lambda: 50 MB for a direct upload)."""

ASSUME_ROLE = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Principal": {"Service": "lambda.amazonaws.com"}, "Action": "sts:AssumeRole"}],
}
"""The trust policy of the functions' role."""

_RETENTIONS = (1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922, 3288, 3653)
"""Retention periods that CloudWatch Logs accepts, in days."""

_MAX_MEMORY_MB = 10_240
_MAX_TIMEOUT_S = 900
_MAX_NAME = 64
_MB_PER_CORE = 1_769
"""Memory per core of Lambda."""


class AwsSettings(Settings):
    """Settings of one account and region. Credentials come from the environment, a profile or a role."""

    region: str = Field(default="", validate_default=True)
    """Empty: AWS_REGION, AWS_DEFAULT_REGION or the profile's, in this order."""
    profile: str = ""
    role_arn: str = Field(default="", pattern=r"^(arn:[\w-]+:iam::\d{12}:role/.+)?$")
    """The execution role of the functions; empty: `role_name`, which is created with permission to write its own logs
    if missing."""
    role_name: str = Field(default="rollart-functions", pattern=r"^[\w+=,.@-]{1,64}$")
    prefix: str = Field(default="rollart-", pattern=r"^[A-Za-z0-9_-]{0,48}$")
    """Prefix of the functions' names. Amazon Nova only calls reward functions named `SageMaker-...`."""
    bucket: str = ""
    """S3 bucket, in the same region, for archives above 50 MB."""
    endpoint_url: str | None = None
    """Another endpoint of all services: for tests and for clouds with the same API."""
    architecture: Literal["x86_64", "arm64"] = "x86_64"
    runtime: str = Field(default="python3.12", pattern=r"^python3\.\d{1,2}$")
    log_retention_days: int = 14
    keep_versions: int = Field(default=5, ge=1, le=100)
    """Published versions to keep for `rollback`, the current one included."""
    reserve_concurrency: bool = False
    """Reserve a function's `concurrency` at each deployment. This takes it from the account's other functions, and a
    new account has none to spare."""
    connections: int = Field(default=512, ge=1, le=10_000)
    """Maximum number of calls in flight of this process."""
    read_timeout_s: float | None = Field(default=None, gt=0.0)
    """Seconds to wait for an answer; None: the function's own limit plus 10 s."""
    drain_s: float = Field(default=10.0, ge=0.0, le=900.0)
    """Seconds to wait at the end for the bills of abandoned calls."""

    @field_validator("region")
    @classmethod
    def _of_environment(cls, region: str) -> str:
        """Use AWS_REGION, which every AWS SDK but botocore reads."""
        return region or os.environ.get("AWS_REGION", "")

    @field_validator("log_retention_days")
    @classmethod
    def _accepted(cls, days: int) -> int:
        if days not in _RETENTIONS:
            raise ValueError(f"CloudWatch Logs keeps {', '.join(map(str, _RETENTIONS))} days, not {days}")
        return days

    def function_name(self, function: str) -> str:
        """Lambda's name of a function. Raises `SpecInvalid` if it is too long."""
        name = self.prefix + function
        if len(name) > _MAX_NAME:
            raise SpecInvalid(
                f"Lambda takes names of up to {_MAX_NAME} characters, {name!r} has {len(name)}",
                remedy="shorten the function's name or the prefix",
            )
        return name


@dataclass(frozen=True)
class AwsFunction:
    """A package as a Lambda function. `name` is Lambda's; `configuration` holds Runtime, Handler, MemorySize and
    Timeout by Lambda's names."""

    package: Package
    settings: AwsSettings
    name: str
    configuration: Mapping[str, Any]

    @property
    def description(self) -> str:
        return DESCRIPTION_PREFIX + self.package.version

    @property
    def log_group(self) -> str:
        return log_group(self.name)

    @property
    def reserved(self) -> int:
        """Reserved concurrency, 0 for none."""
        return self.package.spec.concurrency if self.settings.reserve_concurrency else 0

    @functools.cached_property
    def archive(self) -> bytes:
        return bundle(self.package, self.settings)

    def properties(self, code: Mapping[str, Any], role: Any, **further: Any) -> dict[str, Any]:
        """Arguments of Lambda's `CreateFunction`, which templates share: `code` is its location, `further` come before
        the tags."""
        return {
            "FunctionName": self.name,
            "Description": self.description,
            "PackageType": "Zip",
            **code,
            **self.configuration,
            "Architectures": [self.settings.architecture],
            "Role": role,
            **further,
            "Tags": {DIGEST_TAG: self.package.version},
        }


def aws_function(package: Package, settings: AwsSettings) -> AwsFunction:
    """Describe a package as a Lambda function. Raises `SpecInvalid` for settings that Lambda does not support."""
    name = settings.function_name(package.spec.name)
    return AwsFunction(package, settings, name, function_configuration(package.spec, settings))


def log_group(name: str) -> str:
    return f"/aws/lambda/{name}"


def function_configuration(spec: FunctionSpec, settings: AwsSettings) -> dict[str, Any]:
    """Lambda's configuration of a function, by its own names: whole seconds, memory that brings the declared cores.

    Raises `SpecInvalid` for settings that Lambda does not support.
    """
    if spec.gpu:
        raise SpecInvalid(f"function {spec.name} wants a {spec.gpu}; Lambda has no GPUs", remedy="deploy it on Modal")
    memory = max(spec.memory_mb, round(spec.cpu * _MB_PER_CORE))
    if memory > _MAX_MEMORY_MB:
        raise SpecInvalid(
            f"function {spec.name} needs {memory} MB ({spec.cpu:g} cores); Lambda has up to {_MAX_MEMORY_MB} MB",
            remedy="lower memory_mb or cpu, or deploy it on Modal",
        )
    if spec.timeout_s > _MAX_TIMEOUT_S:
        raise SpecInvalid(
            f"function {spec.name} may run {spec.timeout_s:g} s; Lambda ends a call after {_MAX_TIMEOUT_S} s",
            remedy="lower timeout_s or the items of a batch, or deploy it on Modal",
        )
    return {
        "Runtime": settings.runtime,
        "Handler": "rollart_handler.handler",
        "MemorySize": memory,
        "Timeout": max(1, -int(-spec.timeout_s // 1)),
    }


def log_permission(log_groups: Sequence[Any]) -> dict[str, Any]:
    """Permits a function to write its own log, and nothing else: no access to accounts, buckets or other functions."""
    actions = ["logs:CreateLogStream", "logs:PutLogEvents"]
    return {"Sid": "OwnLogs", "Effect": "Allow", "Action": actions, "Resource": list(log_groups)}


_UNZIPPED_BYTES = 262_144_000
"""Lambda's limit of 250 MB, layers included."""

_LOCK = "rollart_installed.lock"
"""The installed versions; the package's own lock has the requested ones."""

_VERSION = "rollart_version"
_INSTALL_S = 600.0
_LEFT_OUT = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"})
"""Files of a wheel's metadata that depend on the machine that installed it."""


def bundle(package: Package, settings: AwsSettings) -> bytes:
    """A zip with the same bytes for the same content. Raises `PackageError` with a remedy if it cannot be built or is
    too large.

    Entries are stored, not deflated (deflated bytes differ between zlib builds), unless only deflation makes them small
    enough for a direct upload. The package's version is one of the entries, so that versions never share a
    `CodeSha256`.
    """
    files = dict(package.files)
    if package.spec.requirements:
        for path, data in _wheels(package, settings).items():
            files.setdefault(path, data)
    files[_VERSION] = package.version.encode()
    unzipped = sum(map(len, files.values()))
    if unzipped > _UNZIPPED_BYTES:
        largest = max(files, key=lambda path: len(files[path]))
        raise PackageError(
            f"function {package.spec.name} is {unzipped / 1e6:.0f} MB unpacked, Lambda takes "
            f"{_UNZIPPED_BYTES / 1e6:.0f} MB (largest: {largest}, {len(files[largest]) / 1e6:.0f} MB)",
            remedy="drop requirements or artefacts, load weights from object storage in load(), or deploy it on Modal",
        )
    stored = zip_archive(files)
    return stored if len(stored) <= DIRECT_BYTES else zip_archive(files, deflated=True)


def _wheels(package: Package, settings: AwsSettings) -> dict[str, bytes]:
    """The requirements, installed for Lambda's interpreter and machine, with a lock of their exact versions."""
    unpinned = json.loads(package.files["rollart_manifest.json"]).get("unpinned")
    if unpinned:
        raise PackageError(
            f"function {package.spec.name}: not pinned: {', '.join(unpinned)}",
            remedy="write name==version, or install it here: its version is then the pin",
        )
    with tempfile.TemporaryDirectory(prefix="rollart-wheels-") as directory:
        root = pathlib.Path(directory)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
        command += ["--no-compile", "--only-binary=:all:", "--implementation", "cp"]
        command += ["--python-version", settings.runtime.removeprefix("python"), "--target", str(root)]
        # Amazon Linux 2023 (glibc 2.34) from Python 3.12 on, before it 2 (glibc 2.26).
        modern = int(settings.runtime.rpartition(".")[2]) >= 12
        machine = "aarch64" if settings.architecture == "arm64" else "x86_64"
        minors = (34, 31, 28, 27, 26, 24, 17) if modern else (26, 24, 17)
        for tag in (*(f"manylinux_2_{minor}" for minor in minors), "manylinux2014"):
            command += ["--platform", f"{tag}_{machine}"]
        _run([*command, "--", *package.spec.requirements], package.spec.name)
        found = {(d.metadata["Name"], d.version) for d in metadata.distributions(path=[directory])}
        files = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
        wheels = {name: path.read_bytes() for name, path in files.items() if _wanted(name)}
    lock = "".join(f"{re.sub(r'[-_.]+', '-', name).lower()}=={version}\n" for name, version in sorted(found))
    return {**wheels, _LOCK: lock.encode()}


def _wanted(path: str) -> bool:
    """True for files to ship. Scripts contain this machine's interpreter path, and Lambda compiles its own bytecode."""
    head, _, _ = path.partition("/")
    dropped = head == "bin" or "__pycache__" in path
    return not dropped and not (head.endswith(".dist-info") and path.rpartition("/")[2] in _LEFT_OUT)


def _run(command: list[str], name: str) -> None:
    remedy = "use packages with wheels for Lambda's Linux, or pure Python ones; pin versions that exist"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_S, env={**os.environ, "PIP_USER": "0"}
        )
    except subprocess.TimeoutExpired:
        raise PackageError(f"function {name}: requirements took over {_INSTALL_S:g} s", remedy=remedy) from None
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["pip failed"]
        raise PackageError(f"function {name}: requirements: {last[0][:300]}", remedy=remedy)
