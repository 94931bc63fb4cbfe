"""Versions through a store on virtual time: never more buckets on their way than there may be, each moved once."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.adapters.weights.buckets import BucketPusher, BucketWeightStore
from rollart.adapters.weights.delta import LARGEST_SHARE, apply_delta, encode_delta
from rollart.policy.pipeline import MOST_BUCKETS, InFlight
from rollart.sim.loop import run
from rollart.testing.objects import MemoryObjectStore

BUCKET = 100


class Way(MemoryObjectStore):
    """A store that every blob takes `seconds` to reach, whatever else is on the way."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.now = self.most = 0
        self.carried: Counter[tuple[str, str]] = Counter()
        self.order: list[int] = []

    async def put(self, key: str, data: bytes) -> None:
        await self._carry("put", key, len(data))
        await super().put(key, data)

    async def get(self, key: str) -> bytes:
        data = await super().get(key)
        await self._carry("get", key, len(data))
        return data

    async def _carry(self, what: str, key: str, count: int) -> None:
        if not key.startswith("buckets/"):
            return
        self.carried[what, key] += 1
        self.order.append(count)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.seconds)
        self.now -= 1


def written(root: Path, sizes: list[int]) -> Path:
    rng, path = random.Random(0), root / "made"
    path.mkdir()
    for i, size in enumerate(sizes):
        (path / f"part-{i}").write_bytes(rng.randbytes(size))
    (path / "COMPLETE").write_text("{}")
    return path


def moved(root: Path, sizes: list[int], in_flight: InFlight) -> tuple[Way, Way, float]:
    """One way into the store, one out of it, and the seconds of both, one after the other."""
    into, out = Way(0.5), Way(0.25)
    out.blobs = into.blobs
    source = written(root, sizes)

    async def main() -> float:
        pusher = BucketPusher(into, bucket_bytes=BUCKET, in_flight=in_flight)
        await pusher.push(str(source), await pusher.prepare(1, str(source)))
        host = BucketWeightStore(out, root / "host", in_flight=in_flight)
        await host.pull(1)
        assert all((Path(host.path(1)) / f.name).read_bytes() == f.read_bytes() for f in source.glob("part-*"))
        return asyncio.get_running_loop().time()

    return into, out, run(main())


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(0, 2000), min_size=1, max_size=5),
    st.one_of(st.just("auto"), st.integers(1, 80)),
)
def test_never_more_under_way_than_may_be_and_never_slower_than_one(sizes: list[int], in_flight: InFlight) -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        into, out, seconds = moved(Path(one), sizes, in_flight)
        *_, alone = moved(Path(other), sizes, 1)
    limit = MOST_BUCKETS if in_flight == "auto" else in_flight
    for way in (into, out):
        assert way.now == 0
        assert way.most <= limit
        assert set(way.carried.values()) <= {1}, "each bucket once"
    assert len(into.carried) == len(out.carried)
    assert seconds <= alone + 1e-9


def test_a_bucket_alone_and_then_as_many_as_the_rule_says(tmp_path: Path) -> None:
    """Disks take no virtual time, so that the bound holds: 200 buckets, one alone and the others by 64."""
    into, out, seconds = moved(tmp_path, [20_000, 7], "auto")
    assert (into.most, out.most) == (MOST_BUCKETS, MOST_BUCKETS)
    assert into.order[0] == out.order[0] == BUCKET, "a whole bucket is the measure, not the end of a file"
    assert into.order[-1] == out.order[-1] == 7
    assert seconds == pytest.approx((1 + 4) * 0.5 + (1 + 4) * 0.25)


@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(1, 4000),
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=40),
    seed=st.integers(0, 9),
)
def test_a_delta_makes_the_new_bucket_of_the_old_one(size: int, changes: list[tuple[float, int]], seed: int) -> None:
    old = random.Random(seed).randbytes(size)
    new = bytearray(old)
    for at, value in changes:
        new[int(at * size)] = value
    delta = encode_delta(old, bytes(new))
    if delta is None:
        assert len(changes) > size * LARGEST_SHARE / 8 or size < 200, "few changes pay"
    else:
        assert len(delta) <= LARGEST_SHARE * size
        assert apply_delta(old, delta) == new


def test_what_does_not_pay_is_no_delta() -> None:
    data = random.Random(0)
    old = data.randbytes(10_000)
    assert encode_delta(old, data.randbytes(10_000)) is None
    assert encode_delta(old, old + b"1") is None
    assert encode_delta(b"", b"") is None
