"""Function providers by name: checks before a start, and local workers in imitation of a provider."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest

from rollart.errors import ProviderError, SpecError, UsageError
from rollart.launch.functions import (
    LiveVersionCalls,
    TrialMeter,
    backend,
    build_lines,
    check_providers,
    check_secrets,
    deployer,
    packages_in,
)
from rollart.launch.rewards import release_provider
from rollart.settings.cluster import ClusterFunctions, ClusterSpec, LocalFunctions
from rollart.settings.load import builtin, load_prices, load_run
from rollart.settings.planning import Specs
from rollart.sim import loop as virtual
from serverless.deploy import template
from serverless.deploy.aws_function import AwsSettings
from serverless.deploy.package import Package, build
from serverless.errors import BackendFailed, PackageError
from serverless.providers.base import DeployedFunction, Reply
from serverless.providers.rehearsal import MODAL, RehearsedBackend
from serverless.spec import FunctionSpec
from serverless.types import Cause, Invocation
from serverless.workers.local import LocalBackend
from tests.serverless.deploy.wheels import write_wheel


def test_local_workers_play_a_provider_when_told() -> None:
    assert isinstance(backend("local", ClusterFunctions()), LocalBackend)
    played = backend("local", ClusterFunctions(local=LocalFunctions(rehearse="modal", seed=3)))
    assert isinstance(played, RehearsedBackend)
    assert played.provider == "local"


@pytest.mark.parametrize(
    ("functions", "expected"),
    [
        ({"pipeline": {"hedge": {"budget": 2}}}, r"functions\.pipeline\.hedge\.budget is 2"),
        ({"backend": "aws_lambda", "aws_lambda": {"architecture": "mips"}}, r"functions\.aws_lambda\.architecture is"),
        ({"backend": "modal", "modal": {"prefx": "a"}}, r"functions\.modal"),
    ],
)
def test_settings_are_refused_before_anything_starts(functions: dict[str, object], expected: str) -> None:
    with pytest.raises(SpecError, match=expected):
        check_providers(ClusterFunctions.model_validate(functions))


def test_a_secret_that_is_not_set_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = ClusterFunctions.model_validate(
        {"backend": ["http", "local"], "http": {"judge": {"url": "http://h/judge", "token_env": "JUDGE_TOKEN"}}}
    )
    monkeypatch.delenv("JUDGE_TOKEN", raising=False)
    with pytest.raises(ProviderError, match="JUDGE_TOKEN is not set"):
        check_providers(functions)
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    check_providers(functions)


NEBULA = Path(__file__).parents[1] / "fixtures" / "nebula"


@pytest.fixture
def nebula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterFunctions:
    """The settings of a run on the provider of another distribution, which is installed."""
    (tmp_path / "rollart_nebula-1.dist-info").mkdir()
    entry = "[rollart.function_backends]\nnebula = rollart_nebula:PLUGIN\n"
    (tmp_path / "rollart_nebula-1.dist-info/entry_points.txt").write_text(entry)
    (tmp_path / "rollart_nebula-1.dist-info/METADATA").write_text("Name: rollart_nebula\nVersion: 1\n")
    monkeypatch.syspath_prepend(NEBULA)
    monkeypatch.syspath_prepend(tmp_path)
    return ClusterFunctions.model_validate({"backend": "nebula", "nebula": {"root": str(tmp_path / "nebula")}})


@pytest.mark.slow  # function workers are processes
def test_a_provider_of_another_package_gets_secrets_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nebula: ClusterFunctions
) -> None:
    (tmp_path / "f.py").write_text(
        "import os\nfrom rollart import reward\n\n@reward(secrets=['SIZE_KEY'], env={'MODE': 'strict'})\n"
        "def f(sample): return float(len(os.environ['SIZE_KEY'] + os.environ['MODE']))\n"
    )
    (package,) = packages_in("f.py", base=tmp_path)
    monkeypatch.delenv("SIZE_KEY", raising=False)
    with pytest.raises(ProviderError, match="no value of the secret SIZE_KEY"):
        check_secrets(nebula, [package.spec], tmp_path)
    monkeypatch.setenv("SIZE_KEY", "0123456789")
    monkeypatch.setenv("OTHER", "x")
    check_secrets(nebula, [package.spec], tmp_path)

    async def main() -> object:
        async with deployer("nebula", nebula, root=tmp_path) as control:
            await control.deploy(package)
        async with backend("nebula", nebula) as target:
            await target.deploy(package)
            item = {"id": "1", "messages": [], "reference_answer": None, "metadata": {}}
            return (await target.invoke("f", [item], deadline_s=60.0)).body

    assert "'aggregate_reward_score': 16.0" in str(asyncio.run(main()))


class Attached:
    """A backend whose calls answer with the version that it is attached to."""

    provider = "fake"

    def __init__(self) -> None:
        self.names: list[str] = []
        self.broken = False

    async def attach(self, function: str, version: str = "") -> None:
        if self.broken:
            raise BackendFailed("no answer")
        self.names.append(version)

    async def invoke(self, function: str, event: object, **more: object) -> Reply:
        return Reply(body=self.names[-1])


def test_calls_go_through_the_alias_live_while_it_names_their_version_alone() -> None:
    """Lambda has warm environments for that alias alone, and routes its calls by the weights."""

    async def main() -> None:
        target, weights = Attached(), {"now": 1.0}

        def version() -> DeployedFunction:
            return DeployedFunction("f", "fake", "ab" * 32, "3", True, weight=weights["now"])

        async def call() -> object:
            return (await calls.invoke("f", [], deadline_s=9.0)).body

        async with LiveVersionCalls(target, version) as calls:  # type: ignore[arg-type]
            assert [await call(), await call(), target.names] == ["", "", [""]]
            weights["now"] = 0.8
            assert await call() == "3", "a canary got a share: the alias would draw a second time"
            weights["now"] = 1.0
            target.broken = True
            assert await call() == "3", "calls go on where they went"
            target.broken = False
            assert await asyncio.gather(call(), call()) == ["", ""]
            assert target.names == ["", "3", ""]

    virtual.run(main())


def test_a_provider_of_another_package_keeps_versions_for_runs(nebula: ClusterFunctions) -> None:
    cluster = ClusterSpec.model_validate({"name": "c", "pools": [{"name": "p", "count": 2}]})
    run = load_run(builtin("runs/quickstart.yaml"))
    specs = Specs(run, cluster.model_copy(update={"functions": nebula}), load_prices(builtin("prices.yaml")))
    assert release_provider(specs) == "nebula"
    with pytest.raises(UsageError, match="nothing is deployed to 'http'") as refused:
        deployer("http", nebula, root=Path())
    assert refused.value.remedy == "deploy to one of local, aws_lambda, modal, nebula"


def test_no_such_provider() -> None:
    with pytest.raises(UsageError, match="no provider"):
        backend("azure", ClusterFunctions())


def test_trials_are_priced_by_the_list() -> None:
    trials = TrialMeter(load_prices(builtin("prices.yaml")))
    trials.invocation(
        Invocation(
            function="f",
            provider="aws_lambda",
            worker="w",
            t0=0.0,
            t1=1.0,
            cold_start_s=0.5,
            billed_s=2.0,
            memory_mb=512,
            items=0,
            status="ok",
            cause=Cause.SMOKE,
            provider_id="r",
        )
    )
    (bill,) = trials.bills
    assert bill.usd == pytest.approx(2.0 * 0.5 * 0.0000166667 + 0.20 / 1e6)


@pytest.mark.slow  # function workers are processes
def test_a_rehearsed_call_waits_for_the_providers_cold_start(tmp_path: Path) -> None:
    template.write(tmp_path, "mine")
    (package,) = packages_in("mine.py", base=tmp_path)
    cold_s = MODAL.cold_start.draw(random.Random("3/mine"))

    async def main() -> tuple[Reply, Reply]:
        async with backend(
            "local", ClusterFunctions(local=LocalFunctions(rehearse="modal", seed=3)), root=tmp_path / "functions"
        ) as place:
            await place.deploy(package)
            return (
                await place.invoke("mine", [], deadline_s=60.0),
                await place.invoke("mine", [], deadline_s=60.0),
            )

    first, second = asyncio.run(main())
    assert first.invocation is not None
    assert second.invocation is not None
    assert first.invocation.cold_start_s >= cold_s
    assert second.invocation.cold_start_s == 0.0


def test_the_region_is_also_that_of_aws_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert AwsSettings().region == AwsSettings(region="").region == "eu-west-1"
    assert AwsSettings(region="us-east-1").region == "us-east-1"
    monkeypatch.delenv("AWS_REGION")
    assert AwsSettings().region == ""


@pytest.mark.slow  # uv resolves
@pytest.mark.skipif(importlib.util.find_spec("uv") is None, reason="not installed: uv")
def test_a_dry_run_says_what_is_built_and_refuses_what_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(tmp_path / "index", "tiny_reward", "1.5", "")
    write_wheel(tmp_path / "index", "for_windows", "2.0", "", tag="py3-none-win_amd64")
    monkeypatch.setenv("UV_DEFAULT_INDEX", (tmp_path / "index").as_uri())
    monkeypatch.setenv("UV_INDEX", "")
    (tmp_path / "f.py").write_text("def f(sample):\n    return 1.0\n")

    def packed(**settings: Any) -> Package:
        return build(FunctionSpec.model_validate({"name": "f", "source": "f.py", **settings}), base=tmp_path)

    functions = ClusterFunctions(backend=["aws_lambda", "modal"])
    assert list(build_lines(packed(), functions)) == []
    on_aws, on_modal = build_lines(packed(requirements=("tiny-reward==1.5",), image={"system": ["git"]}), functions)
    assert on_aws.startswith("f on aws_lambda: build the image rollart-functions:")
    assert "apt: git" in on_aws
    assert on_modal.startswith("f on modal: build its image; from python:")
    with pytest.raises(PackageError, match="no wheels with a matching platform tag"):
        list(build_lines(packed(requirements=("for-windows==2.0",)), functions))
    weights = tmp_path / "weights.bin"
    with weights.open("wb") as file:
        file.truncate(263_000_000)
    large = packed(requirements=("tiny-reward==1.5",), artefacts=(str(weights),))
    with pytest.raises(PackageError, match="at least 263 MB unpacked") as error:
        list(build_lines(large, functions))
    assert "image={}" in error.value.remedy
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    lines = list(build_lines(packed(requirements=("tiny-reward==1.5",)), functions))
    assert [line.partition(": ")[0] for line in lines] == ["f on aws_lambda", "f on modal"]
    assert all("its wheels are not checked" in line for line in lines)
