"""A function on AWS Lambda, described once: its name, configuration, tags, permissions and archive.

`AwsDeployer` applies the description with boto3; `rollart.infra.aws` renders it as CloudFormation, SAM or Terraform.
The code is an archive, the package with its requirements as wheels for Lambda's Linux and interpreter, or a container
image (`serverless.deploy.images`) if the function asks for one.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Literal

from pydantic import Field, field_validator

from serverless.analysis.imports import check_declared
from serverless.deploy.dockerfile import IMAGE
from serverless.deploy.images import (
    BuildContext,
    SizeEstimate,
    build_context,
    check_image_size,
    image_lines,
    wheel_target,
)
from serverless.deploy.package import HANDLER, Package, with_record, zip_archive
from serverless.deploy.requirements import WheelTarget, index_urls, install, resolve
from serverless.errors import PackageError, SpecInvalid
from serverless.providers.base import LIVE
from serverless.secrets import Secrets
from serverless.spec import FunctionSpec, Settings

ALIAS = LIVE
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
PAYLOAD_BYTES = 6_291_456
"""Lambda's limit of a synchronous request, 6 MiB."""
_MAX_NAME = 64
_ENVIRONMENT_BYTES = 4_096
"""Lambda's limit of all environment variables."""
_MB_PER_CORE = 1_769
"""Memory per core of Lambda."""


class AwsSettings(Settings):
    """Settings of one account and region. Credentials come from the environment, a profile or a role."""

    region: str = Field(default="", validate_default=True)
    """Empty: AWS_REGION, AWS_DEFAULT_REGION or the profile's, in this order."""
    profile: str = ""
    role_arn: str = Field(default="", pattern=r"^(arn:[\w-]+:iam::\d{12}:role/.+)?$")
    """The execution role of the functions; empty: `role_name`, which is created with permission to write its own logs
    if missing. A function with secrets then has a role of its own, `role_name.PREFIXFUNCTION.REGION`."""
    role_name: str = Field(default="rollart-functions", pattern=r"^[\w+=,.@-]{1,64}$")
    prefix: str = Field(default="rollart-", pattern=r"^[A-Za-z0-9_-]{0,48}$")
    """Prefix of the functions' names. Amazon Nova only calls reward functions named `SageMaker-...`."""
    bucket: str = ""
    """S3 bucket, in the same region, for archives above 50 MB, and for calls above 6 MB while they run."""
    repository: str = Field(default="rollart-functions", pattern=r"^[a-z0-9][a-z0-9._/-]{1,254}$")
    """ECR repository of container images, created if missing."""
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
    kms_key_arn: str = Field(default="", pattern=r"^(arn:[\w-]+:kms:[\w-]+:\d{12}:(key|alias)/.+)?$")
    """The key that encrypts the functions' environment and secrets; empty: AWS's own keys."""
    secrets_ttl_s: float = Field(default=300.0, ge=0.0, le=86_400.0)
    """Seconds after which a function fetches its secrets again; 0: with each call."""
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

    @property
    def python(self) -> str:
        """The minor version of the interpreter."""
        return self.runtime.removeprefix("python")

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
    """A package as a Lambda function. `name` is Lambda's; `configuration` holds MemorySize and Timeout by Lambda's
    names, Runtime and Handler of an archive, and, where there are variables, Environment and KMSKeyArn. `references`
    are those of secrets (`serverless.secret_runtime`), by variable; `stored` are secrets whose values are in the
    environment."""

    package: Package
    settings: AwsSettings
    name: str
    configuration: Mapping[str, Any] = field(repr=False)
    references: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    stored: tuple[str, ...] = ()

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

    @functools.cached_property
    def image(self) -> BuildContext | None:
        """The build context of the container image, None for a function whose code is an archive."""
        if self.package.spec.image is None:
            return None
        further = {_VERSION: self.package.version.encode()}
        architecture = self.settings.architecture
        return build_context(self.package, python=self.settings.python, architecture=architecture, further=further)

    @property
    def package_type(self) -> str:
        """Lambda's `PackageType`, which a function keeps for its life."""
        return "Zip" if self.package.spec.image is None else "Image"

    def build_lines(self) -> list[str]:
        """The archive or image that would be built, and its size. Raises as `size` does."""
        estimate = self.size()
        if self.image is None:
            pins = ", ".join(self.package.spec.requirements)
            return [f"install {pins} into its archive", *archive_lines(estimate, self.settings)]
        return [
            f"build the image {self.settings.repository}:{self.image.tag}",
            *image_lines(self.package, self.settings.python, estimate),
        ]

    def size(self) -> SizeEstimate:
        """The size of the code, from the metadata of its wheels. Raises `PackageError` for requirements without wheels
        for Lambda, and for code that cannot fit there."""
        package = self.package
        image = package.spec.image is not None
        target = (
            wheel_target(package, self.settings.python, self.settings.architecture)
            if image
            else _archive_target(package, self.settings)
        )
        package.check_pinned()
        estimate = SizeEstimate.of(package, resolve(package.spec, target))
        if image:
            check_image_size(package, estimate)
        elif estimate.least > _UNZIPPED_BYTES:
            raise PackageError(
                f"function {package.spec.name} is at least {estimate.least / 1e6:.0f} MB unpacked ({estimate}), Lambda "
                f"takes archives of {_UNZIPPED_BYTES / 1e6:.0f} MB",
                remedy=_TOO_LARGE,
            )
        return estimate

    def properties(self, code: Mapping[str, Any], role: Any, **further: Any) -> dict[str, Any]:
        """Arguments of Lambda's `CreateFunction`, which templates share: `code` is its location, `further` come before
        the tags."""
        return {
            "FunctionName": self.name,
            "Description": self.description,
            "PackageType": self.package_type,
            **code,
            **self.configuration,
            "Architectures": [self.settings.architecture],
            "Role": role,
            **further,
            "Tags": {DIGEST_TAG: self.package.version},
        }


