"""AWS Lambda as a provider of the conformance suite: the real clients against the plane, the real runtime behind it."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pathlib
import sys
import tempfile
import zipfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

from serverless.deploy.aws_function import AwsSettings
from serverless.deploy.package import Package, build
from serverless.meter import MeterSink
from serverless.providers.base import Backend
from serverless.spec import FunctionSpec
from tests.serverless.support import Provider

if TYPE_CHECKING:
    from tests.serverless.aws.plane import Plane

NEEDED = ("boto3", "aiobotocore", "moto", "flask", "awslambdaric")
MISSING = ", ".join(name for name in NEEDED if importlib.util.find_spec(name) is None)

REGION = "us-east-1"

KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIATESTS",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


@contextlib.contextmanager
def environment(**changes: str | None) -> Iterator[None]:
    """AWS credentials of the tests, and no others of this machine; None takes one away."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "BOTO"))}
    wanted = {k: v for k, v in {**KEYS, **changes}.items() if v is not None}
    with mock.patch.dict(os.environ, {**kept, **wanted}, clear=True):
        yield


@contextlib.contextmanager
def plane() -> Iterator[Plane]:
    """A plane of one test's, and credentials for it."""
    from tests.serverless.aws.plane import serving

    with tempfile.TemporaryDirectory(prefix="aws-") as root, environment(), serving(pathlib.Path(root)) as one:
        yield one


def settings(one: Plane, **changes: Any) -> AwsSettings:
    """Of a plane: its address, and the interpreter that runs here."""
    runtime = f"python3.{sys.version_info.minor}"
    return AwsSettings(region=REGION, endpoint_url=one.url, runtime=runtime, **changes)


def client(one: Plane, service: str = "lambda") -> Any:
    """boto3, as someone looks at the account from outside."""
    import boto3

    return boto3.client(service, region_name=REGION, endpoint_url=one.url)


def at(source: pathlib.Path, **changes: Any) -> Package:
    """A function of a file of the test's own."""
    return build(FunctionSpec.model_validate({"source": str(source), **changes}))


def archive(files: Mapping[str, bytes]) -> bytes:
    """A zip of these."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for path, data in files.items():
            made.writestr(path, data)
    return buffer.getvalue()


class AwsLambda(Provider):
    """The AWS Lambda backend on a real loop."""

    name = "aws_lambda"
    spans = False
    missing = f"not installed: {MISSING}" if MISSING else ""

    @contextlib.asynccontextmanager
    async def open(self, packages: Sequence[Package], meter: MeterSink | None = None) -> AsyncIterator[Backend]:
        from serverless.providers.aws import AwsLambdaBackend

        with plane() as one:
            async with AwsLambdaBackend(settings(one), meter=meter) as backend:
                for package in packages:
                    await backend.deploy(package)
                yield backend

    def workers(self, backend: Backend, function: str) -> int | None:
        return None
