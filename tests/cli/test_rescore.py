"""`rollart rewards rescore`: a run's kept items through another reward, by the real pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollart.ledger.kept import KeptScore
from rollart.ledger.store import Ledger
from rollart.model import Scored
from serverless.errors import SpecInvalid
from serverless.types import Invocation
from tests.kept import charge, kept

Call = Callable[..., Any]

REWARDS = """\
import random
from rollart import Sample, reward

@reward()
def exact(sample: Sample) -> float:
    return float(sample.completion == sample.reference_answer)

@reward(deterministic=False)
def judge(sample: Sample) -> float:
    return float(sample.completion == sample.reference_answer) + random.Random().random() / 10

@reward()
def broken(sample: Sample) -> float:
    raise KeyError("a field")
"""


@pytest.fixture
def recorded(rollart: Call, launch_calls: Any) -> Path:
    """A run, killed after eight items of two groups; `exact` gave each a 0."""

    def action(directory: Path) -> None:
        ledger = Ledger(directory, clock=lambda: 0.0, inline=True, kept_mb=1)
        for n in range(8):
            id_ = f"g{n % 2}.{n}"
            ledger.keep(kept(id_, "42" if n < 4 else "41", KeptScore("exact", "d1", 1.0, Scored(0.0))))
            ledger.charge(charge(id_, score=0.0))
        ledger.close()

    launch_calls.action = action
    assert rollart("launch", "run.yaml", "--name", "mine").code == 0
    Path("new.py").write_text(REWARDS)
    return Path("runs/mine")


def test_a_run_without_kept_items_says_how_to_get_some(rollart: Call, launch_calls: Any) -> None:
    assert rollart("launch", "run.yaml", "--name", "mine", "keep=none").code == 0
    Path("new.py").write_text(REWARDS)
    done = rollart("rewards", "rescore", "mine", "--with", "new.py:exact")
    assert done.code == 2
    assert "no kept items to score again (its `keep` is 'none')" in done.err
    assert "keep=all" in done.err


@pytest.mark.parametrize("keep", ["all", "sample 0.02", "failed"])
def test_a_run_that_has_scored_nothing_yet_is_to_be_resumed(rollart: Call, launch_calls: Any, keep: str) -> None:
    assert rollart("launch", "run.yaml", "--name", "mine", f"keep={keep}").code == 0
    Path("new.py").write_text(REWARDS)
    done = rollart("rewards", "rescore", "mine", "--with", "new.py:exact")
    assert done.code == 2
    assert "no reward function has scored a trajectory of run 'mine' yet" in done.err
    assert "rollart launch --resume runs/mine" in done.err


def test_a_run_that_kept_none_of_its_items_is_to_be_launched_with_another_keep(
    rollart: Call, launch_calls: Any
) -> None:
    def action(directory: Path) -> None:
        ledger = Ledger(directory, clock=lambda: 0.0, inline=True)
        ledger.record(Invocation("exact", "local", "w", 0.0, 1.0, 0.0, 1.0, 128, 1, "ok"))
        ledger.close()

    launch_calls.action = action
    assert rollart("launch", "run.yaml", "--name", "mine", "keep=failed").code == 0
    Path("new.py").write_text(REWARDS)
    done = rollart("rewards", "rescore", "mine", "--with", "new.py:exact")
    assert (done.code, "(its `keep` is 'failed')" in done.err) == (2, True)


def test_a_file_of_several_rewards_needs_a_name(rollart: Call, recorded: Path) -> None:
    done = rollart("rewards", "rescore", "mine", "--with", "new.py")
    assert (done.code, "new.py:NAME" in done.err) == (2, True)


def test_a_rescoring_keeps_the_quota_of_the_cluster(
    rollart: Call, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quotas: list[int | None] = []

    def offload(*_: Any, quota: int | None = None, **__: Any) -> Any:
        quotas.append(quota)
        raise SpecInvalid("enough is known")

    monkeypatch.setattr("rollart.tools.rescore.Offload", offload)
    Path("cluster.yaml").write_text("name: c\npools: [{name: p, count: 2}]\nfunctions: {quota: 3}\n")
    done = rollart("rewards", "rescore", "mine", "--with", "new.py:exact", "--cluster", "cluster.yaml")
    assert (done.code, quotas) == (2, [3]), done.err


@pytest.mark.slow  # function workers are processes
def test_recorded_items_are_scored_again(rollart: Call, recorded: Path) -> None:
    done = rollart("rewards", "rescore", "mine", "--with", "new.py:exact", "-o", "json")
    assert done.code == 0, done.err
    tables = json.loads(done.out)["tables"]
    assert [(i["trajectory"], i["old"], i["new"]) for i in tables["items"]][3:5] == [
        ("g1.3", 0.0, 1.0),
        ("g0.4", 0.0, 0.0),
    ]
    assert (tables["agreement"][0]["equal"], tables["drift"][0]["difference"]) == (0.5, 0.5)
    assert (tables["advantages"][0]["groups"], tables["advantages"][0]["signal_changed"]) == (2, 1.0)
    assert tables["cost"][0]["cost"] == "elsewhere"
    first = tables

    judged = rollart("rewards", "rescore", "mine", "--with", "new.py:judge", "--times", "3", "--sample", "4", "--json")
    assert judged.code == 0, judged.err
    tables = json.loads(judged.out)["tables"]
    assert len({i["trajectory"].partition(".")[0] for i in tables["items"]}) == 1, "a whole group"
    assert (tables["variance"][0]["items"], tables["variance"][0]["changed"]) == (4, 1.0)
    assert len(set(tables["items"][0]["answers"].split())) == 3

    assert rollart("rewards", "deploy", "new.py:exact").code == 0
    deployed = rollart("rewards", "rescore", "mine", "--with", "exact@live", "--json")
    assert json.loads(deployed.out)["tables"]["items"] == first["items"]
    unknown = rollart("rewards", "rescore", "mine", "--with", "exact@7")
    assert (unknown.code, "no version '7'" in unknown.err) == (2, True)

    failed = rollart("rewards", "rescore", "mine", "--with", "new.py:broken")
    assert failed.code == 1
    assert "broken scored none of 8 items" in failed.err
    assert "crash" in failed.out
