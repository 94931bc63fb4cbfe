"""Functions kept on this machine: versions, the way back, and that a failed deployment changes nothing."""

from __future__ import annotations

import asyncio
import json
import pathlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from serverless.deploy.local import KEPT, LocalDeployer
from serverless.deploy.package import Package, build
from serverless.errors import BackendFailed, FunctionFailed, PackageError, SpecInvalid, UnknownFunction
from serverless.spec import FunctionSpec
from serverless.wire import encode
from serverless.workers.local import LocalBackend
from tests.serverless.support import item, package

pytestmark = pytest.mark.slow  # each deployment tries the function in a real worker


def version(directory: pathlib.Path, value: float | None, **settings: Any) -> Package:
    """A function that scores everything so, or does not load (None)."""
    source = directory / f"v{value}" / "constant.py"
    source.parent.mkdir(exist_ok=True)
    first = "import nothing_here\n" if value is None else ""
    source.write_text(f"{first}\ndef score(sample):\n    print('scored')\n    return {value}\n")
    spec = FunctionSpec(name="f", source="constant.py", handler="score", memory_mb=128, **settings)
    return build(spec, base=source.parent)


def run(work: Callable[[LocalDeployer], Coroutine[Any, Any, None]], root: pathlib.Path) -> None:
    async def main() -> None:
        async with LocalDeployer(root) as deployer:
            await work(deployer)

    asyncio.run(main())


def test_versions_and_the_way_back(tmp_path: pathlib.Path) -> None:
    one, two = version(tmp_path, 1.0), version(tmp_path, 2.0)

    async def work(deployer: LocalDeployer) -> None:
        assert (await deployer.plan(one)).lines == (f"create f at version {one.version[:12]}",)
        first = await deployer.deploy(one)
        assert (first.version, first.provider_version, first.current) == (one.version, "1", True)
        assert not (await deployer.plan(one)).lines
        assert await deployer.deploy(one) == first
        assert (await deployer.plan(two)).lines
        await deployer.deploy(two)
        assert [(v.version, v.current) for v in await deployer.versions("f")] == [
            (two.version, True),
            (one.version, False),
        ]
        assert (await deployer.rollback("f")).version == one.version
        with pytest.raises(UnknownFunction, match="no version before"):
            await deployer.rollback("f")
        assert (await deployer.rollback("f", two.version[:8])).version == two.version
        with pytest.raises(UnknownFunction, match="has no version 'nope'"):
            await deployer.rollback("f", "nope")
        assert [f.version for f in await deployer.functions()] == [two.version]
        await deployer.delete("f")
        assert await deployer.functions() == []
        with pytest.raises(UnknownFunction, match="deployed: none"):
            await deployer.versions("f")

    run(work, tmp_path / "root")


def test_a_version_that_does_not_work_does_not_become_current(tmp_path: pathlib.Path) -> None:
    one, broken = version(tmp_path, 1.0), version(tmp_path, None)

    did_not_load = r"failed its trial call: the function did not load.*nothing_here"

    async def work(deployer: LocalDeployer) -> None:
        with pytest.raises(FunctionFailed, match=did_not_load) as first:
            await deployer.deploy(broken)
        assert first.value.remedy.startswith("nothing is deployed; ")
        await deployer.deploy(one)
        with pytest.raises(FunctionFailed, match=did_not_load) as second:
            await deployer.deploy(broken)
        assert second.value.remedy.startswith("the version before it stays current; ")
        assert [v.version for v in await deployer.versions("f")] == [one.version]
        with pytest.raises(FunctionFailed, match="answered an empty list with"):
            await deployer.deploy(package("lambdas:chatty"))
        assert [f.function for f in await deployer.functions()] == ["f"]

    run(work, tmp_path / "root")


