"""The engine's error when its GPU is out of memory: one line that names the options to lower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollart.engine import __main__ as program

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation")


def test_a_step_that_finds_no_memory_ends_the_engine_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def serve(*_: Any) -> None:
        raise ExceptionGroup("unhandled errors in a TaskGroup", [FULL])

    monkeypatch.setattr(program, "load", lambda args: type("Runner", (), {"decoder": None}))
    monkeypatch.setattr(program, "serve_runner", serve)
    monkeypatch.setattr(program, "die_with_parent", lambda *_, **__: None)
    threads = torch.get_num_threads()
    assert program.main(["--model", "m", "--threads", str(threads)]) == 1
    assert capsys.readouterr().err == (
        "rollart.engine: a step found no memory: CUDA out of memory. Tried to allocate 2.00 GiB. (lower --max-slots "
        "(engines.max_slots) or --max-context (model.context): KV takes their product)\n"
    )


def test_a_cache_that_does_not_fit_is_refused_with_what_to_lower(
    qwen: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise FULL

    monkeypatch.setattr(program, "Runner", full)
    monkeypatch.setattr(program, "die_with_parent", lambda *_, **__: None)
    threads = torch.get_num_threads()
    assert program.main(["--model", str(qwen), "--threads", str(threads)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rollart.engine: cannot start on cpu: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert "lower --max-slots" in line
