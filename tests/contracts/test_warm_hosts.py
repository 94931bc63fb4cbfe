"""A host that makes environments ahead and resets them again keeps the contract of every other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from rollart.errors import EnvironmentFault
from rollart.ports import Environment
from tests.contracts import host_fixture
from tests.contracts.environment_contract import CONTRACT, Make
from tests.contracts.host_fixture import Hosts, hosts_of, resolved_with
from tests.e2e.harness import ROOT

pytestmark = pytest.mark.slow

LIMIT_S = 60.0
"""For whatever is waited for."""

Stage = tuple[asyncio.Runner, Hosts]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp("warm")
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setenv("PYTHONPATH", str(ROOT))
        for name, kind in (("once", "Once"), ("again", "Again")):
            patch.setitem(host_fixture.DOMAINS, name, f"tests.contracts.warm_worlds:{kind}")
        opened = hosts_of(resolved_with(directory, workers=1, warm=2, reuse=3), directory)
        hosts = runner.run(opened.__aenter__())
        try:
            yield runner, hosts
        finally:
            runner.run(opened.__aexit__(None, None, None))


def play(stage: Stage, scenario: Awaitable[Any]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(LIMIT_S):
            await scenario

    stage[0].run(bounded())


@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_the_contract(promise: Callable[[Make], Awaitable[None]], stage: Stage) -> None:
    pytest.importorskip("gymnasium")
    play(stage, promise(stage[1].make))
    assert stage[1].events("host_lost") == []


async def shown(environment: Environment, seed: int) -> tuple[int, bool, list[int]]:
    """The environment's number, whether it was started, and the seeds that it was reset with."""
    number, began, seeds = (await environment.reset(seed)).text.split(maxsplit=2)
    return int(number), began == "True", json.loads(seeds)


def test_each_episode_has_an_environment_of_its_own_that_was_started(stage: Stage) -> None:
    async def scenario() -> None:
        numbers = []
        for seed in range(6):
            one = stage[1].make("once")
            number, began, seeds = await shown(one, seed)
            assert (began, seeds) == (True, [seed])
            numbers.append(number)
            await one.close()
        assert len(set(numbers)) == 6

    play(stage, scenario())
    told = [event for event in stage[1].events("environments_made") if event["domain"] == "once"]
    assert [event["cold"] + event["ahead"] for event in told] == [1, 2, 4]
    assert told[-1]["reused"] == 0


def test_a_reusable_environment_plays_again_within_its_bound_and_not_after_a_fault(stage: Stage) -> None:
    async def scenario() -> None:
        played: dict[int, list[int]] = {}
        broken: set[int] = set()
        for seed in range(12):
            one = stage[1].make("again")
            number, _, seeds = await shown(one, seed)
            assert number not in broken
            assert seeds == [*played.get(number, []), seed]
            played[number] = seeds
            if seed in (4, 7):
                with pytest.raises(EnvironmentFault, match="broken"):
                    await one.step("break")
                broken.add(number)
            await one.close()
        assert max(map(len, played.values())) == 3, "reuse"
        assert len(played) < 12

    play(stage, scenario())
