"""The contract of every `Fleet`, whatever its engines are: they join at the current version and leave without losing a
turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass

import pytest

from rollart.errors import RollartError
from rollart.fleet import EngineKind, EngineRole, FleetMove, FleetMoveKind
from rollart.ledger.intervals import RESOURCE_CLOSED, RESOURCE_OPENED
from rollart.model import Completion, EngineId, Sampling
from rollart.ports import Fleet, RunEvent
from rollart.serving.gateway import Gateway

__all__ = ["HERE", "THERE", "FleetContract", "FleetSubject", "Scenario"]

HERE = EngineKind("here", EngineRole.ENGINE, 1)
"""The kind of `engine-0`, which serves when a scenario begins."""

THERE = EngineKind("there", EngineRole.ENGINE, 1)
"""Another: its pool has two devices, both free."""

START = FleetMove(FleetMoveKind.START, "there", 1, 1, None, EngineRole.ENGINE)
DRAIN = FleetMove(FleetMoveKind.DRAIN, "there", 1, 1, EngineRole.ENGINE, None)


@dataclass
class FleetSubject:
    """A fleet over a gateway and supervision that run. `publish` moves all engines to the next version and, while they
    are paused, notifies its caller; in `broken` no engine starts; `kill` ends an engine's process."""

    fleet: Fleet
    gateway: Gateway
    events: Callable[[], list[RunEvent]]
    publish: Callable[[Callable[[], None]], Awaitable[None]]
    broken: Callable[[], contextlib.AbstractContextManager[None]]
    kill: Callable[[EngineId], Awaitable[None]]
    alive: Callable[[EngineId], Awaitable[bool]]

    async def ask(self, session: str) -> Completion:
        return await self.gateway.generate(session, (2, 3), Sampling(max_tokens=2), spend=lambda _: None)

    async def ask_all(self, sessions: int) -> set[int]:
        """A turn of each at a time; the versions that answered."""
        answers = await asyncio.gather(*(self.ask(f"s{i}") for i in range(sessions)))
        return {span.version for answer in answers for span in answer.spans}

    def sessions(self, engine: EngineId) -> int:
        return len(self.gateway.registry.members[engine].sessions)

    def of(self, kind: EngineKind) -> list[EngineId]:
        return [e for e, seat in self.gateway.seats().items() if seat.kind == kind]

    def event_subjects(self, kind: str) -> list[str]:
        return [e.subject for e in self.events() if e.kind == kind]

    def state(self) -> tuple[Mapping[EngineId, object], Mapping[str, int]]:
        """State that no failed move may change."""
        return dict(self.gateway.seats()), dict(self.fleet.free())

    async def started(self) -> EngineId:
        """A second engine."""
        before = set(self.of(THERE))
        await self.fleet.apply(START)
        (engine,) = set(self.of(THERE)) - before
        return engine

    async def until(self, what: Callable[[], bool]) -> None:
        async with asyncio.timeout(60.0):
            while not what():
                await asyncio.sleep(0.01)


Scenario = Callable[[FleetSubject], Awaitable[None]]


