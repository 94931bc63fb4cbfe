"""Container images that an episode needs: the environment hosts name them, once per prompt."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence

from rollart.errors import EnvironmentFault
from rollart.hosted import EnvironmentHost, EpisodeImages
from rollart.policy.lease import Expiry
from rollart.runtime.leases import Leases

__all__ = ["ImageResolver"]

REMEMBERED_PROMPTS = 4096
"""Number of prompts whose images are cached: those of a few batches."""

MAX_CONCURRENT_QUERIES = 16
"""Maximum concurrent queries, over all hosts. An environment names its images on its host's event loop, and blocks the
host's other episodes meanwhile."""


class ImageResolver:
    """Any task may call `wanted`. It waits for a host's response, or for a pending query of the same prompt, under a
    lease of the calling episode. Queries rotate over the hosts; if a host ends, the next one is queried. Invariant: a
    prompt has at most one query at a time, and none while it is cached."""

    def __init__(self, leases: Leases, pull_s: float, seen: Callable[[EnvironmentHost, EpisodeImages], None]) -> None:
        """`seen` is called with each host and its answer, which includes the images that it has."""
        self._leases = leases
        self._pull_s = pull_s
        self._seen = seen
        self._known: OrderedDict[tuple[str, int], frozenset[str]] = OrderedDict()
        self._asking: dict[tuple[str, int], asyncio.Event] = {}
        self._room = asyncio.Semaphore(MAX_CONCURRENT_QUERIES)
        self._turn = 0

    async def wanted(self, links: Sequence[EnvironmentHost], domain: str, seed: int, owner: str) -> frozenset[str]:
        """Images that an episode needs; none if no host can pull images for its domain. `links`: serving hosts."""
        able = [link for link in links if domain in link.image_domains]
        if not able:
            return frozenset()
        key = domain, seed
        with self._leases.hold(owner, "a host to name the images of its environment", self._pull_s, Expiry.GAP_FILL):
            while (event := self._asking.get(key)) is not None:
                await event.wait()
            if (found := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                return found
            event = self._asking[key] = asyncio.Event()
            try:
                async with self._room:
                    found = self._known[key] = await self._ask(able, domain, seed)
            finally:
                del self._asking[key]
                event.set()
            while len(self._known) > REMEMBERED_PROMPTS:
                self._known.popitem(last=False)
            return found

    async def _ask(self, links: Sequence[EnvironmentHost], domain: str, seed: int) -> frozenset[str]:
        self._turn += 1
        for number in range(len(links)):
            link = links[(self._turn + number) % len(links)]
            try:
                (said, _) = await link.images("", domain, seed, pull=False)
            except EnvironmentFault as fault:
                if not fault.incident or number == len(links) - 1:
                    raise
            else:
                self._seen(link, said)
                return frozenset(said.wanted)
        raise AssertionError("somebody was asked")
