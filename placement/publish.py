"""Publish time: how long a new policy version takes from the trainer's devices to those of the engines.

It follows from the links between the pools, from the transport and from the overlap of push and pull. Plans and
simulations both take it from here, so that they cannot disagree about it.

- `files`: the trainer writes the version, then every host reads it while its engines stand still.
- `store`: the trainer pushes bucket by bucket, and the hosts pull a bucket as soon as the store has it. The slower of
  the two counts whole, and one bucket of the other.
- `collective`: one broadcast into the engines' memory, which crosses the link to a pool once.

A host pulls one copy for all of its engines, and all hosts of a pool pull at a time and share the link. With `files`
and `store` every engine then loads its host's copy.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from placement.types import Link, Pool, require_positive

STORE = "store"
"""The end of a link that is where versions lie: the run's directory, or the store between trainer and engines."""

INSIDE_GB_PER_S, BETWEEN_GB_PER_S = 12.5, 1.25
"""GB/s of one host inside a pool, and over all hosts between two pools, where no link is declared and the catalogue has
no figure: 100 and 10 Gb/s. These are guesses, and a plan that rests on them has a note."""

LOAD_GB_PER_S = 61.02 / 9.442
"""GB/s at which an engine loads its host's copy: 61.02 GB stood still for 9.6 s with their last bucket (RA-16); the
figure is RA-7's for the same bytes over RDMA, which simulations were tuned to. It did not grow with the ranks of an
engine there."""

LOADING = "loading"
"""Limit of a path whose engines take longest to load."""

DEVICES_PER_HOST = 8
"""GPUs of a host whose type does not say how many it has."""


class Transport(enum.StrEnum):
    """How a version reaches the engines."""

    FILES = "files"
    STORE = "store"
    COLLECTIVE = "collective"


@dataclass(frozen=True, slots=True)
class PublishSpeeds:
    """GB/s that were measured, whatever the link could carry: of the trainer's push (or its write of files), of one
    host's pull, of one engine's load, and of a broadcast. None: not measured."""

    push_gb_per_s: float | None = None
    pull_gb_per_s: float | None = None
    load_gb_per_s: float | None = None
    broadcast_gb_per_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.stated().items():
            require_positive(f"publish: {name}", value)

    def stated(self) -> dict[str, float]:
        """The measured speeds, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


PRESETS: Mapping[str, PublishSpeeds] = {
    "rollart": PublishSpeeds(0.45, 61.02 / 29.649 * 1.264, LOAD_GB_PER_S),
}
"""Published measurements by system. `rollart` (arXiv 2512.22560): the push into Mooncake reached 0.41 to 0.48 GB/s on a
link of 200 Gb/s (RA-16), one pull over RDMA 2.6 GB/s (RA-7)."""


@dataclass(frozen=True, slots=True)
class Leg:
    """One part of the path. `link`: the ends of the link that limits it; None: a measured speed, or a host's own
    network. `assumed`: neither was stated, so that the figure is a guess. `instead`: the link that would replace the
    path's own networks in this part, as fast as they are."""

    gb_per_s: float
    limit: str
    link: tuple[str, str] | None = None
    assumed: bool = False
    instead: Link | None = None


@dataclass(frozen=True, slots=True)
class PublishPath:
    """From one trainer to the hosts and engines of one pool. `push` and `pull` have speeds of one copy."""

    transport: Transport
    gb: float
    push: Leg
    pull: Leg
    load_gb_per_s: float
    bucket_gb: float
    overlaps: bool
    """Hosts pull while the rest is pushed."""
    load_assumed: bool = False
    """True if the engines' loading speed is not stated and `LOAD_GB_PER_S` is assumed."""
    load_gb: float | None = None
    """What an engine loads, if that is more than what moves."""

    @property
    def push_s(self) -> float:
        return self.gb / self.push.gb_per_s

    @property
    def pull_s(self) -> float:
        return self.gb / self.pull.gb_per_s

    @property
    def load_s(self) -> float:
        return (self.load_gb or self.gb) / self.load_gb_per_s

    @property
    def seconds(self) -> float:
        """From the end of training until an engine of the pool computes with the version."""
        short, long = sorted((self.push_s, self.pull_s))
        if self.overlaps:
            return long + short / max(1, math.ceil(self.gb / self.bucket_gb)) + self.load_s
        return short + long + self.load_s

    @property
    def slower(self) -> Leg:
        """The part of the path that more bandwidth would shorten most."""
        return self.push if self.push_s >= self.pull_s else self.pull

    @property
    def limit(self) -> str:
        """The part of the path that takes longest."""
        return LOADING if self.load_s > max(self.push_s, self.pull_s) else self.slower.limit


