"""A batch that the trainer refuses is given up with its reason; it costs neither the run nor its resume."""

from __future__ import annotations

import asyncio

import pytest

from rollart.errors import TrainerRefused
from rollart.runtime.training import REFUSALS
from rollart.sim import loop
from rollart.sim.run import SimulatedRun, make


def refusing(*calls: int) -> SimulatedRun:
    run = make(quotas={"a": (4, 2)}, steps=3, engine_s=lambda r: r.expovariate(1.0), train_s=lambda r: 0.5)
    run.trainer.refuse_steps = frozenset(calls)
    return run


def test_a_refused_batch_is_dropped_and_the_run_goes_on() -> None:
    run = refusing(2)
    loop.run(run.run(), seed=1)
    assert len(run.trainer.batches) == 3
    assert run.journal.dropped == dict.fromkeys(run.journal.dropped, "refused")  # type: ignore[attr-defined]
    assert len(run.journal.dropped) == 2  # type: ignore[attr-defined]
    assert sum(run.control.scheduler.outstanding().values()) == 0
    trained = [s.id for _, batch in run.trainer.batches for s in batch]
    assert len(trained) == len(set(trained)) == 12


def test_refusals_in_a_row_end_the_run_with_the_trainers_words() -> None:
    run = refusing(*range(2, 2 + REFUSALS))
    with pytest.raises(BaseExceptionGroup) as caught:
        loop.run(run.run(), seed=1)
    refused = caught.value.subgroup(TrainerRefused)
    assert refused is not None
    assert "will not have it" in str(refused.exceptions[0].args or refused.exceptions[0])


def test_a_close_during_the_schedulers_own_await_ends_it() -> None:
    """Closing sets the event that the scheduler clears before it sleeps: the wake-up must not be lost in between."""

    async def main() -> None:
        run = make(steps=0)

        async def close_in_between() -> None:
            run.control.scheduler.close()

        async def body() -> None:
            await run.run()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(body())
            await asyncio.sleep(0)

        scheduler = run.control.scheduler
        scheduler._closed = False
        scheduler._write_drops = close_in_between  # type: ignore[method-assign]
        await scheduler.run(lambda: 0)

    loop.run(main())
