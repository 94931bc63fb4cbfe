"""Priorities for slots on hosts, reclaimed slots, and the grouping of host failures into incidents."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollart.policy.host_slots import PlacementPriority, PlacementQueue, PlacementRequest
from rollart.policy.incidents import REMEMBERED, TOGETHER_S, IncidentTracker, IncidentWindow

wishes = st.builds(PlacementRequest, st.sampled_from(PlacementPriority), st.integers(0, 3))


@given(st.lists(st.tuples(wishes, st.booleans()), max_size=40))
def test_places_go_by_claim_then_seniority_then_as_they_came(asked: list[tuple[PlacementRequest, bool]]) -> None:
    line: PlacementQueue[int] = PlacementQueue()
    for number, (wish, stays) in enumerate(asked):
        ticket = line.add(wish, number)
        if not stays:
            line.leave(ticket, wish)
    staying = [(wish.claim, wish.seniority, n) for n, (wish, stays) in enumerate(asked) if stays]
    assert line.pressing == sum(claim is not PlacementPriority.AHEAD for claim, _, _ in staying)
    got = []
    while (first := line.first()) is not None:
        line.pop()
        got.append(first)
    assert got == [number for _, _, number in sorted(staying)]
    assert not line.heap
    assert not line.gone
    assert set(line.waiting.values()) == {0}


def test_hosts_of_a_node_that_end_together_are_one_incident_and_a_host_that_ends_again_is_another() -> None:
    ends = IncidentTracker()
    first = ends.of("a1", "a", "node", 100.0)
    assert ends.of("b1", "b", "node", 100.0 + TOGETHER_S) == first
    assert ends.of("c1", "c", "elsewhere", 100.0) != first
    assert ends.of("a1", "a", "node", 500.0) == first, "who learns of it late"
    again = ends.of("a2", "a", "node", 101.0)
    assert again != first
    assert ends.of("d1", "d", "node", 102.0) == again
    assert ends.of("e1", "e", "node", 102.0 + TOGETHER_S) != again


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 30)), max_size=60))
def test_an_incident_has_one_end_of_a_host_and_no_two_far_apart(steps: list[tuple[str, float]]) -> None:
    ends, now, seen = IncidentTracker(), 0.0, dict[str, list[tuple[str, float]]]()
    for life, (host, later) in enumerate(steps):
        now += later
        seen.setdefault(ends.of(f"{host}{life}", host, "node", now), []).append((host, now))
    for of in seen.values():
        assert len({host for host, _ in of}) == len(of)
        assert of[-1][1] - of[0][1] <= TOGETHER_S + 1e-6


def test_ends_that_are_long_past_are_forgotten() -> None:
    ends = IncidentTracker()
    for life in range(REMEMBERED + 50):
        ends.of(f"life {life}", "a", "node", float(life))
    assert len(ends.known) == REMEMBERED


@given(st.integers(1, 12), st.lists(st.sampled_from(["", "", "x", "y", "z"]), max_size=60))
def test_losses_are_those_of_the_last_attempts(size: int, ended: list[str]) -> None:
    losses = IncidentWindow(size)
    for n, incident in enumerate(ended):
        before = ended[max(0, n - size) : n]
        assert losses.add(incident) is (not incident or incident not in before)
        window = [one for one in ended[max(0, n + 1 - size) : n + 1] if one]
        assert losses.lost == len(window)
        assert losses.incidents == len(set(window))
        assert losses.shared_losses == len(window) - len(set(window)) >= 0
