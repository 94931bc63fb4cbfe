"""KV exports: bounded, leased, handed out once, and never older than the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.engine.handoff import MAX_REMEMBERED_REASONS, KvExport, KvExports
from rollart.engine.shm import SharedKvFiles
from rollart.errors import HandoffFailed


def export(name: str, *, session: str = "", size: int = 10, deadline: float = 100.0, file: str = "") -> KvExport:
    data = b"" if file else b"x" * size
    return KvExport(
        host="h",
        port=1,
        request_id=name,
        token="token",
        tokens=2,
        start=0,
        version=0,
        file=file,
        session=session,
        token_ids=(1, 2),
        size=size,
        deadline=deadline,
        data=data,
    )


def refusal(exports: KvExports, name: str, token: str = "token") -> str:
    """The reason why an export is unavailable; '' for one that is there."""
    try:
        exports.find(name, token)
    except HandoffFailed as error:
        return error.message.partition(": ")[2]
    return ""


def kept(exports: KvExports) -> list[str]:
    return list(exports.entries)


def test_an_export_is_handed_out_once_to_who_knows_its_token() -> None:
    exports = KvExports(lambda: 0.0, limit_bytes=100)
    exports.put(export("a"))
    assert refusal(exports, "a", "other") == "the token is not that of the export"
    found = exports.find("a", "token")
    assert exports.take(found) == b"x" * 10
    assert refusal(exports, "a") == "it was taken"
    assert refusal(exports, "b") == "it was never here"
    assert (exports.taken, exports.bytes, len(exports)) == (1, 0, 0)


def test_a_lease_ends_to_the_second() -> None:
    now = 0.0
    exports = KvExports(lambda: now, limit_bytes=100)
    exports.put(export("a", deadline=5.0))
    exports.put(export("b", deadline=3.0))
    now = 4.999
    exports.sweep()
    assert kept(exports) == ["a"]
    now = 5.0
    assert refusal(exports, "a") == refusal(exports, "b") == "its lease ended"
    assert (exports.expired, exports.dropped, exports.bytes) == (2, 0, 0)


def test_one_export_a_session() -> None:
    exports = KvExports(lambda: 0.0, limit_bytes=100)
    exports.put(export("a", session="s"))
    exports.put(export("b", session="s"))
    exports.put(export("c"))
    exports.put(export("d"))
    assert kept(exports) == ["b", "c", "d"]
    assert refusal(exports, "a") == "a later one took its place"
    exports.drop_session("")
    exports.drop_session("never seen")
    exports.drop_session("s")
    exports.drop(["c", "unknown"])
    assert kept(exports) == ["d"]
    assert exports.dropped == 3


def test_files_go_with_their_exports(tmp_path: Path) -> None:
    mine, other = SharedKvFiles(str(tmp_path)), SharedKvFiles(str(tmp_path))
    exports = KvExports(lambda: 0.0, limit_bytes=100, files=mine)
    places = [mine.write([memoryview(b"x" * 10)]) for _ in range(4)]
    for name, place in zip("abcd", places, strict=True):
        exports.put(export(name, file=place))
    assert other.take(places[0]) is not None
    found = exports.find("a", "token")  # not swept yet: a taker does not notify the owner
    assert exports.take(found) is None
    taken = other.take(places[1])
    exports.sweep()
    assert (exports.taken, taken is not None, kept(exports)) == (2, True, ["c", "d"])
    exports.clear("the weights are version 1 now")
    assert not any(mine.holds(place) for place in places)
    assert refusal(exports, "c") == "the weights are version 1 now"
    mine.close()
    other.close()


def test_what_is_larger_than_all_the_room_is_not_kept() -> None:
    exports = KvExports(lambda: 0.0, limit_bytes=100)
    exports.put(export("a", size=60))
    assert not exports.put(export("b", size=101))
    assert kept(exports) == ["a"]
    assert exports.dropped == 1


def test_reasons_are_kept_for_a_bounded_number() -> None:
    exports = KvExports(lambda: 0.0, limit_bytes=10)
    for i in range(MAX_REMEMBERED_REASONS + 5):
        exports.put(export(f"{i}"))
    assert refusal(exports, "3") == "it was never here"
    assert refusal(exports, "4") == "it was the oldest when room ran out"


@given(st.lists(st.tuples(st.sampled_from("pdats"), st.integers(0, 5), st.integers(1, 60)), max_size=60))
def test_bytes_are_bounded_and_accounted_for(steps: list[tuple[str, int, int]]) -> None:
    now = 0.0
    exports = KvExports(lambda: now, limit_bytes=100)
    put = 0
    for action, which, n in steps:
        name = f"{which}"
        if action == "p":
            put += exports.put(export(name, session=f"s{n % 3}" if n % 2 else "", size=n, deadline=now + n))
        elif action == "d":
            exports.drop([name])
        elif action == "a":
            exports.drop_session(f"s{which}")
        elif action == "t":
            if not refusal(exports, name):
                found = exports.find(name, "token")
                assert found.deadline > now
                assert exports.take(found)
        else:
            now += n / 10
            exports.sweep()
        entries = exports.entries.values()
        assert exports.bytes == sum(e.size for e in entries) <= 100
        sessions = [e.session for e in entries if e.session]
        assert len(sessions) == len(set(sessions))
        assert set(exports.sessions) == set(sessions)
        assert put == len(exports) + exports.taken + exports.expired + exports.dropped


def test_a_full_store_first_forgets_what_ended() -> None:
    now = 0.0
    exports = KvExports(lambda: now, limit_bytes=100)
    exports.put(export("keep", size=50, deadline=100.0))
    exports.put(export("ended", size=50, deadline=1.0))
    now = 2.0
    exports.put(export("new", size=50))
    assert kept(exports) == ["keep", "new"]
    assert pytest.approx(exports.bytes) == 100
