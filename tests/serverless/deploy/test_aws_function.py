"""The archive for Lambda: its route, its size limits and its contents."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pathlib
import zipfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from serverless.deploy.aws import AwsDeployer
from serverless.deploy.aws_function import AwsSettings, bundle, reference_permissions
from serverless.errors import PackageError
from tests.serverless.aws.provider import MISSING, at, client, settings
from tests.serverless.aws.provider import plane as new_plane
from tests.serverless.deploy.wheels import write_wheel
from tests.serverless.support import package

if TYPE_CHECKING:
    from tests.serverless.aws.plane import Plane

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}")]


@pytest.fixture
def plane() -> Iterator[Plane]:
    with new_plane() as one:
        yield one


def test_a_large_archive_goes_through_s3(plane: Plane, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of 1 MB in place of 50, which the plane enforces too: packing 50 MB takes seconds."""
    monkeypatch.setattr("serverless.deploy.aws_control.DIRECT_BYTES", 1_000_000)
    monkeypatch.setattr("serverless.deploy.aws_function.DIRECT_BYTES", 1_000_000)
    monkeypatch.setattr("tests.serverless.aws.plane._DIRECT_BYTES", 1_000_000)
    weights = tmp_path / "weights.bin"
    weights.write_bytes(os.urandom(1_200_000))
    one = package(artefacts=(str(weights),))

    async def main() -> Any:
        async with AwsDeployer(settings(plane)) as aws:
            with pytest.raises(PackageError, match="name an S3 bucket"):
                await aws.deploy(one)
        client(plane, "s3").create_bucket(Bucket="ours")
        async with AwsDeployer(settings(plane, bucket="ours")) as aws:
            return await aws.deploy(one)

    assert asyncio.run(main()).current
    assert client(plane, "s3").list_objects_v2(Bucket="ours")["KeyCount"] == 0, "Lambda has its copy"


def test_more_than_lambda_unpacks_is_refused(plane: Plane, tmp_path: pathlib.Path) -> None:
    weights = tmp_path / "weights.bin"
    with weights.open("wb") as file:
        file.truncate(263_000_000)

    async def main() -> None:
        async with AwsDeployer(settings(plane)) as aws:
            with pytest.raises(PackageError, match=r"largest: artefacts/weights.bin"):
                await aws.deploy(package(artefacts=(str(weights),)))

    asyncio.run(main())
    assert client(plane).list_functions()["Functions"] == []


def test_requirements_are_in_the_archive(plane: Plane, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of the function holds nothing but the archive: the import below finds the wheel's module."""
    pytest.importorskip("uv")
    write_wheel(tmp_path / "index", "tiny_reward", "1.5", "def score():\n    return 0.75\n")
    monkeypatch.setenv("UV_DEFAULT_INDEX", (tmp_path / "index").as_uri())
    monkeypatch.setenv("UV_NO_CACHE", "1")
    source = tmp_path / "uses.py"
    source.write_text("import tiny_reward\n\n\ndef uses(sample):\n    return tiny_reward.score()\n")

    async def main() -> Any:
        async with AwsDeployer(settings(plane)) as aws:
            one = at(source, name="uses", handler="uses", requirements=("tiny-reward==1.5",))
            deployed = await aws.deploy(one)
            with pytest.raises(PackageError, match="requirements"):
                await aws.deploy(at(source, name="uses", handler="uses", requirements=("tiny-reward==9",)))
            return deployed

    deployed = asyncio.run(main())
    payload = json.dumps([{"id": "a", "messages": []}]).encode()
    answer = client(plane).invoke(FunctionName=deployed.endpoint, Payload=payload)
    assert json.loads(answer["Payload"].read())[0]["aggregate_reward_score"] == 0.75


def test_a_role_decrypts_with_the_keys_of_all_its_versions() -> None:
    keys = [f"arn:aws:kms:us-east-1:123456789012:{name}" for name in ("alias/judge", "key/1")]
    references = [{"aws_secret": "judge", "key": ""}]
    statements = reference_permissions(references, {"", *keys}, "arn:aws:{}:us-east-1:123456789012")
    assert [one["Resource"] for one in statements] == [
        ["arn:aws:secretsmanager:us-east-1:123456789012:secret:judge-??????"],
        ["arn:aws:kms:us-east-1:123456789012:key/*"],
        [keys[1]],
    ]
    assert [one["Sid"] for one in statements] == ["OwnSecrets", "OwnKey", "OwnKey1"], "unique in a policy"
    assert statements[1]["Condition"] == {"ForAnyValue:StringEquals": {"kms:ResourceAliases": "alias/judge"}}


def test_the_archive_is_the_same_bytes_each_time() -> None:
    first, second = (bundle(package(), AwsSettings()) for _ in range(2))
    assert first == second
    names = zipfile.ZipFile(io.BytesIO(first)).namelist()
    assert names == sorted(names)
    assert {"rollart_handler.py", "function/behave.py", "serverless/types.py"} <= set(names)
