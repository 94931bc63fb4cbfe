"""Candidates that follow from a run's evidence, and a run that its trainer bounds, for which nothing helps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollart.cli.main import run
from rollart.report.compare.advice import NO_ADVICE, Trial
from rollart.report.compare.alarms import Alarm
from rollart.report.compare.parts import ExposedPart
from rollart.settings.resolve import Resolved, resolve_files
from rollart.tools.advise import AdviceSubject, RunEvidence, candidates, combined_change
from serverless.types import Invocation
from tests.report.test_report import rows
from tests.tools.test_replay import GPUS, RUN, make


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> Resolved:
    (path := tmp_path_factory.mktemp("advise") / "r.yaml").write_text(RUN)
    return resolve_files(path)


def evidence(exposed: Mapping[str, float], calls: Sequence[Invocation] = ()) -> RunEvidence:
    """Of a run of 100 s."""
    return RunEvidence(rows(), (), [ExposedPart(part, s, s) for part, s in exposed.items()], {"exact": calls})


def tried(resolved: Resolved, found: RunEvidence, **changes: Any) -> list[str]:
    return [c.text for c in candidates(replace(resolved, run=resolved.run.model_copy(update=changes)), found)]


def call(t0: float, items: int = 1, cold_s: float = 0.0) -> Invocation:
    return Invocation("exact", "local", "w", t0, t0 + 1.0, cold_s, 1.0, 1024, items, "ok")


def test_candidates_are_for_exposed_parts(resolved: Resolved) -> None:
    assert tried(resolved, evidence({"training": 1.0, "rewards": 1.9})) == [], "under 2 % of the run"
    assert tried(resolved, evidence({"training": 50.0})) == ["training.stream=true"]
    assert tried(resolved, evidence({"publishes": 50.0})) == ["weights.overlap=true"]
    assert tried(resolved, evidence({"environment resets": 50.0}))[0] == "rollout.prefetch=auto"
    assert tried(resolved, evidence({"generation": 50.0}))[0] == "cluster.engines.count=2"


def test_candidates_for_the_rollout_follow_the_schedule(resolved: Resolved) -> None:
    exposed = evidence({"environment steps": 50.0})
    assert tried(resolved, exposed) == ["staleness=2", "schedule=paced", "rollout.redundancy.groups=1.25"]
    assert tried(resolved, exposed, schedule="sync", staleness=0) == [
        "schedule=async staleness=1",
        "rollout.redundancy.groups=1.25",
        "rollout.tail_batching={}",
    ]
    assert tried(resolved, evidence({"publishes": 50.0}), schedule="sync_plus", staleness=0) == [], "nothing to hide in"


def test_samples_that_are_too_old_are_made_no_older(resolved: Resolved) -> None:
    alarm = Alarm("effective share", "last 10 steps", 0.5, "median", 0.75, "too stale")
    found = replace(evidence({"environment steps": 50.0}), alarms=[alarm])
    assert tried(resolved, found) == ["schedule=paced", "rollout.redundancy.groups=1.25"]
    lost = replace(evidence({}), alarms=[replace(alarm, alarm="stale losses")])
    assert tried(resolved, lost) == ["staleness=2", "schedule=paced"]


def test_candidates_for_functions_follow_their_calls(resolved: Resolved) -> None:
    def of_functions(*calls: Invocation) -> list[str]:
        return [c for c in tried(resolved, evidence({"rewards": 50.0}, calls)) if c.startswith("functions.")]

    assert of_functions(call(0.0), call(2.0)) == [], "one worker of four was in use, with single items"
    assert of_functions(*(call(0.0) for _ in range(4))) == ["functions.exact.concurrency=16"]
    assert of_functions(call(0.0, items=4)) == ["functions.exact.batch_items=1"]
    assert of_functions(call(0.0, cold_s=0.5)) == ["functions.exact.keep_alive_s=600"]


@pytest.mark.slow  # simulates eight runs, and up to six for their speed: about 3 s
def test_nothing_is_advised_for_a_run_that_its_trainer_bounds(
    resolved: Resolved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = make(tmp_path, resolved)
    arguments = [str(recorded), "weights.overlap=true", "--seeds", "2", "--workers", "1", "-o", "json"]
    assert run(["advise", *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tables"]["exposed"][0]["part"] == "training"
    changes = [row["change"] for row in report["tables"]["tried"]]
    assert changes == ["nothing", "staleness=2", "schedule=paced", "rollout.redundancy.groups=1.25"]
    assert report["tables"]["advice"] == []
    assert NO_ADVICE in report["notes"]
    assert any(
        note.startswith("not tried: cluster.engines.count=2: cluster 'local' cannot") for note in report["notes"]
    )


@pytest.mark.slow  # plans and simulates a run in several variants: about 2 s
def test_a_plan_is_advised_by_its_own_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two GPUs generate 4 trajectories of some seconds at a time, and train them at once."""
    (tmp_path / "r.yaml").write_text(RUN)
    (tmp_path / "g.yaml").write_text(GPUS)
    files = [str(tmp_path / "r.yaml"), "--cluster", str(tmp_path / "g.yaml")]
    assert run(["advise", *files, "--seeds", "2", "--steps", "3", "--workers", "1", "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["run"] == "small"
    assert report["tables"]["exposed"][0]["part"] == "generation"
    assert [row["change"] for row in report["tables"]["advice"]] == ["staleness=2"]
    subject = AdviceSubject(None, tmp_path / "r.yaml", tmp_path / "g.yaml", [])
    changes = "schedule=sync_plus staleness=0", "staleness=2", "batch.tokens=9", "rollout.tail_batching={}"
    together = combined_change(subject, [Trial(change, "", change[:8], ()) for change in changes])
    assert together is not None
    assert together[0].text == "schedule=sync_plus staleness=0 rollout.tail_batching={}", (
        "others are not allowed beside"
    )
    assert together[0].side_effect == "schedule; rollout."
    assert combined_change(subject, [Trial("staleness=2", "", "", ())]) is None
    assert run(["advise", *files, "--fast"]) == 2
    assert "of a recorded run" in capsys.readouterr().err
