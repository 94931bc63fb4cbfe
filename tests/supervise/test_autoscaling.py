"""Hosts follow nodes, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.errors import UsageError
from rollart.sim import loop as virtual
from rollart.supervise.autoscaling import HostAutoscaler
from rollart.supervise.nodes import AvailabilitySettings, NodeTracker
from rollart.testing.ledger import MemoryRecorder

SETTLE_S = 10.0


class Fleet:
    """Implements `Crew`: a host takes a core of a node, three seconds to start, and one to be back elsewhere."""

    def __init__(self, nodes: NodeTracker, cores: dict[str, int], *, core_each: bool = True) -> None:
        self.nodes, self.cores, self.core_each = nodes, cores, core_each
        self.hosts: dict[str, str] = {}
        self.serving: set[str] = set()
        self.numbers = 0
        self.on_change: Any = lambda: None

    def where(self) -> Mapping[str, str]:
        return dict(sorted(self.hosts.items(), key=lambda item: item[0] in self.serving))

    def up(self) -> set[str]:
        return set(self.serving)

    def room(self) -> str | None:
        used = list(self.hosts.values())
        free = [n for n, c in self.cores.items() if used.count(n) < c or not self.core_each]
        return min((n for n in free if n not in self.nodes.availability.leaving()), key=used.count, default=None)

    async def spawn(self) -> str:
        node = self.room()
        if node is None:
            await asyncio.sleep(5.0)
            raise UsageError("no room for a host")
        self.numbers += 1
        name = f"host-{self.numbers}"
        self.hosts[name] = node
        await asyncio.sleep(3.0)
        if name in self.hosts and self.hosts[name] in self.cores:
            self.serving.add(name)
            self.on_change()
        return name

    def retire(self, name: str) -> None:
        assert self.serving - {name}, "one is up that stays"
        del self.hosts[name]
        self.serving.discard(name)
        self.on_change()

    def look(self) -> None:
        """What supervision does: hosts whose node is gone come back where there is room."""
        for name, node in self.hosts.items():
            if node not in self.cores:
                self.serving.discard(name)
                if (other := self.room()) is not None:
                    self.hosts[name] = other
                    self.serving.add(name)
        self.on_change()


class Scene:
    def __init__(self, *, most: int = 6, at_first: int = 1) -> None:
        self.recorder = MemoryRecorder()
        self.nodes = NodeTracker(AvailabilitySettings(settle_s=SETTLE_S), dict, {"cores": 100})
        self.cores: dict[str, int] = {}
        self.fleet = Fleet(self.nodes, self.cores)
        self.keeper = HostAutoscaler(
            self.fleet, self.nodes, lambda devices: min(most, devices["cores"]), self.recorder, what="environments"
        )
        self.at_first = at_first

    async def begin(self, **nodes: int) -> None:
        self.cores.update(nodes)
        self.nodes.found((name, {"cores": cores}) for name, cores in nodes.items())
        for _ in range(self.at_first):
            await self.fleet.spawn()

    def join(self, name: str, cores: int) -> None:
        self.cores[name] = cores
        self.nodes.joined(name, {"cores": cores})

    def die(self, name: str) -> None:
        del self.cores[name]
        self.nodes.lost(name)
        self.fleet.look()

    def run(self, story: Any) -> None:
        async def main() -> None:
            async with asyncio.TaskGroup() as tasks:
                await self.begin(a=2)
                keeping = tasks.create_task(self.keeper.run())
                await story(self)
                keeping.cancel()

        virtual.run(main())


def test_a_node_that_joins_gets_hosts_once_it_has_stayed() -> None:
    async def story(scene: Scene) -> None:
        await asyncio.sleep(20.0)
        assert len(scene.fleet.hosts) == 2, "what was there at first has room for one more"
        scene.join("b", 2)
        await asyncio.sleep(SETTLE_S - 1.0)
        assert len(scene.fleet.hosts) == 2
        await asyncio.sleep(5.0)
        assert sorted(scene.fleet.hosts.values()) == ["a", "a", "b", "b"]

    Scene().run(story)


def test_who_is_on_a_node_that_is_to_go_leaves_it_at_once_for_another() -> None:
    async def story(scene: Scene) -> None:
        scene.join("b", 4)
        await asyncio.sleep(40.0)
        assert len(scene.fleet.hosts) == 6
        scene.nodes.leaving("a")
        await asyncio.sleep(0.1)
        assert set(scene.fleet.hosts.values()) == {"b"}
        await asyncio.sleep(100.0)
        assert len(scene.fleet.hosts) == 4, "so many have room"

    Scene().run(story)


def test_the_last_one_stays_until_another_is_up() -> None:
    async def story(scene: Scene) -> None:
        scene.nodes.leaving("a")
        await asyncio.sleep(60.0)
        assert list(scene.fleet.hosts.values()) == ["a"], "there is nowhere else"
        said = [e.fields["cause"] for e in scene.recorder.events if e.kind == "host_not_placed"]
        assert said == ["no room for a host"], "tried more than once, said once"
        scene.join("b", 1)
        await asyncio.sleep(60.0)
        assert list(scene.fleet.hosts.values()) == ["b"]

    Scene().run(story)


def test_hosts_that_end_unasked_are_not_replaced_for_ever() -> None:
    async def story(scene: Scene) -> None:
        await asyncio.sleep(60.0)
        for name in list(scene.fleet.hosts)[1:]:  # given up: it broke again and again
            del scene.fleet.hosts[name]
            scene.fleet.serving.discard(name)
        scene.fleet.on_change()
        await asyncio.sleep(1000.0)
        assert len(scene.fleet.hosts) == 1
        scene.join("b", 1)
        await asyncio.sleep(60.0)
        assert len(scene.fleet.hosts) == 3, "with more devices there is reason to try again"

    Scene().run(story)


Happenings = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "die", "wait"]), st.sampled_from("bcd"), st.integers(1, 3)), max_size=10
)


@settings(max_examples=60, deadline=None)
@given(Happenings, st.integers(1, 8), st.integers(1, 2))
def test_when_nodes_rest_there_are_as_many_hosts_as_they_have_room_for(
    happenings: list[tuple[str, str, int]], most: int, at_first: int
) -> None:
    async def story(scene: Scene) -> None:
        for what, node, number in happenings:
            if what == "join" and node not in scene.cores:
                scene.join(node, number)
            elif what == "leave":
                scene.nodes.leaving(node)
            elif what == "die" and node in scene.cores:
                scene.die(node)
            await asyncio.sleep(7.0 * number)
        await asyncio.sleep(40 * SETTLE_S * 2**5)
        staying = {n: c for n, c in scene.cores.items() if n not in scene.nodes.availability.leaving()}
        assert len(scene.fleet.hosts) == min(most, sum(staying.values()))
        assert set(scene.fleet.hosts.values()) <= staying.keys()
        assert scene.fleet.up() == set(scene.fleet.hosts)

    Scene(most=most, at_first=at_first).run(story)
