"""The estimated KV of an engine, against the engine's own memory."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from rollart.serving.engine_registry import KvResidency
from rollart.sim.engine import RetainedKv


def known(capacity: float, most: float = math.inf) -> KvResidency:
    r = KvResidency()
    r.set_capacity(capacity, most)
    return r


def turn(r: KvResidency, session: str, tokens: int) -> None:
    r.begin(session, tokens)
    r.end(session, tokens)


def test_the_least_recently_used_goes_first_and_loses_its_end_first() -> None:
    r = known(100)
    for name in "abc":
        turn(r, name, 30)
    turn(r, "a", 32)
    turn(r, "d", 20)  # 112: b, the oldest by now, loses 12
    assert (r.held("a"), r.held("b"), r.held("c"), r.held("d")) == (32, 18, 30, 20)
    assert r.evicted == 0
    turn(r, "d", 50)  # 30 more: b is gone, c loses 12
    assert ("b" in r, r.held("c"), r.evicted) == (False, 18, 1)


def test_running_sessions_are_never_evicted() -> None:
    r = known(50)
    r.begin("a", 40)
    r.begin("b", 40)
    assert (r.total, r.held("a"), r.held("b"), r.evicted) == (80, 40, 40, 0)
    r.end("a", 45)
    assert ("a" in r, r.held("b"), r.evicted) == (False, 40, 1)


def test_room_is_kept_for_what_admitted_sessions_grow_to() -> None:
    r = known(100)
    assert r.fits(1_000)  # alone
    r.admit("a", 60)
    assert r.fits(40)
    assert not r.fits(41)
    assert not r.fits(40, share=0.9)
    r.begin("a", 80)
    assert (r.fill(), r.fits(20), r.fits(21)) == (0.8, True, False)
    r.drop("a")
    assert (r.total, r.reserved) == (0, 0)


def test_slots_bound_sessions_whatever_their_length() -> None:
    r = known(1_000, most=2)
    turn(r, "a", 1)
    turn(r, "b", 1)
    assert not r.fits(1)
    turn(r, "c", 1)
    assert ("a" in r, "b" in r, "c" in r) == (False, True, True)


def test_nothing_is_evicted_while_nobody_knows_what_fits() -> None:
    r = KvResidency()
    turn(r, "a", 10**9)
    assert r.fits(10**9)
    assert r.fill() == 0.0
    r.set_capacity(10)
    assert ("a" in r, r.evicted) == (False, 1)


@given(
    st.integers(10, 200),
    st.integers(1, 8),
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 80), st.integers(0, 3)), max_size=60),
)
def test_the_bound_holds_and_the_sums_are_those_of_what_is_there(
    capacity: int, most: int, turns: list[tuple[str, int, int]]
) -> None:
    r = known(capacity, most)
    for session, tokens, what in turns:
        match what:
            case 0:
                if r.fits(tokens):
                    r.admit(session, tokens)
            case 1:
                r.begin(session, tokens)
            case 2:
                r.end(session, tokens)
            case _:
                r.drop(session)
        idle = [s for s in "abcdefgh" if s in r and s not in r.busy]
        assert r.total == sum(r.held(s) for s in "abcdefgh")
        assert r.reserved == sum(max(r.held(s), r.wanted.get(s, 0)) for s in "abcdefgh" if s in r)
        assert not idle or (r.total <= capacity and len(r) <= most)
    for s in "abcdefgh":
        r.drop(s)
    assert (r.total, r.reserved, len(r)) == (0, 0, 0)


@given(st.integers(50, 300), st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 50)), max_size=60))
def test_it_follows_a_simulated_engine_one_turn_at_a_time(capacity: int, turns: list[tuple[str, int]]) -> None:
    """The estimate is exact, to the token, as long as no session loses more than half at once."""
    ours, theirs = known(capacity), RetainedKv()
    for session, tokens in turns:
        turn(ours, session, tokens)
        theirs.keep(session, tokens, None)
        theirs.shrink(capacity)
        assert ours.held(session) == theirs.held(session, None)
        assert all(ours.held(s) <= theirs.held(s, None) for s in "abcde")
