"""In which order engines go and come, and how turns are routed meanwhile."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rollart.fleet import EngineKind, EngineRole, FleetMove, FleetMoveKind, RoutePrices, Routes
from rollart.supervise.rebalance import order_moves, reverse_drain, transition_routes
from tests.policy.models import LinearModel

ENGINE = EngineRole.ENGINE


def drain(pool: str, tp: int = 1, replicas: int = 1) -> FleetMove:
    return FleetMove(FleetMoveKind.DRAIN, pool, tp, replicas, ENGINE, None)


def start(pool: str, tp: int = 1, replicas: int = 1) -> FleetMove:
    return FleetMove(FleetMoveKind.START, pool, tp, replicas, None, ENGINE)


def test_engine_by_engine_in_the_order_given() -> None:
    flip = FleetMove(FleetMoveKind.FLIP, "x", 1, 1, ENGINE, EngineRole.DECODE)
    moves = [flip, drain("x", replicas=2), start("x", 2), start("y")]
    assert order_moves(moves, serving=3, free={"x": 0, "y": 1}) == [drain("x"), drain("x"), start("x", 2), start("y")]


def test_the_last_engine_waits_for_another_where_there_is_room() -> None:
    moves = [drain("x", replicas=2), start("x", 2), start("y")]
    wanted = [drain("x"), start("y"), drain("x"), start("x", 2)]
    assert order_moves(moves, serving=2, free={"x": 0, "y": 1}) == wanted
    assert order_moves([drain("x"), start("x", 2)], serving=1, free={"x": 2}) == [start("x", 2), drain("x")]


def test_the_last_engine_goes_where_its_devices_are_needed() -> None:
    moves = [drain("x"), start("x", 2)]
    assert order_moves(moves, serving=1, free={"x": 1}) == moves


Moves = st.lists(
    st.builds(
        lambda kind, pool, tp, n: (drain if kind else start)(pool, tp, n),
        st.booleans(),
        st.sampled_from("xyz"),
        st.integers(1, 3),
        st.integers(1, 3),
    ),
    max_size=6,
)


@given(Moves, st.integers(0, 6), st.dictionaries(st.sampled_from("xyz"), st.integers(0, 6)))
def test_all_of_it_and_no_engine_less_than_must_be(moves: list[FleetMove], serving: int, free: dict[str, int]) -> None:
    ordered = order_moves(moves, serving=serving, free=free)
    assert Counter(ordered) == Counter(s for m in moves for s in order_moves([m], serving=99, free={}))
    room = Counter(free)
    for n, move in enumerate(ordered):
        if move.kind is FleetMoveKind.DRAIN and serving <= 1:
            fits = [m for m in ordered[n + 1 :] if m.kind is FleetMoveKind.START and m.tp <= room[m.pool]]
            assert not fits, "it goes although another could have come first"
        gives = 1 if move.kind is FleetMoveKind.DRAIN else -1
        serving -= gives
        room[move.pool] += gives * move.tp


def test_a_drain_is_undone_by_a_start() -> None:
    assert reverse_drain(drain("x", 2)) == start("x", 2)


def test_every_engine_that_serves_while_others_come_has_a_price() -> None:
    old, new = EngineKind("x", ENGINE, 1), EngineKind("y", ENGINE, 1)
    before = Routes(RoutePrices({old: 1.0}, {old: 2.0}), LinearModel(), {"a": {"x": 1.0}})
    after = Routes(RoutePrices({new: 3.0}, {new: 4.0}, in_flight=5.0), LinearModel(), {"a": {"y": 1.0}})
    both = transition_routes(before, after)
    assert both.prices == RoutePrices({old: 1.0, new: 3.0}, {old: 2.0, new: 4.0}, in_flight=5.0)
    assert both.shares == after.shares
    assert transition_routes(Routes(), after) == after
    assert transition_routes(before, Routes()) == Routes()
