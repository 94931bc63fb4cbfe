"""Functions of container images on Lambda: built, pushed to the registry, published, called.

moto has the control plane and the registry. The engine of the tests executes the Python parts of the rendered
Dockerfile (`tests.serverless.aws.engine`), and AWS's runtime client calls the handler in the directory that it leaves.
Not executed: base images, apt, the push over the registry's own protocol, and Lambda's own start of an image.
"""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import stat
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from serverless.deploy.aws import AwsDeployer
from serverless.errors import BackendFailed, PackageError
from tests.serverless.aws.provider import MISSING, at, client, settings
from tests.serverless.aws.provider import plane as new_plane
from tests.serverless.deploy.wheels import write_wheel

if TYPE_CHECKING:
    from tests.serverless.aws.plane import Plane

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}")]

ENGINE = pathlib.Path(__file__).parents[1] / "aws/engine.py"

SCORING = "import tiny_reward\n\n\ndef uses(sample):\n    return tiny_reward.score()\n"


@pytest.fixture
def plane(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    with new_plane() as one:
        monkeypatch.setenv("MOTO_LAMBDA_STUB_ECR", "false")
        yield one


@pytest.fixture
def engine(plane: Plane, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The engine on PATH, and a package index with `tiny-reward` 1.5. Returns the directory of images."""
    index = tmp_path / "index"
    write_wheel(index, "tiny_reward", "1.5", "def score():\n    return 0.75\n")
    programs = tmp_path / "programs"
    programs.mkdir()
    program = programs / "docker"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {ENGINE} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    for name, value in {
        "PATH": f"{programs}:/usr/bin:/bin",
        "ENGINE_ROOT": str(plane.images),
        "ENGINE_REGISTRY": plane.url,
        "PIP_INDEX_URL": index.as_uri(),
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "UV_DEFAULT_INDEX": index.as_uri(),
        "UV_INDEX": "",
        "UV_FIND_LINKS": "",
        "UV_NO_CACHE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    return plane.images


def commands(images: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (images / "commands.jsonl").read_text().splitlines()]


def uses(directory: pathlib.Path, text: str = SCORING, **further: Any) -> Any:
    source = directory / "uses.py"
    source.write_text(text)
    image = further.pop("image", {"system": ["libgl1"]})
    return at(source, name="uses", handler="uses", requirements=("tiny-reward==1.5",), image=image, **further)


def test_an_image_is_built_pushed_published_and_called(
    plane: Plane, engine: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    first, second = uses(tmp_path), None

    async def main() -> None:
        nonlocal second
        async with AwsDeployer(settings(plane)) as aws:
            planned = (await aws.plan(first)).lines
            assert any(line.startswith("build the image rollart-functions:") for line in planned)
            assert "apt: libgl1" in planned
            deployed = await aws.deploy(first)
            assert (deployed.current, deployed.provider_version, deployed.version) == (True, "1", first.version)
            on_lambda = client(plane).get_function(FunctionName="rollart-uses")
            assert on_lambda["Configuration"]["PackageType"] == "Image"
            assert "@sha256:" in on_lambda["Code"]["ImageUri"]
            assert call(plane, deployed.endpoint) == 0.75
            assert (await aws.deploy(first)).unchanged
            assert (await aws.plan(first)).lines == ()
            second = uses(tmp_path, SCORING.replace("score()", "score() / 3"))
            newer = await aws.deploy(second)
            assert call(plane, newer.endpoint) == 0.25
            assert (await aws.rollback("uses")).provider_version == "1"
            assert call(plane, newer.endpoint) == 0.75
            built = [c for c in commands(engine) if c["arguments"][0] == "build"]
            assert len(built) == 2, "a version whose image is in the registry is not built again"

    asyncio.run(main())
    login = next(c for c in commands(engine) if c["arguments"][0] == "login")
    assert login["given"]
    assert login["given"] not in login["arguments"], "the password is in no process list"
    assert next(engine.glob("*/platform")).read_text() == "linux/amd64"


def call(plane: Plane, function: str) -> float:
    payload = json.dumps([{"id": "a", "messages": []}]).encode()
    answer = client(plane).invoke(FunctionName=function, Payload=payload)
    return float(json.loads(answer["Payload"].read())[0]["aggregate_reward_score"])


def test_a_dockerfile_of_the_user_is_built_for_the_architecture(
    plane: Plane, engine: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/Dockerfile").write_text("FROM python:3.11-slim\nCOPY table.txt /var/task/\n")
    (tmp_path / "docker/table.txt").write_text("0.5")
    text = "def uses(sample):\n    return float(open('/proc/self/cwd/table.txt').read())\n"
    one = uses(tmp_path, text, image={"dockerfile": str(tmp_path / "docker/Dockerfile")})

    async def main() -> float:
        async with AwsDeployer(settings(plane, architecture="arm64")) as aws:
            return call(plane, (await aws.deploy(one)).endpoint)

    assert asyncio.run(main()) == 0.5
    assert next(engine.glob("*/platform")).read_text() == "linux/arm64"


def test_without_an_engine_the_remedy_is_the_context_and_an_image_built_elsewhere_is_used(
    plane: Plane, engine: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, programs = uses(tmp_path), os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path / "none"))

    async def refused() -> None:
        async with AwsDeployer(settings(plane)) as aws:
            (line,) = [line for line in (await aws.plan(one)).lines if "no container engine answers" in line]
            assert "deploy FILE --render DIR" in line
            with pytest.raises(BackendFailed, match="no container engine answers") as error:
                await aws.deploy(one)
            assert "--render" in error.value.remedy

    async def elsewhere() -> float:
        async with AwsDeployer(settings(plane)) as aws:
            await aws.deploy(one)
        client(plane).delete_function(FunctionName="rollart-uses")
        monkeypatch.setenv("PATH", str(tmp_path / "none"))
        async with AwsDeployer(settings(plane)) as aws:
            assert any("which is there" in line for line in (await aws.plan(one)).lines)
            return call(plane, (await aws.deploy(one)).endpoint)

    asyncio.run(refused())
    assert client(plane).list_functions()["Functions"] == []
    monkeypatch.setenv("PATH", programs)
    assert asyncio.run(elsewhere()) == 0.75


def test_lambda_keeps_the_type_of_a_functions_code(plane: Plane, engine: pathlib.Path, tmp_path: pathlib.Path) -> None:
    archive = uses(tmp_path, image=None)
    image = uses(tmp_path)

    async def main() -> None:
        async with AwsDeployer(settings(plane)) as aws:
            await aws.deploy(archive)
            for doing in (aws.plan, aws.deploy):
                with pytest.raises(BackendFailed, match="code of type Zip; Lambda never changes it to Image"):
                    await doing(image)

    asyncio.run(main())


def test_a_dry_run_goes_on_where_no_package_index_answers(
    plane: Plane, engine: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    source = tmp_path / "uses.py"
    source.write_text(SCORING)

    async def main() -> None:
        async with AwsDeployer(settings(plane)) as aws:
            for image in (None, {}):
                one = at(source, name="uses", handler="uses", requirements=("tiny-reward==1.5",), image=image)
                assert any(line.startswith("size not known: ") for line in (await aws.plan(one)).lines)

    asyncio.run(main())


def test_requirements_without_a_wheel_for_lambda_are_refused_beforehand(
    plane: Plane, engine: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    index = tmp_path / "index"
    write_wheel(index, "for_windows", "2.0", "", tag="py3-none-win_amd64")
    source = tmp_path / "uses.py"
    source.write_text(SCORING)

    async def main() -> None:
        async with AwsDeployer(settings(plane)) as aws:
            for image in (None, {}):
                one = at(source, name="uses", handler="uses", requirements=("for-windows==2.0",), image=image)
                with pytest.raises(PackageError, match="no wheels with a matching platform tag") as error:
                    await aws.plan(one)
                assert "index_urls" in error.value.remedy

    asyncio.run(main())
