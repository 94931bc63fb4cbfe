"""A run whose reward is a language model: its tokens and dollars are the endpoint's own, to the last one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.harness import CLUSTER, Home, ledger, sound, tiny
from tests.serverless.judge_server import Answer, JudgeServer, served

pytestmark = pytest.mark.slow  # it starts a trainer and an engine

pytest.importorskip("openai", reason="the extra `judge` is not installed")
pytest.importorskip("anthropic", reason="the extra `judge` is not installed")

KEY = "sk-a-key-of-this-test-alone"

USD = {"input": 2.5, "cached": 0.25, "output": 10.0}
"""Dollars per million tokens."""


def test_the_ledger_has_the_tokens_of_the_endpoints_own_log(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request is refused for rate, one verdict is nonsense and asked for again: the run goes on, and both are on
    no score. The tokens of the nonsense are on the bill. The key reaches the endpoint, and no file of the run."""
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    asked = 0

    def judge(system: str, user: str) -> Answer:
        nonlocal asked
        asked += 1
        if asked == 2:
            return Answer(status=429, error={"message": "slow down"}, headers={"retry-after": "0.3"})
        if asked == 3:
            return Answer(text="It is good.")
        completion = user[user.index("<<<COMPLETION") :]
        return Answer({"scores": {"left": 1 if "left" in completion else 0.25}}, cached=5)

    server = JudgeServer(judge, key=KEY)
    with served(server):
        function = {
            "name": "judge",
            "source": "serverless.rewards.llm_judge",
            "handler": "LlmJudge",
            "concurrency": 2,
            "arguments": {
                "model": "tiny-judge",
                "url": server.url,
                "criteria": {"left": "It says left."},
                "scale": [0, 1],
                "reasoning": False,
            },
        }
        prices = [
            {"name": f"{server.endpoint}/tiny-judge", "unit": f"million-{kind}-tokens", "usd": usd}
            | {"source": "the test", "date": "2026-07-01"}
            for kind, usd in USD.items()
        ]
        spec = tiny(functions=[function], domains__0__rewards=[{"function": "judge"}], steps=2)
        run = home.launch(spec, cluster={**CLUSTER, "price_list": prices})
        run.finished()
    sound(home.directory, steps=2)
    files = [path for path in home.path.rglob("*") if path.is_file()]
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    with ledger(home.directory) as db:
        counts = db.execute(
            "SELECT sum(requests), sum(input_tokens), sum(cached_tokens), sum(output_tokens) FROM tokens"
        ).fetchone()
    total = server.total
    assert counts == (total.requests, total.input_tokens, total.cached_tokens, total.output_tokens)
    assert total.requests == asked - 1 >= 3, "a refused request has no tokens"
    usd = (
        total.input_tokens * USD["input"] + total.cached_tokens * USD["cached"] + total.output_tokens * USD["output"]
    ) / 1e6
    report = json.loads(home.run("report", "cost", "-o", "json").stdout)["tables"]
    assert sum(row["usd"] for row in report["tokens"]) == pytest.approx(usd, rel=1e-12)
    lost = {row["cause"]: row["requests"] for row in report["tokens"] if row["cause"] != "call"}
    assert lost == {"no_score": 1}, "the nonsense"
    assert {row["endpoint"] for row in report["tokens"]} == {server.endpoint}
    assert billed(report, "million-") == pytest.approx(usd, rel=1e-12)
    (whole,) = [row["value"] for row in report["total"] if (row["what"], row["unit"]) == ("total", "USD")]
    assert billed(report, "") == pytest.approx(whole)


def billed(report: dict[str, Any], unit: str) -> float:
    rows = [row for row in report["prices"] if row["cost"] == "billed" and row["unit"].startswith(unit)]
    return sum(float(row["usd"]) for row in rows)
