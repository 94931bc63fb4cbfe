"""Function providers by name: checks before a start, and local workers in imitation of a provider."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from rollart.errors import ProviderError, SpecError, UsageError
from rollart.launch.functions import TrialMeter, backend, check_providers, packages_in
from rollart.settings.cluster import ClusterFunctions, LocalFunctions
from rollart.settings.load import builtin, load_prices
from serverless.deploy import template
from serverless.deploy.aws_function import AwsSettings
from serverless.providers.base import Reply
from serverless.providers.rehearsal import MODAL, RehearsedBackend
from serverless.types import Cause, Invocation
from serverless.workers.local import LocalBackend


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
