"""The schedules against a small model of the run: each one's switches give the lag and overlap that it promises."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.policy.schedules import (
    SCHEDULES,
    Admission,
    InFlightHandling,
    RewardTiming,
    Schedule,
    StalenessCheck,
    TurnSynchrony,
    resolve,
)


def test_the_table_of_the_documentation() -> None:
    rows = {n: resolve(n, None) for n in SCHEDULES}
    assert [n for n, s in rows.items() if s.turns is TurnSynchrony.LOCKSTEP] == ["sync"]
    assert [n for n, s in rows.items() if s.rewarding is RewardTiming.INLINE] == ["sync"]
    assert [n for n, s in rows.items() if s.training_blocks_rollout] == ["sync", "sync_plus"]
    assert [s.alpha for s in rows.values()] == [0, 0, 1, 1, 1, 1, 1]
    windowed = [n for n, s in rows.items() if s.admission is Admission.WINDOW]
    assert windowed == ["areal", "rollart", "paced", "roll_flash"]
    assert [n for n, s in rows.items() if s.aborts_stale] == ["rollart", "paced"]
    assert [n for n, s in rows.items() if s.paced] == ["paced"]
    assert [n for n, s in rows.items() if not s.drops_stale] == ["areal"]
    assert [n for n, s in rows.items() if s.in_flight is InFlightHandling.DRAINED] == ["sync", "sync_plus", "one_off"]


def test_resolve_names_the_rule_that_is_broken() -> None:
    assert resolve("async", 3) == resolve("rollart", 3)
    assert resolve("one_off", 1) == resolve("one_off")
    assert resolve("areal", 0).alpha == 0
    with pytest.raises(ValueError, match="unknown schedule 'laminar': choose one of sync, sync_plus"):
        resolve("laminar")
    with pytest.raises(ValueError, match="staleness is 2, but schedule 'one_off' always has 1"):
        resolve("one_off", 2)
    with pytest.raises(ValueError, match="staleness must be at least 0, got -1"):
        resolve("rollart", -1)


class Model:
    """Samples of one token: they start, end in any order, are trained in batches. Follows the switches, no names."""

    def __init__(self, schedule: Schedule, batch: int, rng: random.Random) -> None:
        self.schedule, self.batch, self.rng = schedule, batch, rng
        self.version = 0
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.training: list[int] = []
        self.trained = False
        self.overlapped = self.updated_over_live = False
        self.lags: list[int] = []

    def step(self) -> None:
        s = self.schedule
        training = 0 if s.admission is Admission.NEXT_BATCH else len(self.training)
        ahead = (s.alpha + 1) * self.batch if s.windowed else self.batch
        self.running += [self.version] * max(ahead - len(self.running) - len(self.waiting) - training, 0)
        total = len(self.running) + len(self.waiting) + len(self.training)
        assert total <= (s.alpha + 1) * self.batch, "I4"
        self.overlapped |= bool(self.training and self.running)
        if self.running and self.rng.random() < 0.7:
            self.waiting.append(self.running.pop(self.rng.randrange(len(self.running))))
        if s.drops_stale:
            self.waiting = [v for v in self.waiting if not s.bound.stale(v, self.version)]
        if not self.training and len(self.waiting) >= self.batch:
            self.waiting.sort()
            self.training, self.waiting = self.waiting[: self.batch], self.waiting[self.batch :]
            self.lags += [self.version - v for v in self.training]
        elif self.training and self.rng.random() < 0.3:
            self.trained = True
        if self.trained and s.may_publish(running=len(self.running)):
            self.publish()

    def publish(self) -> None:
        self.version, self.training, self.trained = self.version + 1, [], False
        self.updated_over_live |= bool(self.running)
        if self.schedule.aborts_stale:
            self.running = [v for v in self.running if not self.schedule.bound.stale(v, self.version)]


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(0, 3), st.integers(1, 4), st.integers(0, 2**32))
def test_lag_and_overlap_follow_from_the_switches(name: str, alpha: int, batch: int, seed: int) -> None:
    fixed = name in ("sync", "sync_plus", "one_off")
    schedule = resolve(name, None if fixed else alpha)
    model = Model(schedule, batch, random.Random(seed))
    for _ in range(300):
        model.step()
    assert model.version >= 5, "it goes on"
    if schedule.judged is not StalenessCheck.AT_START:
        assert max(model.lags) <= schedule.alpha
    if name == "one_off":
        assert set(model.lags[batch:]) == {1}, "every batch but the first is exactly one step behind"
    if schedule.training_blocks_rollout:
        assert not model.overlapped
    if schedule.in_flight is InFlightHandling.DRAINED:
        assert not model.updated_over_live
    elif schedule.alpha:
        assert model.overlapped


def test_only_areal_trains_what_outlived_its_bound() -> None:
    """The one difference that RollArt §7.2 makes of it: judged at the start, a straggler is trained however old it
    is."""

    def worst(name: str) -> int:
        lag = 0
        for seed in range(20):
            model = Model(resolve(name, 1), 2, random.Random(seed))
            for _ in range(400):
                model.step()
            lag = max(lag, *model.lags)
        return lag

    assert worst("areal") > 1
    assert worst("rollart") == worst("roll_flash") == 1