def aws_function(package: Package, settings: AwsSettings, secrets: Secrets | None = None) -> AwsFunction:
    """Describe a package as a Lambda function. Raises `SpecInvalid` for settings that Lambda does not support,
    `PackageError` for imports that fail there, and `SecretMissing`."""
    check_declared(package.spec, package.files, "aws_lambda")
    spec, secrets = package.spec, secrets or Secrets()
    name, configuration = settings.function_name(spec.name), function_configuration(spec, settings)
    if variables := secrets.lambda_variables(spec, settings.secrets_ttl_s):
        if (size := len(json.dumps(variables).encode())) > _ENVIRONMENT_BYTES:
            raise SpecInvalid(
                f"function {spec.name} has variables of {size} bytes; Lambda takes {_ENVIRONMENT_BYTES}",
                remedy="shorten env, or pack a file as an artefact",
            )
        configuration |= {"Environment": {"Variables": variables}}
        if settings.kms_key_arn:
            configuration |= {"KMSKeyArn": settings.kms_key_arn}
    stored = secrets.stored_in_lambda(spec)
    references = {one: secrets.reference(one) for one in spec.secrets if one not in stored}
    return AwsFunction(package, settings, name, configuration, references, stored)


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
    if spec.batch.max_bytes > PAYLOAD_BYTES and not settings.bucket:
        raise SpecInvalid(
            f"function {spec.name} has batches of up to {spec.batch.max_bytes:,} bytes; Lambda takes {PAYLOAD_BYTES:,}",
            remedy="name an S3 bucket as functions.aws_lambda.bucket, which larger calls go through, or lower "
            "batch.max_bytes",
        )
    code = {"Runtime": settings.runtime, "Handler": HANDLER} if spec.image is None else {}
    return {**code, "MemorySize": memory, "Timeout": max(1, -int(-spec.timeout_s // 1))}


def secret_permissions(function: AwsFunction, arn_prefix: str) -> list[dict[str, Any]]:
    """Permits a function to read its own secrets: `reference_permissions` of its references and key."""
    return reference_permissions(function.references.values(), {function.settings.kms_key_arn}, arn_prefix)


def reference_permissions(
    references: Collection[Mapping[str, str]], keys: Collection[str], arn_prefix: str
) -> list[dict[str, Any]]:
    """Permits a role to read the secrets of `references`, and to decrypt with the KMS keys of which `keys` are the ARNs
    ('' is ignored). `arn_prefix` is `arn:PARTITION:SERVICE:REGION:ACCOUNT` with the service as `{}`, for references by
    name."""

    def arn(service: str, kind: str, reference: str) -> str:
        if reference.startswith("arn:"):
            return reference
        return f"{arn_prefix.format(service)}:{kind}{reference}"

    statements = []
    names = {one["aws_secret"] for one in references if "aws_secret" in one}
    if names:
        # The ARN of a secret ends with six random characters that its name does not have.
        arns = sorted(
            arn("secretsmanager", "secret:", f"{n}" if n.startswith("arn:") else f"{n}-??????") for n in names
        )
        statements.append(_allowed("OwnSecrets", "secretsmanager:GetSecretValue", arns))
    if parameters := {one["ssm"] for one in references if "ssm" in one}:
        arns = sorted(arn("ssm", "parameter", p if p.startswith(("arn:", "/")) else f"/{p}") for p in parameters)
        statements.append(_allowed("OwnParameters", "ssm:GetParameter", arns))
    for number, key in enumerate(sorted(filter(None, keys)) if references else ()):
        of_region, _, alias = key.partition(":alias/")
        sid = f"OwnKey{number or ''}"  # unique in a policy
        statement = _allowed(sid, "kms:Decrypt", [f"{of_region}:key/*" if alias else key])
        if alias:  # which is no resource of a policy
            statement["Condition"] = {"ForAnyValue:StringEquals": {"kms:ResourceAliases": f"alias/{alias}"}}
        statements.append(statement)
    return statements


def _allowed(sid: str, action: str, resources: list[str]) -> dict[str, Any]:
    return {"Sid": sid, "Effect": "Allow", "Action": action, "Resource": resources}


def log_permission(log_groups: Sequence[Any]) -> dict[str, Any]:
    """Permits a function to write its own log, and nothing else: no access to accounts, buckets or other functions."""
    actions = ["logs:CreateLogStream", "logs:PutLogEvents"]
    return {"Sid": "OwnLogs", "Effect": "Allow", "Action": actions, "Resource": list(log_groups)}


_UNZIPPED_BYTES = 262_144_000
"""Lambda's limit of 250 MB, layers included."""

_LOCK = "rollart_installed.lock"
"""The installed versions; the package's own lock has the requested ones."""

_VERSION = "rollart_version"
_LEFT_OUT = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"})
"""Files of a wheel's metadata that depend on the machine that installed it."""

_TOO_LARGE = (
    "make it a container image (image={}), drop requirements or artefacts, load weights from object storage in load(), "
    "or deploy it on Modal"
)


def bundle(package: Package, settings: AwsSettings) -> bytes:
    """A zip with the same bytes for the same content. Raises `PackageError` with a remedy if it cannot be built or is
    too large.

    Entries are stored, not deflated (deflated bytes differ between zlib builds), unless only deflation makes them small
    enough for a direct upload. The package's version is one of the entries, so that versions never share a
    `CodeSha256`.
    """
    files = {path: data for path, data in with_record(package).items() if not path.startswith(IMAGE)}
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
            remedy=_TOO_LARGE,
        )
    stored = zip_archive(files)
    return stored if len(stored) <= DIRECT_BYTES else zip_archive(files, deflated=True)


def archive_lines(estimate: SizeEstimate, settings: AwsSettings) -> list[str]:
    """The size of an archive and its route, for a dry run."""
    lines = [str(estimate)]
    if estimate.likely > _UNZIPPED_BYTES:
        lines.append(
            f"it may not fit: Lambda takes archives of {_UNZIPPED_BYTES / 1e6:.0f} MB unpacked; image={{}} takes 10 GB"
        )
    elif estimate.download > DIRECT_BYTES:
        route = f"goes through s3://{settings.bucket}" if settings.bucket else "needs `bucket`, an S3 bucket"
        lines.append(f"its archive {route}: it may be above {DIRECT_BYTES / 1e6:.0f} MB")
    return lines


def _archive_target(package: Package, settings: AwsSettings) -> WheelTarget:
    """Lambda's own runtimes: Amazon Linux 2023 (glibc 2.34) from Python 3.12 on, before it 2 (glibc 2.26, of which uv
    knows the wheels for 2.17)."""
    modern = int(settings.python.rpartition(".")[2]) >= 12
    return WheelTarget(settings.python, "2_34" if modern else "2_17", settings.architecture, index_urls(package.spec))


def _wheels(package: Package, settings: AwsSettings) -> dict[str, bytes]:
    """The requirements, installed for Lambda's interpreter and machine, with a lock of their exact versions."""
    with tempfile.TemporaryDirectory(prefix="rollart-wheels-") as directory:
        root = pathlib.Path(directory)
        package.check_pinned()
        install(package.spec, _archive_target(package, settings), root)
        found = {(d.metadata["Name"], d.version) for d in metadata.distributions(path=[directory])}
        files = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
        wheels = {name: path.read_bytes() for name, path in files.items() if _wanted(name)}
    lock = "".join(f"{re.sub(r'[-_.]+', '-', name).lower()}=={version}\n" for name, version in sorted(found))
    return {**wheels, _LOCK: lock.encode()}


def _wanted(path: str) -> bool:
    """True for files to ship. Scripts contain this machine's interpreter path, and Lambda compiles its own bytecode."""
    head, _, _ = path.partition("/")
    dropped = head in ("bin", ".lock") or "__pycache__" in path
    return not dropped and not (head.endswith(".dist-info") and path.rpartition("/")[2] in _LEFT_OUT)
