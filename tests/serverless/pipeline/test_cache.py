"""The result cache: exact, bounded, and never a reason for a call to fail."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import sqlite3
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.sim import loop as virtual
from serverless.pipeline.cache import Cache, item_key
from serverless.pipeline.offload import Offload
from serverless.types import ModelFault, Outcome, Scored
from serverless.wire import encode
from tests.serverless.modelled import Modelled, takes
from tests.serverless.support import item, package

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
RESULTS = st.one_of(
    st.builds(
        Scored,
        NUMBERS,
        st.dictionaries(st.text(max_size=5), NUMBERS, max_size=3),
        st.none() | st.lists(NUMBERS, max_size=4).map(tuple),
    ),
    st.builds(ModelFault, NUMBERS, st.text(max_size=20)),
)


def key(n: int) -> bytes:
    return n.to_bytes(32, "big")


def no_warning(text: str) -> None:
    raise AssertionError(text)


@contextlib.contextmanager
def opened(path: pathlib.Path, *, max_entries: int) -> Iterator[Cache]:
    cache = Cache(path, max_entries=max_entries, warn=no_warning)
    cache.open()
    with contextlib.closing(cache):
        yield cache


@settings(max_examples=25, deadline=None)
@given(results=st.lists(RESULTS, min_size=1, max_size=5))
def test_what_was_put_comes_back_equal_before_and_after_it_is_written(
    results: list[Scored | ModelFault], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cache") / "c.sqlite"
    with opened(path, max_entries=10) as cache:
        for n, result in enumerate(results):
            cache.put(key(n), result)
            assert cache.get(key(n)) == result
        assert cache.get(key(99)) is None
    with opened(path, max_entries=10) as cache:
        assert [cache.get(key(n)) for n in range(len(results))] == results


def test_the_oldest_go_first_and_the_bound_holds(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "c.sqlite"
    for start in (0, 700):  # in two runs, of which the second repeats some
        with opened(path, max_entries=300) as cache:
            for n in range(start, start + 800):
                cache.put(key(n), Scored(float(n)))
    with sqlite3.connect(path) as file:
        assert file.execute("SELECT count(*) FROM results").fetchone() == (300,)
    with opened(path, max_entries=300) as cache:
        assert cache.get(key(1499)) == Scored(1499.0)
        assert cache.get(key(1200)) == Scored(1200.0)
        assert cache.get(key(1199)) is None


def corrupt(path: pathlib.Path) -> None:
    path.write_bytes(b"not a database" * 1000)


def torn(path: pathlib.Path) -> None:
    with opened(path, max_entries=10_000) as cache:
        for n in range(2000):
            cache.put(key(n), Scored(float(n)))
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)


def foreign(path: pathlib.Path) -> None:
    with sqlite3.connect(path) as file:
        file.execute("PRAGMA user_version = 77")


def directory(path: pathlib.Path) -> None:
    path.mkdir()


def offload(path: pathlib.Path, warnings: list[str], count: int = 300) -> list[Outcome]:
    provider = Modelled(takes(0.01))
    one = package(batch={"max_items": 8})

    async def main() -> list[Outcome]:
        async with Offload([one], provider, cache=path, warn=warnings.append) as o, asyncio.TaskGroup() as group:
            tasks = [group.create_task(o.submit("behave", item(str(n), value=float(n)), 10.0)) for n in range(count)]
        return [task.result() for task in tasks]

    return virtual.run(main())


@pytest.mark.parametrize("damage", [corrupt, torn, foreign, directory])
def test_a_broken_file_is_one_warning_and_no_fault(
    damage: Callable[[pathlib.Path], None], tmp_path: pathlib.Path
) -> None:
    path, warnings = tmp_path / "c.sqlite", list[str]()
    damage(path)
    assert offload(path, warnings) == [Scored(float(n)) for n in range(300)]
    assert len(warnings) == 1
    assert "is off" in warnings[0]


def test_a_locked_file_is_one_warning_and_no_fault(tmp_path: pathlib.Path) -> None:
    path, warnings = tmp_path / "c.sqlite", list[str]()
    offload(path, warnings, 3)
    assert warnings == []
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    try:
        assert offload(path, warnings) == [Scored(float(n)) for n in range(300)]
    finally:
        other.close()
    assert len(warnings) == 1
    assert "locked" in warnings[0]


def test_keys_tell_apart_all_but_the_id() -> None:
    def of(version: str = "v", key: str = "a", **metadata: object) -> bytes | None:
        return item_key(version, encode(item(key, **metadata)))

    assert of(key="a", x=1, y=2) == of(key="b", y=2, x=1)
    different = [of(), of("w"), of(x=1), of(x=1.0), of(x=True), of(x="1"), of(x=[1]), of(x={"1": 1}), of(y=1)]
    assert len(set(different)) == len(different)
    assert of(x=float("nan")) is None
    assert of(x=b"bytes") is None
