"""Settings of Hypothesis, and the limit on the CPU time of a fast test.

Property tests have no deadline: how fast this machine is at the moment is no property of the code.
"""

from __future__ import annotations

import ast
import gc
import os
import statistics
import time
from collections.abc import Generator

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import settings

settings.register_profile("any speed", deadline=None)
if not os.environ.get("CI"):  # with it, Hypothesis has a profile of its own: no deadline, the same examples every time
    settings.load_profile("any speed")

MAX_CPU_S = 1.0
"""CPU-seconds of this process that the body of a test without the mark `slow` may take on an idle machine. Aim at half
of them: machines of one kind were seen to differ by 1.7 beyond what `slowdown` measures."""

REFERENCE = "def f(a, b):\n    return {a: [b, a + b], 'c': (a, b)}\n" * 1500
IDLE_REFERENCE_S = 0.045
"""CPU-seconds in which the idle core that the marks were set on parses `REFERENCE`. Load makes a CPU-second do less."""

CPU_S = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    began = time.process_time()
    try:
        return (yield)
    finally:
        pyfuncitem.stash[CPU_S] = time.process_time() - began


def slowdown() -> float:
    """How much slower this machine computes now than an idle one, at least 1."""
    seconds = []
    for _ in range(5):
        began = time.process_time()
        ast.parse(REFERENCE)
        seconds.append(time.process_time() - began)
    return max(statistics.median(seconds) / IDLE_REFERENCE_S, 1.0)


def pytest_collection_finish() -> None:
    gc.freeze()  # imported modules are not collected again and again, at the expense of the test that runs


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test that exceeds the limit again, with its imports and caches warm. Fail it if it exceeds it twice."""
    on_gpu = os.environ.get("ROLLART_TEST_DEVICE", "cpu") != "cpu"  # the first test of a process waits for the driver
    if on_gpu or not isinstance(item, pytest.Function) or item.get_closest_marker("slow") is not None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if item.stash.get(CPU_S, 0.0) > MAX_CPU_S and all(report.passed for report in reports):
        item._initrequest()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if (seconds := item.stash[CPU_S]) > (limit := MAX_CPU_S * slowdown()):
            report = next(report for report in reports if report.when == "call")
            report.outcome = "failed"
            report.longrepr = f"took {seconds:.2f} CPU-seconds, twice above {limit:.2f}: make it faster or mark it slow"
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
