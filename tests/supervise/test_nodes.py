"""Nodes that come and go: the devices that a plan may count on, and how rarely it changes."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from rollart.supervise.nodes import MOST, PATIENCE, AvailabilitySettings, NodeAvailability

SETTLE = AvailabilitySettings(settle_s=10.0, memory_s=1000.0)


def test_a_node_counts_once_it_has_stayed() -> None:
    presence = NodeAvailability(SETTLE)
    presence.come("a", {"h20": 8}, 0.0, trusted=True)
    presence.come("b", {"h20": 4}, 5.0)
    assert presence.counted(5.0) == {"h20": 8}
    assert presence.wait(5.0) == 10.0
    assert presence.counted(14.9, used=["b"]) == {"h20": 12}, "a node in use counts"
    assert presence.counted(15.0) == {"h20": 12}
    assert presence.wait(15.0) == math.inf


def test_what_goes_counts_no_more_at_once_and_the_plan_waits_for_rest() -> None:
    presence = NodeAvailability(SETTLE)
    for node in "abcdefgh":
        presence.come(node, {"h20": 1}, 0.0, trusted=True)
    presence.go("a", 100.0)
    assert presence.counted(100.0) == {"h20": 7}
    assert not presence.ready(109.0)
    assert presence.wait(109.0) == 1.0
    assert presence.ready(110.0)
    for n, node in enumerate("bcdefg"):
        presence.go(node, 200.0 + 9.0 * n)
    assert not presence.ready(200.0 + PATIENCE * 10.0 - 0.1)
    assert presence.ready(200.0 + PATIENCE * 10.0), "though it does not end"


def test_a_node_that_was_told_to_go_is_there_and_does_not_count() -> None:
    presence = NodeAvailability(SETTLE)
    presence.come("a", {"h20": 1, "any": 1}, 0.0, trusted=True)
    presence.warn("a")
    presence.warn("unknown")
    assert presence.counted(1.0, used=["a"]) == {}
    assert presence.leaving() == {"a"}
    assert presence.ready(1.0), "there is no time to lose"
    presence.go("a", 2.0)
    assert presence.leaving() == frozenset()


@given(up=st.floats(0.1, SETTLE.settle_s * 2**MOST - 0.1), down=st.floats(0.0, 0.99 * SETTLE.memory_s))
def test_a_node_that_flaps_is_counted_a_bounded_number_of_times(up: float, down: float) -> None:
    presence, now, counted = NodeAvailability(SETTLE), 0.0, 0
    for _ in range(100):
        presence.come("a", {"h20": 1}, now)
        now += up
        counted += presence.counted(now) != {}
        presence.go("a", now)
        now += down
    assert counted <= MOST + 1
    presence.come("a", {"h20": 1}, now + SETTLE.memory_s + 1.0)
    assert presence.counted(now + SETTLE.memory_s + 11.0) == {"h20": 1}, "calm forgets"


Event = tuple[float, str, int]


@given(st.lists(st.tuples(st.floats(0.0, 50.0), st.sampled_from(["come", "go", "warn"]), st.integers(0, 4))))
def test_never_more_is_counted_than_is_there(events: list[Event]) -> None:
    presence, now, alive = NodeAvailability(SETTLE), 0.0, dict[str, int]()
    leaving: set[str] = set()
    for after, what, number in events:
        now, name, pool = now + after, f"n{number}", f"p{number % 2}"
        if what == "come":
            presence.come(name, {pool: 1 + number}, now)
            alive.setdefault(name, 1 + number)
        elif what == "go":
            presence.go(name, now)
            alive.pop(name, None)
            leaving.discard(name)
        else:
            presence.warn(name)
            leaving |= {name} & alive.keys()
        assert presence.leaving() == leaving
        stay = {n: count for n, count in alive.items() if n not in leaving}
        there = [sum(count for n, count in alive.items() if int(n[1:]) % 2 == number) for number in range(2)]
        for used in ([], list(alive)):
            assert all(v <= there[int(pool[1:])] for pool, v in presence.counted(now, used).items())
        assert sum(presence.counted(now, list(alive)).values()) == sum(stay.values())
    later = now + SETTLE.settle_s * 2**MOST
    assert sum(presence.counted(later).values()) == sum(n for m, n in alive.items() if m not in leaving), "all, in time"
    assert presence.ready(later)
    assert presence.wait(later) == math.inf
