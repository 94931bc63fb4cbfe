"""Redundant environments and tail batching shorten the rollout as order statistics say, with sleeping environments."""

from __future__ import annotations

import asyncio
import itertools
import random
import sqlite3
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rollart.control.training import StepDone
from rollart.errors import EnvironmentFault
from rollart.ledger.database import FILE
from rollart.ledger.events import CANCELLED_AGAINST_KEPT
from rollart.ledger.reader import LedgerReader
from rollart.ledger.store import Ledger
from rollart.model import Observation, Step
from rollart.ports import RELAUNCH_MARK
from rollart.settings.rollout import RedundancySpec, TailBatchingSpec
from rollart.sim import loop
from rollart.testing.run import SimulatedRun, make_simulated_run

THEORY = 0.15


def harmonic(n: int) -> float:
    return sum(1 / i for i in range(1, n + 1))


@dataclass
class Sleeping:
    """An environment of one turn that sleeps before it answers: `draw` says how long, given the prompt's seed."""

    draw: Callable[[int], float]
    broken: Callable[[], bool] = lambda: False
    seconds: float = 0.0

    async def reset(self, seed: int) -> Observation:
        self.seconds = self.draw(seed)
        return Observation("o")

    async def step(self, action: str) -> Step:
        await asyncio.sleep(self.seconds)
        if self.broken():
            raise OSError("the sandbox is gone")
        return Step(Observation("o"), reward=1.0, done=True, success=True)

    async def close(self) -> None:
        return None


def sleeping(
    groups: int, size: int, draw: Callable[[int], float], *, broken: Callable[[], bool] = lambda: False, **more: Any
) -> SimulatedRun:
    """Batches of `groups` x `size` in which nothing but environments takes time."""
    run = make_simulated_run(
        quotas={"a": (groups * size, size)},
        turns=1,
        tokens=1,
        **{"alpha": 0, "steps": 80, "schedule": "sync_plus", **more},
    )
    run.domains = [replace(d, environment=lambda: Sleeping(draw, broken)) for d in run.domains]
    return run


def by_trajectory(scale: float = 1.0) -> Callable[[int], float]:
    """Exponential, each trajectory for itself: a slow sandbox."""
    rng = random.Random(7)
    return lambda seed: scale * rng.expovariate(1.0)


def by_prompt(scale: float = 1.0) -> Callable[[int], float]:
    """Exponential, and a prompt's own: a long task, however often it is begun."""
    return lambda seed: scale * random.Random(seed).expovariate(1.0)


def steps(run: SimulatedRun) -> list[float]:
    """Seconds of each step."""
    ends: list[float] = [0.0]

    def done(step: StepDone) -> None:
        ends.append(asyncio.get_running_loop().time())

    run.on_step = done
    loop.run(run.run(), seed=1)
    return [b - a for a, b in itertools.pairwise(ends)]


def outcomes(run: SimulatedRun) -> Counter[str]:
    return Counter(c.outcome for c in run.recorder.charges)


def test_redundant_members_cut_the_tail_of_a_group() -> None:
    """The 8th of 8 exponentials takes H8 = 2.72 means, the 8th of 10 H10 - H2 = 1.43."""
    plain = sleeping(1, 8, by_trajectory())
    assert statistics.mean(steps(plain)) == pytest.approx(harmonic(8), rel=THEORY)
    run = sleeping(1, 8, by_trajectory(), redundancy=RedundancySpec(size=1.25))
    assert statistics.mean(steps(run)) == pytest.approx(harmonic(10) - harmonic(2), rel=THEORY)
    assert outcomes(run) == {"finished": 640, "redundant": 160}
    assert {len(batch) for _, batch in run.trainer.batches} == {8}


def test_redundant_groups_cut_the_tail_of_a_batch() -> None:
    run = sleeping(8, 1, by_prompt(), redundancy=RedundancySpec(groups=1.25))
    assert statistics.mean(steps(run)) == pytest.approx(harmonic(10) - harmonic(2), rel=THEORY)
    assert outcomes(run) == {"finished": 640, "redundant": 160}
    assert set(run.journal.dropped.values()) == {"redundant"}


def test_redundant_groups_go_on_in_a_window_that_is_wider_by_them() -> None:
    """Nothing is cancelled where nobody waits for a whole batch; a run's last groups end with it."""
    run = sleeping(8, 1, by_prompt(), redundancy=RedundancySpec(groups=1.25), schedule="rollart", alpha=1, steps=50)
    plain = sleeping(8, 1, by_prompt(), schedule="rollart", alpha=1, steps=50)
    assert sum(steps(run)) < sum(steps(plain))
    assert outcomes(run)["redundant"] <= 2 + 8
    assert max(v - s.v0 for v, batch in run.trainer.batches for s in batch) <= 1


