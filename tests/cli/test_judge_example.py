"""The example of a judge, executed as its file says, against an endpoint of this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollart.settings.load import builtin, load_prices
from rollart.settings.resolve import resolve_files
from serverless.deploy.package import build
from serverless.spec import FunctionSpec
from tests.serverless.judge_server import Answer, JudgeServer, served

EXAMPLE = Path(__file__).parents[2] / "examples/judge"


def test_the_examples_can_be_packed_and_their_model_has_a_price() -> None:
    (judge,) = [f for f in resolve_files(EXAMPLE / "run.yaml", None, []).run.functions if f.name == "judge"]
    assert judge.arguments is not None
    own = build(FunctionSpec(name="explains", source="judge.py"), base=EXAMPLE)
    assert (own.spec.secrets, own.spec.reusable, own.spec.hedge) == (("JUDGE_API_KEY",), True, False)
    priced = {entry.name for entry in load_prices(builtin("prices.yaml")).prices}
    assert f"api.openai.com/{judge.arguments['model']}" in priced


def judged(system: str, user: str) -> Answer:
    completion = user[user.index("<<<COMPLETION") :]
    good = "40 + 16" in completion
    return Answer({"reasoning": "", "scores": {"correct": 9 if good else 1, "clear": 8 if good else 2}}, cached=10)


@pytest.mark.slow  # function workers are processes, which import the client
def test_its_cases_pass_and_its_tokens_are_shown(rollart: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai", reason="the extra `judge` is not installed")
    monkeypatch.setenv("JUDGE_API_KEY", "sk-key")
    shutil.copytree(EXAMPLE, "judge")
    source, server = Path("judge/judge.py"), JudgeServer(judged, key="sk-key")
    with served(server):
        text = source.read_text()
        source.write_text(text.replace('model="gpt-5-mini"', f'model="gpt-5-mini", url="{server.url}"'))
        tested = rollart("rewards", "test", str(source), "-o", "json")
        shown = rollart("rewards", "test", str(source))
        changes = rollart("rewards", "diff", str(source), "-o", "json")
        planned = rollart("rewards", "plan", str(source), "--items", "1000", "-o", "json")
    assert tested.code == 0, tested.err
    (report,) = json.loads(tested.out)["rewards"]
    (used,) = report["tokens"]
    asked = server.log[: used["requests"]]
    assert used["input_tokens"] == sum(row.input_tokens for row in asked)
    assert used["output_tokens"] == sum(row.output_tokens for row in asked)
    assert "Tokens of language models per item" in shown.out
    assert f"{server.endpoint}/gpt-5-mini" in {row["provider"] for row in json.loads(changes.out)["tables"]["costs"]}
    rows = {row["provider"]: row for row in json.loads(planned.out)["tables"]["plan"]}
    row = rows[f"{server.endpoint}/gpt-5-mini"]
    assert (row["usd_per_million"], row["note"]) == (None, "no price is known for the model")
