"""CPU time of processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rollart.tools.calibrate import process_cpu_s, reaped_children_cpu_s

BURN = "import time\nwhile time.process_time() < 0.3: pass"


@pytest.mark.slow  # a process that computes for 0.3 s
def test_the_work_of_children_that_ended_is_not_lost() -> None:
    before, own = reaped_children_cpu_s(os.getpid()), process_cpu_s(os.getpid())
    subprocess.run([sys.executable, "-c", BURN], check=True)
    assert reaped_children_cpu_s(os.getpid()) - before >= 0.28  # in ticks of 10 ms
    assert process_cpu_s(os.getpid()) - own < 0.28


def test_a_process_that_is_gone_has_spent_nothing() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert process_cpu_s(child.pid) == reaped_children_cpu_s(child.pid) == 0.0
