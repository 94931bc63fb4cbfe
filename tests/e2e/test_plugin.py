"""A function provider of another distribution, installed as its users do: by pip, found by its entry point."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rollart.cli.commands import cli
from rollart.cli.main import run
from rollart.launch.functions import units_by_provider
from tests.e2e.harness import BATCH, CLUSTER, ROOT, Home, ledger, tiny

pytestmark = pytest.mark.slow  # pip, processes, and a run

NEBULA = Path(__file__).parents[1] / "fixtures" / "nebula"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, target = tmp_path_factory.mktemp("source") / "nebula", tmp_path_factory.mktemp("site")
    shutil.copytree(NEBULA, source)  # building writes there
    pip = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--target",
        str(target),
    ]
    subprocess.run([sys.executable, *pip, str(source)], check=True, timeout=120)
    return target


@pytest.fixture
def user(home: Home, installed: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setattr("tests.e2e.harness.environment", lambda: _environment(installed))
    return home


def _environment(installed: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{installed}", "NO_COLOR": "1"}


def cluster(home: Home, **settings: object) -> dict[str, object]:
    return {**CLUSTER, "functions": {"backend": "nebula", "nebula": {"root": str(home.path / "nebula"), **settings}}}


def test_a_run_scores_on_an_installed_provider(user: Home) -> None:
    user.launch(tiny(steps=1), cluster=cluster(user, nice=1)).finished()
    with ledger(user.directory) as db:
        calls = db.execute("SELECT provider, status, sum(items) FROM invocations GROUP BY provider, status").fetchall()
    assert [(provider, status) for provider, status, _ in calls] == [("nebula", "ok")]
    assert sum(items for *_, items in calls) >= BATCH
    report = json.loads(user.run("report", "cost", "tiny-1", "-o", "json").stdout)
    (row,) = report["tables"]["functions"]
    assert (row["provider"], row["cost"]) == ("nebula", "billed")
    assert row["usd"] == pytest.approx(row["gb_s"] * 0.00002), "at the list price that the plugin brings"
    offload = json.loads(user.run("report", "offload", "tiny-1", "-o", "json").stdout)
    assert any("nebula.example/prices" in note for note in offload["notes"])


def test_rewards_are_deployed_to_it_and_called_by_name(
    home: Home, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed)
    monkeypatch.chdir(home.path)
    home.write(None, cluster(home))

    def rollart(*arguments: str) -> str:
        done = CliRunner().invoke(cli, ["rewards", *arguments, "--provider", "nebula", "--cluster", "cluster.yaml"])
        assert done.exit_code == 0, done.output
        return done.stdout

    rollart("deploy", f"{ROOT / 'tests/e2e/rewards.py'}:rule")
    (row,) = json.loads(rollart("list", "-o", "json"))["tables"]["functions"]
    assert (row["function"], row["provider"], row["current"]) == ("rule", "nebula", "yes")
    answer = rollart("invoke", "rule", "--item", json.dumps({"id": "a", "prompt": "x", "completion": "heads"}))
    assert json.loads(answer)[0]["id"] == "a"
    assert units_by_provider()["nebula"] == {
        "GB-second": 0.00002,
        "gpu-second:L4": 0.0002,
        "idle-gpu-second:L4": 0.0001,
    }, "`rewards plan` and `test` price it"


def test_its_settings_are_checked_before_anything_starts(
    home: Home, installed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(installed)
    monkeypatch.chdir(home.path)

    def refused(functions: object) -> str:
        home.write(None, {**CLUSTER, "functions": functions})
        assert run(["validate", "cluster.yaml"]) == 2
        return capsys.readouterr().err

    said = refused({"backend": "nebula", "nebula": {"root": "x", "knee": 3}})
    assert "unknown key 'knee' in functions.nebula" in said
    assert "one of local, aws_lambda, modal, http, nebula" in refused({"backend": "nebul"})
