"""Settings of functions on AWS Lambda: deployment and calls."""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from serverless.errors import SpecInvalid
from serverless.spec import FunctionSpec

__all__ = ["AwsSettings", "function_configuration"]

_RETENTIONS = (1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922, 3288, 3653)
"""Retention periods that CloudWatch Logs accepts, in days."""

_MAX_MEMORY_MB = 10_240
_MAX_TIMEOUT_S = 900
_MAX_NAME = 64
_MB_PER_CORE = 1_769
"""Memory per core of Lambda."""


class AwsSettings(BaseModel):
    """Settings of one account and region. Credentials come from the environment, a profile or a role."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
