"""The contract of releases, on every provider that keeps versions: canaries, promotions, rollbacks, packages read back,
and calls of one version whatever becomes current."""

from __future__ import annotations

import abc
import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart.launch.functions import backend
from rollart.launch.hosts import provider_run_id
from rollart.launch.rewards import build_rewards, draw_releases
from rollart.settings.functions import FunctionRelease
from rollart.settings.resolve import resolve_files, resolve_saved
from serverless.deploy.changes import file_changes
from serverless.deploy.local import LocalDeployer
from serverless.deploy.package import Package, build
from serverless.errors import BackendFailed, SpecInvalid, UnknownFunction
from serverless.providers.base import Backend, Deployer
from serverless.spec import FunctionSpec
from serverless.wire import encode
from serverless.workers.local import LocalBackend
from tests.e2e.harness import CLUSTER, tiny
from tests.serverless.aws import provider as aws
from tests.serverless.modal_plane import provider as modal
from tests.serverless.support import item

pytestmark = pytest.mark.slow  # each deployment tries the function in a real worker

LIMIT_S = 60.0


def constant(directory: Path, value: float | None) -> Package:
    """A function `f` that scores every item so, or does not load (None)."""
    source = directory / f"v{value}" / "constant.py"
    source.parent.mkdir(exist_ok=True)
    first = "raise RuntimeError('no weights')\n" if value is None else ""
    source.write_text(f"{first}\ndef score(sample):\n    return {value}\n")
    return build(FunctionSpec(name="f", source="constant.py", handler="score", memory_mb=128), base=source.parent)


class Releases(abc.ABC):
    """A provider that keeps two former versions at most."""

    missing = ""

    @abc.abstractmethod
    def deployer(self) -> Deployer: ...

    @abc.abstractmethod
    def functions(self) -> dict[str, Any]:
        """The key `functions` of a cluster spec."""

    @abc.abstractmethod
    async def backend(self, control: Deployer, number: str) -> Backend:
        """A backend, not open yet, whose calls of `f` go to one version."""

    @contextlib.asynccontextmanager
    async def calling(self, control: Deployer, number: str) -> AsyncIterator[Backend]:
        async with await self.backend(control, number) as one:
            await one.attach("f", number)  # type: ignore[attr-defined]
            yield one

    def close(self) -> None: ...


class Local(Releases):
    def __init__(self, root: Path) -> None:
        self.root = root

    def deployer(self) -> Deployer:
        return LocalDeployer(self.root)

    def functions(self) -> dict[str, Any]:
        return {"backend": "local", "local": {"root": str(self.root)}}

    async def backend(self, control: Deployer, number: str) -> Backend:
        return LocalBackend()

    @contextlib.asynccontextmanager
    async def calling(self, control: Deployer, number: str) -> AsyncIterator[Backend]:
        async with LocalBackend() as one:
            await one.deploy(await control.package("f", number))
            yield one


class Lambda(Releases):
    missing = aws.MISSING

    def __init__(self, root: Path) -> None:
        self.stack = contextlib.ExitStack()
        self.plane = self.stack.enter_context(aws.plane())

    def deployer(self) -> Deployer:
        from serverless.deploy.aws import AwsDeployer

        return AwsDeployer(aws.settings(self.plane, keep_versions=2))

    def functions(self) -> dict[str, Any]:
        changed = aws.settings(self.plane).model_dump(include={"region", "endpoint_url", "runtime"})
        return {"backend": "aws_lambda", "aws_lambda": changed}

    async def backend(self, control: Deployer, number: str) -> Backend:
        from serverless.providers.aws import AwsLambdaBackend

        return AwsLambdaBackend(aws.settings(self.plane))

    def close(self) -> None:
        self.stack.close()


class Modal(Releases):
    missing = modal.MISSING

    def __init__(self, root: Path) -> None:
        self.stack = contextlib.ExitStack()
        self.plane = self.stack.enter_context(modal.running_plane())

    def deployer(self) -> Deployer:
        from serverless.deploy.modal_app import ModalDeployer
        from serverless.providers.modal_client import ModalSettings

        return ModalDeployer(ModalSettings(keep=1))

    def functions(self) -> dict[str, Any]:
        return {"backend": "modal"}

    async def backend(self, control: Deployer, number: str) -> Backend:
        from serverless.providers.modal import ModalBackend

        return ModalBackend()

    def close(self) -> None:
        self.stack.close()


