"""Where a gang could lie: found if and only if there is a way, and soon also on many nodes that are alike."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.adapters.clusters.runtime import PlacementSearch, matches
from rollart.fleet import Bundle, Node

Nodes = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3)), min_size=1, max_size=4)
Bundles = st.lists(st.tuples(st.sampled_from(["a", "b", "!a", "in(a,b)"]), st.integers(1, 3)), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(Nodes, Bundles)
def test_a_gang_fits_if_there_is_a_way(rooms: list[tuple[str, int]], asked: list[tuple[str, int]]) -> None:
    nodes = [
        Node(f"n{i}", {"gpu": kind, "ray.io/node-id": f"{i}"}, {"GPU": float(room)})
        for i, (kind, room) in enumerate(rooms)
    ]
    gang = [Bundle(f"b{i}", {"GPU": float(n)}, {"gpu": label}) for i, (label, n) in enumerate(asked)]
    ways = itertools.product(nodes, repeat=len(gang))
    there = any(holds(gang, dict(zip((b.name for b in gang), way, strict=True)), nodes) for way in ways)
    found = PlacementSearch(gang, nodes, {n.id: n.total for n in nodes}).find()
    assert (found is not None) == there
    assert found is None or holds(gang, dict(found), nodes)


def holds(gang: Sequence[Bundle], where: dict[str, Node], nodes: Sequence[Node]) -> bool:
    taken = {n.id: sum(b.resources["GPU"] for b in gang if where[b.name].id == n.id) for n in nodes}
    fine = all(taken[n.id] <= n.total["GPU"] for n in nodes)
    return fine and all(matches(b.labels, where[b.name].labels) for b in gang)


def test_nodes_that_are_alike_are_tried_once() -> None:
    nodes = [Node(f"n{i}", {"gpu": "x", "ray.io/node-id": f"{i}"}, {"GPU": 8.0}) for i in range(40)]
    gang = [Bundle(f"g{i}", {"GPU": 5.0}, {"gpu": "x"}) for i in range(41)]
    search = PlacementSearch(gang, nodes, {n.id: n.total for n in nodes})
    assert search.find() is None
    assert search.steps <= 2 * len(gang)
