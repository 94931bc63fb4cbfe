"""Engines that follow a version one by one: alpha is hard, an engine always serves, no needless interruptions."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.model import Completion, GenerateRequest, PauseMode, WeightsRef
from rollart.sim import loop
from rollart.strategies.rolling_update import Delayed, OnDivergence, Staggered, UpdatePolicy, VersionProbe
from rollart.testing.parts import SimulatedEngine
from rollart.testing.run import SimulatedRun as World
from rollart.testing.run import make_simulated_run

POLICIES: dict[str, Callable[[], UpdatePolicy]] = {
    "delayed": lambda: Delayed(4.0),
    "patient": lambda: Delayed(1e6),
    "staggered": lambda: Staggered(0.3),
    "half": lambda: Staggered(0.5),
    "near": lambda: OnDivergence(VersionProbe(-1, {}), 0.0015),
    "far": lambda: OnDivergence(VersionProbe(-1, {}), 1.0),
}


@dataclass
class Seen:
    """Requests to engines, checked when they are made."""

    world: World
    alpha: int
    judges: bool
    began: dict[str, int] = field(default_factory=dict)
    """Version of each trajectory's first token."""
    lagged: int = 0
    paused: list[tuple[str, int, bool]] = field(default_factory=list)
    """Engine, requests under way, and whether another serves."""

    def watch(self, engine: SimulatedEngine) -> None:
        generate, pause = engine.generate, engine.pause

        async def generated(request: GenerateRequest) -> Completion:
            current = self.world.control.gateway.version
            assert current - engine.version <= self.alpha, "no turn begins on an engine past alpha"
            assert request.cache_salt == f"v{engine.version}"
            assert self.began.get(request.session, 0) <= engine.version, "nor on one older than its first token"
            self.lagged += engine.version < current
            done = await generate(request)
            if done.spans:
                self.began.setdefault(request.session, done.spans[0].version)
            return done

        async def paused(mode: PauseMode) -> None:
            version = self.world.control.gateway.version
            members = self.world.control.gateway.registry.members.values()
            serves = any(m.serves and version - m.version <= self.alpha for m in members)
            self.paused.append((engine.id, engine.running, serves))
            await pause(mode)

        engine.generate, engine.pause = generated, paused  # type: ignore[method-assign]


@st.composite
def worlds(draw: st.DrawFn, policies: tuple[str, ...] = tuple(POLICIES)) -> tuple[World, Seen]:
    schedule = draw(st.sampled_from(("rollart", "areal", "roll_flash")))
    groups, size = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    alpha = draw(st.integers(1, 3))
    load = draw(st.sampled_from([0.1, 2.0, 10.0]))
    world = make_simulated_run(
        quotas={"a": (groups * size, size)},
        alpha=alpha,
        steps=draw(st.integers(2, 6)),
        engines=draw(st.integers(2, 5)),
        turns=draw(st.integers(1, 4)),
        tokens=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 10_000)),
        engine_s=lambda r: r.expovariate(1.0),
        load_s=lambda r: load * r.expovariate(1.0),
        env_s=lambda r: r.lognormvariate(0.0, 1.5),
        train_s=lambda r: r.expovariate(1.0),
        schedule=schedule,
        updates=POLICIES[draw(st.sampled_from(policies))](),
        overlap=draw(st.booleans()),
    )
    world.trainer.drift = 0.001
    world.trainer.streams = draw(st.booleans())
    seen = Seen(world, alpha, schedule == "rollart")
    for engine in world.engines:
        seen.watch(engine)
    return world, seen


def sound(world: World) -> None:
    assert len(world.trainer.batches) == world.steps
    trained = Counter(s.id for _, batch in world.trainer.batches for s in batch)
    assert all(n == 1 for n in trained.values()), "I6"
    for version, batch in world.trainer.batches:
        assert all(n == world.domains[0].group_size for n in Counter(s.group for s in batch).values()), "I6"
        for sample in batch:
            acts = [i for i, m in enumerate(sample.loss_mask) if m]
            assert sample.versions[acts[0]] == sample.v0, "I1"
            assert all(sample.v0 <= sample.versions[i] <= world.steps for i in acts), "I1"
            assert version - sample.v0 <= world.alpha or world.schedule == "areal", "I3"
    assert world.published == list(range(1, world.steps + 1))
    assert sum(world.control.scheduler.admission.slots.outstanding.values()) == 0
    assert not world.leases.open


@settings(max_examples=25, deadline=None)
@given(worlds(), st.integers(0, 2**32))
def test_alpha_is_hard_and_everything_is_trained_once(made: tuple[World, Seen], fuzz: int) -> None:
    world, seen = made
    loop.run(world.run(), seed=fuzz)
    sound(world)
    if isinstance(world.updates, Staggered):
        assert all(serves for _, _, serves in seen.paused), "an engine serves while others load"


@settings(max_examples=23, deadline=None)
@given(worlds(), st.integers(0, 2**32), st.lists(st.tuples(st.floats(0, 40), st.integers(0, 4)), max_size=4))
def test_engines_that_die_and_come_back_join_with_what_is_current(
    made: tuple[World, Seen], fuzz: int, deaths: list[tuple[float, int]]
) -> None:
    world, _ = made

    def die(engine: SimulatedEngine) -> None:
        engine.fail = True

    async def main() -> None:
        for at, which in deaths:
            asyncio.get_running_loop().call_later(at, die, world.engines[which % len(world.engines)])
        await world.run()

    loop.run(main(), seed=fuzz)
    sound(world)


def reasons(world: World) -> Counter[str]:
    events = world.recorder.events  # type: ignore[attr-defined]
    return Counter(str(e.fields["reason"]) for e in events if e.kind == "engine_updated")


