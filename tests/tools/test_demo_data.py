"""The recorded run that ships: each report shows it, and today's code would record one like it."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from rollart.cli.main import run
from rollart.tools.demo_data import ARCHIVE, NAME, record, unpack

REPORTS = ("cost", "utilization", "timeline", "curve", "bias", "offload")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo") / "runs"
    unpack(directory)
    return directory


def tables(runs: Path, report: str, capsys: pytest.CaptureFixture[str]) -> dict[str, set[str]]:
    """The columns of a report's tables."""
    assert run(["report", report, NAME, "--runs-dir", str(runs), "-o", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)["tables"]
    return {name: set(rows[0]) for name, rows in shown.items() if rows}


def schema(runs: Path) -> set[str]:
    with closing(sqlite3.connect(runs / NAME / "ledger.sqlite")) as ledger:
        return {text for (text,) in ledger.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}


@pytest.mark.parametrize("report", REPORTS)
def test_each_report_shows_it(runs: Path, report: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tables(runs, report, capsys)


def test_its_trajectories_can_be_read(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--runs-dir", str(runs)]
    assert run(["trajectories", NAME, *where, "--sort", "reward", "-n", "1", "-o", "json"]) == 0
    (rows,) = json.loads(capsys.readouterr().out)["tables"].values()
    assert run(["trajectory", rows[0]["trajectory"], "--run", NAME, *where]) == 0
    assert "reward" in capsys.readouterr().out


def test_it_is_sound_small_and_names_no_machine(runs: Path) -> None:
    assert run(["verify", NAME, "--runs-dir", str(runs)]) == 0
    assert ARCHIVE.stat().st_size < 2e6
    for path in (runs / NAME).glob("*.*"):
        text = path.read_bytes().replace(str(runs.resolve()).encode(), b"")
        assert b"/tmp/" not in text.replace(str(ARCHIVE.parent).encode(), b""), path.name


def test_a_run_that_is_there_stays(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (runs / NAME / "resolved.yaml").stat().st_mtime_ns
    assert run(["demo-data", "--runs-dir", str(runs)]) == 0
    assert (runs / NAME / "resolved.yaml").stat().st_mtime_ns == before
    assert f"rollart report cost {NAME} --runs-dir" in capsys.readouterr().out


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run(["demo-data", "--runs-dir", str(tmp_path / "file")]) == 1
    assert "remedy: give another --runs-dir" in capsys.readouterr().err


@pytest.mark.slow  # records six steps of the quickstart
def test_todays_code_records_one_like_it(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make demo-data` after a change of the ledger or of a report's columns: the recorded run must not show less."""
    made = tmp_path / "made.tar.xz"
    record(made, ("steps=6", "telemetry.turns=0.5", "evaluation.episodes=16", "warm_start.batches=5"))
    monkeypatch.setattr("rollart.tools.demo_data.ARCHIVE", made)
    unpack(tmp_path / "runs")
    capsys.readouterr()
    assert schema(tmp_path / "runs") == schema(runs)
    for report in REPORTS:
        today, shipped = tables(tmp_path / "runs", report, capsys), tables(runs, report, capsys)
        assert {name: today[name] for name in today if name in shipped} == {
            name: shipped[name] for name in shipped if name in today
        }
        assert today.keys() <= shipped.keys()