class Run:
    """A run that names the function, as far as its rewards go: `draw` starts or resumes it."""

    def __init__(self, directory: Path, functions: dict[str, Any]) -> None:
        self.directory = directory
        directory.mkdir()
        spec = tiny(functions__0={"name": "f", "function": "f@live"}, domains__0__rewards=[{"function": "f"}])
        (directory / "run.yaml").write_text(yaml.safe_dump(spec))
        (directory / "cluster.yaml").write_text(yaml.safe_dump({**CLUSTER, "functions": functions}))
        self.resolved = resolve_files(directory / "run.yaml", directory / "cluster.yaml")

    async def draw(self) -> FunctionRelease:
        self.resolved = await draw_releases(self.resolved, self.directory)
        saved = self.directory / "resolved.yaml"
        saved.write_text(self.resolved.to_yaml())
        self.resolved = resolve_saved(saved)
        return self.resolved.releases["f"]

    async def score(self) -> float:
        (package,) = build_rewards(self.resolved, {}, self.directory).packages
        functions = self.resolved.cluster.functions
        async with backend(functions.chain[0], functions, run=provider_run_id(self.directory)) as target:
            await target.deploy(package)
            return await score(target)


@pytest.fixture(params=[Local, Lambda, Modal], ids=lambda kind: kind.__name__.lower())
def releases(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Releases]:
    if request.param.missing:
        pytest.skip(request.param.missing)
    one: Releases = request.param(tmp_path / "root")
    yield one
    one.close()


async def weights(control: Deployer) -> list[tuple[str, float]]:
    """The versions of `f` with a weight, the current one first."""
    return [(one.version, round(one.weight, 6)) for one in await control.functions()]


async def score(backend: Backend) -> float:
    reply = await backend.invoke("f", [encode(item())], deadline_s=LIMIT_S)
    assert reply.fault is None, reply.fault
    assert isinstance(reply.body, list)
    return float(reply.body[0]["aggregate_reward_score"])


def test_a_canary_from_its_deployment_to_its_end(releases: Releases, tmp_path: Path) -> None:
    one, two, three, four = (constant(tmp_path, float(n)) for n in range(1, 5))

    async def main() -> None:
        async with releases.deployer() as control:
            first = await control.deploy(one, canary=0.3)
            assert (first.current, first.weight) == (True, 1.0), "there is no version to share the calls with"
            with pytest.raises(UnknownFunction, match="f has no canary"):
                await control.promote("f")
            with pytest.raises(SpecInvalid, match="above 0 and below 1"):
                await control.deploy(two, canary=1.0)

            planned = await control.plan(two, canary=0.25)
            assert planned.lines[0] == f"canary: none -> {two.version[:12]} (0.25)"
            assert planned.before is not None
            (change,) = file_changes(planned.before, two)
            assert (change.path, change.lines) == ("function/constant.py", (1, 1))
            made = await control.deploy(two, canary=0.25)
            assert (made.current, made.weight, made.aliases) == (False, 0.25, ("canary",))
            assert (await control.deploy(two, canary=0.25)).unchanged
            assert not (await control.plan(two, canary=0.25)).lines
            shared = [(one.version, 0.75), (two.version, 0.25)]
            assert await weights(control) == shared

            with pytest.raises(BackendFailed):
                await control.deploy(constant(tmp_path, None), canary=0.5)
            assert await weights(control) == shared, "a failed trial changes no weight"
            assert (await control.deploy(two, canary=0.4)).weight == pytest.approx(0.4)
            restored = await control.package("f", made.provider_version)
            assert (restored.version, restored.files) == (two.version, two.files)

            run = Run(tmp_path / "run", releases.functions())
            drawn = await run.draw()
            assert drawn.weights == {first.provider_version: 0.6, made.provider_version: 0.4}
            assert await run.score() == {one.version: 1.0, two.version: 2.0}[drawn.version]
            assert [weight for _, weight in await weights(control)] == [0.6, 0.4], "a run moves no weight"

            async with (
                releases.calling(control, first.provider_version) as main_,
                releases.calling(control, made.provider_version) as canary,
            ):
                assert (await score(main_), await score(canary)) == (1.0, 2.0)
                promoted = await control.promote("f")
                assert (promoted.version, promoted.current, promoted.weight) == (two.version, True, 1.0)
                await control.deploy(three, canary=0.5)
                assert (await control.rollback("f")).version == two.version
                assert await weights(control) == [(two.version, 1.0)], "a rollback ends a canary"
                assert await run.draw() == drawn, "a resume draws no version again"
                assert await run.score() == {one.version: 1.0, two.version: 2.0}[drawn.version]
                assert await weights(control) == [(two.version, 1.0)]
                assert (await Run(tmp_path / "later", releases.functions()).draw()).version == two.version
                assert (await score(main_), await score(canary)) == (1.0, 2.0), "whatever was deployed meanwhile"

            await control.deploy(four, canary=0.1)
            assert await weights(control) == [(two.version, 0.9), (four.version, 0.1)]
            assert (await control.deploy(two)).version == two.version
            assert await weights(control) == [(two.version, 1.0)], "a deployment ends a canary"

    asyncio.run(main())