def test_redundancy_of_health_starts_nothing_more_while_all_is_well() -> None:
    run = sleeping(4, 8, by_trajectory(), redundancy=RedundancySpec(size=1.5, health=True), steps=20)
    steps(run)
    assert outcomes(run) == {"finished": 640}


def test_redundancy_of_health_starts_more_once_environments_break() -> None:
    """It starts at none, and covers what breaks once it has seen 50 ends."""
    rng = random.Random(3)
    run = sleeping(
        4,
        8,
        by_trajectory(),
        broken=lambda: rng.random() < 0.1,
        max_attempts=10,
        redundancy=RedundancySpec(size=1.5, health=True),
        steps=20,
    )
    steps(run)
    assert outcomes(run)["redundant"] > 0
    first = min(c.t0 for c in run.recorder.charges if c.outcome == "redundant")
    assert sum(c.t1 <= first for c in run.recorder.charges) >= 50


def test_a_broken_member_is_tried_again_only_if_the_others_do_not_suffice() -> None:
    faults = iter([True])
    run = sleeping(
        1, 4, by_trajectory(), broken=lambda: next(faults, False), redundancy=RedundancySpec(size=1.5), steps=1
    )
    steps(run)
    assert outcomes(run) == {"finished": 4, "redundant": 1, "infra_fault": 1}


@pytest.mark.slow
def test_what_was_cancelled_is_reported_beside_what_was_kept() -> None:
    """The cancelled are cut off at the same second as the kept end or later: older, and that is said."""
    run = sleeping(1, 8, by_trajectory(), redundancy=RedundancySpec(size=1.5), steps=50)
    steps(run)
    last = {e.subject: e.fields for e in run.recorder.events if e.kind == CANCELLED_AGAINST_KEPT}
    assert last["age_s"]["notable"]
    assert last["age_s"]["delta"] > 0.33
    assert (last["age_s"]["kept_count"], last["age_s"]["cancelled_count"]) == (400, 200)
    assert last["turns"]["cancelled"] == 0.0, "none of them was answered"


def test_tail_batching_defers_the_tail_to_every_fifth_round() -> None:
    """Four rounds wait for the 8th of 10 prompts, the fifth for the longest of the 40 that they began."""
    run = sleeping(8, 1, by_prompt(), tail=TailBatchingSpec(eta_responses=1.0))
    took = steps(run)
    rounds = [e.subject for e in run.recorder.events if e.kind == "tail_round"]
    assert rounds == ["short", "short", "short", "short", "long"] * 16
    short = [s for s, kind in zip(took, rounds, strict=True) if kind == "short"]
    long = [s for s, kind in zip(took, rounds, strict=True) if kind == "long"]
    assert statistics.mean(short) == pytest.approx(harmonic(10) - harmonic(2), rel=THEORY)
    assert statistics.mean(long) == pytest.approx(harmonic(40), rel=THEORY)
    assert statistics.mean(took) < 0.8 * harmonic(8)
    assert outcomes(run) == {"finished": 640, "deferred": 128}


def test_a_deferred_prompt_is_the_same_prompt_generated_again() -> None:
    run = sleeping(8, 2, by_prompt(), tail=TailBatchingSpec(), steps=5)
    steps(run)
    again = {g: s for g, s in run.journal.groups.items() if RELAUNCH_MARK in g}
    assert len(again) == 8, "two are put off in each of four short rounds"
    for group, state in again.items():
        assert state.seed == run.journal.groups[group.partition(RELAUNCH_MARK)[0]].seed
        assert state.state == "consumed"
    assert all(version == sample.v0 for version, batch in run.trainer.batches for sample in batch), "on policy"


