"""What happens to engines and trajectories when something around them breaks, on the virtual loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rollart.control.domain import Domain
from rollart.control.trajectory import FreeRunning, TrajectoryAborted, TrajectoryRunner, TrajectoryState, WaitLimits
from rollart.errors import EngineError, NoPlace, PartDied
from rollart.leases import Leases
from rollart.ledger.intervals import EngineShares, ResourceClock
from rollart.model import (
    AbortReason,
    Completion,
    EngineId,
    FinishReason,
    GenerateRequest,
    GroupId,
    Observation,
    Purpose,
    Sampling,
    TrajectoryId,
    VersionSpan,
    WeightsRef,
)
from rollart.ports import Environment
from rollart.serving.engine_registry import GatewayLimits
from rollart.serving.gateway import Gateway
from rollart.sim import loop
from rollart.supervise.engines import NO_NODE, EngineSupervisor
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.parts import WordTokenizer

SAMPLING = Sampling(max_tokens=1)


class FakeEngine:
    """Answers with one token of its version. `silent` makes every call wait for ever; `load_s` is a weight update's."""

    def __init__(self, name: str, version: int = 0, *, load_s: float = 0.0) -> None:
        self.id = EngineId(name)
        self.version = version
        self.load_s = load_s
        self.silent = False
        self.dead = False
        self.released: list[str] = []

    async def _answers(self) -> None:
        if self.dead:
            raise EngineError(f"{self.id}: connection refused", retryable=True)
        if self.silent:
            await asyncio.get_running_loop().create_future()

    async def generate(self, request: GenerateRequest) -> Completion:
        await self._answers()
        return Completion((1,), (-0.5,), (VersionSpan(self.version, 0, 1),), FinishReason.STOP)

    async def abort(self, request_ids: object) -> None:
        return None

    async def release(self, session: str) -> None:
        await self._answers()
        self.released.append(session)

    async def pause(self, mode: object) -> None:
        await self._answers()

    async def resume(self) -> None:
        await self._answers()

    async def update_weights(self, weights: WeightsRef) -> None:
        await self._answers()
        await asyncio.sleep(self.load_s)
        self.version = weights.version

    async def stats(self) -> Any:
        raise NotImplementedError

    async def healthy(self) -> bool:
        await self._answers()
        return True


class FakePart:
    """An engine's process: `end` is its death, told `reap_s` after it; each start takes `start_s`."""

    def __init__(self, make: Callable[[WeightsRef], FakeEngine], *, start_s: float = 5.0, reap_s: float = 0.01) -> None:
        self.id = EngineId("engine-0")
        self._make = make
        self._start_s = start_s
        self._reap_s = reap_s
        self._ended = asyncio.Event()
        self.engines: list[FakeEngine] = []

    async def start(self, weights: WeightsRef) -> FakeEngine:
        await asyncio.sleep(self._start_s)
        self._ended = asyncio.Event()
        self.engines.append(self._make(weights))
        return self.engines[-1]

    async def wait(self) -> str:
        await self._ended.wait()
        await asyncio.sleep(self._reap_s)
        return "its process was killed by SIGKILL"

    def end(self) -> None:
        self.engines[-1].dead = True
        self._ended.set()


class Fleet:
    """A gateway, a supervisor and what they wrote."""

    def __init__(self, limits: GatewayLimits | None = None) -> None:
        now = asyncio.get_running_loop().time
        self.recorder = MemoryRecorder()
        self.leases = Leases(self.recorder)
        self.suspected: list[str] = []
        self.current = WeightsRef(0, "v0")
        self.gateway = Gateway(
            self.leases, limits=limits or GatewayLimits(), version=0, on_suspect=self._suspect, recorder=self.recorder
        )
        self.shares = {
            EngineId(f"engine-{n}"): EngineShares(
                ResourceClock(role="engine", resource=f"engine-{n}", recorder=self.recorder, clock=now), clock=now
            )
            for n in range(2)
        }
        self.supervisor = EngineSupervisor(
            self.gateway, self.leases, self.recorder, shares=self.shares, weights=lambda: self.current, start_s=60.0
        )

    def join(self, engine: FakeEngine) -> None:
        self.gateway.join(engine, version=engine.version, shares=self.shares[engine.id])  # type: ignore[arg-type]

    async def publish(self, version: int) -> None:
        self.current = WeightsRef(version, f"v{version}")
        await self.gateway.update(self.current, lambda _: None)

    async def ask(self, session: str = "s") -> Completion:
        return await self.gateway.generate(session, (1, 2), SAMPLING, spend=lambda _: None)

    def causes(self) -> list[object]:
        return [e.fields["cause"] for e in self.recorder.events if e.kind == "engine_lost"]

    def _suspect(self, engine: EngineId) -> None:
        self.suspected.append(engine)
        self.supervisor.suspect(engine)