def test_a_kept_version_keeps_its_number_and_a_rollback_follows_the_deployments(tmp_path: pathlib.Path) -> None:
    one, two, three = (version(tmp_path, value) for value in (1.0, 2.0, 3.0))

    async def work(deployer: LocalDeployer) -> None:
        for each in (one, two):
            await deployer.deploy(each)
        assert (await deployer.rollback("f")).version == one.version
        canary = await deployer.deploy(two, canary=0.1)
        assert (canary.provider_version, canary.weight) == ("2", 0.1)
        assert (await deployer.package("f", "2")).version == two.version
        assert (await deployer.promote("f")).provider_version == "2"
        assert (await deployer.deploy(three)).provider_version == "3"
        assert (await deployer.deploy(one)).provider_version == "1"
        assert [v.provider_version for v in await deployer.versions("f")] == ["1", "3", "2"]
        back = [await deployer.rollback("f") for _ in range(2)]
        assert [v.version for v in back] == [three.version, two.version], "the order of the deployments"

    run(work, tmp_path / "root")


def test_a_state_of_an_earlier_release_is_in_the_order_of_its_numbers(tmp_path: pathlib.Path) -> None:
    one, two = version(tmp_path, 1.0), version(tmp_path, 2.0)

    async def work(deployer: LocalDeployer) -> None:
        for each in (one, two):
            await deployer.deploy(each)
        path = tmp_path / "root/deployed/f/state.json"
        state = json.loads(path.read_text())
        for each in state["versions"]:
            del each["activation"]
        path.write_text(json.dumps(state))
        assert (await deployer.rollback("f")).version == one.version
        assert (await deployer.deploy(two)).provider_version == "2"
        assert [v.version for v in await deployer.versions("f")] == [two.version, one.version]

    run(work, tmp_path / "root")


def test_old_versions_are_pruned(tmp_path: pathlib.Path) -> None:
    packages = [version(tmp_path, float(n)) for n in range(KEPT + 2)]

    async def work(deployer: LocalDeployer) -> None:
        for one in packages:
            await deployer.deploy(one)
        kept = [v.version for v in await deployer.versions("f")]
        assert kept == [one.version for one in reversed(packages[2:])]
        directories = {path.name for path in (tmp_path / "root/deployed/f").iterdir() if path.is_dir()}
        assert directories == set(kept)

    run(work, tmp_path / "root")


def test_what_was_deployed_runs_as_it_is_scaled_and_its_logs_are_kept(tmp_path: pathlib.Path) -> None:
    root = tmp_path / "root"

    async def work(deployer: LocalDeployer) -> None:
        deployed = version(tmp_path, 1.0)
        await deployer.deploy(deployed)
        scaled = await deployer.scale("f", warm=1, concurrency=2)
        assert (scaled.warm, scaled.concurrency) == (1, 2)
        with pytest.raises(SpecInvalid, match="warm=3 and concurrency=2"):
            await deployer.scale("f", warm=3)
        again = await deployer.package("f")
        assert (again.version, again.files) == (deployed.version, deployed.files)
        assert (again.spec.warm, again.spec.concurrency) == (1, 2)
        async with LocalBackend(root=root) as backend:
            await backend.deploy(again)
            reply = await backend.invoke("f", [encode(item())], deadline_s=60.0)
            assert isinstance(reply.body, list)
            assert reply.body[0]["aggregate_reward_score"] == 1.0
        assert [line.text for line in await deployer.logs("f")] == ["scored"]

    run(work, root)


def test_files_that_were_changed_are_refused(tmp_path: pathlib.Path) -> None:
    async def work(deployer: LocalDeployer) -> None:
        one = await deployer.deploy(version(tmp_path, 1.0))
        path = pathlib.Path(one.endpoint) / "rollart_handler.py"
        path.write_text(path.read_text() + "\n# more\n")
        with pytest.raises(PackageError, match="changed after it was deployed"):
            await deployer.package("f")

    run(work, tmp_path / "root")


def test_two_changes_at_once_are_one_and_a_refusal(tmp_path: pathlib.Path) -> None:
    async def work(deployer: LocalDeployer) -> None:
        made = await asyncio.gather(
            *(deployer.deploy(version(tmp_path, value)) for value in (1.0, 2.0)), return_exceptions=True
        )
        refused = [one for one in made if isinstance(one, BackendFailed)]
        assert len(refused) == 1
        assert "another deployment" in str(refused[0])
        assert len(await deployer.versions("f")) == 1

    run(work, tmp_path / "root")
