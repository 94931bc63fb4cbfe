"""Memory bounds of hosts: bounds by machine, and the actions above a bound."""

from __future__ import annotations

import math

import pytest

from rollart.policy.hosts import MemoryAction, MemoryRules, MemoryWatch


@pytest.mark.parametrize(
    ("given", "machine", "hosts", "bound"),
    [
        (None, 100 * 10**9, 1, 70e9),
        (None, 100 * 10**9, 7, 10e9),
        (None, 8 * 10**9, 64, 1e9),
        (None, 0, 1, math.inf),
        (0.5e9, 100 * 10**9, 64, 0.5e9),
        (0.5e9, 0, 1, 0.5e9),
    ],
)
def test_a_host_has_its_share_of_the_machine(given: float | None, machine: int, hosts: int, bound: float) -> None:
    assert MemoryRules(given).bound(machine, hosts) == pytest.approx(bound)


def test_a_host_drains_once_and_ends_when_it_is_empty_when_its_time_is_over_or_far_above() -> None:
    def seen(*looks: tuple[float, int, float]) -> list[MemoryAction]:
        watch = MemoryWatch(MemoryRules(drain_s=60.0))
        return [watch.check(memory, 100.0, live, now) for memory, live, now in looks]

    keep, drain, restart = MemoryAction.KEEP, MemoryAction.DRAIN, MemoryAction.RESTART
    assert seen((100, 5, 0), (100, 0, 1)) == [keep, keep]
    assert seen((101, 0, 0)) == [restart]
    assert seen((101, 5, 0), (101, 5, 59), (101, 5, 60)) == [drain, keep, restart]
    assert seen((101, 5, 0), (90, 1, 9), (90, 0, 10)) == [drain, keep, restart]
    assert seen((125, 5, 0), (126, 5, 1)) == [drain, restart]
    assert seen((126, 5, 0)) == [restart]
