"""Shares of domains in the scheduler: weights, floors and caps hold, whatever domains are slow or break."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.ledger.events import DOMAIN_SHARE
from rollart.policy.schedules import FIXED_LAG, SCHEDULES
from rollart.settings.rollout import FilterSpec, FollowSpec, RedundancySpec
from rollart.shares import DomainShare, bounded_shares
from rollart.sim import loop
from rollart.strategies.fairness import FairnessSettings
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.parts import SimulatedEnvironment
from rollart.testing.run import SimulatedRun, make_simulated_run
from tests.properties.test_filter import died

NAMES = ("a", "b", "c")


def paced(run: SimulatedRun, speeds: list[float], faults: list[float], seed: int) -> SimulatedRun:
    """Each domain with environments of its own speed and fault rate."""

    def world(speed: float, fault: float) -> Any:
        return lambda: SimulatedEnvironment(
            turns=1, seed=seed, seconds=lambda r: speed * r.expovariate(1.0), fault_rate=fault
        )

    run.domains = [
        replace(d, environment=world(speed, fault))
        for d, speed, fault in zip(run.domains, speeds, faults, strict=False)
    ]
    return run


@st.composite
def worlds(draw: st.DrawFn) -> SimulatedRun:
    schedule = draw(st.sampled_from(tuple(SCHEDULES)))
    count, size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    groups = [draw(st.integers(1, 4)) for _ in range(count)]
    floors = [draw(st.sampled_from([0.0, 0.1, 0.3])) for _ in range(count)]
    caps = [draw(st.sampled_from([1.0, 0.8])) if count > 1 else 1.0 for _ in range(count)]
    shares = tuple(DomainShare(NAMES[i], draw(st.floats(0.1, 10.0)), floors[i], caps[i]) for i in range(count))
    follow = draw(st.sampled_from([None, FollowSpec(memory=2.0, max_step=0.2)]))
    seed = draw(st.integers(0, 10_000))
    filtering = size > 1 and draw(st.booleans())
    run = make_simulated_run(
        quotas={NAMES[i]: (n * size, size) for i, n in enumerate(groups)},
        alpha=FIXED_LAG[schedule] if schedule in FIXED_LAG else draw(st.integers(0, 2)),
        steps=draw(st.integers(1, 6)),
        turns=1,
        seed=seed,
        engine_s=lambda r: r.expovariate(1.0),
        train_s=lambda r: r.expovariate(0.5),
        reward_of=lambda r: float(r.random() < 0.4),
        fail_steps=draw(st.sampled_from([frozenset(), frozenset({1})])),
        max_attempts=draw(st.integers(1, 3)),
        schedule=schedule,
        redundancy=RedundancySpec(groups=draw(st.sampled_from([1.0, 1.5])), size=draw(st.sampled_from([1.0, 1.5]))),
        filter=FilterSpec(
            zero_variance=filtering,
            max_additional_running_prompts=draw(st.integers(0, 2)) if filtering else 0,
            max_refills=100.0,
            exhausted="keep",
        ),
        fairness=FairnessSettings(shares, draw(st.integers(0, 3)), follow),
    )
    run.trainer.refuse_steps = draw(st.sampled_from([frozenset(), frozenset({1}), frozenset({2})]))
    run.trainer.streams = draw(st.booleans())
    run.overlap = draw(st.booleans())
    push = draw(st.sampled_from([0.1, 3.0]))
    run.trainer.push_s = lambda r: push * r.expovariate(1.0)
    speeds = [draw(st.sampled_from([0.1, 1.0, 20.0])) for _ in range(count)]
    return paced(run, speeds, [draw(st.sampled_from([0.0, 0.2])) for _ in range(count)], seed)


def fair(world: SimulatedRun, batches: Any) -> None:
    """Every batch within floors and caps; after every batch each domain near its share of all."""
    assert world.fairness is not None
    units = sum(d.quota // d.group_size for d in world.domains)
    size, shares = world.domains[0].group_size, bounded_shares(world.fairness.domains)
    served: Counter[str] = Counter()
    for number, (_, batch) in enumerate(batches, start=1):
        counts = {n: c // size for n, c in Counter(s.domain for s in batch).items()}
        assert sum(counts.values()) == units
        assert all(c == size for c in Counter(s.group for s in batch).values()), "whole groups"
        served.update(counts)
        for d in world.fairness.domains:
            got = counts.get(d.domain, 0)
            assert int(d.floor * units + 1e-9) <= got <= -int(-(d.cap * units - 1e-9) // 1)
            if world.fairness.follow is None:
                bound = (world.fairness.slack + 1) * len(shares)
                assert abs(served[d.domain] - shares[d.domain] * units * number) <= bound


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(worlds(), st.integers(0, 2**32))
def test_shares_hold_at_every_step_and_nothing_wedges(world: SimulatedRun, fuzz: int) -> None:
    assert world.fairness is not None
    units = sum(d.quota for d in world.domains)
    extra = sum(
        int((world.redundancy.groups - 1) * d.quota / d.group_size + 1e-9) * d.group_size for d in world.domains
    )
    bound = (
        (world.alpha + 1) * units + extra + world.filter.max_additional_running_prompts * world.domains[0].group_size
    )
    seen: list[int] = []

    class Watched(MemoryRecorder):
        def charge(self, charge: Any) -> None:
            seen.append(sum(world.control.scheduler.admission.slots.outstanding.values()))
            super().charge(charge)

    world.journal = world.recorder = Watched()
    loop.run(world.run(), seed=fuzz)
    # A step that the trainer refused at its end was given to it, and is no batch.
    batches = [b for b in world.trainer.batches if {s.id for s in b[1]} <= trained(world)]
    assert len(batches) == world.steps
    fair(world, batches)
    assert max(seen, default=0) <= bound, "I4"
    assert sum(world.control.scheduler.admission.slots.outstanding.values()) == 0
    assert all(g.state != "live" for g in world.journal.groups.values()), "every group ended"
    assert all(v - s.v0 <= world.alpha or world.schedule == "areal" for v, b in batches for s in b), "I3"
    told = [e for e in world.journal.events if e.kind == DOMAIN_SHARE]
    assert len(told) == world.steps * len(world.domains)
    last = {e.subject: e.fields for e in told}
    assert sum(int(f["served"] or 0) for f in last.values()) * world.domains[0].group_size == world.steps * units


def trained(world: SimulatedRun) -> set[str]:
    return {i for i, end in world.journal.gone.items() if end == "trained"}


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(worlds(), st.integers(0, 2**32), st.integers(5, 120))
def test_a_resume_knows_what_is_owed(world: SimulatedRun, fuzz: int, left: int) -> None:
    journal = died(world, world.run(), fuzz, left)
    if journal is None:
        return  # it came through, or died before it had anything to resume from
    done = len(journal.versions)

    async def resume() -> SimulatedRun:
        recovered = await journal.recover()
        assert recovered is not None
        assert sum(recovered.consumed.values()) == done * sum(d.quota // d.group_size for d in world.domains)
        parts = make_simulated_run(version=recovered.version)
        second = replace(
            world,
            journal=journal,
            recorder=journal,
            published=[],
            shares={},
            engines=parts.engines,
            trainer=parts.trainer,
        )
        await second.run(recovered)
        return second

    # Batches in a version by then: a batch in progress is trained again, by the second run.
    first = [b for b in world.trainer.batches if {s.id for s in b[1]} <= trained(world)]
    second = loop.run(resume(), seed=fuzz + 1)
    assert len(second.trainer.batches) == world.steps - done
    fair(world, [*first, *second.trainer.batches])
    ids = [s.id for _, b in [*first, *second.trainer.batches] for s in b]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("seed", range(6))
def test_shares_that_move_while_a_batch_grows_are_those_of_the_next(seed: int) -> None:
    """The version before is published beside the growth of a batch, and shares follow its cost."""
    world = make_simulated_run(
        quotas={"a": (4, 1), "b": (4, 1)},
        alpha=2,
        steps=10,
        turns=1,
        seed=seed,
        engine_s=lambda r: r.expovariate(1.0),
        train_s=lambda r: 0.1,
        overlap=True,
        reward_of=lambda r: float(r.random() < 0.4),
        fairness=FairnessSettings(
            (DomainShare("a", 1.0), DomainShare("b", 1.0)), 0, FollowSpec(memory=1.0, max_step=1.0, sensitivity=2.0)
        ),
    )
    world.trainer.streams = True
    world.trainer.push_s = lambda r: 3.0 * r.expovariate(1.0)
    paced(world, [0.1, 3.0], [0.0, 0.0], seed)
    loop.run(world.run(), seed=seed)
    fair(world, world.trainer.batches)
    assert world.published == list(range(1, 11))
