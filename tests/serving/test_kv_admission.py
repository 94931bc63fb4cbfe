"""Concurrency by KV memory, on the product's gateway over modelled engines with little of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.fleet import EnginePlacement
from rollart.leases import Leases
from rollart.ledger.intervals import EngineShares, ResourceClock
from rollart.model import Completion, EngineStats, Sampling, WeightsRef
from rollart.serving.engine_registry import GatewayLimits
from rollart.serving.gateway import Gateway
from rollart.serving.kv_admission import ConcurrencySettings
from rollart.settings.rollout import ConcurrencySpec
from rollart.sim import loop
from rollart.sim.engine import EngineLimits, ModelledEngine
from rollart.strategies.skew_aware import SkewAwareDispatcher
from rollart.testing.ledger import MemoryRecorder
from tests.sim.models import steps

PROMPT, NEW, OUTPUT = 400, 300, 60


@dataclass
class Drive:
    """Trajectories of `turns` turns with a wait of a second between them, all at once; engines hold `rooms` tokens."""

    rooms: tuple[int, ...]
    count: int
    concurrency: ConcurrencySettings | None
    turns: int = 6
    silent: bool = False
    """Engines do not say what fits."""
    ended: list[str] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    assignments: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)

    async def run(self, *, meddle: tuple[float, float] | None = None) -> float:
        now = asyncio.get_running_loop().time
        self.recorder = MemoryRecorder()
        kind = Silent if self.silent else ModelledEngine
        self.engines = [
            kind(f"e{n}", steps(), limits=EngineLimits(kv_tokens=room, watermark=0.0))
            for n, room in enumerate(self.rooms)
        ]
        self.gateway = Gateway(
            Leases(self.recorder),
            limits=GatewayLimits(generate_s=1e5, engine_s=50.0),
            version=0,
            on_suspect=lambda _: None,
            recorder=self.recorder,
            concurrency=self.concurrency,
        )
        for engine in self.engines:
            self.join(engine)
        async with asyncio.TaskGroup() as tasks:
            background = []
            if self.gateway.admission is not None:
                background.append(tasks.create_task(self.gateway.admission.run()))
                await asyncio.sleep(0.01)
            if meddle is not None:
                background.append(tasks.create_task(self.meddle(*meddle)))
            began = now()
            async with asyncio.TaskGroup() as work:
                for n in range(self.count):
                    work.create_task(self.trajectory(f"t{n}"))
            for task in background:
                task.cancel()
        return now() - began

    def join(self, engine: ModelledEngine) -> None:
        now = asyncio.get_running_loop().time
        clock = ResourceClock(role="engine", resource=engine.id, recorder=self.recorder, clock=now)
        shares = EngineShares(clock, clock=now)
        self.gateway.join(engine, version=self.gateway.version, shares=shares, seat=EnginePlacement("p", "H800"))

    async def meddle(self, update_at: float, lose_at: float) -> None:
        """New weights, and an engine that is lost and comes back."""
        await asyncio.sleep(update_at)
        await self.gateway.update(WeightsRef(1, ""), lambda _: None)
        await asyncio.sleep(lose_at)
        engine = self.engines[0]
        engine.fail = True
        self.gateway.lose(engine.id)
        await asyncio.sleep(5.0)
        engine.restart(self.gateway.version)
        self.join(engine)

    async def trajectory(self, name: str) -> None:
        length = PROMPT
        for turn in range(self.turns):
            completion = await self.gateway.generate(
                name, (length,), Sampling(OUTPUT), spend=lambda _: None, domain="d", length=length
            )
            assert completion.sampled == OUTPUT
            if not turn:
                self.begun.append(name)
            for member in self.gateway.registry.members.values():
                self.assignments[member.engine.id] += name in member.sessions and turn == 0
                self.most[member.engine.id] = max(self.most[member.engine.id], len(member.kv))
            length += OUTPUT + NEW
            await asyncio.sleep(1.0)
        await self.gateway.forget(name)
        self.ended.append(name)

    def computed(self) -> int:
        return sum(e.prompt_tokens - e.cached_tokens + e.recomputed_tokens for e in self.engines)


class Silent(ModelledEngine):
    """Says how full it is, and not of what."""

    async def stats(self) -> EngineStats:
        s = await super().stats()
        return EngineStats(
            s.running,
            s.waiting,
            s.prompt_tokens,
            s.generated_tokens,
            s.cached_tokens,
            s.prefill_seconds,
            s.decode_seconds,
            s.kv_used,
            s.preemptions,
        )


FINAL = PROMPT + 5 * (OUTPUT + NEW) + OUTPUT
ON = ConcurrencySettings(ConcurrencySpec(interval_s=1.0, settle_s=5.0), {"d": FINAL})


def test_prefixes_stay_where_memory_is_short() -> None:
    """Forty trajectories that end with 2,260 tokens in 20,000: together they would need 90,000."""
    free, bound = Drive((20_000,), 40, None), Drive((20_000,), 40, ON)
    loop.run(free.run())
    loop.run(bound.run())
    assert len(free.ended) == len(bound.ended) == 40
    needed = 40 * (PROMPT + 5 * (NEW + 1))  # the last token of an answer has no KV yet
    assert free.computed() > 2.5 * needed
    assert bound.computed() < 1.1 * needed


def test_who_came_first_begins_first() -> None:
    drive = Drive((6_000,), 12, ON, turns=2)
    loop.run(drive.run())
    waves = [int(name[1:]) for name in drive.begun]
    assert all(abs(at - n) <= 4 for at, n in enumerate(waves)), waves


def test_homes_follow_memory_over_engines_of_all_sizes() -> None:
    drive = Drive((8_000, 32_000), 28, ON)
    loop.run(drive.run())
    assert 3.0 <= drive.assignments["e1"] / drive.assignments["e0"] <= 5.5, drive.assignments


def test_preemptions_lower_the_limit_of_an_engine_that_does_not_say_what_fits() -> None:
    aimd = ConcurrencySpec(start=30, interval_s=1.0, settle_s=5.0)
    drive = Drive((12_000,), 60, ConcurrencySettings(aimd), silent=True)
    loop.run(drive.run())
    assert len(drive.ended) == 60
    lowered = [e for e in drive.recorder.events if e.kind == "concurrency_lowered"]
    assert lowered
    assert {e.fields["why"] for e in lowered} <= {"down_preempted", "down_full"}
    assert drive.gateway.admission is not None
    assert drive.gateway.admission.limits.limit("e0") < 30


def test_one_that_is_longer_than_the_limit_still_runs() -> None:
    """95 % of 2,300 is less than a trajectory ends with: it is alone then, and never refused."""
    drive = Drive((2_300,), 3, ON)
    loop.run(drive.run())
    assert len(drive.ended) == 3


def test_each_version_has_its_limits_in_the_ledger() -> None:
    drive = Drive((6_000, 6_000), 30, ON)
    loop.run(drive.run(meddle=(3.0, 2.0)))
    (event,) = [e for e in drive.recorder.events if e.kind == "concurrency"]
    limits = [float(event.fields[name] or 0) for name in ("least", "median", "most")]
    assert event.subject == "v1"
    assert 1 <= limits[0] <= limits[1] <= limits[2]
    assert event.fields["admitted"] != 0
    assert event.fields["waiting"] != 0


@settings(max_examples=25)
@given(
    st.lists(st.integers(2_300, 12_000), min_size=1, max_size=3),
    st.integers(1, 20),
    st.integers(1, 40),
    st.booleans(),
    st.tuples(st.floats(0.1, 10.0), st.floats(0.1, 10.0)),
    st.integers(0, 3),
)
def test_nobody_is_lost_or_starved(
    rooms: list[int], count: int, start: int, silent: bool, meddle: tuple[float, float], seed: int
) -> None:
    """Whatever fits, and while weights change and an engine is away: every trajectory ends, and what is held is given
    back. A wedge would be a deadlock, which the loop reports."""
    aimd = ConcurrencySpec(start=start, interval_s=1.0, settle_s=5.0)
    drive = Drive(tuple(rooms), count, ConcurrencySettings(aimd, {"d": FINAL}), turns=3, silent=silent)
    loop.run(drive.run(meddle=meddle), seed=seed)
    assert sorted(drive.ended) == sorted(f"t{n}" for n in range(count))
    for member in drive.gateway.registry.members.values():
        assert (len(member.kv), member.kv.total, member.kv.reserved, member.running) == (0, 0, 0, 0)
    admission = drive.gateway.admission
    assert admission is not None
    assert not admission.arrival_order


def test_who_gives_up_while_weights_change_is_forgotten() -> None:
    async def main() -> tuple[int, int]:
        drive = Drive((100_000,), 0, ON)
        await drive.run()
        moving = asyncio.create_task(drive.gateway.update(WeightsRef(1, ""), lambda _: None))
        drive.gateway.turns.gate.clear()
        waiting = asyncio.create_task(
            drive.gateway.generate("t", (PROMPT,), Sampling(OUTPUT), spend=lambda _: None, domain="d")
        )
        await asyncio.sleep(0.0)
        admission = drive.gateway.admission
        assert admission is not None
        before = len(admission.arrival_order)
        waiting.cancel()
        await asyncio.wait([waiting])
        await drive.gateway.forget("t")
        await moving
        return before, len(admission.arrival_order)

    assert loop.run(main()) == (1, 0)


def test_a_trajectory_admitted_as_weights_begin_to_change_does_not_queue_again() -> None:
    """In the queue it would wait behind longer trajectories for the memory that it holds itself."""

    async def main() -> bool:
        dispatcher = SkewAwareDispatcher()
        for _ in range(4):
            dispatcher.ranker.finished("short", "d", 10)
            dispatcher.ranker.finished("long", "d", 1000)
        one = ConcurrencySpec(start=1, least=1, most=1)
        drive = Drive((100_000,), 0, ConcurrencySettings(one, dispatch=lambda: dispatcher))
        await drive.run()
        turns = drive.gateway.turns

        def generate(prompt: str) -> asyncio.Task[Completion]:
            return asyncio.create_task(
                drive.gateway.generate(
                    prompt, (PROMPT,), Sampling(OUTPUT), spend=lambda _: None, domain="d", prompt=prompt
                )
            )

        first = generate("short")
        await asyncio.sleep(0.0)
        second = generate("long")
        await asyncio.sleep(0.0)
        turns.gate.clear()
        await asyncio.sleep(1.0)
        turns.gate.set()
        turns.notify()
        async with asyncio.timeout(100.0):
            await first
        waited = not second.done()
        await drive.gateway.forget("short")
        await second
        return waited

    assert loop.run(main())
