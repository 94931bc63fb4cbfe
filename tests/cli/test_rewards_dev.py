"""`rollart rewards dev`, as a process in which a file is edited."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.serverless.support import alive, descendants

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]  # processes of their own, with function workers

SOURCE = """import helper
from rollart import reward

@reward(memory_mb=128)
def f(sample):
    return helper.score(sample)
"""
CASES = [{"id": key, "completion": key, "expected": {"score": 1.0}} for key in ("a", "b")]


def test_each_save_shows_what_changed(tmp_path: Path) -> None:
    source, helper = tmp_path / "f.py", tmp_path / "helper.py"

    def score(expression: str) -> None:
        helper.write_text(f"def score(sample):\n    return {expression}\n")

    source.write_text(SOURCE)
    score("1.0")
    (tmp_path / "cases.jsonl").write_text("".join(json.dumps(one) + "\n" for one in CASES))
    command = [sys.executable, "-m", "rollart.cli.main", "rewards", "dev", str(source), "-o", "json", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None

            def report() -> dict[str, Any]:
                found: dict[str, Any] = json.loads(process.stdout.readline())
                return found

            def changes() -> list[tuple[str, str, str]]:
                (one,) = report()["rewards"]
                return [(c["case"], c["change"], c["result"]) for c in one["changes"]]

            first = report()["rewards"][0]
            assert (first["passed"], first["changes"]) == (True, [])
            assert {one["provider"] for one in first["costs"]} >= {"aws_lambda", "modal"}
            score("float(sample.completion == 'a')")
            assert changes() == [("b", "fails", "0, expected 1")]
            score("float(sample.completion ==")
            assert report()["error"].startswith(f"{helper}:2: not Python: ")
            score("1.0 if sample.completion == 'a' else 0.5")
            assert changes() == [("b", "was 0, expected 1", "0.5, expected 1")]
            (tmp_path / "cases.jsonl").write_text(json.dumps(CASES[0]) + "\n")
            assert changes() == []
            source.write_text(SOURCE.replace("helper.score(sample)", "undefined"))
            assert changes() == [("a", "fails", "crash: NameError: name 'undefined' is not defined")]
            source.write_text(SOURCE.replace("return", "global N; N = 1; return"))
            assert "N" in report()["error"], "a reward that keeps state"

            found = re.search(r"http://\S+", process.stderr.readline())
            assert found is not None
            body = json.dumps([{"id": "x", "messages": [{"role": "assistant", "content": "a"}]}]).encode()
            with urllib.request.urlopen(found[0].replace("NAME", "f"), body) as answer:
                assert "NameError" in answer.read().decode(), "the last version that was packed"
            started = descendants(process.pid)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
            assert not any(alive(pid) for pid in started)
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_requirements_and_dockerfiles_are_watched(tmp_path: Path) -> None:
    needs, dockerfile, copied = (tmp_path / name for name in ("needs.txt", "Dockerfile", "words.txt"))
    needs.write_text("")
    copied.write_text("one")
    dockerfile.write_text("FROM debian\nCOPY words.txt /\n")
    source = tmp_path / "f.py"
    settings = "requirements=['needs.txt'], image={'dockerfile': 'Dockerfile'}"
    source.write_text(f"from rollart import reward\n\n@reward({settings})\ndef f(sample):\n    return 1.0\n")
    (tmp_path / "cases.jsonl").write_text(json.dumps(CASES[0]) + "\n")
    command = [sys.executable, "-m", "rollart.cli.main", "rewards", "dev", str(source), "-o", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            versions = [json.loads(process.stdout.readline())["rewards"][0]["version"]]
            changes = ((needs, "six==1.17.0"), (dockerfile, "FROM debian\nCOPY words.txt /w\n"), (copied, "another"))
            for path, text in changes:
                path.write_text(text)
                versions.append(json.loads(process.stdout.readline())["rewards"][0]["version"])
            assert len(set(versions)) == 4, "each is a part of the version"
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        finally:
            process.kill()
