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


def test_lines_of_the_environment_file_that_cannot_be_read_are_named(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here)
    (here / ".env").write_text("OTHER=1\nTEAM_KEY: sk-proj-1234567890\n")
    line = refused(capsys, 3, "validate", "run.yaml", "cluster.yaml")
    assert ".env, whose line 2 cannot be read (rule: NAME=value)" in line
    assert "sk-proj" not in line


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


VARIABLE = "(rule: the name of an environment variable: a letter, then one or more letters, digits or '_')"


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"secrets": ["TEAM_KEY=sk-proj"]}, f"functions.0.secrets.0 is a value that is not shown {VARIABLE}"),
        ({"secrets": "TEAM_KEY=sk-proj"}, "functions.0.secrets is a value that is not shown (rule: a list)"),
        ({"env": {"A-B": "x"}}, f"functions.0.env.A-B is 'A-B' {VARIABLE}"),
        ({"function": "my.f@live"}, "functions.0.function is 'my.f@live' (rule: NAME, NAME@VERSION or NAME@ALIAS"),
        ({"name": "a b"}, "functions.0.name is 'a b' (rule: letters, digits, '_', '.', '-', starting with a letter"),
    ],
)
def test_the_rule_that_a_spec_breaks_is_shown(
    here: Path, capsys: pytest.CaptureFixture[str], entry: dict[str, object], expected: str
) -> None:
    write(here)
    spec = yaml.safe_load((here / "run.yaml").read_text())
    spec["functions"][0] |= entry
    (here / "run.yaml").write_text(yaml.safe_dump(spec))
    assert rollart(["validate", "run.yaml", "cluster.yaml"]) == 2
    line = " ".join(capsys.readouterr().err.split())
    assert expected in line
    assert "sk-proj" not in line


def test_a_value_in_the_key_of_a_source_is_not_shown(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, secrets={"TEAM_KEY=sk-proj": {"env": "X"}})
    assert f"TEAM_KEY=… is a value that is not shown {VARIABLE}" in refused(capsys, 2, "validate", "cluster.yaml")


@pytest.mark.parametrize(
    ("decorator", "expected"),
    [
        ('secrets=["TEAM_KEY=sk-proj"]', f"function keyed: entry 0 of secrets is no name {VARIABLE}"),
        ('secrets="sk-proj"', "function keyed: secrets is of type str (rule: a list) remedy: write secrets=[...]"),
        ('env={"A-B": "x"}', f"function keyed: 'A-B' in env is no name {VARIABLE}"),
    ],
)
def test_the_rule_that_a_decorator_breaks_is_shown(
    here: Path, capsys: pytest.CaptureFixture[str], decorator: str, expected: str
) -> None:
    (here / "keyed.py").write_text(SOURCE.replace('secrets=["TEAM_KEY"]', decorator))
    line = refused(capsys, 2, "rewards", "test", "keyed.py")
    assert expected in line
    assert "sk-proj" not in line


@pytest.mark.parametrize(
    "arguments",
    [
        ("validate", "run.yaml", "cluster.yaml"),
        ("launch", "run.yaml", "--cluster", "cluster.yaml"),
        ("rewards", "deploy", "keyed.py"),
        ("rewards", "deploy", "keyed.py", "--dry-run"),
    ],
)
def test_a_value_in_a_packed_file_is_refused_and_not_shown(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    write(here)
    (here / ".env").write_text("TEAM_KEY=sk-proj-1234567890\n")
    (here / "keyed.py").write_text(f"import team\n{SOURCE}")
    (here / "team.py").write_text('KEY = "sk-proj-1234567890"\n')
    line = refused(capsys, 2, *arguments)
    assert "function keyed: the file function/team.py of its package contains the value of the secret TEAM_KEY" in line
    assert "sk-proj" not in line
    assert not (here / "runs").exists()
    assert not (here / ".rollart").exists()


def engines_start(*_: object, **__: object) -> None:
    raise AssertionError("engines start")


@pytest.mark.slow  # function workers are processes
@pytest.mark.parametrize(
    ("decorator", "code", "expected"),
    [
        ('secrets=["TEAM_KEY"]', 3, "no value of the secret TEAM_KEY"),
        ('trust="untrusted"', 3, "never uses the sandbox"),
    ],
)
def test_a_drawn_version_is_checked_before_engines_start(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    decorator: str,
    code: int,
    expected: str,
) -> None:
    write(here, allow_unsafe=True)
    (here / "keyed.py").write_text(
        f"from rollart import reward\n\n\n@reward({decorator})\ndef keyed(sample):\n    exec(sample.completion)\n"
    )
    with monkeypatch.context() as patched:
        patched.setenv("TEAM_KEY", "sk-proj-1234567890")
        assert rollart(["rewards", "deploy", "keyed.py", "--cluster", "cluster.yaml"]) == 0, capsys.readouterr().err
    write(here)
    spec = yaml.safe_load((here / "run.yaml").read_text())
    spec["functions"] = [{"name": "keyed", "function": "keyed@live"}]
    (here / "run.yaml").write_text(yaml.safe_dump(spec))
    monkeypatch.setattr("rollart.launch.launch.open_run", engines_start)
    assert expected in refused(capsys, code, "launch", "run.yaml", "--cluster", "cluster.yaml")


@pytest.mark.parametrize("deterministic", [True, False])
def test_cases_that_a_run_cannot_read_are_refused_before_it_starts(
    here: Path, capsys: pytest.CaptureFixture[str], deterministic: bool
) -> None:
    write(here)
    (here / ".env").write_text("TEAM_KEY=sk-proj-1234567890\n")
    (here / "keyed.py").write_text(SOURCE.replace("(secrets", f"(deterministic={deterministic}, secrets"))
    (here / "cases.jsonl").write_text('{"question": "of another program"}\n')
    if not deterministic:
        assert rollart(["validate", "run.yaml", "cluster.yaml"]) == 0, "a run does not read them"
        return
    line = refused(capsys, 2, "validate", "run.yaml", "cluster.yaml")
    assert "function 'keyed': cases.jsonl:1: unknown key 'question'" in line
    assert "or rename it: a run checks its function with it" in line
    write(here, order_check=False)
    assert rollart(["validate", "run.yaml", "cluster.yaml"]) == 0


def test_a_value_among_the_sources_is_refused_and_not_shown(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, secrets={"TEAM_KEY": "sk-proj-1234567890"})
    line = refused(capsys, 2, "validate", "cluster.yaml")
    assert "functions.secrets.TEAM_KEY is a value that is not shown (rule: a mapping of keys to values)" in line
    assert "sk-proj" not in line
