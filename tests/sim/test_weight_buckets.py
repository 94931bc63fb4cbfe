"""Weight buckets in flight by the look-ahead rule: never more than asked for, and no slower than one at a time."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.model import WeightsRef
from rollart.policy.pipeline import MOST_BUCKETS, InFlight, weight_buckets_in_flight
from rollart.sim.links import LinkProfile, SharedLink
from rollart.sim.loop import run
from rollart.sim.weights import WeightTransfer


class Counted(SharedLink):
    """Notes how many buckets are on it at a time."""

    def __init__(self, profile: LinkProfile) -> None:
        super().__init__(profile)
        self.now = self.most = 0

    def send(self, gb: float, done: Callable[[], None], streams: int = 1) -> None:
        self.now += 1
        self.most = max(self.most, self.now)

        def over() -> None:
            self.now -= 1
            done()

        super().send(gb, over, streams)


def exposed(way: Counted, in_flight: int, *, gb: float = 16.0) -> float:
    """Seconds for which an engine stands still whose weights all lie in the store."""

    async def main() -> float:
        push = SharedLink(LinkProfile(1.0))
        transfer = WeightTransfer(gb, push=push, pull=lambda _: way, load_gb_per_s=8.0, in_flight=in_flight)
        await transfer.load("e", WeightsRef(1, ""))
        return transfer.moved[1].exposed_s["e"]

    return run(main())


def test_the_rule_hides_most_of_the_latency_of_a_way() -> None:
    """A bucket takes 0.125 s on the link after 0.5 s of latency. Five in flight would leave the link no pause if they
    came one by one; sharing it they come together, and the next five wait for the latency again."""
    profile = LinkProfile(8.0, latency_s=0.5)
    depth = weight_buckets_in_flight(0.125, 0.25, bucket_bytes=1e9, memory_bytes=16e9)
    assert depth == 5
    one, more = (exposed(Counted(profile), n) for n in (1, depth))
    assert one == 16 * (0.5 + 0.125) + 2.0
    assert 0.5 + 16 * 0.125 + 2.0 <= more <= 0.5 * one


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.floats(0.0, 1.0), st.floats(0.5, 10.0), st.floats(0.5, 20.0))
def test_never_more_than_the_depth_and_never_slower(depth: int, latency: float, rate: float, gb: float) -> None:
    profile = LinkProfile(rate, latency_s=latency)
    ways = [Counted(profile), Counted(profile)]
    one, more = exposed(ways[0], 1, gb=gb), exposed(ways[1], depth, gb=gb)
    assert (ways[0].most, ways[1].now) == (1, 0)
    assert ways[1].most <= depth
    assert more <= one * (1 + 1e-9)


def taken(way: Counted, in_flight: InFlight, *, versions: int = 3, gb: float = 16.0, ahead_gb: float = 16.0) -> float:
    """Seconds that an engine stands still for its last version, whose like it has loaded before."""

    async def main() -> float:
        push = SharedLink(LinkProfile(1.0))
        transfer = WeightTransfer(
            gb, push=push, pull=lambda _: way, load_gb_per_s=8.0, in_flight=in_flight, ahead_gb=ahead_gb
        )
        for version in range(versions):
            await transfer.load("e", WeightsRef(version, ""))
        return transfer.moved[versions - 1].exposed_s["e"]

    return run(main())


def test_auto_finds_the_depth_of_the_rule_and_hides_the_latency() -> None:
    """A bucket alone takes 0.625 s and 0.125 s to load: six in flight, after the first, which is measured."""
    profile = LinkProfile(8.0, latency_s=0.5)
    way = Counted(profile)
    auto = taken(way, "auto")
    assert way.most == weight_buckets_in_flight(0.125, 0.3125, bucket_bytes=1e9, memory_bytes=16e9) == 6
    assert auto <= 0.5 * taken(Counted(profile), 1)


def test_a_way_without_latency_that_is_as_fast_as_the_devices_needs_one_ahead() -> None:
    way = Counted(LinkProfile(8.0))
    assert taken(way, "auto", versions=6) == taken(Counted(LinkProfile(8.0)), 1, versions=6)
    assert way.most == 2


@settings(max_examples=40, deadline=None)
@given(st.floats(0.0, 1.0), st.floats(0.5, 10.0), st.floats(0.5, 20.0), st.floats(0.5, 8.0), st.integers(1, 4))
def test_auto_stays_within_memory_and_is_never_slower_than_one_at_a_time(
    latency: float, rate: float, gb: float, ahead_gb: float, versions: int
) -> None:
    profile = LinkProfile(rate, latency_s=latency)
    ways = [Counted(profile), Counted(profile)]
    one = taken(ways[0], 1, versions=versions, gb=gb, ahead_gb=ahead_gb)
    auto = taken(ways[1], "auto", versions=versions, gb=gb, ahead_gb=ahead_gb)
    assert (ways[0].most, ways[1].now) == (1, 0)
    assert ways[1].most <= min(MOST_BUCKETS, max(1, ahead_gb // (gb / -(-gb // 1))))
    assert auto <= one * (1 + 1e-9)