@pytest.mark.parametrize("seed", range(4))
def test_a_delayed_update_interrupts_nothing_that_may_end(seed: int) -> None:
    world = make_simulated_run(
        quotas={"a": (8, 2)},
        alpha=2,
        steps=8,
        engines=3,
        turns=3,
        seed=seed,
        engine_s=lambda r: r.expovariate(1.0),
        load_s=lambda r: 0.3,
        env_s=lambda r: r.lognormvariate(0.0, 1.0),
        train_s=lambda r: 0.5,
        updates=Delayed(1e6),
    )
    seen = Seen(world, 2, judges=True)
    for engine in world.engines:
        seen.watch(engine)
    loop.run(world.run(), seed=seed)
    sound(world)
    assert reasons(world)["idle"] > 0
    assert seen.lagged > 0, "turns went on under the weights that their trajectories began with"
    updated = [e for e in world.recorder.events if e.kind == "engine_updated"]  # type: ignore[attr-defined]
    waiting = {e.id: [running for name, running, _ in seen.paused if name == e.id] for e in world.engines}
    for event in updated:
        running = waiting[event.subject].pop(0)
        assert running == 0 or event.fields["reason"] == "alpha", "only trajectories past alpha are interrupted"


def test_an_update_is_put_off_no_longer_than_that() -> None:
    world = make_simulated_run(
        quotas={"a": (8, 2)},
        alpha=3,
        steps=6,
        engines=2,
        turns=6,
        engine_s=lambda r: r.expovariate(0.5),
        env_s=lambda r: r.expovariate(0.5),
        train_s=lambda r: 0.5,
        updates=Delayed(3.0),
    )
    published: list[float] = []

    class Published(list[int]):
        def append(self, version: int) -> None:
            published.append(asyncio.get_running_loop().time())
            super().append(version)

    world.published = Published()
    loop.run(world.run(), seed=1)
    sound(world)
    waited = [e for e in world.recorder.events if e.fields.get("reason") == "waited"]  # type: ignore[attr-defined]
    assert waited
    for event in waited:
        assert event.t == pytest.approx(published[int(event.fields["version"]) - 1] + 3.0)  # type: ignore[arg-type]


@pytest.mark.slow
def test_staggered_updates_keep_somebody_serving_where_one_of_all_stops_everybody() -> None:
    """Loading takes 5 s. All at once, no turn begins meanwhile; staggered, turns begin all the time."""
    gaps = {}
    for name, updates in (("all", None), ("staggered", Staggered(0.25))):
        world = make_simulated_run(
            quotas={"a": (16, 1)},
            alpha=2,
            steps=6,
            engines=4,
            turns=4,
            engine_s=lambda r: 0.2 + r.random() / 10,
            env_s=lambda r: 0.2 + r.random() / 10,
            load_s=lambda r: 5.0,
            train_s=lambda r: 4.0,
            updates=updates,
        )
        times: list[float] = []
        for engine in world.engines:

            def watched(request: GenerateRequest, generate=engine.generate, times=times) -> object:  # type: ignore[no-untyped-def]
                times.append(asyncio.get_running_loop().time())
                return generate(request)

            engine.generate = watched  # type: ignore[method-assign, assignment]
        loop.run(world.run(), seed=3)
        sound(world)
        loads = [i for i in world.recorder.intervals if i.state == "sync" and i.role == "engine"]  # type: ignore[attr-defined]
        gaps[name] = sum(any(i.t0 < t < i.t1 for t in times) for i in loads) / len(loads)
    assert gaps["all"] == 0
    assert gaps["staggered"] > 0.5


def test_the_end_of_the_run_needs_no_engine_to_be_current() -> None:
    """The last versions may never reach every engine: no trajectory needs them."""
    world = make_simulated_run(
        alpha=2, steps=3, engines=3, load_s=lambda r: 1e4, updates=Staggered(0.3), train_s=lambda r: 1.0
    )
    rng = random.Random(1)
    world.limits = type(world.limits)(sync_s=1e6)
    loop.run(world.run(), seed=rng.randrange(100))
    assert len(world.trainer.batches) == 3


def loads(alpha: int, threshold: float | None, steps: int = 12) -> int:
    """Loads of weights by all three engines, of versions 1.00e-3 nats apart."""
    updates = None if threshold is None else OnDivergence(VersionProbe(-1, {}), threshold)
    world = make_simulated_run(
        quotas={"a": (8, 2)},
        alpha=alpha,
        steps=steps,
        engines=3,
        turns=2,
        engine_s=lambda r: r.expovariate(2.0),
        env_s=lambda r: r.expovariate(2.0),
        train_s=lambda r: 0.5,
        updates=updates,
    )
    world.trainer.drift = 0.001
    count = 0
    for engine in world.engines:

        def counted(weights: WeightsRef, update=engine.update_weights) -> object:  # type: ignore[no-untyped-def]
            nonlocal count
            count += 1
            return update(weights)

        engine.update_weights = counted  # type: ignore[method-assign, assignment]
    loop.run(world.run(), seed=4)
    sound(world)
    return count


def test_weights_that_are_close_are_not_sent_and_alpha_still_bounds() -> None:
    every = loads(3, None)
    assert every == 3 * 12
    by_threshold = [loads(3, threshold) for threshold in (0.0, 0.0015, 0.0025, 1.0)]
    assert by_threshold[0] >= 0.9 * every, "nothing is close enough"
    assert by_threshold[0] > by_threshold[1] > by_threshold[2], "the further they may be, the fewer"
    assert by_threshold[-1] <= by_threshold[2]
    assert by_threshold[-1] >= every / 4, "alpha asks for them all the same"
    assert loads(1, 1.0) == pytest.approx(every, rel=0.1), "at alpha 1 every version is needed"
