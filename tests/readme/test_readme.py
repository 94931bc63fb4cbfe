"""What the README says is true: its blocks run as written, its commands exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
MOST_LINES = 15


def blocks() -> dict[str, str]:
    """The code blocks that name a file."""
    return dict(re.findall(r"```\w+ (\S+)\n(.*?)```", README.read_text(), re.DOTALL))


def rollart(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("rollart")), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's directory: the README's files and a model of theirs."""
    for name, body in blocks().items():
        (tmp_path / name).write_text(body)
    model = tmp_path / "my-model"
    model.mkdir()
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    words = ["<pad>", "<unk>", "guess", "higher", "lower", "right", *"123456789"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(model / "tokenizer.json"))
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(model)
    return tmp_path


def test_the_examples_are_short() -> None:
    assert set(blocks()) == {"guess.py", "rewards.py", "run.yaml"}
    for name, body in blocks().items():
        assert len(body.strip().splitlines()) <= MOST_LINES, name


def test_the_commands_exist() -> None:
    from click.testing import CliRunner

    from rollart.cli.commands import cli

    for command in re.search(r"`rollart ([\w |]+)`", README.read_text()).group(1).split("|"):  # type: ignore[union-attr]
        assert CliRunner().invoke(cli, [command.strip(), "--help"]).exit_code == 0, command


@pytest.mark.slow
def test_the_blocks_run_as_written(project: Path) -> None:
    """Slow: starts an engine, a trainer and function workers."""
    assert rollart("validate", "run.yaml", cwd=project).returncode == 0
    plan = rollart("plan", "run.yaml", cwd=project)
    assert plan.returncode == 0, plan.stderr
    done = rollart("launch", "run.yaml", "staleness=2", "training.lr=1e-4", cwd=project)
    assert done.returncode == 0, done.stderr
    assert "step   3/3" in done.stderr
    assert "run directory: " in done.stdout
    report = rollart("report", "cost", "-o", "json", cwd=project)
    told = json.loads(report.stdout)
    assert told["schema_version"]
    assert "infra" not in done.stderr
