"""Training that takes its batch group by group: what it waits for; deaths, refusals and groups that are too old."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.control.buffer import SampleBuffer
from rollart.control.training import MAX_REFUSED_BATCHES, StepDone
from rollart.errors import TrainerRefused
from rollart.model import Group, GroupId, TrainSample, TrajectoryId
from rollart.policy.staleness import StalenessBound
from rollart.sim import loop
from rollart.testing.run import SimulatedRun, make_simulated_run


def streaming(
    *, fail: tuple[int, ...] = (), refuse: tuple[int, ...] = (), steps: int = 3, **more: object
) -> SimulatedRun:
    run = make_simulated_run(
        quotas={"a": (8, 2), "b": (3, 1)},
        steps=steps,
        engine_s=lambda r: r.expovariate(1.0),
        env_s=lambda r: r.lognormvariate(0.5, 1.0),
        train_s=lambda r: 0.5,
        fail_steps=frozenset(fail),
        **more,
    )  # type: ignore[arg-type]
    run.trainer.streams = True
    run.trainer.refuse_steps = frozenset(refuse)
    return run


def sound(run: SimulatedRun, steps: int) -> None:
    assert [version for version, _ in run.trainer.batches] == list(range(steps))
    trained = [s.id for _, batch in run.trainer.batches for s in batch]
    assert len(set(trained)) == len(trained) == steps * 11
    for _, batch in run.trainer.batches:
        assert Counter(s.domain for s in batch) == {"a": 8, "b": 3}
        assert set(Counter(s.group for s in batch if s.domain == "a").values()) == {2}
    assert sum(run.control.scheduler.admission.slots.outstanding.values()) == 0
    assert not run.leases.open


def refused(run: SimulatedRun) -> set[str]:
    events = run.recorder.events  # type: ignore[attr-defined]
    return {e.subject for e in events if e.kind == "group_dropped" and e.fields["reason"] == "refused"}


def test_groups_are_accumulated_while_the_rest_is_rolled_out() -> None:
    """What is left when the batch is whole is the last portion and the update, not the batch."""
    exposed = {}
    for streams in (False, True):
        run = make_simulated_run(
            quotas={"a": (8, 2)},
            alpha=0,
            steps=4,
            engine_s=lambda r: r.expovariate(1.0),
            env_s=lambda r: r.lognormvariate(1.0, 1.0),
            train_s=lambda r, s=streams: 1.0 if s else 5.0,
        )
        run.trainer.streams = streams
        done: list[StepDone] = []
        run.on_step = done.append
        loop.run(run.run(), seed=3)
        assert len(done) == 4
        exposed[streams] = [d.t1 - d.t0 for d in done]
        if streams:
            # Four groups in portions of their own, or a few that finished together.
            assert sum(run.trainer.accumulated) == 32
            assert len(run.trainer.accumulated) > 2 * 4
    assert all(seconds >= 5.0 for seconds in exposed[False])
    assert all(seconds <= 3.1 for seconds in exposed[True]), "a portion under way, the last one, the update"


@pytest.mark.parametrize("call", range(1, 13))
def test_a_trainer_that_dies_gets_again_what_it_had(call: int) -> None:
    run = streaming(fail=(call, call + 1))
    loop.run(run.run(), seed=call)
    sound(run, 3)
    assert run.trainer.calls == len(run.trainer.accumulated) + len(run.trainer.batches) + 2


def test_a_trainer_that_dies_at_every_attempt_ends_the_run() -> None:
    run = streaming(fail=(2, 3, 4))
    with pytest.raises(BaseExceptionGroup, match="unhandled errors") as caught:
        loop.run(run.run(), seed=2)
    assert "the simulated trainer died" in repr(caught.value)
    assert run.trainer.batches == []


def test_only_the_groups_that_are_refused_are_dropped() -> None:
    run = streaming(refuse=(2,))
    loop.run(run.run(), seed=4)
    sound(run, 3)
    trained = {s.group for _, batch in run.trainer.batches for s in batch}
    assert trained.isdisjoint(refused(run))
    assert 0 < len(refused(run)) < 7, "not the whole batch"


def test_refusals_in_a_row_end_the_run_with_the_trainers_words() -> None:
    run = streaming(refuse=tuple(range(2, 2 + MAX_REFUSED_BATCHES)))
    with pytest.raises(BaseExceptionGroup) as caught:
        loop.run(run.run(), seed=1)
    assert caught.value.subgroup(TrainerRefused) is not None


def test_a_batch_that_is_refused_at_its_end_is_dropped_whole() -> None:
    twin = streaming()
    loop.run(twin.run(), seed=6)
    # The first step's calls are its portions and then its end.
    total, first = 0, 0
    while total < 11:
        total += twin.trainer.accumulated[first]
        first += 1
    run = streaming(refuse=(first + 1,))
    loop.run(run.run(), seed=6)
    sound(run, 3)
    assert len(refused(run)) == 7


def test_with_a_token_budget_the_batch_comes_in_one_piece() -> None:
    run = streaming(token_budget=10_000)
    loop.run(run.run(), seed=1)
    sound(run, 3)
    assert run.trainer.accumulated == [11, 11, 11]


def group(name: str, domain: str, size: int, v0: int = 0) -> Group:
    samples = tuple(
        TrainSample(
            id=TrajectoryId(f"{name}.{i}"),
            group=GroupId(name),
            domain=domain,
            v0=v0,
            token_ids=(1, 2),
            loss_mask=(False, True),
            logprobs=(0.0, -1.0),
            versions=(-1, v0),
            turn=(-1, 0),
            rewards=(0.0, 1.0),
            score=1.0,
            success=None,
        )
        for i in range(size)
    )
    return Group(GroupId(name), domain, samples)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3)), min_size=1, max_size=30),
    st.integers(2, 3),
    st.randoms(use_true_random=False),
)
def test_a_batch_that_grows_is_a_batch(arrivals: list[tuple[str, int]], version: int, rng: object) -> None:
    """Whole groups, fresh ones only, each once, never more than the quotas; what does not fit stays."""
    sizes = {"a": 2, "b": 1}
    buffer = SampleBuffer({"a": 4, "b": 2}, bound=StalenessBound(1))
    coming = [group(f"{d}{i}", d, sizes[d], min(v0, version)) for i, (d, v0) in enumerate(arrivals)]

    async def main() -> tuple[list[Group], bool]:
        taken: list[Group] = []

        async def feed() -> None:
            for each in coming:
                buffer.add(each)
                for _ in range(rng.randrange(4)):  # type: ignore[attr-defined]
                    await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(feed())
            try:
                async with asyncio.timeout(1.0):
                    while more := await buffer.grow(version, taken):
                        taken += more
            except TimeoutError:
                return taken, False
        return taken, True

    taken, whole = loop.run(main())
    fresh = [g for g in coming if version - g.v0 <= 1]
    count = Counter(g.domain for g in taken)
    assert count["a"] <= 2
    assert count["b"] <= 2
    assert whole == (count == {"a": 2, "b": 2})
    assert whole == all(sum(g.domain == d for g in fresh) >= 2 for d in "ab")
    assert {g.id for g in taken} <= {g.id for g in fresh}
    assert len({g.id for g in taken}) == len(taken)
    left = set(buffer.groups)
    assert left == {g.id for g in coming} - {g.id for g in taken}
    assert buffer.held == {d: sum(len(g.samples) for g in coming if g.id in left and g.domain == d) for d in "ab"}