@pytest.mark.skipif(bool(Lambda.missing), reason=Lambda.missing or "-")
def test_a_run_calls_the_version_that_it_has_drawn_whatever_its_settings(tmp_path: Path) -> None:
    """Settings of a cluster that would make another version do not: the drawn one is called as it is, or refused."""
    releases = Lambda(tmp_path)

    async def main() -> None:
        async with releases.deployer() as control:
            await control.deploy(constant(tmp_path, 1.0))
            functions = releases.functions()
            functions["aws_lambda"] |= {"architecture": "arm64", "secrets_ttl_s": 7.0}
            run = Run(tmp_path / "run", functions)
            assert (await run.draw()).number == "1"
            await control.deploy(constant(tmp_path, 2.0))
            uploads = releases.plane.calls["PUT /code"]
            assert await run.score() == 1.0
            assert [one.provider_version for one in await control.versions("f")] == ["2", "1"]
            assert releases.plane.calls["PUT /code"] == uploads
            aws.client(releases.plane).delete_function(FunctionName="rollart-f", Qualifier="1")
            with pytest.raises(UnknownFunction, match=r"version 1 .* of f, which the run has drawn, is gone"):
                await run.score()

    try:
        asyncio.run(main())
    finally:
        releases.close()


def test_versions_with_a_weight_are_kept(tmp_path: Path) -> None:
    """Whatever their age: here the current version is older than all that were deployed as its canaries."""

    async def main() -> None:
        async with LocalDeployer(tmp_path / "root") as control:
            for value in range(8):
                await control.deploy(constant(tmp_path, float(value)), canary=0.1)
            oldest, newest = constant(tmp_path, 0.0).version, constant(tmp_path, 7.0).version
            assert await weights(control) == [(oldest, 0.9), (newest, 0.1)]
            assert (await control.package("f")).version == oldest

    asyncio.run(main())


@pytest.mark.skipif(bool(Lambda.missing), reason=Lambda.missing or "-")
def test_lambda_routes_calls_of_live_and_concurrent_deployments_lose_nothing(tmp_path: Path) -> None:
    """The current version never returns to one that a concurrent deployment has replaced."""
    one, two, three = (constant(tmp_path, float(n)) for n in range(1, 4))
    releases = Lambda(tmp_path)

    async def main() -> None:
        async with releases.deployer() as control, releases.deployer() as other:
            await control.deploy(one)
            await control.deploy(two, canary=0.3)
            async with await releases.backend(control, "") as live:
                await live.attach("f")  # type: ignore[attr-defined]
                found = [await score(live) for _ in range(100)]
            assert abs(found.count(2.0) - 30) < 4 * (100 * 0.3 * 0.7) ** 0.5, "four standard deviations"
            await asyncio.gather(control.deploy(two, canary=0.5), other.deploy(three))
            shares = await weights(control)
            assert shares[0][0] == three.version
            assert sum(share for _, share in shares) == pytest.approx(1.0)

    try:
        asyncio.run(main())
    finally:
        releases.close()
