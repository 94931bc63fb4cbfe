"""Update policies under random publishes, traffic and failures: alpha is hard, an engine serves, all engines update."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.strategies.rolling_update import (
    AllAtOnce,
    Delayed,
    EngineState,
    OnDivergence,
    Staggered,
    UpdatePlan,
    UpdatePolicy,
    UpdateReason,
    VersionProbe,
    may_publish,
)


def may_serve(engine: EngineState, *, v0: int | None, version: int, alpha: int) -> bool:
    """True if a turn of a trajectory that began under `v0` (None: it begins here) may go to the engine.

    Where engines lag, an engine older than v0 would generate tokens older than v0, and n - v0 would no longer bound
    their age. So versions never decrease along a trajectory.
    """
    fresh = version - engine.version <= alpha
    return engine.healthy and not engine.updating and fresh and (v0 is None or engine.version >= v0)


def bytes_on_wire(plan: UpdatePlan, *, engines: int, weight_bytes: int, probe_bytes: int) -> int:
    """Bytes that the plan sends: the probe to every engine, the weights to the updated ones."""
    return engines * probe_bytes + len(plan.update) * weight_bytes


@dataclass
class Fleet:
    """Engines, their trajectories and a publisher. Executes a plan and checks it before anything is generated."""

    alpha: int
    rng: random.Random
    make: Callable[[int], UpdatePolicy]
    engines: dict[str, EngineState]
    version: int = 0
    loading: dict[str, int] = field(default_factory=dict)
    trajectories: dict[str, list[int]] = field(default_factory=dict)
    """v0 of the trajectories on each engine."""
    served: list[int] = field(default_factory=list)
    bytes: int = 0

    def views(self) -> list[EngineState]:
        return list(self.engines.values())

    def serves(self, engine: EngineState) -> bool:
        return may_serve(engine, v0=None, version=self.version, alpha=self.alpha)

    def plan(self) -> UpdatePlan:
        policy = self.make(self.version)
        plan = policy.plan(self.views(), version=self.version, alpha=self.alpha)
        for name in plan.update:
            self.loading[name] = self.version
            self.engines[name] = replace(self.engines[name], updating=True)
        self.bytes += bytes_on_wire(plan, engines=0, weight_bytes=100, probe_bytes=1)
        self.served.append(sum(self.serves(engine) for engine in self.views()))
        return plan

    def generate(self, plan: UpdatePlan) -> None:
        for name, engine in self.engines.items():
            if self.serves(engine):
                for v0 in self.trajectories[name]:
                    assert self.version - v0 <= self.alpha, "generated for a stale trajectory"
                if name not in plan.drain and self.rng.random() < 0.5:
                    self.trajectories[name].append(engine.version)
            if self.trajectories[name] and self.rng.random() < 0.3:
                self.trajectories[name].pop(0)
            self.engines[name] = replace(engine, busy=len(self.trajectories[name]), since_s=engine.since_s + 1.0)

    def publish(self) -> None:
        if may_publish(self.views(), version=self.version + 1, alpha=self.alpha):
            self.version += 1
            for name in self.trajectories:
                self.trajectories[name] = [v for v in self.trajectories[name] if self.version - v <= self.alpha]
                self.engines[name] = replace(self.engines[name], since_s=0.0)

    def loaded(self, name: str) -> None:
        self.engines[name] = replace(self.engines[name], version=self.loading.pop(name), updating=False)

    def step(self, publish: float) -> None:
        if self.rng.random() < publish:
            self.publish()
        for name in sorted(self.loading):
            if self.rng.random() < 0.4:
                self.loaded(name)
        self.generate(self.plan())


def fleet(make: Callable[[int], UpdatePolicy], alpha: int, engines: int, seed: int) -> Fleet:
    names = [f"e{i}" for i in range(engines)]
    states = {n: EngineState(n, 0) for n in names}
    return Fleet(alpha, random.Random(seed), make, states, trajectories={n: [] for n in names})


def probes(threshold: float, per_step: float = 1.0, reserve: int = 1) -> Callable[[int], UpdatePolicy]:
    def make(version: int) -> UpdatePolicy:
        far = {v: per_step * (version - v) for v in range(version)}
        return OnDivergence(VersionProbe(version, far), threshold, reserve)

    return make


POLICIES: dict[str, Callable[[int], UpdatePolicy]] = {
    "all_at_once": lambda _: AllAtOnce(),
    "delayed": lambda _: Delayed(4.0),
    "staggered": lambda _: Staggered(0.3),
    "on_divergence": probes(1.5),
}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(POLICIES)), st.integers(0, 4), st.integers(1, 6), st.integers(0, 2**32))
def test_alpha_is_hard_and_everybody_gets_there(name: str, alpha: int, engines: int, seed: int) -> None:
    alpha = max(alpha, 1) if name == "staggered" else alpha
    world = fleet(POLICIES[name], alpha, engines, seed)
    for _ in range(60):
        world.step(publish=0.3)
    if name == "staggered" and engines > 1:
        assert min(world.served) >= 1, "an engine always serves"
    for _ in range(60):
        world.step(publish=0.0)
    for engine in world.views():
        assert world.version - engine.version <= (max(alpha - 1, 0) if name == "on_divergence" else 0)
    world.publish()
    assert world.version > 0, "publishes are not held up for ever"


@given(st.integers(1, 12), st.floats(0.05, 1), st.integers(0, 2**32))
def test_staggered_updates_no_more_than_its_fraction_of_those_that_could_serve(
    engines: int, fraction: float, seed: int
) -> None:
    rng = random.Random(seed)
    states = [EngineState(f"e{i}", rng.randint(0, 5), rng.randint(0, 9), rng.random() < 0.9) for i in range(engines)]
    plan = Staggered(fraction).plan(states, version=5, alpha=2)
    able = {e.id for e in states if e.healthy and e.version >= 3}
    healthy = sum(e.healthy for e in states)
    taken = plan.update.keys() & able
    assert len(taken) <= max(int(fraction * healthy), 1)
    assert not able or healthy == 1 or able - taken, "an engine that can serve stays"
    assert {e.id for e in states if e.healthy and e.version < 3} <= plan.update.keys(), "the blocked lose nothing"
    turn = [(e.version, e.busy, e.id) for e in states if e.id in able - taken and e.version < 5]
    chosen = [(e.version, e.busy, e.id) for e in states if e.id in taken]
    assert not turn or not chosen or max(chosen) < min(turn), "oldest, then least busy, first"


def test_what_each_policy_does_after_a_publish() -> None:
    engines = [
        EngineState("a", 3, busy=2),
        *(EngineState(n, v, healthy=n != "d") for n, v in (("b", 3), ("c", 2), ("d", 2))),
    ]
    plan = AllAtOnce().plan(engines, version=4, alpha=1)
    assert plan.update == dict.fromkeys("abc", UpdateReason.NEW_VERSION)
    plan = Delayed(10.0).plan(engines, version=4, alpha=1)
    assert plan.update == {"b": UpdateReason.IDLE, "c": UpdateReason.ALPHA}
    assert plan.drain == {"a"}
    late = [replace(engines[0], since_s=10.0)]
    assert Delayed(10.0).plan(late, version=4, alpha=1).update == {"a": UpdateReason.WAITED}
    plan = Staggered(0.25).plan(engines, version=4, alpha=1)
    assert plan.update == {"b": UpdateReason.NEW_VERSION, "c": UpdateReason.ALPHA}
    probe = VersionProbe(4, {3: 0.001, 2: 0.02})
    plan = OnDivergence(probe, 0.01).plan(engines, version=4, alpha=3)
    assert plan.update == {"c": UpdateReason.DIVERGED}
    assert bytes_on_wire(plan, engines=4, weight_bytes=1000, probe_bytes=8) == 1032
    unknown = OnDivergence(VersionProbe(4, {}), 1.0).plan(engines, version=4, alpha=3)
    assert unknown.update["a"] is UpdateReason.DIVERGED, "an unmeasured version counts as far"


def test_bytes_on_the_wire_fall_as_the_threshold_rises() -> None:
    """AAPS as it stands sends every version to everybody and only then decides; a pull sends less, down to alpha's
    bound."""

    def sent(threshold: float, alpha: int = 4) -> float:
        world = fleet(probes(threshold), alpha, 4, seed=9)
        for _ in range(120):
            world.publish()
            world.plan()
            for name in sorted(world.loading):
                world.loaded(name)
            world.generate(world.plan())
        return world.bytes / (120 * 4 * 100)

    curve = [sent(t) for t in (0.0, 1.0, 2.0, 3.0, 99.0)]
    assert curve[0] == 1.0, "threshold 0: every version to every engine"
    assert curve == sorted(curve, reverse=True)
    assert curve[1:] == pytest.approx([1 / 2, 1 / 3, 1 / 4, 1 / 4]), "alpha asks for one version in four"
    assert sent(99.0, alpha=1) == 1.0, "with alpha 1 and a reserve of 1 there is nothing to save"


def test_versions_never_fall_along_a_trajectory() -> None:
    engine = EngineState("a", 3)
    assert may_serve(engine, v0=None, version=4, alpha=1)
    assert may_serve(engine, v0=3, version=4, alpha=1)
    assert not may_serve(engine, v0=4, version=4, alpha=1), "its tokens would be older than its v0"
    assert not may_serve(engine, v0=3, version=5, alpha=1)
    assert not may_serve(replace(engine, updating=True), v0=None, version=3, alpha=1)
    assert not may_serve(replace(engine, healthy=False), v0=None, version=3, alpha=1)


def test_an_engine_ahead_of_the_version_is_refused() -> None:
    engines = [EngineState("a", 5)]
    with pytest.raises(ValueError, match=r"engines \['a'\] are past version 4"):
        AllAtOnce().plan(engines, version=4, alpha=1)
