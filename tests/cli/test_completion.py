"""Completion of names in a shell, over click's protocol."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollart.cli.commands import COMPLETE
from rollart.cli.completion import remember
from rollart.cli.main import run
from serverless.providers.base import DeployedFunction

Complete = Callable[..., list[str]]

DIGESTS = ("a1" * 32, "b2" * 32)


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Complete:
    """What bash offers for the last of these words, in an empty directory: for its part from `@` or after `=`."""
    monkeypatch.chdir(tmp_path)

    def ask(*words: str) -> list[str]:
        monkeypatch.setenv(COMPLETE, "bash_complete")
        split = ["rollart", *(part for word in words for part in re.split("([@=])", word) if part or not word)]
        monkeypatch.setenv("COMP_WORDS", "\n".join(split))
        monkeypatch.setenv("COMP_CWORD", str(len(split) - 1))
        assert run([]) == 0
        found = capsys.readouterr()
        assert found.err == ""
        return [line.partition(",")[2] for line in found.out.splitlines() if line]

    return ask


def deployed_here(name: str) -> None:
    directory = Path(".rollart/functions/deployed") / name
    directory.mkdir(parents=True)
    versions = [{"version": digest, "number": n, "created": "", "spec": {}} for n, digest in enumerate(DIGESTS, 1)]
    (directory / "state.json").write_text(
        json.dumps({"current": DIGESTS[0], "canary": DIGESTS[1], "versions": versions})
    )


def test_commands_and_options(complete: Complete) -> None:
    assert {"deploy", "delete", "dev", "diff", "doctor"} <= set(complete("rewards", "d"))
    assert complete("rewards", "logs", "f", "--tr") == ["--trajectory"]
    assert complete("rewards", "list", "--provider", "a") == ["aws"]
    assert complete("rewards", "list", "--provider=a") == ["aws"]


def test_providers_of_other_packages(complete: Complete, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nebula-1.dist-info").mkdir()
    entry = "[rollart.function_backends]\nnebula = nebula:PLUGIN\n"
    (tmp_path / "nebula-1.dist-info/entry_points.txt").write_text(entry)
    (tmp_path / "nebula-1.dist-info/METADATA").write_text("Name: nebula\nVersion: 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert complete("rewards", "list", "--provider", "") == ["local", "aws", "modal", "nebula"]
    assert complete("rewards", "list", "--provider", "n") == ["nebula"]


def test_functions_of_this_machine_and_their_versions(complete: Complete) -> None:
    assert complete("rewards", "logs", "") == []
    deployed_here("exact")
    deployed_here("judge")
    assert complete("rewards", "logs", "") == ["exact", "judge"]
    assert complete("rewards", "scale", "j") == ["judge"]
    for command in (("invoke",), ("serve",), ("rescore", "lake-1", "--with")):
        assert complete("rewards", *command, "ju") == ["judge"]
        assert complete("rewards", *command, "judge@l") == ["@live"]
    names = ["canary", "live", DIGESTS[0][:12], DIGESTS[1][:12], "2", "1"]
    assert complete("rewards", "invoke", "judge@") == [f"@{one}" for one in names]
    assert complete("rewards", "invoke", "judge@l") == ["@live"]
    assert complete("rewards", "rollback", "judge", "--to", "b") == [DIGESTS[1][:12]]


def test_functions_of_a_provider_are_those_of_its_last_listing(complete: Complete) -> None:
    def listed(*names: str, number: str = "1", everything: bool = True) -> None:
        found = [DeployedFunction(n, "aws_lambda", DIGESTS[0], number, True, aliases=("live",)) for n in names]
        remember(Path(".rollart/functions"), "aws_lambda", found, everything=everything)

    assert complete("rewards", "logs", "--provider", "aws", "") == []
    listed("exact", "gone")
    listed("exact", "judge")
    listed("judge", number="7", everything=False)
    assert complete("rewards", "logs", "--provider", "aws", "") == ["exact", "judge"]
    assert complete("rewards", "invoke", "--provider", "aws", "judge@") == ["@live", f"@{DIGESTS[0][:12]}", "@7"]
    assert complete("rewards", "logs", "--provider", "modal", "") == []
    Path(".rollart/functions/listed.json").write_text("{")
    assert complete("rewards", "logs", "--provider", "aws", "") == []


def test_runs_the_latest_first(complete: Complete) -> None:
    for n, name in enumerate(("lake-1", "lake-2", "sea-1")):
        (Path("runs") / name).mkdir(parents=True)
        file = Path("runs") / name / "resolved.yaml"
        file.touch()
        os.utime(file, (n, n))
    assert complete("report", "cost", "lake") == ["lake-2", "lake-1"]
    assert complete("rewards", "rescore", "lake") == ["lake-2", "lake-1"]
    assert complete("logs", "") == ["sea-1", "lake-2", "lake-1"]


def test_domains_of_the_run_file(complete: Complete) -> None:
    Path("run.yaml").write_text("domains:\n  - {name: lake}\n  - {name: sea}\n")
    assert complete("launch", "run.yaml", "domains.s") == ["domains.sea."]
    assert complete("launch", "missing.yaml", "domains.s") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    assert f"{COMPLETE}={shell}_complete" in capsys.readouterr().out


def test_another_request_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(COMPLETE, "none")
    assert run(["--help"]) == 2
    assert capsys.readouterr().err.startswith("rollart: _ROLLART_COMPLETE=none is no request of a shell")


@pytest.mark.slow  # a process
def test_an_answer_takes_less_than_half_a_second_of_cpu(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    environment: dict[str, Any] = {**os.environ, COMPLETE: "bash_complete"}
    used = []
    for words in ("rollart rewards invoke j", "rollart rewards logs --provider aws j", "rollart report cost l"):
        words_of = {"COMP_WORDS": words.replace(" ", "\n"), "COMP_CWORD": str(len(words.split()) - 1)}
        command = [sys.executable, "-m", "rollart.cli.entry"]
        process = subprocess.Popen(command, env={**environment, **words_of}, cwd=tmp_path)
        _, status, usage = os.wait4(process.pid, 0)  # of this process alone
        assert status == 0
        used.append(usage.ru_utime + usage.ru_stime)
    assert min(used) < 0.5


@pytest.mark.slow  # an interactive shell
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_a_key_press_in_bash(complete: Complete, tmp_path: Path) -> None:
    deployed_here("judge")
    (tmp_path / "rollart").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m rollart.cli.entry "$@"\n')
    (tmp_path / "rollart").chmod(0o755)
    ours, theirs = os.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PS1": "> ", "TERM": "dumb"},
        start_new_session=True,
    )
    os.close(theirs)

    def answered(keys: str, wanted: str) -> None:
        os.write(ours, keys.encode())
        shown = ""
        while wanted not in shown:
            assert select.select([ours], [], [], 30)[0], shown
            shown += os.read(ours, 1 << 16).decode(errors="replace")

    try:
        answered('eval "$(rollart completion bash)" && echo re""ady\n', "ready")
        answered("rollart rewards invoke ju\t", "invoke judge ")
        answered("\x15rollart rewards invoke judge@l\t", "invoke judge@live ")
        answered("\x15rollart rewards list --provider=a\t", "--provider=aws ")
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)