def virtual(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    loop.run(main())


async def supervised(fleet: Fleet, part: FakePart, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    engine = await fleet.supervisor.bring_up(part)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(fleet.supervisor.keep(engine))
        await body()
        watch.cancel()


def test_an_engine_that_joins_during_an_update_is_brought_to_the_version() -> None:
    """It loaded the old weights while the other loaded the new ones: nobody else would ever tell it."""

    async def main() -> None:
        fleet = Fleet()
        part = FakePart(lambda w: FakeEngine("engine-0", w.version))

        async def body() -> None:
            fleet.join(FakeEngine("engine-1", load_s=30.0))
            part.end()
            await asyncio.sleep(1.0)
            assert fleet.causes() == ["its process was killed by SIGKILL"]
            slow = asyncio.timeout(100.0)
            async with slow, asyncio.TaskGroup() as tasks:
                update = tasks.create_task(fleet.gateway.update(WeightsRef(1, "v1"), lambda v: _set(fleet, v)))
                await asyncio.sleep(15.0)
                assert len(part.engines) == 2
                assert part.engines[1].version == 0
                await update
            await asyncio.sleep(1.0)
            assert part.engines[1].version == 1
            assert fleet.gateway.trust(EngineId("engine-0"))
            assert fleet.gateway.trust(EngineId("engine-1"))

        await supervised(fleet, part, body)

    virtual(main)


def test_the_death_that_broke_a_connection_is_the_cause() -> None:
    async def main() -> None:
        fleet = Fleet()
        part = FakePart(lambda w: FakeEngine("engine-0", w.version))

        async def body() -> None:
            part.end()
            assert (await fleet.ask()).token_ids == (1,)
            assert fleet.causes() == ["its process was killed by SIGKILL"]

        await supervised(fleet, part, body)

    virtual(main)


def test_a_turn_waits_for_a_restart_however_short_a_generation_may_be() -> None:
    async def main() -> None:
        fleet = Fleet(GatewayLimits(generate_s=2.0, engine_s=60.0))
        part = FakePart(lambda w: FakeEngine("engine-0", w.version), start_s=20.0)

        async def body() -> None:
            part.engines[0].silent = True
            assert (await fleet.ask()).token_ids == (1,)
            assert fleet.causes() == ["it stopped answering"]
            assert len(part.engines) == 2

        await supervised(fleet, part, body)

    virtual(main)


def test_a_suspicion_that_is_wrong_costs_no_restart() -> None:
    async def main() -> None:
        fleet = Fleet()
        part = FakePart(lambda w: FakeEngine("engine-0", w.version))

        async def body() -> None:
            fleet.gateway.lose(part.id)
            fleet.supervisor.suspect(part.id)
            assert (await fleet.ask()).token_ids == (1,)
            assert len(part.engines) == 1
            assert fleet.causes() == []

        await supervised(fleet, part, body)

    virtual(main)


class World:
    def __init__(self, *, text: str = "a b", close_s: float = 0.0) -> None:
        self._text = text
        self._close_s = close_s

    async def reset(self, seed: int) -> Observation:
        return Observation(self._text)

    async def step(self, action: str) -> Any:
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        await asyncio.sleep(self._close_s)


def runner_of(fleet: Fleet, **limits: Any) -> TrajectoryRunner:
    return TrajectoryRunner(
        fleet.gateway,
        WordTokenizer(),
        fleet.leases,
        limits=WaitLimits(**limits),
        stale=lambda _: False,
        barrier=FreeRunning(),
    )


def live(environment: Callable[[], Environment]) -> TrajectoryState:
    domain = Domain("d", environment, quota=1, group_size=1, max_turns=2, max_tokens=4)
    return TrajectoryState(TrajectoryId("d-0.0"), GroupId("d-0"), domain, 0, Purpose.TRAIN, 0, 0.0)


def test_a_prompt_that_fills_the_context_says_so() -> None:
    async def main() -> None:
        fleet = Fleet()
        fleet.join(FakeEngine("engine-0"))
        with pytest.raises(
            TrajectoryAborted, match=r"prompt of \d+ tokens fills the context of 2 \(model.context\)"
        ) as aborted:
            await runner_of(fleet, context_tokens=2).run(live(lambda: World(text="a b c d")))
        assert aborted.value.reason is AbortReason.INFRA_FAULT

    virtual(main)


def test_an_observation_of_many_megabytes_is_not_encoded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    whole = WordTokenizer.encode

    def encode(tokenizer: WordTokenizer, text: str) -> tuple[int, ...]:
        encoded.append(len(text))
        return whole(tokenizer, text)

    async def main() -> None:
        fleet = Fleet()
        fleet.join(FakeEngine("engine-0"))
        with pytest.raises(TrajectoryAborted, match=r"fills the context of 20 \(model.context\)"):
            await runner_of(fleet, context_tokens=20).run(live(lambda: World(text="word " * 200_000)))

    monkeypatch.setattr(WordTokenizer, "encode", encode)
    virtual(main)
    assert sum(encoded) < 1000


def test_an_environment_that_cannot_be_made_is_a_fault_of_infrastructure() -> None:
    def make() -> Environment:
        raise RuntimeError("no licence left")

    async def main() -> None:
        with pytest.raises(TrajectoryAborted, match="no licence left") as aborted:
            await runner_of(Fleet()).run(live(make))
        assert aborted.value.reason is AbortReason.INFRA_FAULT

    virtual(main)


def test_a_shutdown_waits_seconds_for_an_environment_that_does_not_close() -> None:
    """And its engine is told first: a close that hangs holds no KV."""

    async def main() -> None:
        fleet = Fleet()
        engine = FakeEngine("engine-0")
        fleet.join(engine)
        now = asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as tasks:
            runner = runner_of(fleet, env_step_s=1000.0, env_close_s=5.0)
            task = tasks.create_task(runner.run(live(lambda: World(close_s=10_000.0))))
            await asyncio.sleep(100.0)
            task.cancel()
            await asyncio.sleep(1.0)
            assert engine.released == ["d-0.0"]
        assert now() == pytest.approx(105.0)

    virtual(main)


def _set(fleet: Fleet, version: int) -> None:
    fleet.current = WeightsRef(version, f"v{version}")


def test_an_engine_joins_although_versions_move_faster_than_it_starts() -> None:
    """It starts once, with the version of then, and catches up with the current one before it takes a turn."""

    async def main() -> None:
        fleet = Fleet()
        part = FakePart(lambda w: FakeEngine("engine-0", w.version), start_s=3.0)

        async def body() -> None:
            part.end()
            for version in range(1, 9):
                await asyncio.sleep(2.0)
                await fleet.publish(version)
            assert len(part.engines) == 2
            assert part.engines[1].version == 8
            assert (await fleet.ask()).spans[0].version == 8
            assert fleet.supervisor.versions_in_use() == ()

        await supervised(fleet, part, body)

    virtual(main)


def test_a_slow_turn_does_not_take_a_healthy_engine_out() -> None:
    async def main() -> None:
        fleet = Fleet(GatewayLimits(generate_s=2.0))
        part = FakePart(lambda w: FakeEngine("engine-0", w.version))

        async def body() -> None:
            engine = part.engines[0]
            asked = engine.generate

            async def slow_once(request: GenerateRequest) -> Completion:
                engine.generate = asked  # type: ignore[method-assign]
                await asyncio.sleep(60.0)
                return await asked(request)

            engine.generate = slow_once  # type: ignore[method-assign]
            assert (await fleet.ask()).token_ids == (1,)
            assert fleet.causes() == []
            assert len(part.engines) == 1

        await supervised(fleet, part, body)

    virtual(main)


class Doomed(FakePart):
    """Starts once and never again."""

    async def start(self, weights: WeightsRef) -> FakeEngine:
        if self.engines:
            raise PartDied(self.id, "no such device")
        return await super().start(weights)


def test_an_engine_lost_past_its_restarts_is_given_up_while_another_serves() -> None:
    async def main() -> None:
        fleet = Fleet()
        gone: list[tuple[str, str]] = []
        fleet.supervisor.on_gone = lambda engine, cause: gone.append((engine, cause))
        part = Doomed(lambda w: FakeEngine("engine-0", w.version))
        engine = await fleet.supervisor.bring_up(part)  # type: ignore[arg-type]
        fleet.join(FakeEngine("engine-1"))
        assert (await fleet.ask()).token_ids == (1,)
        part.end()
        await fleet.supervisor.keep(engine)
        assert (await fleet.ask()).token_ids == (1,), "its session goes on elsewhere"
        (event,) = [e for e in fleet.recorder.events if e.kind == "engine_given_up"]
        assert event.subject == "engine-0"
        assert gone == [("engine-0", "engine-0: no such device")]
        assert [load.engines for load in fleet.gateway.load().values()] == [1]
        await fleet.gateway.forget("s")

    virtual(main)


def test_the_last_engine_is_not_given_up() -> None:
    async def main() -> None:
        fleet = Fleet()
        part = Doomed(lambda w: FakeEngine("engine-0", w.version))
        engine = await fleet.supervisor.bring_up(part)  # type: ignore[arg-type]
        part.end()
        with pytest.raises(PartDied, match="after 5 restarts"):
            await fleet.supervisor.keep(engine)

    virtual(main)


class Homeless(FakePart):
    """Its node is gone: it finds a place again when there is one."""

    place: bool = True

    async def start(self, weights: WeightsRef) -> FakeEngine:
        if not self.place:
            raise NoPlace(self.id, "no node could ever hold it")
        return await super().start(weights)


def test_a_run_without_an_engine_waits_for_a_node() -> None:
    async def main() -> None:
        fleet = Fleet()
        fleet.supervisor.patience_s = 600.0
        part = Homeless(lambda w: FakeEngine("engine-0", w.version))
        engine = await fleet.supervisor.bring_up(part)  # type: ignore[arg-type]
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(fleet.supervisor.keep(engine))
            part.place = False
            part.end()
            turn = tasks.create_task(fleet.ask())
            await asyncio.sleep(100.0)
            before = fleet.supervisor.waited
            await asyncio.sleep(10.0)
            assert fleet.supervisor.waited > before, "the watchdog sees that it is waited for"
            part.place = True
            assert (await turn).token_ids == (1,)
            watch.cancel()
        (said,) = [e for e in fleet.recorder.events if e.kind == "no_engine_left"]
        assert (said.subject, said.fields["wait_s"]) == ("engine-0", 600.0)
        assert "no node could ever hold it" in str(said.fields["cause"])
        lost = [i for i in fleet.recorder.intervals if i.cause == NO_NODE]
        assert sum(i.t1 - i.t0 for i in lost) > 80.0
        await fleet.gateway.forget("s")

    virtual(main)


def test_a_run_without_an_engine_waits_no_longer_than_it_may() -> None:
    async def main() -> None:
        fleet = Fleet()
        fleet.supervisor.patience_s = 60.0
        part = Homeless(lambda w: FakeEngine("engine-0", w.version))
        engine = await fleet.supervisor.bring_up(part)  # type: ignore[arg-type]
        part.place = False
        part.end()
        began = asyncio.get_running_loop().time()
        with pytest.raises(PartDied, match=r"no engine is left, and no node came for one within 60 s.*--resume"):
            await fleet.supervisor.keep(engine)
        assert 60.0 <= asyncio.get_running_loop().time() - began <= 70.0

    virtual(main)


def test_a_run_without_an_engine_waits_for_hours_where_it_may() -> None:
    async def main() -> None:
        fleet = Fleet()
        fleet.supervisor.patience_s = 7200.0
        part = Homeless(lambda w: FakeEngine("engine-0", w.version))
        engine = await fleet.supervisor.bring_up(part)  # type: ignore[arg-type]
        part.place = False
        part.end()
        with pytest.raises(PartDied, match="no node came for one within 7200 s"):
            await fleet.supervisor.keep(engine)

    virtual(main)


class Reluctant(FakePart):
    """Ends in its first `fails` starts."""

    def __init__(self, name: str, fails: int) -> None:
        super().__init__(lambda w: FakeEngine(name, w.version))
        self.id, self.tries, self._fails = EngineId(name), 0, fails

    async def start(self, weights: WeightsRef) -> FakeEngine:
        self.tries += 1
        if self.tries <= self._fails:
            raise PartDied(self.id, "ended with status 1 before it was ready: no memory", remedy="see its log")
        return await super().start(weights)


def test_a_first_start_is_tried_again() -> None:
    async def main() -> None:
        fleet, part = Fleet(), Reluctant("engine-0", fails=2)
        await fleet.supervisor.begin([part])  # type: ignore[list-item]
        assert (part.tries, (await fleet.ask()).token_ids) == (3, (1,))
        assert [str(cause).partition(" (")[2] for cause in fleet.causes()] == ["start 1 of 3)", "start 2 of 3)"]

    virtual(main)


def test_an_engine_that_never_starts_ends_the_run_with_its_last_line_unless_another_serves() -> None:
    async def main() -> None:
        fleet, dead, other = Fleet(), Reluctant("engine-0", fails=9), Reluctant("engine-1", fails=0)
        with pytest.raises(PartDied, match=r"^engine-0: ended with status 1 .*: no memory, 3 starts in a row"):
            await fleet.supervisor.begin([dead])  # type: ignore[list-item]
        assert dead.tries == 3
        fleet = Fleet()
        await fleet.supervisor.begin([dead, other])  # type: ignore[list-item]
        assert (await fleet.ask()).token_ids == (1,)
        assert [e.subject for e in fleet.recorder.events if e.kind == "engine_given_up"] == ["engine-0"]
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(fleet.supervisor.run([dead, other]))  # type: ignore[list-item]
            await asyncio.sleep(100.0)
            assert dead.tries == 6, "nobody looks after one that was given up"
            running.cancel()

    virtual(main)
