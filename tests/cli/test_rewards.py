"""`rollart rewards`: a reward's life on this machine, and how it fails elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]

ITEM = {"messages": [{"role": "assistant", "content": "<answer>42</answer>"}], "reference_answer": "42"}


def rows(text: str, table: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(text)["tables"][table]
    return found


@pytest.mark.slow  # function workers are processes
def test_the_life_of_a_reward(rollart: Call) -> None:
    written = rollart("rewards", "init", "mine")
    assert written.code == 0
    assert "rollart rewards test mine/mine.py" in written.err
    tried = rollart("rewards", "test", "mine/mine.py", "-o", "json")
    assert tried.code == 0, tried.err
    (report,) = json.loads(tried.out)["rewards"]
    assert report["passed"] is True
    assert {c["provider"] for c in report["costs"]} >= {"aws_lambda", "modal"}

    (change,) = rows(rollart("rewards", "deploy", "mine/mine.py", "--dry-run", "-o", "json").out, "changes")
    assert "create" in change["change"]
    assert rows(rollart("rewards", "list", "-o", "json").out, "functions") == []
    (first,) = rows(rollart("rewards", "deploy", "mine/mine.py", "-o", "json").out, "functions")
    (again,) = rows(rollart("rewards", "deploy", "mine/mine.py", "--dry-run", "-o", "json").out, "changes")
    assert "nothing" in again["change"]

    source = Path("mine/mine.py")
    source.write_text(source.read_text().replace("timeout_s=5", "timeout_s=6"))
    (second,) = rows(rollart("rewards", "deploy", "mine/mine.py", "-o", "json").out, "functions")
    assert second["version"] != first["version"]
    assert [v["version"] for v in rows(rollart("rewards", "versions", "mine", "-o", "json").out, "functions")] == [
        second["version"],
        first["version"],
    ]
    (back,) = rows(rollart("rewards", "rollback", "mine", "-o", "json").out, "functions")
    assert back["version"] == first["version"]
    (scaled,) = rows(rollart("rewards", "scale", "mine", "--warm", "2", "-o", "json").out, "functions")
    assert scaled["warm"] == 2

    called = rollart("rewards", "invoke", "mine/mine.py", "--item", json.dumps(ITEM))
    assert called.code == 0
    assert json.loads(called.out)[0]["aggregate_reward_score"] == 1.0
    assert "billed" in called.err
    assert rollart("rewards", "delete", "mine", "--yes").code == 0
    assert rows(rollart("rewards", "list", "-o", "json").out, "functions") == []


@pytest.mark.slow  # function workers are processes
def test_a_case_that_is_not_as_expected_fails_the_command(rollart: Call) -> None:
    rollart("rewards", "init", "mine")
    Path("mine/cases.jsonl").write_text(json.dumps({**ITEM, "expected": {"score": 0.0}}) + "\n")
    done = rollart("rewards", "test", "mine/mine.py")
    assert done.code == 1
    assert "1, expected 0" in done.out
    assert "1 of 1 cases are not as expected" in done.err


UNTRUSTED = """from rollart import reward


@reward(trust="untrusted")
def runs(sample):
    scope = {}
    exec(sample.completion, scope)
    return float(scope["x"])
"""


@pytest.mark.slow  # function workers are processes
def test_untrusted_code_runs_in_a_sandbox_or_not_at_all(rollart: Call) -> None:
    Path("runs.py").write_text(UNTRUSTED)
    Path("cases.jsonl").write_text(json.dumps({"completion": "x = 1", "expected": {"score": 1.0}}) + "\n")
    refused = rollart("rewards", "test", "runs.py")
    assert refused.code == 3
    assert "never uses the sandbox" in refused.err
    assert rollart("rewards", "test", "runs.py", "--allow-unsafe").code == 0


@pytest.mark.slow  # function workers are processes
def test_a_plan_compares_providers(rollart: Call) -> None:
    rollart("rewards", "init", "mine")
    done = rollart("rewards", "plan", "mine/mine.py", "--items", "1000000", "--runs-per-month", "3", "--from", "aws",
                   "-o", "json")  # fmt: skip
    assert done.code == 0, done.err
    found = {row["provider"]: row for row in rows(done.out, "plan")}
    assert found["aws_lambda"]["usd_per_month"] == pytest.approx(3 * found["aws_lambda"]["usd_per_run"])
    assert found["aws_lambda"]["month_against_now"] == pytest.approx(0.0)
    assert found["modal"]["month_against_now"] == pytest.approx(
        found["modal"]["usd_per_month"] - found["aws_lambda"]["usd_per_month"]
    )


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("test", "nowhere.py"), 2, "nowhere.py"),
        (("deploy", "empty.py"), 2, "no function with @reward"),
        (("deploy", "wrong.py"), 2, "memory_mb"),
        (("deploy", "two.py", "--name", "x"), 2, "2 rewards"),
        (("list", "--provider", "azure"), 2, "no provider 'azure'"),
        (("list", "--provider", "http"), 2, "nothing is deployed to 'http'"),
        (("scale", "f"), 2, "nothing to scale"),
        (("versions", "f"), 2, "f"),
        (("invoke", "two.py:a", "--item", "{"), 2, "not JSON"),
        (("list", "--provider", "aws", "--cluster", "nonsense.yaml"), 2, "functions.aws_lambda.architecture"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(rollart: Call, arguments: tuple[str, ...], code: int, word: str) -> None:
    Path("empty.py").write_text("X = 1\n")
    Path("wrong.py").write_text("from rollart import reward\n\n@reward(memory_mb=1)\ndef f(s): return 1.0\n")
    Path("two.py").write_text(
        "from rollart import reward\n\n@reward\ndef a(s): return 1.0\n\n@reward\ndef b(s): return 1.0\n"
    )
    Path("nonsense.yaml").write_text(
        "name: c\npools: [{name: p, device: cpu, count: 1}]\nfunctions: {aws_lambda: {architecture: mips}}\n"
    )
    done = rollart("rewards", *arguments)
    assert done.code == code, done.err
    assert word in done.err
    assert "Traceback" not in done.err


def test_without_credentials_the_remedy_is_named(rollart: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3")
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "none")
    done = rollart("rewards", "list", "--provider", "aws")
    assert done.code == 3
    assert "AWS_REGION" in done.err
