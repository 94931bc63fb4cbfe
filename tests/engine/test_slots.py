from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rollart.engine.slots import SlotTable


def ids(*values: int) -> npt.NDArray[np.int64]:
    return np.array(values, np.int64)


def turn(table: SlotTable, session: str, prompt: npt.NDArray[np.int64], salt: str | None = None) -> tuple[int, int]:
    """Claim, pretend that all was computed, retire."""
    claim = table.acquire(session, salt, prompt)
    assert claim is not None
    table.kv[claim[0]] = len(prompt)
    table.retire(claim[0], session, salt)
    return claim


def test_a_session_keeps_its_slot_and_its_common_prefix() -> None:
    table = SlotTable(4, 16)
    slot, cached = turn(table, "s", ids(1, 2, 3))
    assert cached == 0
    assert turn(table, "s", ids(1, 2, 3, 4, 5)) == (slot, 3)
    assert turn(table, "s", ids(1, 2, 9, 4)) == (slot, 2)
    assert turn(table, "s", ids(1, 2, 9, 4)) == (slot, 3), "one token is left to compute"
    assert turn(table, "s", ids(7, 2)) == (slot, 0)


def test_another_salt_shares_nothing() -> None:
    table = SlotTable(4, 16)
    turn(table, "s", ids(1, 2, 3), "a")
    assert turn(table, "s", ids(1, 2, 3, 4), "b")[1] == 0
    assert turn(table, "s", ids(1, 2, 3, 4, 5), "b")[1] == 4


def test_the_least_recently_used_session_goes_first() -> None:
    table = SlotTable(2, 16)
    first, _ = turn(table, "a", ids(1, 2))
    turn(table, "b", ids(3, 4))
    turn(table, "a", ids(1, 2, 3))
    turn(table, "c", ids(5, 6))
    assert turn(table, "a", ids(1, 2, 3, 4)) == (first, 3), "b went"
    assert turn(table, "b", ids(3, 4, 5))[1] == 0


def test_no_slot_while_all_are_active() -> None:
    table = SlotTable(1, 16)
    claim = table.acquire("a", None, ids(1, 2))
    assert claim is not None
    assert table.acquire("b", None, ids(1)) is None
    table.discard(claim[0])
    assert table.acquire("b", None, ids(1)) is not None


def test_two_requests_of_one_session_at_once_keep_one_prefix() -> None:
    table = SlotTable(4, 16)
    one, two = table.acquire("s", None, ids(1, 2)), table.acquire("s", None, ids(1, 2))
    assert one is not None
    assert two is not None
    assert one[0] != two[0]
    table.kv[[one[0], two[0]]] = 2
    table.retire(one[0], "s", None)
    table.retire(two[0], "s", None)
    assert table.idle_sessions() == 1
    assert table.used_tokens() == 2
    assert table.release("s")
    assert not table.release("s")
    assert table.used_tokens() == 0


def test_stop_ids_grow() -> None:
    table = SlotTable(2, 16)
    table.limits(1, limit=4, temperature=1.0, top_p=1.0, seed=-1, stops=tuple(range(20)), arrival=1)
    table.limits(0, limit=4, temperature=1.0, top_p=1.0, seed=2**64 - 1, stops=(3,), arrival=1)
    assert set(range(20)) <= set(table.stops[1].tolist())
    assert table.stops[0].tolist().count(-1) == table.stops.shape[1] - 1
    assert table.seed[0] == table.seed[1]
