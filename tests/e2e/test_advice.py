"""The first advice for a run with a known bottleneck is its remedy, and a run with it gains as predicted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollart.cli.main import run
from rollart.ledger.reader import LedgerReader
from tests.e2e.harness import Home, tiny

pytestmark = pytest.mark.slow  # two real runs and their simulations: about 20 CPU-seconds


def test_the_advice_for_a_slow_reward_holds_in_a_real_run(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight rewards of 0.2 s a step by one worker, beside some 0.1 s of games and training."""

    def tables(*arguments: str) -> dict[str, Any]:
        assert run([*arguments, "--runs-dir", str(home.path / "runs"), "-o", "json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)["tables"]
        return found

    function = {"functions__0__handler": "slow", "functions__0__concurrency": 1, "functions__0__batch_items": 1}
    spec = tiny(steps=5, **function)
    home.launch(spec).finished()
    report = tables("advise", "tiny-1", "--seeds", "3", "--workers", "1")
    assert report["exposed"][0]["part"] == "rewards"
    assert report["tried"][0]["change"] == "nothing"
    best = report["advice"][0]
    assert best["change"] == "functions.rule.concurrency=4"
    assert best["saved_s"] > best["±_s"] > 0
    assert best["saved"] > 0.4
    home.launch(spec, *best["change"].split()).finished()
    before, after = (loop_s(home, name) for name in ("tiny-1", "tiny-2"))
    assert (before - after) / before == pytest.approx(best["saved"], abs=0.2)
    apart = tables("diff", "tiny-1", "tiny-2")
    assert apart["inputs"] == [{"kind": "run", "key": "functions.rule.concurrency", "a": "1", "b": "4"}]
    waited = next(row for row in apart["seconds"] if row["part"] == "waiting for samples")
    assert waited["difference_s"] == pytest.approx(after - before, abs=0.2 * before)


def loop_s(home: Home, name: str) -> float:
    """Seconds from the first sample's wait to the last step."""
    with LedgerReader(home.path / "runs" / name) as reader:
        steps = reader.events("step")
    first = float(steps[0].fields["train_s"] or 0) + float(steps[0].fields["waited_s"] or 0)
    return steps[-1].t - steps[0].t + first
