"""Masks of secrets, and a function that is loaded again when AWS has a new value."""

from __future__ import annotations

import base64
import json
import pathlib
import sys
import types
import urllib.parse
from typing import Any

import pytest

from serverless.secret_runtime import REFERENCES, GuardedFunction, Mask

VALUE = "sk-abc/def+ghi==0123"


@pytest.mark.parametrize(
    "form",
    [
        VALUE,
        urllib.parse.quote(VALUE),
        urllib.parse.quote(VALUE, safe=""),
        urllib.parse.quote_plus(VALUE),
        VALUE.encode().hex(),
        VALUE.encode().hex().upper(),
        json.dumps(VALUE),
        base64.b64encode(VALUE.encode()).decode().rstrip("="),
    ],
)
def test_a_value_is_masked_in_each_encoding(form: str) -> None:
    masked = Mask({"KEY": VALUE}).text(f"before {form} after")
    assert "[secret KEY]" in masked
    assert masked.startswith("before ")
    assert masked.endswith(" after")


def test_fields_of_the_protocol_stay_what_they_are() -> None:
    """`test` is a usual key of a local endpoint."""
    answer = {"id": "test-0001", "error": {"kind": "crash", "message": "401 for test"}}
    masked = Mask({"KEY": "test"}).tree([answer])
    assert masked == [{"id": "test-0001", "error": {"kind": "crash", "message": "401 for [secret KEY]"}}]


class Store:
    """AWS Secrets Manager as far as a function asks it."""

    def __init__(self) -> None:
        self.value = "first-value"

    def client(self, service: str, **settings: Any) -> Store:
        return self

    def get_secret_value(self, SecretId: str) -> dict[str, str]:
        return {"SecretString": self.value}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    boto3, botocore, config = (types.ModuleType(name) for name in ("boto3", "botocore", "botocore.config"))
    boto3.client = made.client  # type: ignore[attr-defined]
    config.Config = lambda **settings: None  # type: ignore[attr-defined]
    for module in (boto3, botocore, config):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    references = {"ttl_s": 0, "from": {"KEY": {"aws_secret": "prod/key", "key": ""}}}
    monkeypatch.setenv(REFERENCES, json.dumps(references))
    monkeypatch.setenv("KEY", "")
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, getattr(sys, stream))
    return made


def test_a_reload_that_fails_is_tried_again_by_the_next_call(store: Store, tmp_path: pathlib.Path) -> None:
    """The value before it would stay in use otherwise, until the next rotation."""
    import os

    fails = False

    def load() -> Any:
        if fails:
            raise ConnectionError(f"no answer for {os.environ['KEY']}, it was {loaded[-1]}")
        loaded.append(os.environ["KEY"])
        return lambda event, context: [f"key {loaded[-1]}"]

    loaded: list[str] = []
    function = GuardedFunction(["KEY"], tmp_path, load)
    assert function([], None) == ["key [secret KEY]"]
    store.value, fails = "second-value", True
    for _ in range(2):
        with pytest.raises(Exception, match=r"no answer for \[secret KEY\], it was \[secret KEY\]"):
            function([], None)
    fails = False
    assert function([], None) == ["key [secret KEY]"]
    assert loaded == ["first-value", "second-value"]


def test_the_text_of_an_exit_is_masked(store: Store, tmp_path: pathlib.Path) -> None:
    def call(event: Any, context: Any) -> Any:
        sys.exit("refused: first-value")

    with pytest.raises(SystemExit) as exit:
        GuardedFunction(["KEY"], tmp_path, lambda: call)([], None)
    assert str(exit.value) == "refused: [secret KEY]"
