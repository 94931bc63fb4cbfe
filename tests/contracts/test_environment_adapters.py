"""Every adapter's environments keep one contract, in the controller and on a host: Gymnasium, GEM's interface,
reasoning-gym, OpenEnv's real server and verifiers where they are installed, and the quickstart's two domains."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollart.settings.load import builtin, load_run
from tests.adapters.openenv_process import PYTHON, served
from tests.contracts.adapter_contract import CONTRACT, LIMIT_S, Case, Make
from tests.contracts.host_fixture import Hosts, hosts_of, resolved_with
from tests.e2e.harness import ROOT

ADAPTERS = "rollart.adapters.envs"
QUICKSTART = {domain.name: domain for domain in load_run(builtin("runs/quickstart.yaml")).domains}


def of_the_quickstart(name: str, *actions: str) -> Case:
    domain = QUICKSTART[name]
    assert isinstance(domain.environment, str)
    return Case(domain.environment, actions, domain.environment_args)


CASES: dict[str, tuple[str, Case]] = {
    "frozen_lake": ("gymnasium", of_the_quickstart("frozen_lake", "down", "right", "left", "up")),
    "spell_backward": ("reasoning_gym", of_the_quickstart("spell_backward", "a b c")),
    "reasoning_gym": (
        "reasoning_gym",
        Case(f"{ADAPTERS}.reasoning_gym:ReasoningGymEnv", ["1", "true"], {"dataset": "chain_sum"}),
    ),
    "gymnasium": (
        "gymnasium",
        Case(
            f"{ADAPTERS}.gymnasium:GymnasiumText",
            ["down", "right"],
            {
                "id": "FrozenLake-v1",
                "make_args": {"is_slippery": True, "max_episode_steps": 12},
                "render": "ansi",
                "actions": ["left", "down", "right", "up"],
                "success_at": 1,
            },
        ),
    ),
    "on_the_loop": (
        "gymnasium",
        Case(
            f"{ADAPTERS}.gymnasium:GymnasiumText",
            ["0", "1"],
            {"id": "CartPole-v1", "threaded": False, "success_at": 20, "restrict": False},
            turns=500,
        ),
    ),
    "gem": (
        "gymnasium",
        Case(f"{ADAPTERS}.gymnasium:GymnasiumText", ["1", "2"], {"make": "tests.adapters.gym_worlds:GuessText"}),
    ),
    "openenv": (PYTHON, Case(f"{ADAPTERS}.openenv:OpenEnv", ["1", "2"], {"action": "guess", "success_at": 1})),
    "verifiers": (
        "verifiers",
        Case(f"{ADAPTERS}.verifiers:VerifiersText", ["well", "so", "bye"], {"env": "tests.adapters.vf_worlds:talk"}),
    ),
    "verifiers_question": (
        "verifiers",
        Case(f"{ADAPTERS}.verifiers:VerifiersText", ["4"], {"env": "tests.adapters.vf_worlds:load_environment"}),
    ),
}
"""By name: the module or file that the case needs, and the case."""

SLOW = {"openenv", "verifiers", "verifiers_question", "reasoning_gym", "spell_backward"}
"""Those that start a server or take seconds to import."""


def installed(name: str) -> bool:
    need = CASES[name][0]
    return Path(need).exists() if os.sep in need else importlib.util.find_spec(need) is not None


def lacking(name: str) -> Any:
    return pytest.mark.skipif(not installed(name), reason=f"needs {CASES[name][0]}")


def cases(*names: str) -> Any:
    return pytest.mark.parametrize("name", [pytest.param(name, marks=lacking(name)) for name in names])


promises = pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
Promise = Callable[[Case, Make], Awaitable[None]]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """OpenEnv's."""
    if not installed("openenv"):
        yield "http://127.0.0.1:1"
        return
    with served(64) as url:
        yield url


def case_of(name: str, server: str) -> Case:
    case = CASES[name][1]
    return case if name != "openenv" else Case(case.path, case.actions, {**case.arguments, "url": server})


@promises
@cases(*(name for name in CASES if name not in SLOW))
def test_in_the_controller(name: str, promise: Promise) -> None:
    case = CASES[name][1]
    asyncio.run(promise(case, case.here))  # type: ignore[arg-type]


@pytest.mark.slow
@promises
@cases(*sorted(SLOW))
def test_slow_adapters_in_the_controller(name: str, promise: Promise, server: str) -> None:
    case = case_of(name, server)
    asyncio.run(promise(case, case.here))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, server: str) -> Iterator[tuple[asyncio.Runner, Hosts]]:
    """One host that plays them all, on a loop that goes on."""
    directory = tmp_path_factory.mktemp("adapters")
    domains = {name: case_of(name, server) for name in CASES if installed(name)}
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        given = {name: (case.path, dict(case.arguments)) for name, case in domains.items()}
        opened = hosts_of(resolved_with(directory, domains=given, workers=1), directory)
        found = runner.run(opened.__aenter__())
        try:
            yield runner, found
        finally:
            runner.run(opened.__aexit__(None, None, None))


@pytest.mark.slow
@promises
@cases(*CASES)
def test_on_a_host(name: str, promise: Promise, server: str, hosts: tuple[asyncio.Runner, Hosts]) -> None:
    runner, fleet = hosts

    async def bounded() -> None:
        async with asyncio.timeout(2 * LIMIT_S):
            await promise(case_of(name, server), lambda: fleet.make(name))

    runner.run(bounded())
    assert fleet.events("host_lost") == []
