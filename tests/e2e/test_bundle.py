"""A step of a real run as a file, repeated elsewhere when the run is gone."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.harness import BATCH, LIMIT_S, MOVES_WEIGHTS, ROLLART, Home, environment, tiny

pytestmark = pytest.mark.slow  # a run, and a trainer of its own: torch three times, about 20 CPU-seconds

PAY = """\
from rollart import reward

@reward(memory_mb=128, timeout_s=5.0)
def rule(sample):
    return {won} if sample.messages[-1]["content"] == sample.reference_answer else {lost}
"""


def test_a_step_is_repeated_bit_for_bit_without_its_run(home: Home, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of an asynchronous run with stale samples, the decoupled loss, two updates per step, and adapters where peft is
    installed."""
    (home.path / "pay.py").write_text(PAY.format(won=1.0, lost=0.25))
    changes: dict[str, object] = {"functions__0__source": str(home.path / "pay.py"), "training__minibatches": 2}
    if importlib.util.find_spec("peft") is not None:
        changes["training__lora"] = {"rank": 4}
    changes |= {"training__lr": 0.05, "domains__0__advantage": MOVES_WEIGHTS}
    home.launch(tiny(steps=3, checkpoints={"every": 2}, **changes)).finished()
    refused = home.run("bundle", "tiny-1", "--step", "2", "-o", "b.zip")
    assert (refused.returncode, "v1, which it started from, is not on disk" in refused.stderr) == (2, True)
    assert "steps that can be: 1, 3" in refused.stderr
    for out, *options in (("b.zip",), ("light.zip", "--no-weights")):
        written = home.run("bundle", "tiny-1", "--step", "3", "-o", out, *options)
        assert written.returncode == 0, written.stderr
        assert f"{BATCH} samples, {BATCH} trajectories" in written.stdout
    elsewhere = tmp_path_factory.mktemp("laptop")
    for name in ("b.zip", "light.zip"):
        shutil.move(home.path / name, elsewhere / name)
    shutil.rmtree(home.path / "runs")
    (home.path / "pay.py").unlink()

    done = replay(elsewhere, "b.zip", "-o", "json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (rule,) = report["tables"]["functions"]
    assert (rule["replayed"], rule["bit_equal"], rule["different"]) == ("again", BATCH, 0)
    metrics = {row["metric"]: row for row in report["tables"]["metrics"]}
    assert {row["agrees"] for row in metrics.values()} == {"bit-equal"}
    assert metrics["grad_norm"]["recorded"] > 0
    assert metrics["updates"]["recorded"] == 2

    (elsewhere / "new.py").write_text(PAY.format(won=2.0, lost=0.5))
    changed = replay(elsewhere, "light.zip", "--rewards", "new.py", "-o", "json")
    assert changed.returncode == 1
    assert "is not repeated: reward 'rule' of coin-" in changed.stderr
    paid = json.loads(changed.stdout)["tables"]["rewards"]
    assert len(paid) == BATCH
    assert all(row["replayed"] == 2.0 * row["recorded"] and row["differs"] for row in paid)
    first = paid[0]
    assert f"{first['trajectory']} is {first['replayed']}, recorded {first['recorded']}" in changed.stderr


def replay(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ROLLART, "replay", *arguments],
        cwd=where,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
