"""Publish time follows from links, transport, overlap and measurements."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.publish import PRESETS, Publishing, PublishSpeeds, Transport
from placement.types import Device, Link, Pool

GPU = Device("g", 400, 80, 2.0, devices_per_host=8)
POOLS = (Pool("train", GPU, 16), Pool("serve", GPU, 32))
INSIDE = (Link("train", "train", 200.0), Link("serve", "serve", 200.0))
STORE = Publishing(64.0, Transport.STORE)


def seconds(publish: Publishing, between: float, serving: str = "serve") -> float:
    return publish.path(POOLS, (*INSIDE, Link("train", "serve", between)), "train", serving).seconds


def test_a_store_overlaps_push_and_pull_and_every_host_pulls_a_copy() -> None:
    path = STORE.path(POOLS, (*INSIDE, Link("train", "serve", 16.0)), "train", "serve")
    assert path.push_s == pytest.approx(64 / 200)
    assert path.pull_s == pytest.approx(64 / (16 / 4)), "four hosts share the link"
    assert path.seconds == pytest.approx(path.pull_s + path.push_s / 64 + path.load_s)
    assert path.slower.link == ("train", "serve")


def test_files_are_written_then_read_then_loaded() -> None:
    path = Publishing(64.0).path(POOLS, (*INSIDE, Link("train", "serve", 16.0)), "train", "serve")
    assert path.seconds == pytest.approx(64 / 200 + 16.0 + path.load_s)


def test_a_broadcast_crosses_the_link_once_and_leaves_nothing_to_load() -> None:
    path = Publishing(64.0, Transport.COLLECTIVE).path(POOLS, (*INSIDE, Link("train", "serve", 16.0)), "train", "serve")
    assert path.seconds == pytest.approx(64 / 16)


def test_all_hosts_of_the_trainers_own_pool_pull_over_its_network() -> None:
    path = STORE.path(POOLS, INSIDE, "train", "train")
    assert path.pull_s == pytest.approx(2 * 64 / 200)


def test_a_link_to_the_store_goes_before_those_between_pools() -> None:
    stored = Publishing(64.0, Transport.STORE, (Link("train", "store", 2.0), Link("store", "serve", 40.0)))
    path = stored.path(POOLS, (*INSIDE, Link("train", "serve", 0.1)), "train", "serve")
    assert (path.push_s, path.pull_s) == (pytest.approx(32.0), pytest.approx(6.4))
    assert path.slower.link == ("train", "store")


def test_what_no_link_declares_is_assumed_and_known_to_be() -> None:
    path = STORE.path(POOLS, (), "train", "serve")
    assert path.push.assumed
    assert path.pull.assumed
    nic = (Pool("train", Device("g", 400, 80, 2.0, link_gb_per_s=50, devices_per_host=8), 16),)
    known = STORE.path(nic, (), "train", "train").push
    assert (known.gb_per_s, known.assumed) == (400, False)


def test_a_measured_speed_caps_a_faster_link_and_not_a_slower_one() -> None:
    preset = Publishing(64.0, Transport.STORE, speeds=PRESETS["rollart"])
    assert seconds(preset, 1000.0) == pytest.approx(64 / 0.45, rel=0.1)
    slow = Publishing(64.0, Transport.STORE, speeds=PublishSpeeds(pull_gb_per_s=10.0))
    assert seconds(slow, 4.0) == pytest.approx(seconds(STORE, 4.0))


def test_ra_16_by_the_papers_preset() -> None:
    """Published: 127.3 s of push of 61.02 GB; push and accumulated pull in sequence 157.0 s."""
    own = Publishing(61.02, Transport.STORE, speeds=PRESETS["rollart"]).path(POOLS, INSIDE, "train", "train")
    assert own.push_s == pytest.approx(127.3, rel=0.1)
    assert own.pull_s == pytest.approx(29.7, rel=0.25)


def test_the_slowest_pool_is_waited_for() -> None:
    links = (*INSIDE, Link("train", "serve", 1.0))
    assert STORE.slowest(POOLS, links, "train", {"train", "serve"}).seconds == pytest.approx(seconds(STORE, 1.0))


@pytest.mark.parametrize("transport", list(Transport))
@pytest.mark.parametrize("speeds", [PublishSpeeds(), PublishSpeeds(0.9, 1.9, 40.0, 0.4)])
@pytest.mark.parametrize(
    "links",
    [(), *((*INSIDE, Link("train", "serve", gb_per_s)) for gb_per_s in (1.0, 100.0, 1000.0))],
    ids=["none declared", "slow", "fast", "faster than the load"],
)
def test_what_limits_a_publish_twice_as_fast_takes_half_as_long(
    transport: Transport, speeds: PublishSpeeds, links: tuple[Link, ...]
) -> None:
    asked = Publishing(64.0, transport, speeds=speeds)
    path = asked.path(POOLS, links, "train", "serve")
    found = asked.faster(path, links, 2.0)
    if found is None:
        assert transport is Transport.COLLECTIVE
        assert not links
        return
    faster, wider = found
    again = faster.path(POOLS, wider, "train", "serve")
    longest = max(path.push_s, path.pull_s, path.load_s)
    assert sorted((again.push_s, again.pull_s, again.load_s)) == pytest.approx(
        sorted([longest / 2, *sorted((path.push_s, path.pull_s, path.load_s))[:-1]])
    )


@given(st.sampled_from(Transport), st.floats(0.5, 500), st.floats(0.1, 1000), st.floats(1.01, 10), st.floats(0.01, 100))
def test_a_faster_link_never_takes_longer(
    transport: Transport, gb: float, gb_per_s: float, factor: float, cap: float
) -> None:
    for speeds in (PublishSpeeds(), PublishSpeeds(cap, cap)):
        asked = Publishing(gb, transport, speeds=speeds)
        assert seconds(asked, gb_per_s * factor) <= seconds(asked, gb_per_s) * (1 + 1e-9)
        assert math.isfinite(seconds(asked, gb_per_s))
