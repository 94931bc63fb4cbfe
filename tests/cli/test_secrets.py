"""Refusals of secrets: one line with the name and the remedy, never a value."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rollart.cli.main import run as rollart
from tests.e2e.harness import CLUSTER, tiny

SOURCE = """\
from rollart import reward


@reward(secrets=["TEAM_KEY"])
def keyed(sample):
    return 1.0
"""

ITEM = '{"id": "a", "messages": [{"role": "user", "content": "p"}]}'
CASE = '{"id": "a", "prompt": "p", "completion": "c", "expected": {"score": 1.0}}\n'


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "keyed.py").write_text(SOURCE)
    (tmp_path / "cases.jsonl").write_text(CASE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TEAM_KEY", raising=False)
    return tmp_path


def write(here: Path, **cluster: object) -> None:
    functions = [{"name": "keyed", "source": "keyed.py", "handler": "keyed"}]
    spec = tiny(functions=functions, domains__0__rewards=[{"function": "keyed"}])
    (here / "run.yaml").write_text(yaml.safe_dump(spec))
    functions_of_cluster = {"backend": "local", **cluster}
    (here / "cluster.yaml").write_text(yaml.safe_dump({**CLUSTER, "functions": functions_of_cluster}))


def refused(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    assert rollart(arguments) == code
    text = capsys.readouterr().err
    last = text[text.rindex("rollart: ") :]
    assert "Traceback" not in text
    assert len(last.splitlines()) <= 2, last
    return " ".join(last.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ("rewards", "test", "keyed.py"),
        ("rewards", "deploy", "keyed.py", "--provider", "local"),
        ("rewards", "invoke", "keyed.py", "--item", ITEM),
        ("validate", "run.yaml", "cluster.yaml"),
        ("launch", "run.yaml", "--cluster", "cluster.yaml", "--dry-run"),
        ("launch", "run.yaml", "--cluster", "cluster.yaml"),
    ],
)
def test_a_missing_secret_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    write(here)
    line = refused(capsys, 3, *arguments)
    assert "function keyed has no value of the secret TEAM_KEY" in line
    assert "export TEAM_KEY=…, or write it to .env" in line
    assert not (here / "runs").exists()


def test_the_environment_file_is_beside_the_spec(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And of the variable that the cluster names."""
    write(here, secrets={"TEAM_KEY": {"env": "THEIR_KEY"}})
    line = refused(capsys, 3, "validate", "run.yaml", "cluster.yaml")
    assert "(THEIR_KEY here)" in line
    (here / ".env").write_text("THEIR_KEY=sk-1234\n")
    assert rollart(["validate", "run.yaml", "cluster.yaml"]) == 0
    assert "sk-1234" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("secret", "reason"),
    [
        ("sk-proj-1234567890", "a value that is not shown"),
        ("PATH", "set by the provider's runtime"),
        ("PYTHONPATH", "set by the provider's runtime"),
        ("AWS_SESSION_TOKEN", "set by the provider's runtime"),
        ("LAMBDA_TASK_ROOT", "set by the provider's runtime"),
        ("ROLLART_SECRETS", "set by the provider's runtime"),
    ],
)
def test_a_name_that_no_function_can_have_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], secret: str, reason: str
) -> None:
    write(here)
    spec = yaml.safe_load((here / "run.yaml").read_text())
    spec["functions"][0]["secrets"] = [secret]
    (here / "run.yaml").write_text(yaml.safe_dump(spec))
    line = refused(capsys, 2, "validate", "run.yaml", "cluster.yaml")
    assert reason in line
    assert "sk-proj" not in line


def test_a_value_among_the_sources_is_refused_and_not_shown(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, secrets={"TEAM_KEY": "sk-proj-1234567890"})
    line = refused(capsys, 2, "validate", "cluster.yaml")
    assert "functions.secrets.TEAM_KEY is a value that is not shown (rule: a mapping of keys to values)" in line
    assert "sk-proj" not in line
