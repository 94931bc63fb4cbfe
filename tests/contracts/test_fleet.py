"""`EngineFleet` keeps the contract: over simulated devices on virtual time, and over processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rollart import controller_loop
from rollart.controller_loop import ControllerLoop
from rollart.launch.plan import RunStart
from rollart.launch.wiring import RunContext, open_run
from rollart.leases import Leases
from rollart.ledger.store import Ledger
from rollart.model import EngineId, WeightsRef
from rollart.ports import RunEvent
from rollart.serving.engine_registry import GatewayLimits
from rollart.serving.gateway import Gateway
from rollart.settings.resolve import resolve_files
from rollart.sim import loop
from rollart.supervise.engines import EngineSupervisor
from rollart.supervise.fleet import EngineFleet
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.parts import SimulatedEngine, SimulatedSite
from tests.contracts.fleet_contract import HERE, FleetContract, FleetSubject, Scenario, setting
from tests.e2e.harness import CLUSTER, events, processes, tiny


class Loading(SimulatedEngine):
    """Weights take a while to load."""

    async def update_weights(self, weights: WeightsRef) -> None:
        await asyncio.sleep(2.0)
        await super().update_weights(weights)


class TestSimulated(FleetContract):
    def run(self, scenario: Scenario) -> None:
        async def main() -> None:
            recorder = MemoryRecorder()
            leases = Leases(recorder)

            def suspect(engine: EngineId) -> None:
                supervisor.suspect(engine)

            gateway = Gateway(leases, limits=GatewayLimits(), version=0, on_suspect=suspect, recorder=recorder)
            site = SimulatedSite(
                {"here": 1, "there": 2},
                lambda name: Loading(name, version=0, tokens=2, seconds=lambda r: 0.5 + r.random()),
                recorder,
            )
            supervisor = EngineSupervisor(
                gateway,
                leases,
                recorder,
                shares=site.shares,
                weights=lambda: WeightsRef(gateway.version, ""),
                start_s=60.0,
            )
            fleet = EngineFleet(gateway, supervisor, site, recorder, drain_s=30.0)
            first = await site.place(HERE)
            await supervisor.bring_up(first.part, first.seat)

            async def publish(told: Callable[[], None]) -> None:
                await gateway.update(WeightsRef(gateway.version + 1, ""), lambda _: told())

            async def kill(engine: EngineId) -> None:
                site.parts[engine].die()

            async def alive(engine: EngineId) -> bool:
                return engine in site.parts and site.parts[engine].runs

            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(supervisor.run([first.part]))
                await scenario(
                    FleetSubject(
                        fleet,
                        gateway,
                        lambda: recorder.events,
                        publish,
                        lambda: setting(site, "broken", True),
                        kill,
                        alive,
                    )
                )
                watch.cancel()

        loop.run(main())


TWO_POOLS = {
    **CLUSTER,
    "pools": [{"name": "here", "device": "cpu", "count": 4}, {"name": "there", "device": "cpu", "count": 2}],
}
"""The engine and the trainer go where most is free."""


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[WeightsRef]:
    """As many as a scenario publishes, from one trainer: a second is as slow to start as three engines."""
    directory = tmp_path_factory.mktemp("versions")

    async def main() -> list[WeightsRef]:
        async with _wired(directory) as parts:
            await parts.trainer.start()
            return [await parts.trainer.publish(version) for version in range(3)]

    return asyncio.run(main())


def _wired(directory: Path) -> contextlib.AbstractAsyncContextManager[RunContext]:
    run, cluster = directory / "run.yaml", directory / "cluster.yaml"
    run.write_text(yaml.safe_dump(tiny()))
    cluster.write_text(yaml.safe_dump(TWO_POOLS))
    began = asyncio.get_running_loop().time()
    return open_run(RunStart(resolve_files(run, cluster)), directory / "run", lambda _: None, began=began)


@pytest.mark.slow  # makes a run's parts, without starting them
def test_a_pause_that_the_ledgers_last_write_causes_ends_nothing(tmp_path: Path) -> None:
    """A slow disk holds the loop when the ledger closes, and the pause is measured after that."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ControllerLoop)
        async with _wired(tmp_path):
            loop.shift_timers(2000.0)
        loop.shift_timers(3000.0)

    controller_loop.run(main())
    assert 2000.0 in [event["seconds"] for event in events(tmp_path / "run", "controller_paused")]


@pytest.mark.slow  # starts up to three engines per test: about 4 s
class TestLocal(FleetContract):
    @pytest.fixture(autouse=True)
    def _prepare(self, tmp_path: Path, versions: list[WeightsRef], monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self.versions, self.events = tmp_path, versions, []
        kept: list[RunEvent] = self.events

        class Kept(Ledger):
            def event(self, event: RunEvent) -> None:
                kept.append(event)
                super().event(event)

        monkeypatch.setattr("rollart.launch.wiring.Ledger", Kept)

    def run(self, scenario: Scenario) -> None:
        async def main() -> None:
            async with asyncio.timeout(300.0), _wired(self.directory) as parts:
                parts.begin(self.version(0))
                await parts.supervisor.bring_up(parts.site.parts[0])
                async with asyncio.TaskGroup() as tasks:
                    watch = tasks.create_task(parts.supervisor.run(parts.site.parts))
                    await scenario(self.subject(parts))
                    watch.cancel()

        asyncio.run(main())
        assert processes(self.directory) == []

    def version(self, number: int) -> WeightsRef:
        """In the test's own directory, which its engines' commands name."""
        here = shutil.copytree(self.versions[number].path, self.directory / f"v{number}")
        return dataclasses.replace(self.versions[number], path=str(here))

    def subject(self, parts: RunContext) -> FleetSubject:
        gateway = parts.control.gateway

        async def publish(told: Callable[[], None]) -> None:
            weights = self.version(gateway.version + 1)

            def moved(version: int) -> None:
                parts.current = weights
                told()

            await gateway.update(weights, moved)

        async def kill(engine: EngineId) -> None:
            os.kill(await parts.site.engines[engine].program.call("pid"), signal.SIGKILL)

        async def alive(engine: EngineId) -> bool:
            running = [p for p in processes(self.directory) if "rollart.engine" in p.command]
            assert len(running) == len(parts.site.engines)
            return engine in parts.site.engines

        def broken() -> contextlib.AbstractContextManager[None]:
            return setting(parts, "current", WeightsRef(gateway.version, str(self.directory / "nowhere")))

        return FleetSubject(parts.fleet, gateway, lambda: self.events, publish, broken, kill, alive)
