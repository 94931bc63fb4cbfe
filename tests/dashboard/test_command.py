"""`rollart dashboard`: what it refuses, and the token that it draws."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from rollart.cli.main import run
from tests.e2e.harness import ROLLART, environment


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--runs", "gone"], 2, "gone: no directory of runs"),
        (["mine", "--runs", "."], 2, "no run 'mine' in ."),
        (["--runs", ".", "--port", "TAKEN"], 2, "cannot listen on 127.0.0.1:"),
        (["--runs", ".", "--host", "no.such.host.invalid"], 2, "cannot listen on no.such.host.invalid"),
        (["--runs", ".", "--token-env", "UNSET_TOKEN"], 3, "UNSET_TOKEN is not set"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = str(other.getsockname()[1])
        assert run(["dashboard", *(taken if a == "TAKEN" else a for a in arguments)]) == code
    shown = capsys.readouterr().err.splitlines()
    assert text in shown[0]
    assert shown[1].startswith("  remedy: ")
    assert len(shown) == 2


@pytest.mark.slow  # a process: 1 s
def test_a_token_is_drawn_where_others_reach_it(tmp_path: Path) -> None:
    command = [*ROLLART, "dashboard", "--json", "--runs", str(tmp_path), "--host", "0.0.0.0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        url, _, token = json.loads(process.stdout.readline())["url"].partition("?token=")
        assert len(token) >= 32
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            urllib.request.urlopen(url, timeout=60)
        refused.value.close()
        asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert b"no runs yet" in answer.read()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (130, "", "")
