"""The watcher that ends what a process started."""

from __future__ import annotations

import subprocess
import sys

import pytest

TWICE = """
import os
from pathlib import Path
from rollart.orphans import kill_at_end
kill_at_end()
mark = os.environ["ROLLART_LIFE"]
kill_at_end()
assert os.environ["ROLLART_LIFE"] == mark
print(len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
"""


@pytest.mark.slow  # a process that ends only after its watcher
@pytest.mark.skipif(sys.platform != "linux", reason="of Linux alone")
def test_a_process_has_one_watcher_however_many_runs_it_makes() -> None:
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "1"
