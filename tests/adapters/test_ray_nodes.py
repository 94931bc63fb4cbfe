"""The nodes of a runtime on Ray, without a Ray cluster."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollart.adapters.clusters.ray import RayRuntime


def row(ray_id: str, name: str, *, alive: bool = True) -> dict[str, Any]:
    resources = {"CPU": 4.0, "memory": 1.0, "node:10.0.0.1": 1.0}
    return {
        "NodeID": ray_id,
        "NodeName": name,
        "NodeManagerAddress": "10.0.0.1",
        "Alive": alive,
        "Labels": {"zone": "a"},
        "Resources": resources,
    }


def test_a_node_of_the_name_of_a_dead_one_is_another() -> None:
    runtime = RayRuntime("auto")
    runtime.update_nodes([row("id-1", "n1")])
    assert runtime.node_name("id-1") == "n1"
    assert [(n.id, n.total) for n in runtime.nodes()] == [("n1", {"CPU": 4.0})]
    runtime.update_nodes([row("id-1", "n1"), row("id-2", "n1")])
    assert [n.id for n in runtime.nodes()] == ["n1", "n1-id-2"], "both live"
    runtime.update_nodes([row("id-1", "n1", alive=False), row("id-2", "n1")])
    assert [n.id for n in runtime.nodes()] == ["n1-id-2"]

    runtime = RayRuntime("auto")
    runtime.update_nodes([row("id-1", "n1")])
    runtime.update_nodes([row("id-1", "n1", alive=False), row("id-2", "n1")])
    assert (runtime.node_name("id-1"), runtime.node_name("id-2")) == ("id-1", "n1")


def test_many_who_look_at_a_time_share_a_look_that_began_after_they_asked() -> None:
    class Slow:
        looks = 0

        async def nodes(self) -> list[dict[str, Any]]:
            self.looks += 1
            poll_nodes = self.looks
            await answered.wait()
            if poll_nodes == 2:
                raise ConnectionError("the head is busy")
            return [row(f"id-{n}", f"n{n}") for n in range(poll_nodes)]

    async def scenario() -> None:
        runtime.link = link  # type: ignore[assignment]
        first = asyncio.create_task(runtime.poll_nodes())
        await asyncio.sleep(0)
        others = [asyncio.create_task(runtime.poll_nodes()) for _ in range(50)]
        await asyncio.sleep(0)
        answered.set()
        await first
        done = await asyncio.gather(*others, return_exceptions=True)
        assert [type(one) for one in done if one is not None] == [ConnectionError], "an error is no answer"
        assert link.looks == 3
        assert len(runtime.nodes()) == 3, "no caller gets an answer from before its call"
        await runtime.poll_nodes()
        assert link.looks == 4

    runtime, link, answered = RayRuntime("auto"), Slow(), asyncio.Event()
    asyncio.run(scenario())


@given(st.lists(st.sets(st.integers(0, 7), max_size=6), max_size=12))
def test_the_nodes_are_the_live_ones_whatever_their_names(lives: list[set[int]]) -> None:
    """Ids that live, look by look; ids that are equal modulo 3 have the same name."""
    runtime = RayRuntime("auto")
    for alive in lives:
        runtime.update_nodes([row(f"id-{i}", f"n{i % 3}") for i in alive])
        assert {runtime.node_name(f"id-{i}") for i in alive} == {node.id for node in runtime.nodes()}
        assert len(runtime.nodes()) == len(alive)
