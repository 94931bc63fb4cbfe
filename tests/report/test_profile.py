"""Profiles out of a ledger: what was asked of the engines, whatever was kept of the samples."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollart.errors import UsageError
from rollart.ledger.reader import FinishedRow
from rollart.ledger.store import Ledger
from rollart.model import Group, GroupId, TrainSample, TrajectoryId
from rollart.ports import Charge
from rollart.report.profile import observed_trajectories, profiles_of
from serverless.types import Cause, Invocation

FIRST, NEW, OUTPUT = 24, 7, 2

CONFIG = {
    "run": {
        "domains": [
            {"name": "lake", "rewards": [{"function": "distance"}, {"function": "rule"}]},
            {"name": "spell", "rewards": []},
        ]
    }
}


def finished(domain: str, turns: int, first: int, later: int, actions: int, t: float = 0.0) -> FinishedRow:
    return FinishedRow(domain, turns, first + later + actions, actions, 0.1, t, t + 1.0, first, 0.25, 0.5 * turns)


def lake(turns: int, t: float = 0.0) -> FinishedRow:
    return finished("lake", turns, FIRST, NEW * (turns - 1), OUTPUT * turns, t)


def test_rows_keep_what_was_asked_for() -> None:
    rows = [lake(turns) for turns in (1, 3, 3, 8, 5)]
    for seen, row in zip(observed_trajectories(rows), rows, strict=True):
        assert (seen.first_tokens, seen.new_tokens) == (FIRST, NEW * (row.turns - 1))
        assert (seen.output_tokens, seen.reset_s, seen.wait_s) == (OUTPUT * row.turns, 0.25, 0.5 * row.turns)
        assert seen.first_tokens + seen.new_tokens + seen.output_tokens == row.tokens


def sample(name: str, domain: str, row: FinishedRow) -> TrainSample:
    n, acts = row.tokens, row.action_tokens
    mask = (False,) * (n - acts) + (True,) * acts
    return TrainSample(
        id=TrajectoryId(name),
        group=GroupId(f"g-{name}"),
        domain=domain,
        v0=0,
        token_ids=(1,) * n,
        loss_mask=mask,
        logprobs=(0.0,) * n,
        versions=(0,) * n,
        turn=(0,) * n,
        rewards=(0.0,) * n,
        score=1.0,
        success=None,
    )


async def _written(directory: Path, config: Any = CONFIG) -> None:
    """Ten trajectories of two domains, half of them trained (their payload is gone), an evaluation and an abort."""
    with Ledger(directory, clock=lambda: 0.0, config=config, inline=True) as ledger:
        rows = [lake(n, t=float(n)) for n in (1, 2, 3, 4, 5)] + [finished("spell", 1, 6, 0, 20, t=9.0)] * 5
        groups = []
        for i, row in enumerate(rows):
            one = sample(f"s{i}", row.domain, row)
            await ledger.admit(one.group, row.domain, i)
            groups.append(Group(one.group, row.domain, (one,)))
            await ledger.finish(one, _charge(one.id, row, "finished", "train"))
        ledger.charge(_charge(TrajectoryId("e0"), lake(8), "finished", "eval"))
        ledger.charge(_charge(TrajectoryId("x0"), lake(8), "stale", "train"))
        await ledger.commit(version=1, step=1, consumed=groups[::2], metrics={})
        for name, billed, items in (("distance", 3.0, 30), ("rule", 1.0, 100)):
            ledger.invocation(Invocation(name, "local", "w", 0.0, 1.0, 0.0, billed, 512, items, "ok"))
        ledger.invocation(Invocation("rule", "local", "w", 0.0, 1.0, 0.0, 99.0, 512, 1, "timeout"))
        await ledger.flush()


def _charge(name: TrajectoryId, row: FinishedRow, outcome: str, purpose: str) -> Charge:
    return Charge(
        name,
        domain=row.domain,
        outcome=outcome,
        v0=0,
        engine_seconds=0.1,
        turns=row.turns,
        prompt_tokens=1,
        action_tokens=row.action_tokens,
        success=None,
        score=1.0,
        purpose=purpose,
        t0=row.t0,
        t1=row.t1,
        first_tokens=row.first_tokens,
        reset_s=row.reset_s,
        env_s=row.env_s,
    )


def test_profiles_of_a_run(tmp_path: Path) -> None:
    asyncio.run(_written(tmp_path / "lake-1"))
    by_name = {p.name: p for p in profiles_of(tmp_path / "lake-1")}
    assert sorted(by_name) == ["lake", "spell"]
    found = by_name["lake"]
    assert (found.turns.mean, found.prompt.mean, found.new_tokens.mean) == (3, FIRST, NEW)
    assert found.output_tokens.mean == OUTPUT
    assert (found.environment.wait_s, found.environment.reset_s) == (0.5, 0.25)
    assert found.weight == pytest.approx(0.5)
    assert found.source == "measured, n=5 (lake-1)"
    assert found.reward is not None
    assert found.reward.seconds == pytest.approx(0.1 + 0.01), "calls that failed scored nothing"
    assert found.reward.memory_gb == pytest.approx(512 * 2**20 / 1e9)
    assert by_name["spell"].reward is None
    assert by_name["spell"].total_tokens == 26


def test_a_run_of_which_nothing_has_finished(tmp_path: Path) -> None:
    with Ledger(tmp_path, clock=lambda: 0.0, inline=True):
        pass
    with pytest.raises(UsageError, match="no trajectory has finished"):
        profiles_of(tmp_path)
    with pytest.raises(UsageError, match="no ledger"):
        profiles_of(tmp_path / "elsewhere")


GPU_CONFIG = {
    "run": {
        "functions": [{"name": "distance", "gpu": None, "warm": 1}, {"name": "rule", "gpu": None}],
        "domains": [
            {"name": "lake", "rewards": [{"function": "rule"}, {"function": "distance"}]},
            {"name": "spell", "rewards": [{"function": "rule"}]},
        ],
    },
    "functions": {
        "distance": {"gpu": "L4:2", "keep_alive_s": 20.0, "concurrency": 3, "warm": 1, "memory_mb": 8192},
        "rule": {"gpu": ""},
    },
}


def test_a_function_with_a_gpu_is_measured_as_one_that_only_its_provider_runs(tmp_path: Path) -> None:
    """By hand: 60 s for 30 + 10 items in 5 calls, of which 40 s were a start; what was checked here counts nowhere."""
    asyncio.run(_written(tmp_path, GPU_CONFIG))
    with Ledger(tmp_path, clock=lambda: 0.0, config=GPU_CONFIG, inline=True) as ledger:
        start = Invocation("distance", "modal", "w", 0.0, 41.0, 40.0, 41.0, 8192, 1, "ok", cold_billed_s=40.0)
        ledger.invocation(start)
        for _ in range(3):
            ledger.invocation(Invocation("distance", "modal", "w", 0.0, 1.0, 0.0, 16 / 3, 8192, 3, "ok"))
        ledger.invocation(Invocation("distance", "local", "c", 0.0, 1.0, 9.0, 500.0, 512, 8, "ok", cause=Cause.CHECK))
    found = {profile.name: profile.reward for profile in profiles_of(tmp_path)}
    judge, rule = found["lake"], found["spell"]
    assert judge is not None
    assert rule is not None
    assert (judge.on_gpu, judge.gpu, judge.gpus, judge.provided) == (True, "L4", 2, True)
    assert (judge.functions, judge.keep_alive_s, judge.warm) == (("distance",), 20.0, 1)
    assert judge.worker_memory_gb == judge.memory_gb == pytest.approx(8192 * 2**20 / 1e9)
    assert judge.seconds == pytest.approx((3.0 + 1.0 + 16.0) / 40)
    assert (judge.batch, judge.cold_start_s) == (8, 40.0)
    (checked,) = judge.additional
    assert (checked.on_gpu, checked.gpu, checked.seconds) == (False, "", pytest.approx(0.01)), "seconds of cores"
    assert (rule.on_gpu, rule.seconds, rule.additional) == (False, pytest.approx(0.01), ())
