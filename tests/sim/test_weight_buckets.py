"""Weight buckets in flight by the look-ahead rule: never more than asked for, and no slower than one at a time."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.model import WeightsRef
from rollart.policy.pipeline import weight_buckets_in_flight
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
