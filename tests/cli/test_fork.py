"""`rollart launch --from`: another run's weights under this run's spec, or a refusal with the difference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart.quickstart.tokenizer import write_tokenizer
from tests.cli.conftest import RUN
from tests.tools.test_export import FILES, record, write_files

Call = Callable[..., Any]

SPEC = yaml.safe_load(RUN)


@pytest.fixture
def source(rollart: Call) -> Path:
    """A run of the same model with v1 and v2 on disk, whose v1 is the better one."""
    run = Path("runs/old")
    record(run, 3, {1: 0.9, 2: 0.5}, model=SPEC["model"], training={"lora": None}, seed=0)
    (run / "resolved.yaml").write_text("")
    write_tokenizer(run)
    tokenizer = (run / "tokenizer.json").read_text()
    for version in (1, 2):
        write_files(
            run, version, FILES | {"config.json": json.dumps(SPEC["model"]["init"]), "tokenizer.json": tokenizer}
        )
    return run


@pytest.mark.parametrize(
    ("named", "version", "options"), [("old@v1", 1, ["--optimizer"]), ("old@best", 1, []), ("old", 2, [])]
)
def test_a_fork_is_recorded_in_the_new_run(
    rollart: Call, launch_calls: Any, source: Path, named: str, version: int, options: list[str]
) -> None:
    done = rollart("launch", "run.yaml", "--from", named, *options, "--name", "new")
    assert done.code == 0, done.err
    ((resolved, directory, _),) = launch_calls.calls
    fork = {"run": str(source.resolve()), "version": version, "optimizer": bool(options)}
    assert resolved.run.fork.model_dump() == fork
    assert yaml.safe_load((directory / "resolved.yaml").read_text())["run"]["fork"] == fork


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--from", "old@v0"], "v0 of run 'old' was not kept; there are v1, v2"),
        (["--from", "old@newest"], "version 'newest' (rule: best, latest or a number, as v40)"),
        (["--from", "none@v1"], "no run 'none' in runs"),
        (["--optimizer"], "--optimizer without --from"),
        (["--from", "old", "--optimizer", "training.optimizer=muon"], "is muon, and the state of v2 is adamw's"),
        (["--from", "old", "model.init.hidden_size=64"], "model.init differs from v000002"),
        (["--from", "old", "model.init.hidden_size=64"], "hidden 64 for 32"),
        pytest.param(
            ["--from", "old", "training.lora.rank=4"],
            "training.lora is {'rank': 4, 'alpha': 32.0, 'targets': ['all-linear']}",
            marks=pytest.mark.slow,  # needs the extra `lora`
        ),
    ],
)
def test_a_fork_that_does_not_fit_is_refused_with_the_difference(
    rollart: Call, launch_calls: Any, source: Path, arguments: list[str], problem: str
) -> None:
    for options in ((), ("--dry-run",)):
        done = rollart("launch", "run.yaml", *arguments, *options)
        assert (done.code, problem in done.err) == (2, True), done.err
    assert launch_calls.calls == []
    assert not Path("runs/test-1").exists()


def test_a_run_may_have_an_at_sign_in_its_name(rollart: Call, source: Path) -> None:
    source.rename("runs/o@ld")
    for named in ("o@ld@v0", "runs/o@ld@v0"):
        done = rollart("launch", "run.yaml", "--from", named)
        assert (done.code, "v0 of run 'o@ld' was not kept" in done.err) == (2, True), done.err


def test_a_fork_with_another_tokenizer_is_refused(rollart: Call, source: Path) -> None:
    (source / "weights" / "v000002" / "tokenizer.json").write_text("{}")
    done = rollart("launch", "run.yaml", "--from", "old", "--dry-run")
    assert (done.code, "the tokenizer differs from" in done.err) == (2, True), done.err


def test_a_resume_is_no_fork(rollart: Call, source: Path) -> None:
    done = rollart("launch", "--resume", "old", "--from", "old")
    assert (done.code, "--resume continues a run as it was started" in done.err) == (2, True)


@pytest.mark.slow  # three launches up to their start: 1 s of CPU time
def test_only_a_run_that_has_begun_no_longer_needs_the_version(rollart: Call, launch_calls: Any, source: Path) -> None:
    """A launch that was interrupted at its start, and the other run going on meanwhile."""
    assert rollart("launch", "run.yaml", "--from", "old@v1", "--name", "new").code == 0
    (source / "weights" / "v000001" / "COMPLETE").unlink()
    done = rollart("launch", "--resume", "new")
    assert (done.code, "fork.version is 1, which was not kept (there are v2)" in done.err) == (2, True), done.err
    record(Path("runs/new"), 1, {}, **yaml.safe_load(Path("runs/new/resolved.yaml").read_text())["run"])
    done = rollart("launch", "--resume", "new", "--dry-run")
    assert done.code == 0, done.err


def test_validate_checks_a_fork_of_the_run_file(rollart: Call, source: Path) -> None:
    forked = SPEC | {"fork": {"run": "runs/old", "version": 7}}
    Path("fork.yaml").write_text(yaml.safe_dump(forked))
    done = rollart("validate", "fork.yaml")
    assert done.code == 2
    assert "fork.yaml" in done.err
    assert "fork.version is 7, which was not kept (there are v1, v2)" in done.err
    Path("fork.yaml").write_text(yaml.safe_dump(forked | {"fork": {"run": "nowhere", "version": 1}}))
    assert "is no run with a ledger" in rollart("validate", "fork.yaml").err
