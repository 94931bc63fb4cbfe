"""The admission queue: no item is lost, LPT within a wave, bounded overtaking between waves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.bounds import lpt_order
from rollart.serving.kv_admission import GRACE, AdmissionQueue

LENGTHS = st.lists(st.integers(0, 50), max_size=80)


@given(LENGTHS)
def test_those_that_come_together_go_longest_first(lengths: list[int]) -> None:
    line: AdmissionQueue[int] = AdmissionQueue(longest=True)
    for n, length in enumerate(lengths):
        line.add(n, age=n, length=length)
    assert [line.leave() for _ in lengths] == lpt_order(lengths)
    assert line.head() is None
    assert len(line) == 0


@given(LENGTHS)
def test_without_lengths_in_the_order_they_came(lengths: list[int]) -> None:
    line: AdmissionQueue[int] = AdmissionQueue()
    for n, length in enumerate(lengths):
        line.add(n, age=n, length=length)
    assert [line.leave() for _ in lengths] == list(range(len(lengths)))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50), st.booleans()), max_size=120), st.booleans())
def test_none_is_lost_and_those_under_way_go_first(moves: list[tuple[bool, int, bool]], longest: bool) -> None:
    line: AdmissionQueue[tuple[int, bool]] = AdmissionQueue(longest=longest)
    inside: set[tuple[int, bool]] = set()
    came: set[tuple[int, bool]] = set()
    for n, (comes, length, begun) in enumerate(moves):
        if comes or not line:
            line.add((n, begun), age=n, length=length, begun=begun)
            came.add((n, begun))
        else:
            item = line.leave()
            assert item[1] or not any(b for _, b in came - inside)
            inside.add(item)
    while line:
        inside.add(line.leave())
    assert inside == came


@given(st.integers(0, 30), st.integers(1, 3))
def test_a_short_one_is_passed_by_no_more_than_it_was_promised(before: int, coming: int) -> None:
    """The shortest item, in a queue where a longer one arrives at each admission."""
    line: AdmissionQueue[int] = AdmissionQueue(longest=True)
    for n in range(before):
        line.add(n, age=n, length=10)
    line.add(before, age=before, length=0)
    age, let_in = before + 1, [line.leave()]
    while let_in[-1] != before:
        for _ in range(coming):
            line.add(age, age=age, length=100)
            age += 1
        let_in.append(line.leave())
    assert len(let_in) - 1 <= 2 * (before + 1) + GRACE


def test_waves_of_any_size_keep_their_order() -> None:
    line: AdmissionQueue[int] = AdmissionQueue(longest=True)
    for n in range(500):
        line.add(n, age=n, length=n)
    assert [line.leave() for _ in range(500)] == list(range(499, -1, -1))
