"""`rollart calibrate` measures runs that differ, and `rollart plan` uses what it wrote."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from placement.roofline import Calibration, Constants
from rollart.cli.calibrate import STEPS, references
from rollart.errors import UsageError
from rollart.settings.resolve import Resolved, resolve_files

Call = Callable[..., Any]

FITTED = Calibration(Constants(), "cpu", "cpu", "bf16", "policy", 0.05, rows=14)


@dataclass
class FakeMachine:
    engine: Any = field(default_factory=lambda: types.SimpleNamespace(calibration=FITTED))

    @staticmethod
    def from_dict(data: dict[str, Any]) -> FakeMachine:
        if "cores" not in data:
            raise ValueError("machine: fields are missing")
        return FakeMachine()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Resolved]]:
    """Stands in for the measurement: notes the runs that it is asked for."""
    asked: list[Sequence[Resolved]] = []

    def calibrate(probed: Resolved, references: Sequence[Resolved], *, out: Path) -> tuple[FakeMachine, list[Any]]:
        asked.append(references)
        out.write_text("{}")
        return FakeMachine(), []

    monkeypatch.setattr("rollart.cli.calibrate.run_calibration", calibrate)
    monkeypatch.setattr("rollart.cli.plan.Machine", FakeMachine)
    return asked


class TestReferences:
    def test_three_short_runs_that_differ(self) -> None:
        resolved = resolve_files()
        made = references(resolved)
        assert {r.run.steps for r in made} == {STEPS}
        assert [(r.run.evaluation.episodes, r.run.training.epochs) for r in made] == [(0, 1), (0, 2), (0, 1)]
        assert [dict(r.quotas) for r in made] == [
            {"frozen_lake": 6, "spell_backward": 12},
            {"frozen_lake": 32, "spell_backward": 16},
            {"spell_backward": 48},
        ]
        for reference in made:
            assert sum(reference.quotas.values()) == reference.run.batch.trajectories
            assert type(reference.run).model_validate(reference.run.model_dump()) == reference.run
        assert [f.name for f in made[2].run.functions] == ["process_verifier", "exact_match"]
        assert (resolved.run.training.epochs, len(resolved.run.domains)) == (4, 2), "the run itself is as it was"

    def test_a_single_domain_is_cut_in_turns_and_in_tokens(self, rollart: Call) -> None:
        small, fewer, shorter = references(resolve_files("run.yaml"))
        assert (small.run.domains[0].max_turns, small.run.batch.trajectories) == (8, 8)
        assert (fewer.run.domains[0].max_turns, shorter.run.domains[0].max_tokens) == (4, 2)

    def test_where_nothing_can_differ(self, rollart: Call) -> None:
        with pytest.raises(UsageError, match="every domain has one turn"):
            references(resolve_files("run.yaml", overrides=["domains.lake.max_turns=1"]))


def test_the_command_writes_the_file_and_says_how_to_use_it(rollart: Call, measured: list[Any]) -> None:
    done = rollart("calibrate", "run.yaml", "-o", "mine.json")
    assert (done.code, done.out) == (0, "")
    assert len(measured[0]) == 3
    assert "mine.json: cpu, 14 measurements, off by 5.0% where held out" in done.err
    assert "calibration: [mine.json]" in done.err
    assert Path("mine.json").exists()


def test_a_place_that_is_not_there_is_told_before_anything_runs(rollart: Call, measured: list[Any]) -> None:
    done = rollart("calibrate", "run.yaml", "-o", "nowhere/mine.json")
    assert done.code == 2
    assert "nowhere is no directory" in done.err
    assert measured == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run.yaml", "--from", "r"], "--from takes a run as it was"),
        (["--from", "none-1"], "none-1"),
        (["run.yaml", "cluster.engines.kind=vllm"], "the engines are vLLM's"),
    ],
)
def test_what_it_does_not_measure(rollart: Call, measured: list[Any], arguments: list[str], said: str) -> None:
    done = rollart("calibrate", *arguments)
    assert done.code == 2
    assert said in done.err
    assert measured == []


@pytest.mark.slow
def test_a_machine_that_is_none(rollart: Call, measured: list[Any]) -> None:
    """Slow: numpy is imported."""
    Path("cal.json").write_text(json.dumps({"update_s": 1.0, "engine": FITTED.to_dict()}))
    Path("c.yaml").write_text("name: c\npools: [{name: p, count: 2}]\nengines: {count: 1}\ncalibration: [cal.json]\n")
    done = rollart("plan", "run.yaml", "--cluster", "c.yaml")
    assert done.code == 2
    assert "machine: fields are missing" in done.err
    assert "rollart calibrate" in done.err
