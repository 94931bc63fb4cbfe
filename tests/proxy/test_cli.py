"""Errors of `rollart proxy` before it serves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollart.cli.main import run
from tests.proxy.scripted import spelling


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--listen", "everywhere"], 2, "--listen everywhere (rule: HOST:PORT)"),
        (["--listen", "0.0.0.0:0"], 2, "is reachable from elsewhere (rule: with a key"),
        (["--token-env", "NOBODY_SET_THIS"], 3, "NOBODY_SET_THIS is not set"),
        (["--chat-template", "none.jinja"], 2, "cannot read none.jinja"),
        (["--record", "/proc/none/turns.jsonl"], 2, "cannot write /proc/none/turns.jsonl"),
        (["--engine", "127.0.0.1:2"], 2, "--engine 127.0.0.1:2 (rule: a URL)"),
        ([], 1, "/v1/models failed"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int, said: str
) -> None:
    spelling(tmp_path)
    given = ["proxy", "--engine", "http://127.0.0.1:1", "--tokenizer", str(tmp_path), *options]
    assert run(given) == code
    assert said in capsys.readouterr().err


def test_a_template_or_tokenizer_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["proxy", "--engine", "http://127.0.0.1:1", "--tokenizer", str(tmp_path)]
    assert run(given) == 2
    assert "no tokenizer.json" in capsys.readouterr().err
    spelling(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% for %}"}))
    assert run(given) == 2
    assert "the chat template cannot be read" in capsys.readouterr().err
    (tmp_path / "tokenizer.json").write_text("{")
    assert run(given) == 2
    assert "tokenizer.json is no tokenizer: EOF" in capsys.readouterr().err
