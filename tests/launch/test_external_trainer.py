"""An external trainer on another machine needs a token; its absence is an error before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollart.errors import SpecError
from rollart.launch.layout import trainer_actors
from rollart.launch.requirements import refuse_missing
from rollart.settings.resolve import resolve_files

ELSEWHERE = ["cluster.trainer.external=0.0.0.0:8200"]


def test_an_address_that_others_reach_needs_a_token() -> None:
    for address in ("0.0.0.0:8200", "[::]:8200", "trainer.example.com:8200", "10.0.0.7:0"):
        with pytest.raises(SpecError, match=r"\(rule: external_token, file or env:VAR, with external"):
            resolve_files(overrides=[f"cluster.trainer.external='{address}'"])
    for address in ("127.0.0.1:8200", "localhost:0", "[::1]:8200"):
        resolve_files(overrides=[f"cluster.trainer.external='{address}'"])
    for wrong in ("8200", "host:x", "::1:8200", "host:70000"):
        with pytest.raises(SpecError, match=r"\(rule: HOST:PORT\)"):
            resolve_files(overrides=[f"cluster.trainer.external='{wrong}'"])


def test_a_token_that_is_none_is_told_what_it_may_be() -> None:
    with pytest.raises(SpecError, match=r"external_token is 'flie' \(rule: file, or env:VAR\)"):
        resolve_files(overrides=[*ELSEWHERE, "cluster.trainer.external_token=flie"])


def test_where_the_token_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINE", raising=False)
    inside = resolve_files(overrides=[*ELSEWHERE, "cluster.trainer.external_token='env:MINE'"])
    with pytest.raises(SpecError, match="the environment variable MINE is not set"):
        refuse_missing(inside)
    monkeypatch.setenv("MINE", "secret")
    refuse_missing(inside)
    (bridge,) = trainer_actors(inside, tmp_path, tmp_path / "trainer.json")
    assert bridge.kwargs["env"]["MINE"] == "secret"
    assert "secret" not in str(bridge.args), "arguments are for everybody to read"
    (bridge,) = trainer_actors(
        resolve_files(overrides=[*ELSEWHERE, "cluster.trainer.external_token=file"]), tmp_path, tmp_path / "t.json"
    )
    assert str(tmp_path / "service.token") in str(bridge.args)