@pytest.mark.slow  # waits on real time
@pytest.mark.parametrize(
    ("groups", "size", "policy", "seconds"),
    [
        (1, 8, {"redundancy": RedundancySpec(size=1.25)}, harmonic(10) - harmonic(2)),
        (8, 1, {"redundancy": RedundancySpec(groups=1.25)}, harmonic(10) - harmonic(2)),
        (8, 1, {"tail": TailBatchingSpec(eta_responses=1.0)}, (4 * (harmonic(10) - harmonic(2)) + harmonic(40)) / 5),
    ],
)
def test_on_the_real_loop_as_well(groups: int, size: int, policy: dict[str, Any], seconds: float) -> None:
    """The same files on the real clock: the rollout is shorter than without, and as long as the virtual one says.

    The sleeps are the very ones of the virtual run, so what is compared is how the scheduler uses them.
    A host that stalls can only be slower: the best of three counts.
    """
    scale, count = 0.1, 20
    draw = by_prompt if groups > 1 else by_trajectory

    def real(**how: Any) -> float:
        run = sleeping(groups, size, draw(scale), steps=count, **how)
        ends: list[float] = []

        async def main() -> None:
            clock = asyncio.get_running_loop()
            began = clock.time()
            run.on_step = lambda step: ends.append(clock.time() - began)
            await run.run()

        asyncio.run(main())
        assert len(ends) == count
        return ends[-1]

    expected = sum(steps(sleeping(groups, size, draw(scale), steps=count, **policy)))
    assert expected == pytest.approx(scale * count * seconds, rel=2 * THEORY), "20 steps scatter more"
    took = []
    while len(took) < 3 and (not took or min(took) > (1 + THEORY) * expected):
        took.append(real(**policy))
    assert min(took) == pytest.approx(expected, rel=THEORY)
    assert min(took) < 0.95 * real()


def test_the_ledger_tells_the_fates_apart_and_a_resume_goes_on_with_what_was_put_off(tmp_path: Path) -> None:
    """A controller that dies after two rounds: what was put off is in the file, and is trained in the end."""

    class Killed(BaseException):
        pass

    def die(done: StepDone) -> None:
        if done.step == 1:
            raise Killed

    async def life(first: bool) -> SimulatedRun:
        with Ledger(tmp_path, clock=asyncio.get_running_loop().time, inline=True) as ledger:
            recovered = await ledger.recover()
            version = 0 if recovered is None else recovered.version
            run = sleeping(
                8, 2, by_prompt(), tail=TailBatchingSpec(), steps=5, journal=ledger, recorder=ledger, version=version
            )
            run.on_step = die if first else lambda _: None
            await run.run(recovered)
            return run

    with pytest.raises(BaseExceptionGroup) as caught:
        loop.run(life(True))
    assert caught.value.subgroup(Killed) is not None
    loop.run(life(False))
    with LedgerReader(tmp_path) as reader:
        fates: Counter[str] = Counter()
        for charge in reader.charge_sums():
            fates[charge.outcome] += charge.trajectories
        events = reader.events("tail_round")
    assert fates["trained"] == 5 * 16
    assert set(fates) == {"trained", "deferred"}, "in pairs: 2 x 1.25 is 2, so no member is redundant"
    assert [e.subject for e in events] == ["short", "short", "short", "short", "long"]
    connection = sqlite3.connect(tmp_path / FILE)
    trained = [g for (g,) in connection.execute("SELECT id FROM groups WHERE state = 1")]
    connection.close()
    assert sorted(int(g.partition(RELAUNCH_MARK)[0].partition("-")[2]) for g in trained) == list(range(40))


def test_members_that_end_together_are_not_all_written_down(tmp_path: Path) -> None:
    """While samples are on their way to the disk they count already: the file holds as many as a group needs."""

    async def main() -> None:
        with Ledger(tmp_path, clock=asyncio.get_running_loop().time, inline=True) as ledger:
            redundancy = RedundancySpec(size=1.5)
            await sleeping(
                2, 4, lambda seed: 1.0, redundancy=redundancy, steps=3, journal=ledger, recorder=ledger
            ).run()

    loop.run(main())
    connection = sqlite3.connect(tmp_path / FILE)
    counts = connection.execute("SELECT grp, count(*), min(state), max(state) FROM samples GROUP BY grp").fetchall()
    connection.close()
    assert [(n, low, high) for _, n, low, high in counts] == [(4, 1, 1)] * 6
    with LedgerReader(tmp_path) as reader:
        fates = Counter({c.outcome: 0 for c in reader.charge_sums()})
        for charge in reader.charge_sums():
            fates[charge.outcome] += charge.trajectories
    assert fates == {"trained": 24, "redundant": 12}


def test_the_end_of_a_host_is_one_failed_attempt_of_a_group_whatever_it_took_of_it() -> None:
    run = make_simulated_run(quotas={"a": (8, 4)}, steps=3, env_s=lambda r: 1.0, max_attempts=2)

    class OnAHost(Sleeping):
        async def step(self, action: str) -> Step:
            done = await super().step(action)
            if asyncio.get_running_loop().time() < 2.0:
                raise EnvironmentFault("environment-0", "its connection broke", incident="environment-0 of life 1")
            return done

    run.domains = [replace(d, environment=lambda: OnAHost(lambda seed: 1.0)) for d in run.domains]
    loop.run(run.run(), seed=1)
    assert len([e for e in run.recorder.events if e.kind == "infra_fault"]) >= 8
    assert [e for e in run.recorder.events if e.kind == "group_dropped"] == []
