from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rollart.cli.main import run
from rollart.ledger.store import Ledger
from rollart.ports import RunEvent

RUN = """\
name: test
model:
  init: {model_type: qwen3, vocab_size: 128, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
         num_attention_heads: 2}
  tokenizer: "rollart.quickstart.tokenizer:write_tokenizer"
  context: 128
steps: 2
batch: {trajectories: 8}
domains:
  - {name: lake, environment: "tests.contracts.worlds:Tale", max_tokens: 4}
"""


@dataclass
class Result:
    """What a command did."""

    code: int
    out: str
    err: str


@dataclass
class FakeLaunch:
    """Stands in for `rollart.launch`: notes the calls, then does as it is told."""

    calls: list[tuple[Any, Path, bool]] = field(default_factory=list)
    action: Callable[[Path], None] = lambda directory: None

    def launch(
        self, resolved: Any, *, run_dir: Path, resume: bool, on_progress: Callable[[RunEvent], None], since_s: float
    ) -> None:
        self.calls.append((resolved, run_dir, resume))
        fields = {"step": 1, "steps": 2, "train_s": 0.5, "waited_s": 0.1, "success.lake": 0.25}
        on_progress(RunEvent(1.0, "step", "training", fields))
        home = run_dir.absolute()
        self.action(run_dir)
        Ledger(home, clock=lambda: 0.0, config=resolved.to_dict(), inline=True).close()


@pytest.fixture
def rollart(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Result]:
    """Runs a command in an empty directory that has run.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)

    def call(*arguments: str) -> Result:
        code = run(arguments)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def launch_calls(monkeypatch: pytest.MonkeyPatch) -> FakeLaunch:
    fake = FakeLaunch()
    monkeypatch.setattr("rollart.cli.launch.start", fake.launch)
    return fake
