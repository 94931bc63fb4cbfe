"""The AWS resources of a run's functions, independent of the template language: names, settings, archives,
permissions."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollart.errors import SpecError
from serverless.deploy.aws_bundle import bundle
from serverless.deploy.aws_settings import AwsSettings, function_configuration
from serverless.deploy.package import Package

__all__ = [
    "ALIAS",
    "AwsFunction",
    "archive_files",
    "assume_lambda",
    "aws_functions",
    "controller_statements",
    "log_statement",
    "transport_statement",
]

ALIAS = "live"
"""The alias that a run calls; `rollart rewards rollback` moves it."""

DIGEST_TAG = "rollart:digest"
"""The tag that marks a function of `rollart`; its value is the digest of the package."""

DESCRIPTION_PREFIX = "rollart:"

RESERVED_LOGICAL_NAMES = ("Bucket", "BucketPolicy", "ControllerPolicy", "FunctionsRole")
"""Logical names of a template's other resources."""

LOGICAL_NAME_SUFFIXES = ("", "Logs", "Live")
"""Suffixes of the logical names of a function's resources."""


@dataclass(frozen=True, slots=True)
class AwsFunction:
    """One Lambda function. `logical` is its name in a template, `archive` the code, at `key` in a bucket or directory;
    `settings` are Runtime, Handler, MemorySize and Timeout, by Lambda's names. `reserved` and `warm` 0: none."""

    name: str
    logical: str
    digest: str
    archive: bytes
    key: str
    settings: dict[str, Any]
    architecture: str
    retention_days: int
    reserved: int
    warm: int

    @property
    def description(self) -> str:
        return DESCRIPTION_PREFIX + self.digest

    @property
    def log_group(self) -> str:
        return f"/aws/lambda/{self.name}"


def aws_functions(packages: Sequence[Package], settings: AwsSettings) -> tuple[AwsFunction, ...]:
    """The functions as `rollart rewards deploy` would create them: the same archives under the same names, so that a
    run finds them deployed. Errors of `serverless` for settings that Lambda does not support; SpecError for names that
    are equal in a template."""
    found = tuple(_aws_function(package, settings) for package in packages)
    _check_logical_names({p.spec.name: f.logical for p, f in zip(packages, found, strict=True)})
    return found


def _check_logical_names(logical: Mapping[str, str]) -> None:
    taken = dict.fromkeys(map(str.lower, RESERVED_LOGICAL_NAMES), "a resource of another kind")
    for name, own in logical.items():
        us = f"function '{name}'"
        for part in LOGICAL_NAME_SUFFIXES:
            other = taken.setdefault((own + part).lower(), us)
            if other != us:
                raise SpecError(
                    f"{us} would be '{own + part}' in a template, as {other} (rule: letters and digits tell names "
                    "apart, case does not)",
                    remedy="rename the function",
                )


def _aws_function(package: Package, settings: AwsSettings) -> AwsFunction:
    spec, name = package.spec, settings.function_name(package.spec.name)
    wanted = function_configuration(spec, settings)
    archive = bundle(package, settings)
    return AwsFunction(
        name=name,
        logical="".join(part.capitalize() for part in re.split(r"[^A-Za-z0-9]+", spec.name)),
        digest=package.version,
        archive=archive,
        key=f"functions/{name}/{hashlib.sha256(archive).hexdigest()[:32]}.zip",
        settings=wanted,
        architecture=settings.architecture,
        retention_days=settings.log_retention_days,
        reserved=spec.concurrency if settings.reserve_concurrency else 0,
        warm=spec.warm,
    )


def archive_files(found: Sequence[AwsFunction]) -> dict[str, bytes]:
    return {function.key: function.archive for function in found}


def assume_lambda() -> dict[str, Any]:
    """The trust policy of the functions' role."""
    statement = {"Effect": "Allow", "Principal": {"Service": "lambda.amazonaws.com"}, "Action": "sts:AssumeRole"}
    return {"Version": "2012-10-17", "Statement": [statement]}


def log_statement(log_groups: Sequence[Any]) -> dict[str, Any]:
    """Permits a function to write its own log, and nothing else: no access to accounts, buckets or other functions."""
    return {
        "Sid": "OwnLogs",
        "Effect": "Allow",
        "Action": ["logs:CreateLogStream", "logs:PutLogEvents"],
        "Resource": list(log_groups),
    }


def controller_statements(aliases: Sequence[Any], functions: Sequence[Any], bucket: Any, objects: Any) -> list[Any]:
    """The permissions of a run: to call the functions, if there are any, to verify that they match its packages, to
    keep the run's alias on each, with provisioned concurrency, and to transfer weights."""
    if not functions:
        return _weight_statements(bucket, objects)
    return [
        {"Sid": "Call", "Effect": "Allow", "Action": "lambda:InvokeFunction", "Resource": list(aliases)},
        {
            "Sid": "Look",
            "Effect": "Allow",
            "Action": [
                "lambda:GetFunction",
                "lambda:GetFunctionConcurrency",
                "lambda:GetFunctionConfiguration",
                "lambda:GetProvisionedConcurrencyConfig",
                "lambda:ListAliases",
                "lambda:ListVersionsByFunction",
            ],
            "Resource": [*functions, *aliases],
        },
        {
            "Sid": "OwnAlias",
            "Effect": "Allow",
            "Action": [
                "lambda:CreateAlias",
                "lambda:UpdateAlias",
                "lambda:DeleteAlias",
                "lambda:PutProvisionedConcurrencyConfig",
                "lambda:DeleteProvisionedConcurrencyConfig",
            ],
            "Resource": [*functions, *aliases],
        },
        *_weight_statements(bucket, objects),
    ]


def _weight_statements(bucket: Any, objects: Any) -> list[Any]:
    return [
        {
            "Sid": "Weights",
            "Effect": "Allow",
            "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"],
            "Resource": objects,
        },
        {"Sid": "ListWeights", "Effect": "Allow", "Action": "s3:ListBucket", "Resource": bucket},
    ]


def transport_statement(bucket: Any, objects: Any) -> dict[str, Any]:
    """Denies unencrypted access to the bucket."""
    return {
        "Sid": "OnlyTls",
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:*",
        "Resource": [bucket, objects],
        "Condition": {"Bool": {"aws:SecureTransport": "false"}},
    }