class FleetContract:
    """A subclass implements `run` for a scenario."""

    def run(self, scenario: Scenario) -> None:
        raise NotImplementedError

    def test_a_started_engine_serves_at_the_current_version(self) -> None:
        async def scenario(s: FleetSubject) -> None:
            await s.publish(lambda: None)
            free = s.fleet.free()["there"]
            engine = await s.started()
            assert engine != "engine-0"
            assert s.fleet.free()["there"] == free - 1
            assert engine in s.event_subjects(RESOURCE_OPENED), "it is billed"
            assert await s.ask_all(4) == {1}
            assert s.sessions(engine) == 2, "half of the trajectories live there"
            await s.publish(lambda: None)
            assert await s.ask_all(4) == {2}, "the publisher knows it"

        self.run(scenario)

    def test_a_started_engine_is_kept_alive(self) -> None:
        async def scenario(s: FleetSubject) -> None:
            engine = await s.started()
            await s.kill(engine)
            await s.until(lambda: s.event_subjects("engine_started").count(engine) == 2)
            assert s.event_subjects("engine_lost") == [engine]
            assert s.gateway.load()[THERE].healthy == 1

        self.run(scenario)

    def test_a_drained_engine_is_gone_and_no_turn_is_lost(self) -> None:
        async def scenario(s: FleetSubject) -> None:
            engine = await s.started()
            await s.ask_all(6)
            assert s.sessions(engine) == 3
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(s.ask(f"s{i}")) for i in range(6)]
                drained = tasks.create_task(s.fleet.apply(DRAIN))
            assert drained.done()
            assert all(len(task.result().token_ids) for task in asked)
            assert s.gateway.turns.served == 12, "each turn once"
            assert s.gateway.seats().keys() == {"engine-0"}
            assert s.fleet.free()["there"] == 2
            assert not await s.alive(engine)
            assert s.event_subjects("engine_drained") == [engine]
            assert engine in s.event_subjects(RESOURCE_CLOSED), "it is billed no more"
            assert s.event_subjects("engine_lost") == []
            assert await s.ask_all(6) == {0}, "its trajectories go on"
            assert s.sessions(EngineId("engine-0")) == 6

        self.run(scenario)

    def test_a_start_that_fails_leaves_nothing_behind(self) -> None:
        async def scenario(s: FleetSubject) -> None:
            before = s.state()
            with s.broken(), pytest.raises(RollartError, match="engine-1"):
                await s.fleet.apply(START)
            assert s.state() == before
            assert not await s.alive(EngineId("engine-1"))
            assert set(s.event_subjects(RESOURCE_OPENED)) - set(s.event_subjects(RESOURCE_CLOSED)) >= {"engine-0"}
            assert "engine-1" in s.event_subjects(RESOURCE_CLOSED)
            assert await s.ask_all(2) == {0}
            assert await s.started() == "engine-2", "no name is used twice"

        self.run(scenario)

    def test_a_start_without_devices_is_refused(self) -> None:
        async def scenario(s: FleetSubject) -> None:
            async with asyncio.TaskGroup() as tasks:  # started together, executed one after the other
                both = [tasks.create_task(s.fleet.apply(START)) for _ in range(2)]
            assert all(task.done() for task in both)
            assert s.fleet.free()["there"] == 0
            before = s.state()
            with pytest.raises(RollartError, match="free devices"):
                await s.fleet.apply(START)
            assert s.state() == before

        self.run(scenario)

    def test_the_last_engine_of_a_kind_may_go(self) -> None:
        async def scenario(s: FleetSubject) -> None:
            await s.started()
            await s.fleet.apply(DRAIN)
            assert THERE not in s.gateway.load()
            before = s.state()
            with pytest.raises(RollartError, match="none can be drained"):
                await s.fleet.apply(DRAIN)
            assert s.state() == before

        self.run(scenario)

    def test_moves_wait_for_a_weight_update(self) -> None:
        async def scenario(s: FleetSubject) -> None:
            engine = await s.started()
            seen: list[tuple[Mapping[EngineId, object], Mapping[str, int]]] = []
            stable: list[set[EngineId]] = []

            def look() -> None:
                seen.append(s.state())
                stable.append(s.gateway.stable())

            before = s.state()
            async with asyncio.TaskGroup() as tasks:
                published = tasks.create_task(s.publish(look))
                while not (s.gateway.moving.locked() or published.done()):  # an update may take a few ms
                    await asyncio.sleep(0.001)
                moves = [tasks.create_task(s.fleet.apply(m)) for m in (DRAIN, START)]
                await published
            assert all(move.done() for move in moves)
            assert seen == [before]
            assert stable == [{"engine-0", engine}], "nothing was drained while the weights moved"
            (other,) = s.of(THERE)
            assert other != engine
            assert await s.ask_all(4) == {1}

        self.run(scenario)

    def test_only_single_moves_of_engines(self) -> None:
        async def scenario(s: FleetSubject) -> None:
            before = s.state()
            flip = FleetMove(FleetMoveKind.FLIP, "here", 1, 1, EngineRole.ENGINE, EngineRole.DECODE)
            two = FleetMove(FleetMoveKind.START, "there", 1, 2, None, EngineRole.ENGINE)
            for move in (flip, two):
                with pytest.raises(RollartError, match="not a move of the fleet"):
                    await s.fleet.apply(move)
            assert s.state() == before

        self.run(scenario)


@contextlib.contextmanager
def setting(target: object, name: str, value: object) -> Iterator[None]:
    """An attribute has another value while the body runs."""
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)
