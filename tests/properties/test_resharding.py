"""Tensor parallelism that follows preemption, by the product's own fleet: bounded, undone where it fails, no wedge."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.fleet import EngineKind, EngineRole
from rollart.ledger.intervals import RESOURCE_CLOSED, RESOURCE_OPENED
from rollart.model import EngineStats, TrainReport, TrainSample
from rollart.serving.engine_registry import GatewayLimits
from rollart.sim import loop
from rollart.strategies.tp_change import ReshardSettings, TensorParallelRule
from rollart.testing.laws import find_tiling_errors
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.parts import SimulatedEngine, SimulatedSite, SimulatedTrainer
from rollart.testing.run import SimulatedRun, make_simulated_run

DEVICES = 4
RULE = TensorParallelRule((1, 2, 4), devices=4, quiet_steps=2)


class Pressed(SimulatedEngine):
    """Preempts at the configured rate; each preemption costs a second of prefill."""

    pressure = 0

    async def stats(self) -> EngineStats:
        found = await super().stats()
        n = Pressed.pressure
        return replace(found, prompt_tokens=10 * n, prefill_seconds=float(n), preemptions=n)


class Pressing(SimulatedTrainer):
    """Preemptions of a step are counted before it is published."""

    __slots__ = ("pressure",)
    pressure: Iterator[int]

    async def train(self, samples: Sequence[TrainSample], version: int) -> TrainReport:
        Pressed.pressure += next(self.pressure, 0)
        return await super().train(samples, version)


def world(
    seed: int, pressure: list[int], *, start_s: float = 0.3, horizon_s: float = 1e9, refuses: str = "", tp: int = 1
) -> tuple[SimulatedRun, SimulatedSite, MemoryRecorder]:
    """One pool of four devices; `pressure[i]` is every engine's preemptions during step i."""
    recorder = MemoryRecorder()
    Pressed.pressure = 0
    run = make_simulated_run(
        quotas={"a": (60, 2)},
        steps=len(pressure),
        turns=3,
        seed=seed,
        alpha=1,
        env_s=lambda r: r.expovariate(2.0),
        train_s=lambda r: 5 + r.expovariate(1.0),
        limits=GatewayLimits(generate_s=20.0, engine_s=200.0),
        max_attempts=50,
        recorder=recorder,
        journal=recorder,
        kinds=[EngineKind("p", EngineRole.ENGINE, tp)] * (DEVICES // tp),
        drain_s=5.0,
        reshard=ReshardSettings({"p": RULE}, horizon_s=horizon_s, restart_s=1.0, refuses=lambda _: refuses),
    )
    run.trainer = Pressing(run.trainer.seed, run.trainer.seconds)
    run.trainer.pressure = iter(pressure)
    site = run.site = SimulatedSite(
        {"p": DEVICES}, lambda name: Pressed(name, version=0, seed=seed), recorder, start_s=start_s
    )
    return run, site, recorder


def sizes(run: SimulatedRun) -> Counter[int]:
    return Counter(seat.tp for seat in run.control.gateway.seats().values())


def events(recorder: MemoryRecorder, kind: str) -> list[dict[str, object]]:
    return [dict(e.fields) for e in recorder.events if e.kind == kind]


def check(run: SimulatedRun, recorder: MemoryRecorder) -> None:
    trained = Counter(s.id for _, batch in run.trainer.batches for s in batch)
    assert set(trained.values()) == {1}
    assert run.published == list(range(1, run.steps + 1))
    assert not run.leases.open
    assert find_tiling_errors(recorder.intervals) == []
    held, by_name = 0.0, defaultdict(float)
    for event in recorder.events:
        if event.kind in (RESOURCE_OPENED, RESOURCE_CLOSED) and event.subject != "trainer":
            sign = 1 if event.kind == RESOURCE_OPENED else -1
            held += sign * float(event.fields["units"] or 0.0)
            by_name[event.subject] += sign
            assert 0 <= held <= DEVICES, "no device in two hands"
    assert set(by_name.values()) == {0}


def test_engines_double_under_pressure_and_halve_when_it_is_gone() -> None:
    run, _, recorder = world(0, [5, 50, 500, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    loop.run(run.run())
    check(run, recorder)
    changed = [(e["before"], e["after"]) for e in events(recorder, "parallelism_changed")]
    assert changed[0] == (1, 2)
    assert changed[-1][1] < changed[-1][0], "smaller again"
    assert all(e["seconds"] > 0 for e in events(recorder, "parallelism_changed"))  # type: ignore[operator]
    assert events(recorder, "plan_adopted"), "a resume starts the engines there are"


def test_a_change_that_does_not_pay_is_not_made() -> None:
    run, _, recorder = world(0, [5, 50, 500, 0, 0, 0], horizon_s=1e-3)
    loop.run(run.run())
    check(run, recorder)
    assert sizes(run) == {1: 4}
    assert "engine-seconds" in str(events(recorder, "parallelism_kept")[0]["why"])


def test_sizes_that_nothing_can_start_are_refused_once_and_nothing_is_drained() -> None:
    run, _, recorder = world(0, [5, 50, 500, 5000, 50_000, 1], refuses="CPUs do not divide a model")
    loop.run(run.run())
    check(run, recorder)
    assert [e["cause"] for e in events(recorder, "rebalance_failed")] == ["CPUs do not divide a model"]
    assert not events(recorder, "engine_drained")


def test_what_was_drained_comes_back_where_the_new_size_does_not_start() -> None:
    """Even where nothing serves meanwhile: two engines are one pair."""
    run, site, recorder = world(3, [5, 500, 400, 300, 200, 100], tp=2)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(run.run())

            async def breaks() -> None:
                while not any(e.kind == "engine_drained" for e in recorder.events):
                    await asyncio.sleep(0.05)
                site.broken = True
                while not events(recorder, "rebalance_failed"):
                    await asyncio.sleep(0.05)
                site.broken = False

            trouble = tasks.create_task(breaks())
            await running
            trouble.cancel()

    loop.run(main())
    check(run, recorder)
    assert sizes(run) == {2: 2}
    assert len(events(recorder, "rebalance_failed")) == 1, "that size is not tried again"


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 100_000),
    st.lists(st.sampled_from([0, 0, 1, 10, 100, 1000]), min_size=3, max_size=10),
    st.sampled_from(["none", "deaths", "broken"]),
    st.sampled_from([1, 2]),
)
def test_whatever_is_counted_and_whatever_breaks(seed: int, pressure: list[int], trouble: str, tp: int) -> None:
    run, site, recorder = world(seed, pressure, tp=tp)
    rng = random.Random(seed)

    async def disturb() -> None:
        died: Counter[str] = Counter()
        while True:
            await asyncio.sleep(2.0 + rng.expovariate(0.5))
            running = sorted(e for e, part in site.parts.items() if part.runs and died[e] < 3)
            if trouble == "deaths" and running:
                engine = rng.choice(running)
                died[engine] += 1
                site.parts[engine].die()  # type: ignore[index]
            if trouble == "broken":
                site.broken = True
                await asyncio.sleep(0.5)
                site.broken = False

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(run.run())
            await asyncio.sleep(1.0)
            task = tasks.create_task(disturb())
            await running
            task.cancel()

    loop.run(main(), seed=seed)
    check(run, recorder)
    assert all(size in RULE.sizes for size in sizes(run))
