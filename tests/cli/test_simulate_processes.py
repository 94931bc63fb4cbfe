"""`rollart simulate` with several processes: a signal ends all of them, in a word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollart.settings.load import builtin

pytestmark = pytest.mark.slow


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def listen() -> None:
    """A test that was started in the background ignores SIGINT, and so would its child."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize(
    ("sent", "code", "told"),
    [(signal.SIGINT, 130, "rollart: interrupted"), (signal.SIGTERM, 143, "rollart: terminated")],
)
def test_a_signal_leaves_nothing_behind(tmp_path: Path, sent: signal.Signals, code: int, told: str) -> None:
    command = [
        sys.executable,
        "-c",
        "from rollart.cli.main import main; main()",
        "simulate",
        str(builtin("runs/agentic-math-32b.yaml")),
        "--cluster",
        str(builtin("clusters/rollart-96h800-32h20.yaml")),
        "--seeds",
        "2",
        "--workers",
        "2",
        "--steps",
        "100",
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        preexec_fn=listen,
    )
    try:
        until = time.monotonic() + 300.0
        while not (started := list(tmp_path.glob("rollart-simulate-*/*/ledger.sqlite"))) or len(started) < 2:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.05)
        below = children(process.pid)
        process.send_signal(sent)
        _, said = process.communicate(timeout=120.0)
    finally:
        process.kill()
    assert process.returncode == code
    assert said.splitlines()[-1:] == [told]
    until = time.monotonic() + 60.0
    while any(Path(f"/proc/{pid}").exists() for pid in below):
        assert time.monotonic() < until, "a process was left running"
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []
