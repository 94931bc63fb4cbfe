"""Environments keep one contract in the controller and on hosts of their own; hosts that die, hang or lie are named."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import venv
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollart.adapters.envs.frozen_lake import FrozenLakeText
from rollart.errors import EnvironmentFault, SpecError
from rollart.launch.hosts import HostProgram
from rollart.ports import Environment
from rollart.supervise.environment_hosts import HostedEnvironment
from tests.contracts import host_fixture
from tests.contracts.environment_contract import CONTRACT, Make
from tests.contracts.host_fixture import Hosts, hosts_of, resolved_with
from tests.contracts.worlds import Blocking, Tale, Told
from tests.e2e.harness import ROOT

HERE: dict[str, Callable[[], Environment]] = {"tale": Tale, "told": Told, "blocking": Blocking, "lake": FrozenLakeText}

LIMIT_S = 60.0
"""For whatever is waited for."""


class Stage:
    """A loop that goes on between the scenarios of a module, with a fleet on it."""

    def __init__(self, runner: asyncio.Runner, hosts: Hosts, directory: Path) -> None:
        self._runner = runner
        self.hosts = hosts
        self.directory = directory

    def play(self, scenario: Awaitable[Any]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(LIMIT_S):
                await scenario

        self._runner.run(bounded())


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp("hosts")
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setenv("PYTHONPATH", str(ROOT))
        opened = hosts_of(resolved_with(directory, workers=1, health_s=2.0), directory)
        hosts = runner.run(opened.__aenter__())
        try:
            yield Stage(runner, hosts, directory)
        finally:
            runner.run(opened.__aexit__(None, None, None))


@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_in_the_controller(promise: Callable[[Make], Awaitable[None]]) -> None:
    pytest.importorskip("gymnasium")
    asyncio.run(promise(lambda domain: HERE[domain]()))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_on_a_host(promise: Callable[[Make], Awaitable[None]], stage: Stage) -> None:
    pytest.importorskip("gymnasium")
    stage.play(promise(stage.hosts.make))
    assert stage.hosts.events("host_lost") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("raise spoon", "raised KeyError: 'spoon' on environment-0"),
        ("nothing", "answered NoneType where a rollart.Step is due on environment-0"),
        ("nan", "a step's reward is nan .* on environment-0"),
        ("object", "a _thread.lock cannot leave its host .* on environment-0"),
        ("leave", "raised SystemExit: 3 on environment-0"),
        ("cancel", "raised CancelledError of its own on environment-0"),
    ],
)
def test_a_fault_names_its_host_and_is_its_episodes_alone(stage: Stage, action: str, words: str) -> None:
    async def scenario() -> None:
        bad, good = stage.hosts.make("told"), stage.hosts.make("told")
        await asyncio.gather(bad.reset(0), good.reset(0))
        with pytest.raises(EnvironmentFault, match=words) as fault:
            await bad.step(action)
        assert (fault.value.host, fault.value.incident) == ("environment-0", "")
        assert (await good.step("go on")).observation.text.startswith("go on")
        before = stage.hosts.fleet.faults()["environment-0"]
        await asyncio.gather(bad.close(), good.close())
        assert stage.hosts.fleet.faults()["environment-0"] == before + 1

    stage.play(scenario())
    assert stage.hosts.events("host_lost") == []


@pytest.mark.slow
def test_a_step_after_the_end_is_refused_and_printing_does_not_block(stage: Stage) -> None:
    async def scenario() -> None:
        environment = stage.hosts.make("told")
        await environment.reset(0)
        for _ in range(3):
            await environment.step("print")
        assert (await environment.step("end")).done
        with pytest.raises(EnvironmentFault, match="a step after the end of its episode on environment-0"):
            await environment.step("go on")
        await environment.close()

    stage.play(scenario())


@pytest.mark.slow
def test_blocking_environments_have_threads_and_block_no_other(stage: Stage) -> None:
    """Calls that block for longer than any health check, and others that go on beside them."""

    async def scenario() -> None:
        blocked, other = stage.hosts.make("blocking"), stage.hosts.make("told")
        await asyncio.gather(blocked.reset(0), other.reset(0))
        step = asyncio.get_running_loop().create_task(blocked.step("block 4"))
        while not step.done():
            assert (await other.step("go on")).observation.text.endswith("True")  # the main thread's loop
            await asyncio.sleep(0.05)
        assert (await step).observation.text.endswith("False")
        await asyncio.gather(blocked.close(), other.close())

    stage.play(scenario())
    assert stage.hosts.events("host_lost") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "cause"),
    [
        ("die 7", "its process ended with status 7"),
        ("die", "its process was killed by SIGSEGV"),
        ("block 3600", "step of told-.* blocked all of its episodes for"),
    ],
)
def test_a_host_that_ends_or_is_blocked_is_started_again(stage: Stage, action: str, cause: str) -> None:
    """Every episode on it fails with the cause; the next one goes to the new process."""

    async def scenario() -> None:
        lost = len(stage.hosts.events("host_lost"))
        culprit, other = stage.hosts.make("told"), stage.hosts.make("tale")
        await asyncio.gather(culprit.reset(0), other.reset(0))
        ended = asyncio.get_running_loop().create_task(culprit.step(action))
        with pytest.raises(EnvironmentFault) as fault:
            await ended
        assert fault.value.host == "environment-0"
        assert fault.value.incident.startswith("environment-0 of life ")
        with pytest.raises(EnvironmentFault) as same:
            await other.step("left")
        assert same.value.incident == fault.value.incident
        await asyncio.gather(culprit.close(), other.close())
        again = stage.hosts.make("tale")
        await again.reset(0)
        await again.close()
        events = stage.hosts.events("host_lost")[lost:]
        assert len(events) == 1
        assert events[0]["subject"] == "environment-0"
        assert re.search(cause, events[0]["cause"]), events

    stage.play(scenario())
    assert action != "die" or "worlds.py" in (stage.directory / "logs" / "environment-0.log").read_text()


@pytest.mark.slow
def test_a_killed_host_is_started_again_and_its_time_is_in_one_state_at_a_time(stage: Stage) -> None:
    from rollart.testing.laws import find_tiling_errors

    async def scenario() -> None:
        environment = stage.hosts.make("told")
        await environment.reset(0)
        waiting = asyncio.get_running_loop().create_task(environment.step("hang"))
        assert isinstance(environment, HostedEnvironment)
        host = stage.hosts.fleet.hosts[environment.host]
        assert isinstance(host.part, HostProgram)
        os.kill(host.link.pid, signal.SIGKILL)  # type: ignore[union-attr]
        with pytest.raises(EnvironmentFault, match="on environment-0"):
            await waiting
        await environment.close()
        again = stage.hosts.make("tale")
        await again.reset(0)
        await again.close()
        assert "SIGKILL" in stage.hosts.events("host_lost")[-1]["cause"]
        for clock in stage.hosts.fleet.clocks:
            clock.flush()

    stage.play(scenario())
    assert find_tiling_errors(stage.hosts.recorder.intervals) == []
    assert {i.role for i in stage.hosts.recorder.intervals} == {"environment"}
    lost = {i.cause for i in stage.hosts.recorder.intervals if i.state in ("down", "startup")}
    assert lost >= {"", "host_restart"}


@pytest.mark.slow
def test_an_environment_that_cannot_be_made_is_a_spec_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setitem(host_fixture.DOMAINS, "tale", "tests.contracts.worlds:Nobody")

    async def scenario() -> None:
        async with hosts_of(resolved_with(tmp_path, workers=1), tmp_path):
            raise AssertionError("it started")

    with pytest.raises(BaseExceptionGroup) as group:
        asyncio.run(scenario())
    errors = group.value.subgroup(SpecError)
    assert errors is not None
    assert "environment of domain 'tale': 'tests.contracts.worlds:Nobody' cannot" in str(errors.exceptions[0])


@pytest.mark.slow
def test_environments_in_an_interpreter_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has rollart's sources and the environment's, and nothing else that is installed here."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    venv.create(tmp_path / "envs", with_pip=False, symlinks=True)
    (packages,) = (tmp_path / "envs" / "lib").glob("python*/site-packages")
    (packages / "only_there.py").write_text(
        "import sys\n"
        "from rollart import Observation, Step\n"
        "class World:\n"
        "    async def reset(self, seed): return Observation(sys.prefix)\n"
        "    async def step(self, action): return Step(Observation(str('pydantic' in sys.modules)), 1.0, True)\n"
        "    async def close(self): pass\n"
    )
    monkeypatch.setitem(host_fixture.DOMAINS, "tale", "only_there:World")
    monkeypatch.delitem(host_fixture.DOMAINS, "lake")  # needs a package that is installed here

    async def scenario() -> None:
        resolved = resolved_with(tmp_path, workers=1, python="envs/bin/python")
        async with asyncio.timeout(LIMIT_S), hosts_of(resolved, tmp_path) as hosts:
            world = hosts.make("tale")
            assert (await world.reset(0)).text == str(tmp_path / "envs")
            step = await world.step("look")
            assert (step.observation.text, step.reward, step.done) == ("False", 1.0, True)
            await world.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_an_interpreter_that_is_not_there_is_a_spec_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts_of(resolved_with(tmp_path, workers=1, python="nowhere/python"), tmp_path):
            raise AssertionError("it started")

    with pytest.raises(BaseExceptionGroup) as group:
        asyncio.run(scenario())
    errors = group.value.subgroup(SpecError)
    assert errors is not None
    assert "environments.python: No such file or directory" in str(errors.exceptions[0])