@dataclass(frozen=True, slots=True)
class Publishing:
    """The publish settings of a run besides pools and their links: `gb` that move, the transport, links that end in
    `STORE`, and measured speeds. `ahead`: with a store, hosts pull before their engines stand still. `load_gb`: what an
    engine loads, where adapters move and whole weights are loaded; None: what moves."""

    gb: float
    transport: Transport = Transport.FILES
    store_links: tuple[Link, ...] = ()
    bucket_gb: float = 1.0
    ahead: bool = True
    speeds: PublishSpeeds = PublishSpeeds()
    load_gb: float | None = None

    def __post_init__(self) -> None:
        if not (0 < self.gb < math.inf and 0 < self.bucket_gb < math.inf):
            raise ValueError(f"publish: {self.gb} GB in buckets of {self.bucket_gb} GB (rule: both above 0)")

    def path(self, pools: Sequence[Pool], links: Sequence[Link], trainer: str, serving: str) -> PublishPath:
        """From the trainer's pool to a pool of engines."""
        network, speeds = _Network(pools, (*links, *self.store_links)), self.speeds
        hosts = network.hosts(serving)
        if self.transport is Transport.COLLECTIVE:
            sent = network.between(serving, serving, hosts)
            if serving != trainer:
                sent = _slower(sent, network.between(trainer, serving, 1))
            sent, nothing = _capped(sent, speeds, "broadcast_gb_per_s"), Leg(math.inf, "nothing")
            return PublishPath(self.transport, self.gb, sent, nothing, math.inf, self.bucket_gb, overlaps=True)
        push = network.link(trainer, STORE) or network.stored(trainer, trainer, 1)
        pull = network.link(STORE, serving, hosts) or network.stored(trainer, serving, hosts)
        return PublishPath(
            self.transport,
            self.gb,
            _capped(push, speeds, "push_gb_per_s"),
            _capped(pull, speeds, "pull_gb_per_s"),
            LOAD_GB_PER_S if speeds.load_gb_per_s is None else speeds.load_gb_per_s,
            self.bucket_gb,
            overlaps=self.transport is Transport.STORE and self.ahead,
            load_assumed=speeds.load_gb_per_s is None,
            load_gb=self.load_gb,
        )

    def slowest(
        self, pools: Sequence[Pool], links: Sequence[Link], trainer: str, serving: Iterable[str]
    ) -> PublishPath:
        """The path that all pools of engines wait for. Ties: the first by name."""
        paths = (self.path(pools, links, trainer, pool) for pool in sorted(set(serving) or {trainer}))
        return max(paths, key=lambda path: path.seconds)

    def faster(
        self, path: PublishPath, links: Sequence[Link], factor: float
    ) -> tuple[Publishing, tuple[Link, ...]] | None:
        """The same settings with the slowest part of a path `factor` times as fast: loading, a link (of `links`, which
        are returned too, or of the store), a measured speed, or the networks of hosts. None if the slowest part is none
        of these."""
        if path.limit == LOADING:
            speeds = replace(self.speeds, load_gb_per_s=path.load_gb_per_s * factor)
            return replace(self, speeds=speeds), tuple(links)
        leg = path.slower
        if leg.link is not None:
            found = tuple(_scaled(link, leg.link, factor) for link in links)
            return replace(self, store_links=tuple(_scaled(x, leg.link, factor) for x in self.store_links)), found
        measured = {MEASURED[name]: name for name in self.speeds.stated()}
        if leg.limit in measured:
            speeds = replace(self.speeds, **{measured[leg.limit]: leg.gb_per_s * factor})
            return replace(self, speeds=speeds), tuple(links)
        if leg.instead is None:
            return None
        more = replace(leg.instead, gb_per_s=leg.instead.gb_per_s * factor)
        return replace(self, store_links=(*self.store_links, more)), tuple(links)


MEASURED = {
    "push_gb_per_s": "the measured push",
    "pull_gb_per_s": "the measured pull",
    "load_gb_per_s": "the measured load",
    "broadcast_gb_per_s": "the measured broadcast",
}


class _Network:
    """GB/s between pools."""

    def __init__(self, pools: Sequence[Pool], links: Sequence[Link]) -> None:
        self._pools = {pool.name: pool for pool in pools}
        self._links = {frozenset((link.a, link.b)): link for link in links}

    def link(self, a: str, b: str, copies: int = 1) -> Leg | None:
        """One of so many copies that share it; None if it is not declared."""
        found = self._links.get(frozenset((a, b)))
        if found is None:
            return None
        words = f"network of {a}" if a == b else f"link {found.a}–{found.b}"
        return Leg(found.gb_per_s / copies, words, (found.a, found.b))

    def host(self, pool: str) -> Leg:
        """The network of one host."""
        found = self._pools.get(pool)
        each = None if found is None else found.device.link_gb_per_s
        if found is None or each is None:
            return Leg(INSIDE_GB_PER_S, f"the network of a host of {pool}", assumed=True)
        return Leg(each * min(found.count, self._per_host(pool)), f"the network of a host of {pool}")

    def hosts(self, pool: str) -> int:
        return math.ceil(self._pools[pool].count / self._per_host(pool)) if pool in self._pools else 1

    def between(self, a: str, b: str, copies: int) -> Leg:
        """Between hosts of two pools, or of one: its link, and no more than a host's own network has."""
        found, host = self.link(a, b, copies), self.host(b)
        if found is None:
            if a == b:
                return host
            return Leg(BETWEEN_GB_PER_S / copies, f"the connection of {a} and {b}", assumed=True)
        return found if host.assumed else _slower(found, host)

    def stored(self, trainer: str, pool: str, copies: int) -> Leg:
        """From the trainer's hosts to those of a pool, where no link to the store is declared."""
        leg = self.between(trainer, pool, copies)
        return replace(leg, instead=Link(pool, STORE, leg.gb_per_s * copies))

    def _per_host(self, pool: str) -> int:
        device = self._pools[pool].device
        return device.devices_per_host or (self._pools[pool].count if device.is_cpu else DEVICES_PER_HOST)


def _capped(leg: Leg, speeds: PublishSpeeds, name: str) -> Leg:
    """A measurement counts where the link is assumed, and where it is less than the link could carry."""
    gb_per_s = speeds.stated().get(name, math.inf)
    if math.isinf(gb_per_s) or (gb_per_s >= leg.gb_per_s and not leg.assumed):
        return leg
    return Leg(gb_per_s, MEASURED[name])


def _slower(a: Leg, b: Leg) -> Leg:
    return min(a, b, key=lambda leg: leg.gb_per_s)


def _scaled(link: Link, ends: tuple[str, str], factor: float) -> Link:
    return replace(link, gb_per_s=link.gb_per_s * factor) if {link.a, link.b} == set(ends) else link
