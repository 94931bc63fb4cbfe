"""Updates of single engines: who is lost while it loads, and what was measured of a version that is not current yet."""

from __future__ import annotations

import asyncio
import functools

import pytest

from rollart.leases import Leases
from rollart.ledger.intervals import EngineShares, ResourceClock
from rollart.model import Sampling, WeightsRef
from rollart.serving.engine_registry import GatewayLimits
from rollart.serving.gateway import Gateway
from rollart.serving.weight_updates import AllAtOnceUpdates
from rollart.sim import loop
from rollart.strategies.rolling_update import (
    OnDivergence,
    RollingUpdater,
    Staggered,
    UpdatePolicy,
    VersionProbe,
)
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.parts import SimulatedEngine

LOAD_S = 5.0


class Fleet:
    """Two engines that load for five seconds, and their gateway."""

    def __init__(self, updates: UpdatePolicy | None, alpha: int = 2) -> None:
        now = asyncio.get_running_loop().time
        self.recorder = MemoryRecorder()
        self.engines = [SimulatedEngine(f"e{n}", version=0, load_s=lambda _: LOAD_S) for n in range(2)]
        self.gateway = Gateway(
            Leases(self.recorder),
            limits=GatewayLimits(),
            version=0,
            on_suspect=lambda _: None,
            recorder=self.recorder,
            updates=AllAtOnceUpdates if updates is None else functools.partial(RollingUpdater, updates, alpha),
        )
        self.clocks = [
            ResourceClock(role="rollout", resource=e.id, recorder=self.recorder, clock=now) for e in self.engines
        ]
        for engine, clock in zip(self.engines, self.clocks, strict=True):
            self.gateway.join(engine, version=0, shares=EngineShares(clock, clock=now))

    async def publish(self, version: int) -> None:
        await self.gateway.update(WeightsRef(version, ""), lambda _: None)


@pytest.mark.parametrize("updates", [None, Staggered(0.5)])
def test_an_engine_lost_while_it_loads_is_down_though_it_answers(updates: UpdatePolicy | None) -> None:
    async def main() -> list[tuple[float, str]]:
        fleet = Fleet(updates)
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(fleet.gateway.updates.run())
            await asyncio.sleep(0.0)
            publish = tasks.create_task(fleet.publish(1))
            await asyncio.sleep(1.0)
            for engine in fleet.engines:
                fleet.gateway.lose(engine.id)
            await asyncio.sleep(2 * LOAD_S)
            await publish
            following.cancel()
        for clock in fleet.clocks:
            clock.close()
        return [(i.t0, i.state) for i in fleet.recorder.intervals if i.t1 > 1.0]

    assert loop.run(main()) == [(1.0, "down"), (1.0, "down")]


def test_what_was_measured_of_the_next_version_outlives_what_happens_before_it_is_current() -> None:
    async def main() -> list[int]:
        fleet = Fleet(OnDivergence(VersionProbe(-1, {}), 0.1))
        updates = fleet.gateway.updates
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(updates.run())
            updates.measured(1, {0: 0.01})
            await fleet.publish(1)
            updates.measured(2, {0: 0.5, 1: 0.4})
            fleet.gateway.trust(fleet.engines[0].id)  # routing is told of a change, and every engine looked at again
            await asyncio.sleep(2 * LOAD_S)
            assert [e.version for e in fleet.engines] == [0, 0], "close to the version that is current"
            await fleet.publish(2)
            await asyncio.sleep(2 * LOAD_S)
            updates.measured(3, {2: 0.01})
            fleet.gateway.trust(fleet.engines[0].id)
            await asyncio.sleep(2 * LOAD_S)
            await fleet.publish(3)
            await asyncio.sleep(2 * LOAD_S)
            following.cancel()
        return [e.version for e in fleet.engines]

    assert loop.run(main()) == [2, 2]


def test_a_turn_does_not_wait_for_its_home_that_loads_while_another_serves() -> None:
    async def main() -> tuple[float, str]:
        fleet = Fleet(Staggered(0.5))
        updates, now = fleet.gateway.updates, asyncio.get_running_loop().time

        async def turn(session: str) -> None:
            sampling = Sampling(2)
            await fleet.gateway.generate(
                session, (1, 2), sampling, spend=lambda _: None, sent=lambda _: None, domain="d"
            )

        def sticky() -> str:
            return next(name for name, m in fleet.gateway.registry.members.items() if "a" in m.sessions)

        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(updates.run())
            await asyncio.sleep(0.0)
            for session in ("a", "b"):
                await turn(session)
            lived, began = sticky(), now()
            await fleet.publish(1)
            assert [m.updating for m in fleet.gateway.registry.members.values()] == [True, False]
            assert lived == "e0", "the one that loads"
            await turn("a")
            took, lives = now() - began, sticky()
            following.cancel()
        return took, lives

    took, lives = loop.run(main())
    assert took < LOAD_S
    assert lives == "e1"


def test_a_version_whose_last_engine_left_for_good_is_loaded_by_another() -> None:
    """e0 has v1 and a trajectory that began with it, e1 is close and would not load: it does, at once."""

    async def main() -> tuple[float, list[int], dict[str, object]]:
        fleet = Fleet(OnDivergence(VersionProbe(-1, {}), 0.1), alpha=4)
        updates, now = fleet.gateway.updates, asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(updates.run())
            await asyncio.sleep(0.0)
            fleet.gateway.retire(fleet.engines[1].id)
            updates.measured(1, {0: 0.5})
            await fleet.publish(1)
            await asyncio.sleep(2 * LOAD_S)
            assert [e.version for e in fleet.engines] == [1, 0]
            turn = functools.partial(
                fleet.gateway.generate, "a", (1, 2), Sampling(2), spend=lambda _: None, sent=lambda _: None, domain="d"
            )
            await turn()
            updates.measured(1, {0: 0.01})
            updates.measured(2, {0: 0.01, 1: 0.01})
            await fleet.publish(2)
            fleet.gateway.registry.members[fleet.engines[1].id].draining = False
            fleet.gateway.leave(fleet.engines[0].id)
            began = now()
            await turn()
            waited = now() - began
            following.cancel()
        for clock in fleet.clocks:
            clock.close()
        told = next(dict(e.fields) for e in fleet.recorder.events if e.kind == "engine_updated" and e.subject == "e1")
        return waited, [e.version for e in fleet.engines], told

    waited, versions, told = loop.run(main())
    assert LOAD_S <= waited < LOAD_S + 5.0, "not the 240 s that an engine may take"
    assert versions == [1, 2]
    assert (told["reason"], told["skipped"]) == ("needed", 1)
